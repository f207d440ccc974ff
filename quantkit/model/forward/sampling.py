"""Continue text by the predictions of a model, at temperature 1 or greedily, without an end."""

import math
from typing import Any

import torch


def continued(
    model: Any, beginnings: torch.Tensor, length: int, seed: int | None, min_p: float = 0.0
) -> torch.Tensor:
    """Let `model` of transformers continue `beginnings`, int64 [B, n]; return sequences int64 [B, length].

    Sequences include the beginnings. Draws from the tokens with at least `min_p` of the largest probability
    (arXiv 2407.01082); without a `seed` it takes the likeliest one. Sequences continue after an end-of-text
    token, like joined documents. On one device the result depends on the arguments alone. Overwrites
    `model.generation_config`; torch's random state is restored.
    """
    from transformers import GenerationConfig

    settings = GenerationConfig(
        do_sample=seed is not None,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=length - beginnings.shape[1],
        min_new_tokens=length - beginnings.shape[1],
        pad_token_id=0,
        use_cache=True,
    )
    # Fields that are None in `settings` would be taken from the model's own.
    model.generation_config = GenerationConfig()
    devices = [beginnings.device] if beginnings.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        if seed is not None:
            torch.manual_seed(seed)
        found: torch.Tensor = model.generate(
            beginnings,
            attention_mask=torch.ones_like(beginnings),
            generation_config=settings,
            logits_processor=[_least(min_p)] if min_p else [],
        )
    return found


def _least(min_p: float) -> Any:
    """Return a logits processor that leaves tokens with at least `min_p` of the largest probability.

    It has no need to sort the logits, as the one of transformers does.
    """

    def processor(_: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        floor = logits.amax(-1, keepdim=True) + math.log(min_p)
        return logits.masked_fill(logits < floor, -math.inf)

    return processor
