"""Size of the KV cache of a model, from its config alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError
from quantkit.model.model_class import model_config

#: Kinds of layers (`layer_types` of a config) whose cache grows to a size in the config, or with the context.
_WINDOWS = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
_GROWING = ("full_attention", "attention")


def cached_tokens(config: Any, context: int) -> list[int]:
    """Return for each layer with a KV cache the number of tokens that it caches for a `context` of tokens.

    A layer with a sliding window or chunks caches at most one window or chunk. Layers of linear attention
    have a state of constant size, which is not counted. Layers that share the cache of earlier ones have
    none.
    """
    layers = int(config.num_hidden_layers) - int(getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * layers
    found = []
    for kind in kinds[:layers]:
        if kind in _WINDOWS:
            found.append(min(context, int(getattr(config, _WINDOWS[kind], None) or context)))
        elif kind in _GROWING:
            found.append(context)
    return found


def kv_heads(config: Any) -> tuple[int, int] | None:
    """Return the number of heads with keys and values in a layer, and the numbers of a key or value of one.

    None for a text config that does not tell, and for multi-head latent attention.
    """
    every, heads, size, hidden = (
        _count(config, name)
        for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "hidden_size")
    )
    if getattr(config, "num_key_value_heads", None) is None:
        heads = every
    if getattr(config, "head_dim", None) is None and hidden and every:
        size = hidden // every
    if not heads or not size or getattr(config, "kv_lora_rank", None):
        return None
    return heads, size


def _count(config: Any, name: str) -> int | None:
    """Return a positive number of a config; None without it, and for a list with a number per layer."""
    found = getattr(config, name, None)
    return found if isinstance(found, int) and found > 0 else None


def kv_bytes(
    config: Mapping[str, Any], directory: Path, context: int, batch: int, row_bytes: Callable[[int], int]
) -> int:
    """Return the bytes of keys and values of `batch` sequences of `context` tokens.

    `row_bytes(n)` is the bytes of a key or value of one token and head with n numbers. Raises `UsageError`
    for a model without such a cache, or whose config does not tell its sizes.
    """
    text = model_config(config, directory).get_text_config(decoder=True)
    found = kv_heads(text)
    if found is None:
        raise UsageError(
            f"{directory / 'config.json'}: it is not known how much a {text.model_type!r} caches for a token "
            "(multi-head latent attention, or heads and sizes under other names). Leave out --fit, and take "
            "the sizes of weights from `quantkit plan`."
        )
    heads, size = found
    return sum(cached_tokens(text, context)) * batch * heads * 2 * row_bytes(size)
