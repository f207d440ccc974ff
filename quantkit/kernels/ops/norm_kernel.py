"""RMSNorm of x, or of a sum x + other; its results may be rounded or quantized to 8 bits.

Numbers are rounded where torch, which runs a kernel per operation, rounds them.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.ops.quantize_x_kernel import rounded, store_codes


@triton.jit
def rms_norm(
    x, other, weight, total, y, x_o, x_i, o_o, o_i, w_i, scale_bits,
    ROWS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr,
    ROUND: tl.constexpr, OFFSET: tl.constexpr, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr, MOST: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr,
    FMA: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `y` = x / sqrt(mean(x^2) + EPS) * (weight + OFFSET) for each row of N values. Grid: (rows,).

    Row r of `x` begins at element r // ROWS * x_o + r % ROWS * x_i. Row r of `other` begins likewise, by o_o
    and o_i. `weight` [N] has stride w_i. `y` and `total` are contiguous [rows, N].

        NP          N rounded up to a power of two, and to 128 if ABSMAX is above 0
        ADD         if True, `total` = x + other is written and takes the place of x
        ROUND       if True, x / sqrt(mean(x^2) + EPS) is rounded to y's dtype before the product with weights
        ABSMAX      if above 0, `y` is also rounded to 8 bits and back, by `quantize_x_kernel.rounded`
        LATE        if True, the next kernel may start only after the previous one has ended
        PDL         if True, start before the previous kernel ends (programmatic dependent launch)

    `scale_bits`, ABSMAX, MANTISSA, SMALLEST, MOST, GROUPED, STATIC and FMA are those of `rounded`.
    """
    row = tl.program_id(0).to(tl.int64)
    found = _norm_of_row(
        x, other, weight, total, row, x_o, x_i, o_o, o_i, w_i, y.dtype.element_ty, ROWS, N, NP, EPS, ADD,
        ROUND, OFFSET, LATE, PDL,
    )  # fmt: skip
    if ABSMAX > 0.0:
        found = rounded(found, scale_bits, ABSMAX, MANTISSA, SMALLEST, MOST, GROUPED, STATIC, FMA)
    n = tl.arange(0, NP)
    tl.store(y + row * N + n, found, mask=n < N)


@triton.jit
def rms_norm_codes(
    x, other, weight, total, codes, scales, sums, x_o, x_i, o_o, o_i, w_i, M_STRIDE, scale_bits,
    ROWS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr,
    ROUND: tl.constexpr, OFFSET: tl.constexpr, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, FMA: tl.constexpr,
    STRIDE: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr, LATE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Quantize RMSNorm of each row of N values of x to 8 bits: write `codes`, `scales` and `sums`.

    The norm is x / sqrt(mean(x^2) + EPS) * (weight + OFFSET). Row r of `x` begins at element r // ROWS * x_o
    + r % ROWS * x_i. Row r of `other` begins likewise, by o_o and o_i. `weight` [N] has stride w_i.

        NP          128 * BLOCKS rounded up to a power of two
        ADD         if True, `total` [rows, N] = x + other is written and takes the place of x
        ROUND       if True, x / sqrt(mean(x^2) + EPS) is rounded to x's dtype before the product with weights
        LATE        if True, the next kernel may start only after the previous one has ended
        PDL         if True, start before the previous kernel ends (programmatic dependent launch)

    `codes` [rows, STRIDE], `scales`, `sums`, M_STRIDE, `scale_bits` and the constexprs from ABSMAX to SUMS
    are those of `quantize_x_kernel.quantize_x`, whose input is the norm. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    found = _norm_of_row(
        x, other, weight, total, row, x_o, x_i, o_o, o_i, w_i, x.dtype.element_ty, ROWS, N, NP, EPS, ADD,
        ROUND, OFFSET, LATE, PDL,
    )  # fmt: skip
    # 1 / RMS of a row with NaN makes zeros NaN.
    found = tl.where(tl.arange(0, NP) < N, found, 0.0)
    store_codes(
        found, 0, row, codes, scales, sums, M_STRIDE, scale_bits, ABSMAX, MANTISSA, SMALLEST, GROUPED, STATIC,
        FMA, STRIDE, BLOCKS, SPAN, SUMS,
    )  # fmt: skip


@triton.jit
def _norm_of_row(
    x, other, weight, total, row, x_o, x_i, o_o, o_i, w_i, dtype: tl.constexpr, ROWS: tl.constexpr,
    N: tl.constexpr, NP: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr, ROUND: tl.constexpr,
    OFFSET: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Return RMSNorm of row `row` of x, x / sqrt(mean(x^2) + EPS) * (weight + OFFSET), in `dtype`: [NP].

    The row has N values, which begin at element row // ROWS * x_o + row % ROWS * x_i; those of `other`
    likewise, by o_o and o_i. `weight` [N] has stride w_i. Results beyond N are undefined.

        ADD         if True, `total` [rows, N] = x + other is written and takes the place of x
        ROUND       if True, x / sqrt(mean(x^2) + EPS) is rounded to `dtype` before the product with weights
        LATE        if True, the next kernel may start only after the previous one has ended
        PDL         if True, wait for the previous kernel to end (programmatic dependent launch)
    """
    n = tl.arange(0, NP)
    inside = n < N
    # Before PDL's wait: no kernel that may still run writes weights.
    factor = tl.load(weight + n * w_i, mask=inside, other=0.0)
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    numbers = tl.load(x + row // ROWS * x_o + row % ROWS * x_i + n, mask=inside, other=0.0)
    if ADD:
        more = tl.load(other + row // ROWS * o_o + row % ROWS * o_i + n, mask=inside, other=0.0)
        numbers = (numbers.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * N + n, numbers, mask=inside)
    scaled = numbers.to(tl.float32)
    rstd = tl.rsqrt(tl.sum(scaled * scaled, 0) / N + EPS)
    return normed(scaled, rstd, factor, dtype, ROUND, OFFSET)


@triton.jit
def normed(x, rstd, weight, dtype: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr):
    """Return `x` * `rstd` * (`weight` + OFFSET) in `dtype`, the last step of RMSNorm.

    The operands [...] are broadcast. `x` and `rstd` = 1 / sqrt(mean(x^2) + eps) are float32. If ROUND, x *
    rstd is rounded to `dtype` first.
    """
    x *= rstd
    if ROUND:
        x = x.to(dtype).to(tl.float32)
    factor = weight.to(tl.float32)
    # Without OFFSET the compiler multiplies 16-bit values as such, two at a time.
    if OFFSET != 0.0:
        factor += OFFSET
    return (x * factor).to(dtype)
