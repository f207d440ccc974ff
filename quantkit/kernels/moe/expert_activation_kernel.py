"""Biases and activation of experts between their two products, in one launch."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.ops.activation_kernel import gated


@triton.jit
def activate_experts(
    y, index, out, N, bias, EXPERTS: tl.constexpr, KIND: tl.constexpr, LIMIT: tl.constexpr,
    ALPHA: tl.constexpr, INTERLEAVED: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `out` [P, N] = f(gate) * up for `y` [P, 2 N], gate and up side by side, after adding a bias.

        index           [P]: the expert of each row; a row is a routed token (token-expert pair)
        bias            [EXPERTS, 2 N], a row for each expert, or None
        INTERLEAVED     True if gate and up alternate in the columns of `bias`, False if gate comes first
        KIND            f: "silu", or "gelu" (by tanh). For "swiglu" the result is
                        (up + 1) * gate * sigmoid(ALPHA * gate)
        LIMIT           upper bound of gate, and bound of the magnitude of up; None for no bound
        PDL             True if launched with programmatic dependent launch: waits for the kernel before it

    Sums are float32. Rows of no expert are undefined. A program has BLOCK columns. Grid: (P, N / BLOCK).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = n < N
    gate = tl.load(y + row * 2 * N + n, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(y + row * 2 * N + N + n, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        expert = tl.load(index + row).to(tl.int64)
        has_one = inside & (expert >= 0) & (expert < EXPERTS)
        of_expert = bias + expert * 2 * N
        to_gate = of_expert + (2 * n if INTERLEAVED else n)
        to_up = of_expert + (2 * n + 1 if INTERLEAVED else N + n)
        gate += tl.load(to_gate, mask=has_one, other=0.0).to(tl.float32)
        up += tl.load(to_up, mask=has_one, other=0.0).to(tl.float32)
    if LIMIT is not None:
        gate = tl.minimum(gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.minimum(up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        up = tl.maximum(up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    if KIND == "swiglu":
        found = (up + 1.0) * (gate / (1.0 + tl.exp(-ALPHA * gate)))
    else:
        found = gated(gate, up, KIND)
    tl.store(out + row * N + n, found.to(out.dtype.element_ty), mask=inside)
