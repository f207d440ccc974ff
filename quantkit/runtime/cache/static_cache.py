"""Static caches, of fixed length, for CUDA graphs: which models support them, and how long they are."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.generation import MaxLengthCriteria

from quantkit.runtime.cache.cache_name import CACHE, OLD_NAME
from quantkit.runtime.cuda_graphs import refusals

#: Cache lengths are multiples of this, so that texts of similar length reuse a graph.
BUCKET = 256
#: Layer types that store keys and values of all tokens, or of a window.
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
#: Options of `generate` that bring a cache, select another kind, or remove tokens from it.
_OWN_CACHE = (
    CACHE,
    OLD_NAME,
    "cache_implementation",
    "assistant_model",
    "assistant_early_exit",
    "prompt_lookup_num_tokens",
    "is_assistant",
    "custom_generate",
)
#: Default number of new tokens in `generate`.
_NEW_TOKENS = 20


def option_of(requested: Mapping[str, Any], defaults: Any, name: str) -> Any:
    """Return the value of option `name` of `generate`; None if it is not set.

    The first source that has the option counts: the arguments `requested` of the call, the generation config
    among these, then `defaults`, the generation config of the model.
    """
    if name in requested:
        return requested[name]
    values = (getattr(requested.get("generation_config"), name, None), getattr(defaults, name, None))
    return next((value for value in values if value is not None), None)


def max_tokens(requested: Mapping[str, Any], defaults: Any) -> int | None:
    """Return the most tokens of a sequence, prompt and new ones, in a call of `generate`.

    `requested` are the arguments of the call, `defaults` the generation config of the model. None if the call
    brings a cache, asks for another kind of cache, or for none.
    """
    # Old checkpoints with sliding windows say "hybrid"; transformers ignores it.
    own = [option_of(requested, defaults, name) for name in _OWN_CACHE]
    if any(value not in (None, False, "hybrid") for value in own):
        return None
    # use_cache=None as an argument also means no cache.
    if option_of(requested, defaults, "use_cache") is False or requested.get("use_cache", True) is None:
        return None
    prompts = [requested.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    prompt = max((part.shape[1] for part in prompts if part is not None), default=1)
    new: int | None = option_of(requested, defaults, "max_new_tokens")
    tokens = (
        prompt + new
        if new is not None
        else max(prompt, option_of(requested, defaults, "max_length") or 0) + _NEW_TOKENS
    )
    # Stopping criteria of the caller override the length.
    criteria = requested.get("stopping_criteria") or ()
    lengths: list[int] = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
    return max([tokens, *lengths])


def static_cache(model: Any, tokens: int) -> Cache | None:
    """Create a static cache for at least `tokens` tokens; None if `model` does not support one.

    CUDA graphs need fixed shapes. The length is rounded up to a multiple of `BUCKET`. Layers with a sliding
    window have the full length too; a mask limits the window.
    """
    if why_no_static_cache(model) is not None:
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    length = -(-tokens // BUCKET) * BUCKET
    return Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(layers)])


def layers_without_keys(model: Any) -> list[str]:
    """Return the layer types of `model` that are neither full nor sliding-window attention, sorted."""
    config = model.config.get_text_config(decoder=True)
    return sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)


def why_no_static_cache(model: Any) -> str | None:
    """Return why `model` cannot use a static cache; None if it can."""
    config = model.config.get_text_config(decoder=True)
    if other_layers := layers_without_keys(model):
        return refusals.MIXED_LAYERS.because(kind=other_layers[0])
    two_caches = any(getattr(one, "is_encoder_decoder", False) for one in (model.config, config))
    # transformers marks models that run with a static cache as compilable. A CTC class generates without a
    # decoder, and its config has no number of layers.
    counted = hasattr(config, "num_hidden_layers")
    if two_caches or not counted or not getattr(model, "_can_compile_fullgraph", False):
        return refusals.NO_STATIC_CACHE.because()
    # Under autocast keys and values may differ in dtype; a static layer has one dtype.
    return refusals.ASKED.because(what="autocast") if torch.is_autocast_enabled(model.device.type) else None


def to_dynamic(cache: Cache, model: Any) -> Cache:
    """Return a copy of `cache` as a `DynamicCache` of transformers, which can grow."""
    dynamic = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:
            length = int(layer.get_seq_length())
            dynamic.update(layer.keys[:, :, :length], layer.values[:, :, :length], number)
    return dynamic
