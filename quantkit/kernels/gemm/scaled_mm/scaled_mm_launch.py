"""`scaled-mm`: unpack the e4m3 codes of a weight to rows, then call the library's FP8 product."""

import torch
import torch.nn.functional as F

from quantkit.errors import KernelError
from quantkit.kernels.gemm.dequantize.dequantize_launch import at_once, dequantize
from quantkit.kernels.gemm.operands import Operands, empty
from quantkit.kernels.layouts.geometry import ROWS
from quantkit.kernels.library_gemm import BLOCK, MULTIPLE_OF_M, product
from quantkit.kernels.ops.quantize_x import NATURAL_ORDER, QuantizedX, quantize_x


def run(op: Operands, tile: None, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x W^T + bias of the operands `op`, for x [m, k] rounded to e4m3 by groups of 128.

    x is quantized first, unless `op.codes` holds its codes. y is rounded to bfloat16 before the bias is
    added, and after. `tile` is None, because this kernel has no launch configurations. `features` are what
    the GPU and Triton can do. Raises `KernelError` if `op.activations` is None.
    """
    if op.activations is None:
        raise KernelError("scaled-mm multiplies inputs that a scheme rounds; this has none.")
    m, k = op.x.shape
    quantized = op.codes or quantize_x(op.x, op.activations, NATURAL_ORDER)
    codes, of_x = _padded(quantized, m, k)

    def product_of(start: int, stop: int) -> torch.Tensor:
        """Return columns `start` to `stop` of y."""
        weight = dequantize(op, k, start, stop, features, torch.float8_e4m3fn)
        return product(codes, weight, of_x, _weight_scales(op.layout[1], start, stop))[:m]

    step = at_once(k, BLOCK)
    if op.n <= step:
        y = product_of(0, op.n)
    else:
        y = empty(op, m, op.n)
        for start in range(0, op.n, step):
            stop = min(start + step, op.n)
            y[:, start:stop] = product_of(start, stop)
    return y if op.bias is None else y.add_(op.bias)


def _padded(x: QuantizedX, m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (codes, scales) of x [m, k] as `product` takes them, with rows up to `MULTIPLE_OF_M`.

    The scales of further rows are those that `x` has there, undefined. They reach no row up to m.
    """
    rows = -(-m // MULTIPLE_OF_M) * MULTIPLE_OF_M
    codes = x.codes[:, :k]
    if rows != m:
        codes = F.pad(codes.view(torch.int8), (0, 0, 0, rows - m)).view(x.codes.dtype)
    return codes, x.scales[: k // BLOCK, :rows].contiguous()


def _weight_scales(scale: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Return the scales of blocks of rows `start` to `stop` of a weight, float32 [rows / 128, K / 128].

    `scale` [N / 16, K / 128, 8, 1, 2] are those of the fragment layout, one per row: all rows of a block have
    the same.
    """
    tiles = scale[start // ROWS : stop // ROWS : BLOCK // ROWS, :, 0, 0, 0]
    return tiles.to(torch.float32, memory_format=torch.contiguous_format)
