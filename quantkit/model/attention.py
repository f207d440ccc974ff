"""Attention for transformers: `decode_attention` for one new token on a GPU, SDPA for everything else.

It is registered under the name "quantkit" in transformers' table of attention implementations, with the masks
of SDPA.
"""

from typing import Any

import torch
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quantkit.kernels.attention import decode_attention, why_not
from quantkit.kernels.problem import device_features

NAME = "quantkit"
#: What SDPA's implementation is called with and `decode_attention` needs not know.
_KNOWN = frozenset({"dropout", "is_causal", "position_ids", "cache_position", "use_cache", "sliding_window"})


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
    unknown = any(value is not None and name not in _KNOWN for name, value in options.items())
    if unknown or options.get("dropout") or why_not(query, key, value, attention_mask) is not None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return result
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return decode_attention(query, key, value, attention_mask, scale), None


def use_decode_attention(model: Any) -> None:
    """Make `model` use `attention_forward` where it would use SDPA, if there is Triton to run it."""
    if "triton" not in device_features("cuda"):
        return
    ALL_ATTENTION_FUNCTIONS.register(NAME, attention_forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, sdpa_mask)
    if model.config._attn_implementation == "sdpa":
        model.set_attn_implementation(NAME)
