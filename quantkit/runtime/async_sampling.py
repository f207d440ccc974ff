"""Generation in which the host never waits for the running step: the end of all texts is seen a step late.

transformers asks the GPU after each token whether there are more to come, and launches nothing before it
knows, while the GPU has nothing to do. Here the next step runs already when the host asks, and what it made
is left out of the result if it was one too many.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quantkit.kernels.ops.argmax import argmax_tokens
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.runtime.cuda_graphs.capture import Inputs
from quantkit.runtime.host_copy import HostCopy
from quantkit.runtime.next_inputs import NextInputs

#: Arguments of `generate`, beside inputs and what a generation config has, with which `sample` does as well.
_KNOWN = frozenset(
    {"inputs", "input_ids", "attention_mask", "position_ids", "generation_config", "logits_processor"}
    | {"stopping_criteria", "use_model_defaults", "streamer"}
)
#: What asks for more than tokens, or for none of what makes them fast, in a generation config.
_MORE = ("return_dict_in_generate", "stop_strings", "prefill_chunk_size", "disable_compile", "compile_config")


def is_enough(asked: Mapping[str, Any], defaults: Any) -> bool:
    """Whether `sample` does what `generate` is `asked` for; `defaults` is the model's generation config."""
    from transformers.generation import GenerationMode

    config = type(defaults)(**defaults.to_dict())
    given = asked.get("generation_config")
    if given is not None:
        config.update(**{name: value for name, value in given.to_dict().items() if value is not None})
    unknown = config.update(**{name: value for name, value in asked.items() if value is not None})
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    return (
        unknown.keys() <= _KNOWN
        and config.get_generation_mode() in modes
        and not any(getattr(config, name, None) for name in _MORE)
    )


def sample(
    model: Any,
    input_ids: torch.Tensor,
    logits_processor: Any,
    stopping_criteria: Any,
    generation_config: Any,
    streamer: Any = None,
    **inputs: Any,
) -> torch.Tensor:
    """`input_ids` int64 [B, T] with what follows, as transformers' own loop: for its `custom_generate`.

    `streamer`, which transformers does not pass on, gets each token while the next step runs. If that was one
    too many, it changed nothing but the cache.
    """
    first = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
    output = model(**first, return_dict=True)
    # While a GPU runs the prompt, as this looks at all of the model.
    forward = model.get_compiled_call(getattr(generation_config, "compile_config", None))
    with_ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    most = stopping_criteria.max_length
    # Of what replays graphs, unless somebody took its place.
    following_of: Callable[[], Callable[[Inputs], Any]] | None = getattr(forward, "following", None)
    follow: Callable[[Inputs], Any] | None = None
    known = NextInputs(model.config, None if following_of is None else most)
    before: list[HostCopy] = []
    with model._optimize_model_for_decode():
        while True:
            if before:
                # The step before this one, which runs already.
                ended, *shown = (copy.get() for copy in before)
                if streamer is not None:
                    streamer.put(*shown)
                if ended:
                    break
            is_known = known.is_proved
            if not is_known:
                inputs = model._update_model_kwargs_for_generation(output, inputs)
            tokens = _chosen(input_ids, output.logits[:, -1], logits_processor, generation_config.do_sample)
            # Logits of a long prompt may be large.
            del output
            if with_ends:
                tokens = tokens * unfinished + generation_config._pad_token_tensor * (1 - unfinished)
            input_ids = torch.cat([input_ids, tokens[:, None]], dim=-1)
            unfinished = unfinished & ~stopping_criteria(input_ids, None)
            length = input_ids.shape[1]
            if most is not None and length >= most:
                if streamer is not None:
                    streamer.put(tokens.cpu())
                break
            before = [HostCopy(one) for one in (unfinished.max() == 0, *[tokens] * (streamer is not None))]
            if is_known and follow is not None:
                output = follow(known.advance(tokens, length))
                continue
            following = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **inputs)
            following["return_dict"] = True
            known.compare(following, length)
            output = forward(**following)
            follow = None if following_of is None else following_of()
    if streamer is not None:
        streamer.end()
    return input_ids


def _chosen(
    input_ids: torch.Tensor, logits: torch.Tensor, logits_processor: Any, random: bool
) -> torch.Tensor:
    """A token [B] after each text of `input_ids` [B, T], by its `logits` [B, V] in float32."""
    if not random and not logits_processor and logits.dtype in ACTIVATION_DTYPES:
        # They are in the same order as in float32.
        return argmax_tokens(logits)
    scores = logits_processor(input_ids, logits.to(torch.float32, copy=True))
    if random:
        return torch.multinomial(scores.softmax(-1), 1).squeeze(1)
    return argmax_tokens(scores)
