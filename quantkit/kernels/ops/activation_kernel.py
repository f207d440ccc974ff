"""Gated activations, rounded where torch, which runs a kernel per operation, rounds."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.ops.quantize_x_kernel import store_codes


@triton.jit
def gate(x, up, y, x_r, u_r, N, KIND: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Write `y` [rows, N] = f(x) * up, where f is the activation that KIND names. Grid: (rows, N / B).

    `x` and `up` [rows, N] have row strides x_r and u_r.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    tl.store(y + row * N + n, _gated_part(x, up, row, n, x_r, u_r, N, KIND, PDL), mask=n < N)


@triton.jit
def gate_codes(
    x, up, codes, scales, sums, x_r, u_r, N, M_STRIDE, scale_bits, KIND: tl.constexpr, B: tl.constexpr,
    ABSMAX: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, GROUPED: tl.constexpr,
    STATIC: tl.constexpr, FMA: tl.constexpr, STRIDE: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr,
    SUMS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `codes` [rows, STRIDE], `scales` and `sums` of the result of `gate`. Grid: (rows, STRIDE / B).

    They are those of `quantize_x_kernel.quantize_x` with the result [rows, N] as x. Without GROUPED, B is at
    least STRIDE.
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    found = _gated_part(x, up, row, n, x_r, u_r, N, KIND, PDL)
    store_codes(
        found, tl.program_id(1), row, codes, scales, sums, M_STRIDE, scale_bits, ABSMAX, MANTISSA, SMALLEST,
        GROUPED, STATIC, FMA, STRIDE, BLOCKS, SPAN, SUMS,
    )  # fmt: skip


@triton.jit
def _gated_part(x, up, row, n, x_r, u_r, N, KIND: tl.constexpr, PDL: tl.constexpr):
    """Return f(x) * up of the columns `n` [B] of a row, with zeros beyond N."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = n < N
    numbers = tl.load(x + row * x_r + n, mask=inside, other=0.0)
    return gated(numbers, tl.load(up + row * u_r + n, mask=inside, other=0.0), KIND)


@triton.jit
def gated(x, up, KIND: tl.constexpr):
    """Return f(x) * up [...] in x's dtype; f is SiLU or GELU by tanh, by KIND."""
    numbers = x.to(tl.float32)
    if KIND == "silu":
        found = numbers / (1.0 + tl.exp(-numbers))
    else:
        # sqrt(2 / pi) * (x + 0.044715 x^3), and tanh(z) = 1 - 2 / (exp(2 z) + 1).
        z = 0.7978845608028654 * (numbers + 0.044715 * numbers * numbers * numbers)
        found = 0.5 * numbers * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    return (found.to(x.dtype).to(tl.float32) * up.to(tl.float32)).to(x.dtype)
