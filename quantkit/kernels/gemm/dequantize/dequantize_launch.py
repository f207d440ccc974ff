"""`dequantize`: write a weight, or a block of its rows, in the dtype of x, then call the library's GEMM."""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.kernels.gemm.bound import Bound, Y
from quantkit.kernels.gemm.operands import Operands, constants, empty
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.geometry import ROWS, geometry
from quantkit.packing.schemes import Scheme

#: Row tiles per program, one per warp.
WARPS = 4
#: Most weights dequantized at a time: 256 MiB in 16 bits.
AT_ONCE = 1 << 27


@lru_cache(maxsize=4096)
def _launch(
    rows: int, n: int, k: int, scheme: Scheme, dtype: torch.dtype, features: frozenset[str]
) -> Launch:
    """Build the launch of `dequantize` for `rows` rows of a weight [n, k]."""
    from quantkit.kernels.gemm.dequantize.dequantize_kernel import dequantize as kernel

    shape = geometry(n, k, scheme, dtype)
    spans = max(128 // shape.span, 1)
    return Launch(
        kernel,
        (-(-rows // (ROWS * WARPS)), -(-shape.spans // spans)),
        **constants(n, k, scheme, dtype, "ptx" in features),
        C=spans,
        W=WARPS,
        num_warps=WARPS,
    )


def dequantize(
    op: Operands, k: int, start: int, stop: int, features: frozenset[str] = frozenset()
) -> torch.Tensor:
    """Return rows `start` (a multiple of 16) to `stop` of the weight [n, k], dequantized to x's dtype."""
    out = empty(op, stop - start, k)
    launch = _launch(stop - start, op.n, k, op.scheme, op.x.dtype, features)
    launch(*op.layout, out, start // ROWS, stop)
    return out


def bind_weight(op: Operands, k: int, features: frozenset[str] = frozenset()) -> Bound | None:
    """Prepare the launch that writes the whole weight [n, k] as the y of a `Bound`; None if it is too large.

    `op.x` [m, k] gives the dtype alone; no x is read.
    """
    if op.n > _at_once(k):
        return None
    launch = _launch(op.n, op.n, k, op.scheme, op.x.dtype, features)
    return Bound(((launch, (*op.layout, Y, 0, op.n)),), (op.n, k), op.x.dtype, op.x.device, lambda x: x)


def _row_blocks(op: Operands, k: int, features: frozenset[str]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the weight [n, k] in blocks of rows: (slice of the rows, the rows dequantized to x's dtype)."""
    step = _at_once(k)
    for start in range(0, op.n, step):
        stop = min(start + step, op.n)
        yield slice(start, stop), dequantize(op, k, start, stop, features)


def _at_once(k: int) -> int:
    """Return how many rows of `k` columns are dequantized at a time: a multiple of 16."""
    return max(1, AT_ONCE // k // ROWS) * ROWS


def run(op: Operands, tile: None, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Compute y [m, n] = x W^T + bias for x [m, k] of any m, dequantizing W first.

    `tile` is None, as this kernel has no launch configurations; `features` are what the GPU and Triton can
    do.
    """
    x, bias, k = op.x, op.bias, op.x.shape[1]
    if op.n <= _at_once(k):
        return F.linear(x, dequantize(op, k, 0, op.n, features), bias)
    y = x.new_empty(x.shape[0], op.n)
    for block, weight in _row_blocks(op, k, features):
        y[:, block] = F.linear(x, weight, None if bias is None else bias[block])
    return y


def grad_x(op: Operands, k: int, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return the gradient of x, [m, k] = g W, for W [n, k]; `op.x` is g [m, n], the gradient of y.

    Products of blocks of rows of W are added in float32.
    """
    if op.n <= _at_once(k):
        return op.x @ dequantize(op, k, 0, op.n, features)
    total = torch.zeros(op.x.shape[0], k, dtype=torch.float32, device=op.x.device)
    for block, weight in _row_blocks(op, k, features):
        total += op.x[:, block] @ weight
    return total.to(op.x.dtype)
