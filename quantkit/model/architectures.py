"""Modules that can be packed, families whose blocks are Llama's, and sizes that config.json states."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from quantkit.model.experts import ExpertsSpec, find_spec, is_fused_experts
from quantkit.model.linears import is_linear

#: Families whose blocks are Llama's. Norms multiply by their weight, and only linears read the outputs of a
#: norm or linear, so scales of input features fold into it (`quantization/blockwise/fold_scales.py`). Only
#: linears and norms read or write the residual stream, and values pass from v to o unchanged, so the model
#: can be rotated (`quantization/rotated_checkpoint.py`). Tests fold and rotate each family.
LLAMA_LIKE = frozenset(
    {
        *("llama", "mistral", "qwen2", "qwen3", "granite", "smollm3", "phi3", "glm"),
        *("mixtral", "qwen2_moe", "qwen3_moe"),
    }
)

#: Names in config.json of the number of experts that a token is routed to.
EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "top_k_experts"),
    *("moe_top_k", "moe_topk", "moe_k"),
)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of config.json, with those of its text config in place of its own."""
    return {**config, **(config.get("text_config") or {})}


def experts_per_token(config: Mapping[str, Any]) -> int | None:
    """Return the number of experts that a token is routed to by config.json; None if it states none."""
    text = text_config(config)
    return next((text[name] for name in EXPERTS_PER_TOKEN if isinstance(text.get(name), int)), None)


def why_not_packable(module: nn.Module) -> str | None:
    """Return why quantkit has no packed replacement for `module`; None if it has one.

    Replaced are linears, by their function, and fused experts of a known layout and function. Works for
    modules on the meta device.
    """
    if is_linear(module):
        return None
    if not is_fused_experts(module):
        return f"{type(module).__name__} computes something else than x W^T + b"
    found = find_spec(module)
    return None if isinstance(found, ExpertsSpec) else found
