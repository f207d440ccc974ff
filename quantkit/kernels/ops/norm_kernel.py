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
    """Write `y` = x / sqrt(mean(x^2) + EPS) * (weight + OFFSET), the mean over each row of N values.

    Row r of `x` begins at element r // ROWS * x_o + r % ROWS * x_i; `other` is addressed likewise, by o_o and
    o_i. `weight` [N] has stride w_i. `y` and `total` are [rows, N], contiguous. NP is N rounded up to a power
    of two. Grid: (rows,).

        ADD                     x is first replaced by `total` = x + other
        ROUND                   x / RMS is rounded to y's dtype before it is multiplied by weights
        ABSMAX .. FMA           with ABSMAX > 0, `y` is rounded to 8 bits and back by
                                `quantize_x_kernel.rounded`, which also takes `scale_bits`
        LATE                    signal the next kernel after this one's PDL wait, not before it
        PDL                     programmatic dependent launch: start while the kernel before ends
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
    """Write RMSNorm of x, quantized to 8 bits: `codes` [rows, STRIDE], `scales` and `sums` of codes.

        x, other, total            rows of N values, padded to NP; with ADD the norm is of total = x + other
        x_o, x_i, o_o, o_i         row r of x is at r // ROWS * x_o + r % ROWS * x_i; of `other` likewise
        weight [N], w_i            weights of the norm, to which OFFSET is added, and their stride
        ROUND                      x / RMS is rounded to x's dtype before it is multiplied by weights
        LATE                       signal the next kernel after this one's PDL wait, not before it
        codes, scales, sums        as `quantize_x_kernel.quantize_x` writes them, for the norm as its x
        M_STRIDE, STRIDE           row lengths of scales and of codes
        BLOCKS                     number of blocks of 128 columns
        ABSMAX .. FMA              the format of codes and how they are rounded, with `scale_bits`
        SPAN                       codes of columns c and c + SPAN / 2 are stored next to each other
        SUMS                       write `sums`

    Grid: (rows,). With PDL (programmatic dependent launch) it starts while the kernel before it ends.
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

    The first N of NP values count. With ADD, x is first replaced by x + other, which is written to `total`
    [rows, N]. Row r of x begins at element r // ROWS * x_o + r % ROWS * x_i, of `other` likewise. `weight`
    [N] has stride w_i. ROUND rounds x / RMS to `dtype` before it is multiplied by weights.

    With PDL (programmatic dependent launch) it waits for the kernel before it; with LATE the next kernel
    starts only then.
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
    """Return `x` * `rstd` * (`weight` + OFFSET) in `dtype`, broadcast [...]: the last step of RMSNorm.

    `x` and `rstd` = 1 / sqrt(mean(x^2) + eps) are float32. With ROUND, x * rstd is rounded to `dtype` first.
    """
    x *= rstd
    if ROUND:
        x = x.to(dtype).to(tl.float32)
    factor = weight.to(tl.float32)
    # Without OFFSET the compiler multiplies 16-bit values as such, two at a time.
    if OFFSET != 0.0:
        factor += OFFSET
    return (x * factor).to(dtype)
