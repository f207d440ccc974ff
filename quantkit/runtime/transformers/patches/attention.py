"""Attention of one new token in recorded steps: `decode_attention` under a name of its own in transformers.

The model's configs have that name while a step is recorded, and the one that they had again afterwards. So
nobody else's attention changes, and neither does what a config says or saves. The mask is that of "sdpa".
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

#: What transformers' registries of attention and of masks call it.
NAME = "quantkit_decode"
#: The implementation that it stands in for.
SDPA = "sdpa"
#: Where a config keeps the name of its implementation; its setter changes the configs in it too.
_FIELD = "_attn_implementation_internal"
#: What SDPA's implementation is called with and `decode_attention` needs not know.
_KNOWN = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"})


def apply() -> None:
    """Add the name to both registries of transformers; does nothing when that was done already."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS[SDPA])


def undo() -> None:
    """Take the name out of both again."""
    from transformers import AttentionInterface, AttentionMaskInterface

    for registry in (AttentionInterface, AttentionMaskInterface):
        registry._global_mapping.pop(NAME, None)


def is_applied() -> bool:
    """Whether transformers knows the name."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    return NAME in ALL_ATTENTION_FUNCTIONS


@contextmanager
def decode_attention_in(model: nn.Module) -> Iterator[None]:
    """A block in which `model` attends by `decode_attention` where it would by SDPA, if Triton is there.

    Models whose code asks for "sdpa" by name are left as they are: they make other masks for other names.
    """
    configs = _configs_of(model) if "triton" in device_features("cuda") and _takes_any_name(model) else []
    apply()
    try:
        for config in configs:
            setattr(config, _FIELD, NAME)
        yield
    finally:
        for config in configs:
            setattr(config, _FIELD, SDPA)


def _configs_of(model: nn.Module) -> list[Any]:
    """The configs of the modules of `model` that ask for SDPA."""
    found = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    return [config for config in found.values() if getattr(config, _FIELD, None) == SDPA]


def _takes_any_name(model: nn.Module) -> bool:
    kinds: set[Any] = {type(module) for module in model.modules()}
    return not any(_asks_by_name(kind) for kind in kinds)


@lru_cache(maxsize=1024)
def _asks_by_name(kind: Any) -> bool:
    """Whether the code of a module compares with "sdpa", as sparse attention does; True without code."""
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
    """Attention [B, T, H, V] of queries [B, H, T, D] as transformers' attention layers ask for it."""
    if _asks_for_more(options) or why_not(query, key, value, attention_mask) is not None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        result: tuple[torch.Tensor, None] = ALL_ATTENTION_FUNCTIONS[SDPA](
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def _asks_for_more(options: dict[str, Any]) -> bool:
    """Whether options ask for what `decode_attention` has not; flags that are off, as of routers, do not."""
    unknown = [value for name, value in options.items() if name not in _KNOWN]
    return bool(options.get("dropout")) or any(value is not None and value is not False for value in unknown)
