"""`dequantize`: write a weight, or a block of its rows, in the dtype of x, then call the library's GEMM."""

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.kernels.gemm.bound import Bound, Y
from quantkit.kernels.gemm.operands import Operands, constants, empty
from quantkit.kernels.jit.launcher import Launch
from quantkit.kernels.layouts.geometry import ROWS, geometry
from quantkit.kernels.problem import Outline, on_device
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Row tiles per program, one per warp.
WARPS = 4
#: Most weights dequantized at a time: 256 MiB in 16 bits.
AT_ONCE = 1 << 27


@lru_cache(maxsize=4096)
def _launch(
    rows: int, n: int, k: int, scheme: Scheme, dtype: torch.dtype, features: frozenset[str], scaled: bool
) -> Launch:
    """Build the launch of the kernel `dequantize` for `rows` rows of a weight [n, k], to `dtype`.

    `features` are what the GPU and Triton can do, such as "ptx" for inline PTX. If not `scaled`, it writes
    the values of codes without their scales, in any dtype.
    """
    from quantkit.kernels.gemm.dequantize.dequantize_kernel import dequantize as kernel

    shape = geometry(n, k, scheme, dtype)
    spans = max(128 // shape.span, 1)
    return Launch(
        kernel,
        (-(-rows // (ROWS * WARPS)), -(-shape.spans // spans)),
        **constants(n, k, scheme, dtype, "ptx" in features),
        C=spans,
        W=WARPS,
        SCALED=scaled,
        num_warps=WARPS,
    )


def dequantize(
    op: Operands,
    k: int,
    start: int,
    stop: int,
    features: frozenset[str] = frozenset(),
    of_codes: torch.dtype | None = None,
) -> torch.Tensor:
    """Return rows `start` to `stop` of the weight of `op`, [n, k], dequantized to the dtype of `op.x`.

    If `of_codes` is a dtype, they are the values of the codes alone, without scales, in that dtype. `start`
    is a multiple of 16. `features` are what the GPU and Triton can do, such as "ptx" for inline PTX.
    """
    out = empty(op, stop - start, k, dtype=of_codes)
    launch = _launch(stop - start, op.n, k, op.scheme, op.x.dtype, features, of_codes is None)
    launch(*op.layout, out, start // ROWS, stop)
    return out


def bind_weight(op: Operands, k: int, features: frozenset[str] = frozenset()) -> Bound | None:
    """Prepare the launch that dequantizes the weight of `op`, [n, k], as the y of a `Bound`.

    Return None if the weight is too large to be dequantized at once. `op.x` [m, k] gives the dtype and
    device; its values are not read. `features` are what the GPU and Triton can do.
    """
    if op.n > at_once(k):
        return None
    launch = _launch(op.n, op.n, k, op.scheme, op.x.dtype, features, True)
    return Bound(((launch, (*op.layout, Y, 0, op.n)),), (op.n, k), op.x.dtype, op.x.device, lambda x: x)


def _row_blocks(op: Operands, k: int, features: frozenset[str]) -> Iterator[tuple[slice, torch.Tensor]]:
    """Yield the weight of `op`, [n, k], in blocks of rows: (slice of rows, rows dequantized to x's dtype).

    `features` are what the GPU and Triton can do, such as "ptx" for inline PTX.
    """
    step = at_once(k)
    for start in range(0, op.n, step):
        stop = min(start + step, op.n)
        yield slice(start, stop), dequantize(op, k, start, stop, features)


def at_once(k: int, unit: int = ROWS) -> int:
    """Return how many rows of `k` columns are dequantized in one launch: a multiple of `unit`."""
    return max(1, AT_ONCE // k // unit) * unit


def run(op: Operands, tile: None, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x W^T + bias of the operands `op`, for x [m, k] of any m; W is dequantized first.

    `tile` is None, because this kernel has no launch configurations. `features` are what the GPU and Triton
    can do, such as "ptx" for inline PTX.
    """
    x, bias, k = op.x, op.bias, op.x.shape[1]
    if op.n <= at_once(k):
        return F.linear(x, dequantize(op, k, 0, op.n, features), bias)
    y = x.new_empty(x.shape[0], op.n)
    for block, weight in _row_blocks(op, k, features):
        y[:, block] = F.linear(x, weight, None if bias is None else bias[block])
    return y


def grad_x(op: Operands, k: int, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return the gradient of x, [m, k] = g W, for the gradient g [m, n] of y, which is passed as `op.x`.

    W [n, k] is dequantized first; if it is too large, in blocks of rows, whose products are added in float32.
    `features` are what the GPU and Triton can do, such as "ptx" for inline PTX.
    """
    if op.n <= at_once(k):
        return op.x @ dequantize(op, k, 0, op.n, features)
    total = torch.zeros(op.x.shape[0], k, dtype=torch.float32, device=op.x.device)
    for block, weight in _row_blocks(op, k, features):
        total += op.x[:, block] @ weight
    return total.to(op.x.dtype)


def launch_grad_x(
    grad: torch.Tensor, weight: PackedTensor | Outline, layout: tuple[torch.Tensor, ...]
) -> torch.Tensor:
    """Return the gradient of x, [m, k] = `grad` [m, n] W, from the gradient of y; `layout` is W."""
    rows, columns = weight.shape
    operands = Operands(grad, layout, None, weight.scheme, rows)
    return on_device(grad.device, lambda features: grad_x(operands, columns, features))


def prepare_weight(x: torch.Tensor, weight: Outline, layout: tuple[torch.Tensor, ...]) -> Bound | None:
    """Return the prepared launch that dequantizes W to [n, k] in x's dtype; None if it is too large."""
    rows, columns = weight.shape
    operands = Operands(x, layout, None, weight.scheme, rows)
    return on_device(x.device, lambda features: bind_weight(operands, columns, features))
