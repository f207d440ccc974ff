"""Sample asynchronously: launch the next decoding step before the host knows whether the text has ended.

transformers reads "all texts have ended" from the GPU after each token and launches nothing until then, so
the GPU idles. `sample` launches a step and only then reads whether texts ended with the step before. If they
did, the token of the extra step is dropped.

    host   launch n+1, wait for token n | launch n+2, wait for token n+1 | ...
    GPU    step n                       | step n+1                       | step n+2
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from quantkit.kernels.ops.argmax import argmax_tokens
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.runtime.cuda_graphs.capture import Inputs
from quantkit.runtime.host_copy import HostCopy
from quantkit.runtime.next_inputs import NextInputs

#: Arguments of `generate` that `sample` supports, apart from fields of a generation config.
_SUPPORTED = frozenset(
    {"inputs", "input_ids", "attention_mask", "position_ids", "generation_config", "logits_processor"}
    | {"stopping_criteria", "use_model_defaults", "streamer"}
)
#: Generation config fields that `sample` does not support: other outputs, stop strings, chunked prefill,
#: compile.
_UNSUPPORTED = (
    "return_dict_in_generate",
    "stop_strings",
    "prefill_chunk_size",
    "disable_compile",
    "compile_config",
)


def is_supported(requested: Mapping[str, Any], defaults: Any) -> bool:
    """Return True if `sample` can serve a call of `generate` with arguments `requested`.

    `defaults` is the generation config of the model.
    """
    from transformers.generation import GenerationMode

    config = type(defaults)(**defaults.to_dict())
    config_argument = requested.get("generation_config")
    if config_argument is not None:
        config.update(
            **{name: value for name, value in config_argument.to_dict().items() if value is not None}
        )
    unused = config.update(**{name: value for name, value in requested.items() if value is not None})
    modes = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
    return (
        unused.keys() <= _SUPPORTED
        and config.get_generation_mode() in modes
        and not any(getattr(config, name, None) for name in _UNSUPPORTED)
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
    """Generate tokens like transformers, but one step ahead; passed to `generate` as `custom_generate`.

    `input_ids` is [B, T] int64; returns [B, T + new tokens] int64. Other arguments are those of transformers.
    `streamer` receives each token while the next step runs. The caller passes it, as transformers does not. A
    step launched after all texts have ended changes only the cache.
    """
    first = model.prepare_inputs_for_generation(input_ids, is_first_iteration=True, **inputs)
    output = model(**first, return_dict=True)
    # Placed here because it walks over the whole model: the GPU runs the prompt meanwhile.
    forward = model.get_compiled_call(getattr(generation_config, "compile_config", None))
    with_ends = any(hasattr(criterion, "eos_token_id") for criterion in stopping_criteria)
    unfinished = torch.ones(len(input_ids), dtype=torch.long, device=input_ids.device)
    most = stopping_criteria.max_length
    # Only a forward with CUDA graphs has it; the caller may have replaced that forward.
    following_of: Callable[[], Callable[[Inputs], Any]] | None = getattr(forward, "following", None)
    follow: Callable[[Inputs], Any] | None = None
    predicted = NextInputs(model.config, None if following_of is None else most)
    before: list[HostCopy] = []
    with model._optimize_model_for_decode():
        while True:
            if before:
                # Results of the previous step; the current one runs already.
                ended, *shown = (copy.get() for copy in before)
                if streamer is not None:
                    streamer.put(*shown)
                if ended:
                    break
            is_predicted = predicted.is_proved
            if not is_predicted:
                inputs = model._update_model_kwargs_for_generation(output, inputs)
            tokens = _next_tokens(
                input_ids, output.logits[:, -1], logits_processor, generation_config.do_sample
            )
            # Free the logits: for a long prompt they are large.
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
            if is_predicted and follow is not None:
                output = follow(predicted.advance(tokens, length))
                continue
            following = model.prepare_inputs_for_generation(input_ids, next_sequence_length=1, **inputs)
            following["return_dict"] = True
            predicted.compare(following, length)
            output = forward(**following)
            follow = None if following_of is None else following_of()
    if streamer is not None:
        streamer.end()
    return input_ids


def _next_tokens(
    input_ids: torch.Tensor, logits: torch.Tensor, logits_processor: Any, random: bool
) -> torch.Tensor:
    """Return the next token of each of B texts, [B] int64, from `logits` [B, V] of a vocabulary of V tokens.

    If `random`, tokens are sampled, else they are the argmax. `input_ids` [B, T] are the tokens so far, which
    `logits_processor` reads. Processors and sampling compute in float32.
    """
    if not random and not logits_processor and logits.dtype in ACTIVATION_DTYPES:
        # Rounding to float32 is exact, so the argmax is the same.
        return argmax_tokens(logits)
    scores = logits_processor(input_ids, logits.to(torch.float32, copy=True))
    if random:
        return torch.multinomial(scores.softmax(-1), 1).squeeze(1)
    return argmax_tokens(scores)
