"""`dequantize`: write rows of a weight in the dtype of x, then call the library's GEMM."""

from functools import lru_cache

import torch
import torch.nn.functional as F

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


def dequantize(op: Operands, start: int, stop: int, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return rows `start` (a multiple of 16) to `stop` of the weight in x's dtype, [stop - start, k]."""
    k = op.x.shape[1]
    out = empty(op, stop - start, k)
    launch = _launch(stop - start, op.n, k, op.scheme, op.x.dtype, features)
    launch(*op.layout, out, start // ROWS, stop)
    return out


def run(op: Operands, tile: None, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T + bias for any m. This kernel has no tiles."""
    x, bias, n = op.x, op.bias, op.n
    step = max(1, AT_ONCE // x.shape[1] // ROWS) * ROWS
    if step >= n:
        return F.linear(x, dequantize(op, 0, n, features), bias)
    y = x.new_empty(x.shape[0], n)
    for start in range(0, n, step):
        stop = min(start + step, n)
        block = dequantize(op, start, stop, features)
        y[:, start:stop] = F.linear(x, block, None if bias is None else bias[start:stop])
    return y
