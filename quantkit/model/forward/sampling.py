"""Draw tokens from the predictions of a model: temperature 1, and no end."""

import math
from typing import Any

import torch


def continued(
    model: Any, beginnings: torch.Tensor, length: int, seed: int, min_p: float = 0.0
) -> torch.Tensor:
    """Let `model` of transformers continue `beginnings`, int64 [B, n]; return sequences int64 [B, length].

    Sequences include the beginnings. Draws from the tokens with at least `min_p` of the largest probability
    (arXiv 2407.01082). Sequences continue after an end-of-text token, like joined documents. On one device
    the result depends on `seed` and the arguments alone. Overwrites `model.generation_config`; torch's random
    state is restored.
    """
    from transformers import GenerationConfig

    from quantkit.model.forward.cache_name import CACHE

    settings = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_length=length,
        min_length=length,
        pad_token_id=0,
        use_cache=True,
    )
    # Fields that are None in `settings` would be taken from the model's own.
    model.generation_config = GenerationConfig()
    devices = [beginnings.device] if beginnings.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.no_grad():
        torch.manual_seed(seed)
        found: torch.Tensor = model.generate(
            beginnings,
            attention_mask=torch.ones_like(beginnings),
            generation_config=settings,
            logits_processor=[_least(min_p)] if min_p else [],
            **{CACHE: _cache(model, length)},
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


def _cache(model: Any, length: int) -> Any:
    """Return an empty cache of `model` whose keys and values have room for `length` tokens.

    The cache of transformers copies all keys and values for each token that it adds.
    """
    from transformers.cache_utils import DynamicCache, DynamicLayer

    class Layer(DynamicLayer):  # type: ignore[misc]
        """Keys and values [B, H, t, D], the beginning of tensors [B, H, length, D]."""

        def update(self, keys: torch.Tensor, values: torch.Tensor, *_: Any, **__: Any) -> Any:
            begin = self.get_seq_length()
            end = begin + keys.shape[-2]
            if not self.is_initialized:
                self.lazy_initialization(keys, values)
                self.room = [one.new_empty(*one.shape[:-2], length, one.shape[-1]) for one in (keys, values)]
            for room, new in zip(self.room, (keys, values), strict=True):
                room[..., begin:end, :] = new
            self.keys, self.values = (room[..., :end, :] for room in self.room)
            return self.keys, self.values

    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    cache.layers = [Layer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
    return cache
