"""Gated activations, f(x) * up, rounded where torch, with one kernel per operation, rounds them."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.ops.quantize_x_kernel import store_codes


@triton.jit
def gate(x, up, y, x_r, u_r, N, KIND: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """Write `y` [rows, N] = f(x) * up, where f is SiLU for KIND "silu", else GELU with tanh.

    `x` and `up` [rows, N] have row strides x_r and u_r. A program has B columns of a row. Grid: (rows, N /
    B). If PDL (programmatic dependent launch), the kernel starts while the one before it ends.
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
    """Write f(x) * up, quantized to 8 bits: `codes` [rows, STRIDE], their `scales` and `sums`.

    f is SiLU for KIND "silu", else GELU with tanh. `x` and `up` [rows, N] have row strides x_r and u_r. A
    program has B columns of a row. Grid: (rows, STRIDE / B). If PDL (programmatic dependent launch), the
    kernel starts while the one before it ends.

        codes                  int8 or e4m3, zeros beyond N; columns c and c + SPAN / 2 are adjacent
        scales                 float32 [M_STRIDE], one per row; if GROUPED, [BLOCKS, M_STRIDE], one per block
        sums                   float32 [BLOCKS, M_STRIDE], the sums of each 128 codes; written only if SUMS
        M_STRIDE               length of a row of `scales` and `sums`, at least the number of rows
        BLOCKS                 number of blocks of 128 columns
        B                      at least STRIDE unless GROUPED, so that a program has all columns of a scale
        ABSMAX                 the largest code
        MANTISSA, SMALLEST     mantissa bits of codes, 0 for integers, and their smallest normal
        STATIC                 True if all scales are the float32 with the bits `scale_bits`
        FMA                    True if a * b + c is rounded once (not in Triton's interpreter)
    """
    row, n = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B)
    found = _gated_part(x, up, row, n, x_r, u_r, N, KIND, PDL)
    store_codes(
        found, tl.program_id(1), row, codes, scales, sums, M_STRIDE, scale_bits, ABSMAX, MANTISSA, SMALLEST,
        GROUPED, STATIC, FMA, STRIDE, BLOCKS, SPAN, SUMS,
    )  # fmt: skip


@triton.jit
def _gated_part(x, up, row, n, x_r, u_r, N, KIND: tl.constexpr, PDL: tl.constexpr):
    """Return f(x) * up for columns `n` [B] of row `row`: [B] in x's dtype, with zeros beyond N.

    f is the activation KIND, as in `gated`. `x` and `up` are [rows, N], with row strides x_r and u_r. If PDL,
    it first waits for the kernel before this one (programmatic dependent launch).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    inside = n < N
    numbers = tl.load(x + row * x_r + n, mask=inside, other=0.0)
    return gated(numbers, tl.load(up + row * u_r + n, mask=inside, other=0.0), KIND)


@triton.jit
def gated(x, up, KIND: tl.constexpr):
    """Return f(x) * up [...] in x's dtype: f is SiLU for KIND "silu", else GELU with tanh."""
    numbers = x.to(tl.float32)
    if KIND == "silu":
        found = numbers / (1.0 + tl.exp(-numbers))
    else:
        # sqrt(2 / pi) * (x + 0.044715 x^3), and tanh(z) = 1 - 2 / (exp(2 z) + 1).
        z = 0.7978845608028654 * (numbers + 0.044715 * numbers * numbers * numbers)
        found = 0.5 * numbers * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    return (found.to(x.dtype).to(tl.float32) * up.to(tl.float32)).to(x.dtype)
