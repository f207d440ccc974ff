"""Text from a model, streamed, with what it took."""

import inspect
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.calibrate.data.seeds import check_seed
from quantkit.errors import UsageError
from quantkit.kernels.ops.argmax import likeliest
from quantkit.runtime.host_copy import HostCopy

#: The model ended the text; as many tokens as were asked for; the model has no more positions.
ENDS = (END_OF_TEXT, MAX_NEW_TOKENS, POSITIONS) = ("end_of_text", "max_new_tokens", "positions")

#: Below, logits over it may be beyond float32, and the likeliest token is the only one with a chance.
_LEAST_TEMPERATURE = 1e-30

#: What models call their cache, by the version of transformers; until 5.23 Mambas had a name of their own.
CACHE_NAMES = ("past_key_values", "cache", "cache_params")


@dataclass(frozen=True)
class Generation:
    """What was generated, and in how many seconds: the prompt's forward, then one per token.

    `end` is why there is no more: one of `ENDS`.
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
    def tokens_per_second(self) -> float:
        """Decoding speed. The first token comes out of the prompt's forward and is not counted."""
        decoded = len(self.tokens) - 1
        return decoded / self.decode_seconds if decoded > 0 and self.decode_seconds > 0 else 0.0


#: Pieces of text as they come, and in the end what it took.
Chunks = Generator[str, None, Generation]


def generate(
    model: Any,
    tokenizer: Any,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    kv_cache: str | None = None,
    on_text: Callable[[str], object] | None = None,
) -> Generation:
    """Continue `prompt`; `on_text` gets each piece of text as it comes. Arguments as for `stream`."""
    chunks = stream(
        model,
        tokenizer,
        prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        kv_cache=kv_cache,
    )
    return collect(chunks, on_text)


def collect(chunks: Chunks, on_text: Callable[[str], object] | None = None) -> Generation:
    """What `stream` returned, read to its end; `on_text` gets each piece of text as it comes."""
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
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    seed: int = 0,
    kv_cache: str | None = None,
) -> Chunks:
    """The continuation of `prompt` piece by piece; the generator returns the `Generation`.

    Greedy at temperature 0, else sampled with `seed`. Ends after `max_new_tokens`, at an end-of-text token
    of the model's generation config, or when the model has no positions left. `kv_cache` is the format of
    the KV cache, one of `kv_cache.KV_SCHEMES`, by default the dtype of the model. Raises `UsageError` for a
    prompt without tokens or too long, or arguments out of range, before the first piece is asked for.
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

        packed_cache = PackedCache(model.config, kv_cache)
    ids: torch.Tensor = tokenizer(prompt, return_tensors="pt").input_ids.to(model.device)
    if ids.shape[1] == 0:
        raise UsageError("the prompt has no tokens; write something.")
    prompt_tokens = ids.shape[1]
    # Past its positions a model was never trained: stop there instead of going on with noise.
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and prompt_tokens >= positions:
        raise UsageError(
            f"the prompt has {prompt_tokens} tokens and the model {positions} positions; shorten the prompt."
        )
    room, end = max_new_tokens, MAX_NEW_TOKENS
    if positions is not None and positions - prompt_tokens < room:
        room, end = positions - prompt_tokens, POSITIONS
    generator = torch.Generator(device=ids.device).manual_seed(seed)
    return _decoded(model, tokenizer, ids, room, end, temperature, generator, packed_cache)


@torch.no_grad()
def _decoded(
    model: Any,
    tokenizer: Any,
    ids: torch.Tensor,
    room: int,
    end: str,
    temperature: float,
    generator: torch.Generator,
    cache: Any,
) -> Chunks:
    """Up to `room` tokens after `ids` [1, P], where `end` is why they are no more.

    `cache` is the packed one, None for that of the model.
    """
    prompt_tokens = ids.shape[1]
    ends = _end_tokens(model)
    text = _TextOf(tokenizer, ids[0].tolist())
    name = cache_name(model)
    from quantkit.runtime.decoding import graphs_of

    graphed = graphs_of(model) if cache is None and name != CACHE_NAMES[-1] else None
    if graphed is not None:
        cache = graphed.cache_for(prompt_tokens + room)
        graphed = None if cache is None else graphed
    only_last = last_logits(model)

    def follow(tokens: torch.Tensor, run: Any) -> torch.Tensor:
        nonlocal cache
        output = run(input_ids=tokens, use_cache=True, **{name: cache}, **only_last)
        cache = getattr(output, name, None)
        if cache is None:
            raise UsageError(f"{type(model).__name__} returns no {name}; use its own generate().")
        return _choose(output.logits[:, -1], temperature, generator)

    started = time.perf_counter()
    chosen, prefilled = follow(ids, model), None
    # While a GPU runs the prompt, as this looks at all of the model.
    forward = model if graphed is None else graphed.renew()
    while True:
        # A GPU runs the next step while the host waits for this token, which may have been the last.
        answer = HostCopy(chosen)
        ahead = follow(chosen, forward) if chosen.is_cuda and len(text.tokens) + 1 < room else None
        token = int(answer.get())
        now = time.perf_counter()
        prefilled = now if prefilled is None else prefilled
        last = token in ends or len(text.tokens) + 1 >= room
        piece = text.add(token, flush=last)
        if piece:
            yield piece
        if last:
            break
        chosen = follow(chosen, forward) if ahead is None else ahead
    return Generation(
        text.text,
        tuple(text.tokens),
        prompt_tokens,
        prefilled - started,
        now - prefilled,
        END_OF_TEXT if token in ends else end,
    )


def cache_name(model: Any) -> str:
    """What `model` calls the cache that it takes and returns."""
    known = inspect.signature(model.forward).parameters
    return next((name for name in CACHE_NAMES if name in known), CACHE_NAMES[0])


def last_logits(model: Any) -> dict[str, int]:
    """What `model` is called with for the logits of the last position alone, if it knows how to."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _choose(logits: torch.Tensor, temperature: float, generator: torch.Generator) -> torch.Tensor:
    """The next token, int64 [1, 1], from logits [1, V]."""
    if temperature < _LEAST_TEMPERATURE:
        return likeliest(logits)[:, None]
    probabilities = torch.softmax(logits.float() / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator)


def _end_tokens(model: Any) -> frozenset[int]:
    ends = model.generation_config.eos_token_id
    if ends is None:
        return frozenset()
    return frozenset(ends if isinstance(ends, Sequence) else [ends])


class _TextOf:
    """Text of a growing list of tokens, piece by piece.

    A character may need several tokens, and a token's text may depend on the one before it. So each
    piece is the difference between the texts of the last tokens with and without the new ones, held back
    while it ends in the middle of a character.
    """

    def __init__(self, tokenizer: Any, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.text = ""
        self._tokenizer = tokenizer
        # The prompt's end comes along: the first new token is in the middle of a text, not its beginning.
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
            # A special token has no text and would hide that a word came before it.
            self._context = self._shown
        self._shown = len(self._all)
        self.text += piece
        return piece

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
