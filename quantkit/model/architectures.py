"""Modules that can be packed, and families whose blocks are Llama's."""

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
