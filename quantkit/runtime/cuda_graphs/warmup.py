"""Warm-up: run a decoding step while the kernels of its prompt compile, so that both compile in parallel."""

from collections.abc import Callable
from typing import Any

import torch
from transformers.cache_utils import Cache, StaticLayer

from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cuda_graphs.capture import Inputs, used_layers
from quantkit.runtime.passes.fused_forward import warm_up_fused

#: Tokens in the cache of the warm-up step, and the largest length of that cache: longer caches rarely select
#: other kernels.
TOKENS, MOST_TOKENS = 3, 4096


def warm_up(model: Any, forward: Callable[..., Any], prompt: Inputs) -> None:
    """Run a decoding step of `model` once, so that its kernels compile; discard the results.

    `prompt` are the inputs of a prompt's forward: call this while the kernels of that forward compile.
    `forward` runs the step, with a temporary cache as long as the cache in `prompt`, but at most
    `MOST_TOKENS`. Does nothing if the cache in `prompt` is not static.
    """
    layers = prompt[CACHE].layers
    if not layers or not all(type(layer) is StaticLayer for layer in layers):
        return
    ids = prompt["input_ids"][:, :2]
    lengths = [min(layer.max_cache_len, MOST_TOKENS) for layer in layers]
    if min(lengths) < TOKENS:
        return
    cache = Cache(layers=[StaticLayer(max_cache_len=length) for length in lengths])
    inputs = {CACHE: cache, "attention_mask": torch.ones_like(ids), "use_cache": True}
    if torch.is_tensor(prompt.get("position_ids")):
        inputs["position_ids"] = prompt["position_ids"][..., :2]
    prepare = model.prepare_inputs_for_generation
    try:
        # A layer has keys and values only after its first update.
        forward(**prepare(ids[:, :1], is_first_iteration=True, **inputs), return_dict=True)
        step = prepare(ids, next_sequence_length=1, **inputs)
        warm_up_fused(lambda: forward(**step, return_dict=True), step)
    finally:
        # Free them now: traced nodes refer to them until Python collects cycles.
        for layer in used_layers(cache):
            for states in (layer.keys, layer.values):
                states.untyped_storage().resize_(0)
