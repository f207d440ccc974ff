"""Attention for transformers: `decode_attention` for one new token on a GPU in 16 bits, SDPA for all else.

It is what transformers calls for "sdpa", and SDPA itself for models that did not ask for it. It has no name
of its own: models with sparse attention mask keys for names that they know, and continuous batching takes
those alone.
"""

import logging
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.kernels.attention import DTYPES, decode_attention, why_not
from quantkit.kernels.problem import device_features

logger = logging.getLogger("quantkit.kernels")

#: What SDPA's implementation is called with and `decode_attention` needs not know.
_KNOWN = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"})
#: Set in the modules of models that use it.
_MARK = "_quantkit_attention"

_sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]


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
    ours = getattr(module, _MARK, False) and not _asks_for_more(options)
    if not ours or why_not(query, key, value, attention_mask) is not None:
        result: tuple[torch.Tensor, None] = _sdpa(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def _asks_for_more(options: dict[str, Any]) -> bool:
    """Whether options ask for what `decode_attention` has not; flags that are off, as of routers, do not."""
    unknown = [value for name, value in options.items() if name not in _KNOWN]
    return bool(options.get("dropout")) or any(value is not None and value is not False for value in unknown)


def use_decode_attention(model: Any) -> None:
    """Make `model` use `decode_attention` where it would use SDPA, if there is Triton to run it.

    A model that it does not take has a warning.
    """
    if "triton" not in device_features("cuda"):
        return
    if model.dtype not in DTYPES:
        logger.warning(
            "attention of new tokens is torch's, not quantkit's: the model computes in %s, quantkit's kernel "
            "in bfloat16 and float16. Load the model with one of these as dtype.",
            str(model.dtype).removeprefix("torch."),
        )
    ALL_ATTENTION_FUNCTIONS.register("sdpa", attention_forward)
    for module in model.modules():
        setattr(module, _MARK, True)
