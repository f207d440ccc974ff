"""Register `decode_attention`, the kernel for attention of one new token, as an attention of transformers.

The configs of a model have its name only while a CUDA graph is captured. So other models, and what a config
saves, never change. The mask is made as for "sdpa".
"""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from quantkit.kernels.ops.attention import decode_attention, why_not
from quantkit.kernels.problem import device_features

#: Name in the registries of attention and of masks.
NAME = "quantkit_decode"
#: Attention that it replaces, by `torch.nn.functional.scaled_dot_product_attention`.
SDPA = "sdpa"
#: Field of a config with the name of its implementation; the public setter would also change nested configs.
_FIELD = "_attn_implementation_internal"
#: Options of SDPA that `decode_attention` can ignore.
_UNUSED = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"})


def apply() -> None:
    """Add the name to both registries; does nothing if already added."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[SDPA])


def undo() -> None:
    """Remove the name from both registries."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(NAME, None)


def is_applied() -> bool:
    """Return True if the name is in both registries."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return NAME in ALL_ATTENTION_FUNCTIONS


@contextmanager
def decode_attention_in(model: nn.Module) -> Iterator[None]:
    """Context manager: `model` uses `decode_attention` instead of SDPA, if Triton is available.

    Models whose code contains "sdpa" are not changed, because their masks may depend on the name.
    """
    configs = _configs_of(model) if "triton" in device_features("cuda") and _accepts_any_name(model) else []
    apply()
    try:
        for config in configs:
            setattr(config, _FIELD, NAME)
        yield
    finally:
        for config in configs:
            setattr(config, _FIELD, SDPA)


def _configs_of(model: nn.Module) -> list[Any]:
    """Return the configs of modules of `model` that select SDPA."""
    by_id = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in by_id.values() if getattr(config, _FIELD, None) == SDPA]


def _accepts_any_name(model: nn.Module) -> bool:
    kinds: set[Any] = {type(module) for module in model.modules()}
    return not any(_compares_name(kind) for kind in kinds)


@lru_cache(maxsize=1024)
def _compares_name(kind: Any) -> bool:
    """Return True if the source code of a module class contains "sdpa", or cannot be read.

    Models with sparse attention compare the name, for example.
    """
    if kind.__module__.startswith("torch."):
        return False
    try:
        source = inspect.getsource(kind)
    except (OSError, TypeError):
        return True
    return f'"{SDPA}"' in source or f"'{SDPA}'" in source


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute the attention of a layer of transformers; return ([B, T, H, V], None).

    `query` is [B, H, T, D], `key` [B, Hkv, L, D], `value` [B, Hkv, L, V], all of one float dtype. The mask
    broadcasts to [B, H, T, L]. Calls SDPA for options or tensors that `decode_attention` does not support.
    """
    if _has_more_options(options) or why_not(query, key, value, attention_mask) is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[SDPA](
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def _has_more_options(options: dict[str, Any]) -> bool:
    """Return True if an option is on that `decode_attention` lacks; False and None count as off."""
    unknown = [value for name, value in options.items() if name not in _UNUSED]
    return bool(options.get("dropout")) or any(value is not None and value is not False for value in unknown)
