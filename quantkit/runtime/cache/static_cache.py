"""Caches of a fixed length, which steps are recorded with: which models take one, and how long it is."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicCache, StaticLayer
from transformers.generation import MaxLengthCriteria

from quantkit.runtime.cache.cache_name import CACHE, OLD_NAME

#: Lengths of caches are multiples of this, so that answers of other lengths find their graph again.
BUCKET = 256
#: Layers that a cache of whole keys and values does for.
_ATTENTION = frozenset({"full_attention", "sliding_attention"})
#: Arguments of `generate` with which it has a cache, makes another, or takes tokens back from it.
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
#: New tokens that `generate` makes where nobody says how many.
_NEW_TOKENS = 20


def said(asked: Mapping[str, Any], defaults: Any, name: str) -> Any:
    """The value of an option where `generate` is `asked` for this: that of the argument, if it is one.

    Else that of the generation config that it is given, else that of `defaults`, the model's.
    """
    if name in asked:
        return asked[name]
    values = (getattr(asked.get("generation_config"), name, None), getattr(defaults, name, None))
    return next((value for value in values if value is not None), None)


def tokens_of(asked: Mapping[str, Any], defaults: Any) -> int | None:
    """The most tokens of a sequence, with its prompt, that `generate` makes when it is asked for this.

    None where it needs another cache than a static one. `defaults` is the generation config of the model.
    """
    # "hybrid" is what old checkpoints of sliding windows say, which transformers takes for nothing.
    own = [said(asked, defaults, name) for name in _OWN_CACHE]
    if any(value not in (None, False, "hybrid") for value in own):
        return None
    # None, if that is asked for, is no cache either.
    if said(asked, defaults, "use_cache") is False or asked.get("use_cache", True) is None:
        return None
    prompts = [asked.get(name) for name in ("inputs", "input_ids", "inputs_embeds")]
    prompt = max((part.shape[1] for part in prompts if part is not None), default=1)
    new: int | None = said(asked, defaults, "max_new_tokens")
    tokens = (
        prompt + new
        if new is not None
        else max(prompt, said(asked, defaults, "max_length") or 0) + _NEW_TOKENS
    )
    # Criteria of the caller are taken instead.
    criteria = asked.get("stopping_criteria") or ()
    lengths: list[int] = [one.max_length for one in criteria if isinstance(one, MaxLengthCriteria)]
    return max([tokens, *lengths])


def static_cache(model: Any, tokens: int) -> Cache | None:
    """A cache for so many tokens that graphs can be recorded with; None where the model needs another.

    Windows of sliding attention come from masks: every layer has room for all tokens.
    """
    if why_no_static_cache(model) is not None:
        return None
    layers = model.config.get_text_config(decoder=True).num_hidden_layers
    length = -(-tokens // BUCKET) * BUCKET
    return Cache(layers=[StaticLayer(max_cache_len=length) for _ in range(layers)])


def layers_without_keys(model: Any) -> list[str]:
    """The kinds of layers of `model` that have something else than keys and values of all tokens."""
    config = model.config.get_text_config(decoder=True)
    return sorted(set(getattr(config, "layer_types", None) or ()) - _ATTENTION)


def why_no_static_cache(model: Any) -> str | None:
    """None if keys and values of a length that is fixed do for `model`, else the reason they do not."""
    config = model.config.get_text_config(decoder=True)
    if others := layers_without_keys(model):
        return f"the model has layers of {others[0]}"
    # transformers says of a model that it compiles if it runs with such keys and values.
    if getattr(config, "is_encoder_decoder", False) or not getattr(model, "_can_compile_fullgraph", False):
        return "transformers does not run the model with a static cache"
    # Keys and values may have two dtypes then, for which a static layer has one.
    return "autocast is asked for" if torch.is_autocast_enabled(model.device.type) else None


def growing(cache: Cache, model: Any) -> Cache:
    """A cache as transformers makes it, which has room for more tokens, with what `cache` holds."""
    grown = DynamicCache(config=model.config.get_text_config(decoder=True))
    for number, layer in enumerate(cache.layers):
        if layer.is_initialized:
            held = int(layer.get_seq_length())
            grown.update(layer.keys[:, :, :held], layer.values[:, :, :held], number)
    return grown
