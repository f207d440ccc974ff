"""The launch that writes rows of a weight in the dtype of x."""

from functools import lru_cache

import torch

from quantkit.kernels.fused.launch.operands import Operands, constants, empty
from quantkit.kernels.fused.layout import ROWS, geometry
from quantkit.kernels.launcher import Launch
from quantkit.packing.schemes import Scheme

#: Row tiles of a program, one per warp.
WARPS = 4


@lru_cache(maxsize=4096)
def _launch(
    rows: int, n: int, k: int, scheme: Scheme, dtype: torch.dtype, features: frozenset[str]
) -> Launch:
    from quantkit.kernels.fused.dense import dequantize as kernel

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
    """Rows `start` (a multiple of 16) to `stop` of the weight in x's dtype, [stop - start, k]."""
    k = op.x.shape[1]
    out = empty(op, stop - start, k)
    launch = _launch(stop - start, op.n, k, op.scheme, op.x.dtype, features)
    launch(*op.layout, out, start // ROWS, stop)
    return out
