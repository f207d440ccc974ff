"""Generate text from a model, streamed, with token counts and times."""

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.calibrate.data.seeds import check_seed
from quantkit.errors import UsageError
from quantkit.kernels.ops.argmax import argmax_tokens
from quantkit.runtime.chat import chat_tokens
from quantkit.runtime.host_copy import HostCopy

#: Reasons for the end of a text: an end token, `max_new_tokens` reached, no positions left in the model.
ENDS = (END_OF_TEXT, MAX_NEW_TOKENS, POSITIONS) = ("end_of_text", "max_new_tokens", "positions")

#: Below this temperature, logits / temperature may overflow float32; then the argmax token is taken.
_LEAST_TEMPERATURE = 1e-30

#: Names of the cache argument in models of transformers; until 5.23 Mamba models had their own.
CACHE_NAMES = ("past_key_values", "cache", "cache_params")


@dataclass(frozen=True)
class Generation:
    """Generated text with its tokens and times.

    tokens            ids of the generated tokens
    prompt_tokens     number of tokens of the prompt
    prefill_seconds   from the prompt to the first token
    decode_seconds    all decoding steps, for the other tokens
    end               reason for the end of the text, one of `ENDS`
    """

    text: str
    tokens: tuple[int, ...]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    end: str

    @property
    def seconds(self) -> float:
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Return decoded tokens per second; None below two tokens, as the first comes from the prefill."""
        decoded = len(self.tokens) - 1
        return decoded / self.decode_seconds if decoded > 0 and self.decode_seconds > 0 else None


#: Yields pieces of text; returns the `Generation`.
Chunks = Generator[str, None, Generation]


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    kv_cache: str | None = None,
    on_text: Callable[[str], object] | None = None,
) -> Generation:
    """Continue `prompt` and return the whole `Generation`; call `on_text` with new text as it comes.

    If `chat`, `prompt` is what a user says, and the text is the answer by the chat template of the model.
    Decodes greedily at temperature 0, else samples with `seed`. `kv_cache` is a format of
    `kv_cache.KV_SCHEMES`; by default the KV cache has the dtype of the model. Ends after `max_new_tokens`, at
    an end-of-text token, or at the last position of the model. Raises `UsageError` for a prompt that is empty
    or too long, and for arguments out of range. If `chat`, raises what `chat_tokens` does.
    """
    chunks = stream(
        model,
        tokenizer,
        prompt,
        chat=chat,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        kv_cache=kv_cache,
    )
    return collect(chunks, on_text)


def collect(chunks: Chunks, on_text: Callable[[str], object] | None = None) -> Generation:
    """Run `chunks`, the result of `stream`; call `on_text` with each piece; return the `Generation`."""
    while True:
        try:
            text = next(chunks)
        except StopIteration as stop:
            result: Generation = stop.value
            return result
        if on_text is not None:
            on_text(text)


def stream(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    chat: bool = False,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    kv_cache: str | None = None,
) -> Chunks:
    """Yield the text that continues `prompt`, as tokens come; the generator returns the `Generation`.

    If `chat`, `prompt` is what a user says, and the text is the answer by the chat template of the model.
    Decodes greedily at temperature 0, else samples with `seed`. Ends after `max_new_tokens`, at an
    end-of-text token of the generation config, or at the last position of the model. `kv_cache` is a format
    of `kv_cache.KV_SCHEMES`; by default the KV cache has the dtype of the model. Raises `UsageError` before
    the first text: for a prompt that is empty or too long, and for arguments out of range. If `chat`, raises
    what `chat_tokens` does.
    """
    if max_new_tokens < 1 or not temperature >= 0:
        raise UsageError(
            f"max_new_tokens is {max_new_tokens} and temperature {temperature}; "
            "use at least 1 and at least 0."
        )
    check_seed(seed)
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise UsageError(f"the prompt is no Unicode text: {error.reason}. Write it in UTF-8.") from None
    packed_cache = None
    if kv_cache is not None:
        from quantkit.runtime.cache.kv_cache import PackedCache

        packed_cache = PackedCache.of_model(model, kv_cache)
    words = chat_tokens(tokenizer, prompt) if chat else tokenizer(prompt, return_tensors="pt").input_ids
    ids: torch.Tensor = words.to(model.device)
    if ids.shape[1] == 0:
        raise UsageError("the prompt has no tokens; write something.")
    prompt_tokens = ids.shape[1]
    # A model is not trained past its positions: stop there, as further text is noise.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt_tokens >= positions:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and the model {positions} positions; shorten the prompt."
        )
    limit, end = max_new_tokens, MAX_NEW_TOKENS
    if positions is not None and positions - prompt_tokens < limit:
        limit, end = positions - prompt_tokens, POSITIONS
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    return _decode(model, tokenizer, ids, limit, end, temperature, generator, packed_cache)


@torch.no_grad()
def _decode(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    limit: int,
    end: str,
    temperature: float,
    generator: torch.Generator,
    cache: Any,
) -> Chunks:
    """Decode up to `limit` tokens after `ids` [1, P] int64 and yield the text; return the `Generation`.

    `end` is the value of `Generation.end` if `limit` is reached. `temperature` and `generator` are those of
    `_select`. `cache` is a packed KV cache, or None for the default cache of the model.
    """
    prompt_tokens = ids.shape[1]
    ends = _end_tokens(model)
    text = _TextOf(tokenizer, ids[0].tolist())
    name = cache_name(model)
    from quantkit.runtime.decoding import graphs_of

    graphed = graphs_of(model) if cache is None and name != CACHE_NAMES[-1] else None
    if graphed is not None:
        cache = graphed.cache_for(prompt_tokens + limit)
        graphed = None if cache is None else graphed
    only_last = last_logits(model)

    def step(tokens: torch.Tensor, run: Any) -> torch.Tensor:
        nonlocal cache
        output = run(input_ids=tokens, use_cache=True, **{name: cache}, **only_last)
        cache = getattr(output, name, None)
        if cache is None:
            raise UsageError(f"{type(model).__name__} returns no {name}; use its own generate().")
        return _select(output.logits[:, -1], temperature, generator)

    started = time.perf_counter()
    token_id, prefilled = step(ids, model), None
    # Placed here because it walks over the whole model: the GPU runs the prompt meanwhile.
    forward = model if graphed is None else graphed.renew()
    while True:
        # The GPU runs the next step while the host reads this token, which may have been the last.
        copy = HostCopy(token_id)
        next_token = step(token_id, forward) if token_id.is_cuda and len(text.tokens) + 1 < limit else None
        token = int(copy.get())
        now = time.perf_counter()
        prefilled = now if prefilled is None else prefilled
        last = token in ends or len(text.tokens) + 1 >= limit
        piece = text.add(token, flush=last)
        if piece:
            yield piece
        if last:
            break
        token_id = step(token_id, forward) if next_token is None else next_token
    return Generation(
        text.text,
        tuple(text.tokens),
        prompt_tokens,
        prefilled - started,
        now - prefilled,
        END_OF_TEXT if token in ends else end,
    )


def cache_name(model: Any) -> str:
    """Return the name of the cache argument of `model.forward`."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in parameters), CACHE_NAMES[0])


def last_logits(model: Any) -> dict[str, int]:
    """Return the arguments that request logits of the last position only; empty without such an option."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _select(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """Return the next token, [1, 1] int64, for logits [1, V]: the argmax at `temperature` 0.

    Otherwise it is sampled by `generator` from softmax(logits / temperature).
    """
    if temperature < _LEAST_TEMPERATURE:
        return argmax_tokens(logits)[:, None]
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, Sequence) else [ends])


class _TextOf:
    """Detokenizer: returns the text of each new token.

    A character may need several tokens, and the text of a token may depend on the token before it. So each
    piece is a difference: the text of the last tokens with the new ones, minus the text without them. A piece
    that ends inside a character is delayed until the character is complete.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer = tokenizer
        # Start with the last 8 prompt tokens: the first new token continues a text.
        self._all = prompt[-8:]
        self._context = 0
        self._shown = len(self._all)

    def add(self, token: int, *, flush: bool) -> str:
        self.tokens.append(token)
        self._all.append(token)
        before = self._decode(self._all[self._context : self._shown])
        after = self._decode(self._all[self._context :])
        if after.endswith("\ufffd") and not flush:
            return ""
        piece = after[len(before) :]
        if piece:
            # A special token has no text, so as context it would hide the word before it.
            self._context = self._shown
        self._shown = len(self._all)
        self.text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
