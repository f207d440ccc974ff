"""Biases and activation of experts between their two products, in one launch, as a torch operator."""

from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.problem import on_device

#: Columns per program.
ACTIVATED = 1024


def activate_experts(
    y: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    limit: float | None,
    alpha: float = 1.0,
    interleaved: bool = False,
) -> torch.Tensor:
    """Return f(gate) * up [P, N] for `y` [P, 2 N], gate and up side by side, after adding a bias per expert.

        index         [T, top_k]: the expert of each of the P = T * top_k rows
        bias          [E, 2 N] for E experts, or None for no bias
        interleaved   True if gate and up alternate in the columns of `bias`, False if gate comes first
        kind          f: "silu", or "gelu" (by tanh). For "swiglu" the result is
                      (up + 1) * gate * sigmoid(alpha * gate)
        limit         upper bound of gate, and bound of the magnitude of up; None for no bound

    Sums are float32, and the result has y's dtype. Rows without an expert are undefined.
    """
    out: torch.Tensor = torch.ops.quantkit.activate_experts(y, index, bias, kind, limit, alpha, interleaved)
    return out


@lru_cache(maxsize=256)
def _launch(
    rows: int,
    n: int,
    experts: int,
    options: tuple[tuple[str, object], ...],
    dtypes: tuple[torch.dtype | None, ...],
    features: frozenset[str],
) -> Launch:
    """Build the launch of `activate_experts` for `rows` rows of gate and up, `n` columns each.

    `options` are (kind, limit, alpha, interleaved), `dtypes` the dtypes of y, index and bias.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.moe.expert_activation_kernel import activate_experts as kernel

    without = {"bias": None} if dtypes[-1] is None else {}
    grid = (rows, -(-n // ACTIVATED))
    constexprs = {"EXPERTS": experts, "BLOCK": ACTIVATED, **dict(options), **without, **overlap(features)}
    return Launch(kernel, grid, **constexprs, num_warps=4)


torch.library.define(
    "quantkit::activate_experts",
    "(Tensor y, Tensor index, Tensor? bias, str kind, float? limit, float alpha, bool interleaved) -> Tensor",
)


@torch.library.impl("quantkit::activate_experts", "default")
def _activate_experts(
    y: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    limit: float | None,
    alpha: float,
    interleaved: bool,
) -> torch.Tensor:
    """Compute the operator `activate_experts`: gate and up `y` [P rows, 2 N] -> [P, N] = f(gate) * up.

    The arguments are described at the function `activate_experts`; `index` [T, top_k] are the experts of the
    rows, `bias` is [E, 2 N] or None.
    """
    out = _activate_experts_fake(y)
    if not len(y):
        return out
    options = (("KIND", kind), ("LIMIT", limit), ("ALPHA", alpha), ("INTERLEAVED", interleaved))
    dtypes = (y.dtype, index.dtype, None if bias is None else bias.dtype)
    experts = 0 if bias is None else len(bias)
    biases = () if bias is None else (bias.contiguous(),)
    operands = (y.contiguous(), index.contiguous(), out, out.shape[1], *biases)

    def run(features: frozenset[str]) -> torch.Tensor:
        _launch(len(y), out.shape[1], experts, options, dtypes, features)(*operands)
        return out

    return on_device(y.device, run)


def _activate_experts_fake(y: torch.Tensor, *_: object) -> torch.Tensor:
    """Return an empty [P rows, N] for `y` [P, 2 N], for tracing."""
    return y.new_empty(y.shape[0], y.shape[1] // 2)


torch.library.register_fake("quantkit::activate_experts", _activate_experts_fake)
