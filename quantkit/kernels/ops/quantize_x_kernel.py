"""Quantize inputs of linears to 8 bits: write codes, scales and sums of codes, or the inputs rounded."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def quantize_x(
    x, codes, scales, sums, M_STRIDE, scale_bits, K: tl.constexpr, KP: tl.constexpr, STRIDE: tl.constexpr,
    BLOCKS: tl.constexpr, SPAN: tl.constexpr, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr, MOST: tl.constexpr, GROUPED: tl.constexpr, SUMS: tl.constexpr,
    STATIC: tl.constexpr, FMA: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Quantize each row of x [M, K] to int8 or e4m3: codes = round(x / scale). Grid: (M,).

        codes int8 or e4m3     [M, STRIDE], zeros beyond K, columns in the order of SPAN
        scales float32         [M_STRIDE], or [BLOCKS, M_STRIDE] with GROUPED: one per 128 columns
        sums float32           [BLOCKS, M_STRIDE] with SUMS: sum of each 128 codes

    M_STRIDE is at least M, BLOCKS the number of blocks of 128 columns. In codes, columns c and c + SPAN / 2
    of every SPAN columns are adjacent. KP is 128 * BLOCKS rounded up to a power of two.

        MOST                 above 0: write the rounded inputs, scale * code, instead of codes, and no
                             scales; they have the dtype of x, whose largest number is MOST
        ABSMAX               the largest code
        MANTISSA, SMALLEST   mantissa bits of codes, 0 for integers, and their smallest normal
        STATIC               the scale is the float32 whose bits are `scale_bits`, not absmax / ABSMAX
        FMA                  a * b + c is rounded once (not in Triton's interpreter): x / scale is then a
                             corrected product with 1 / scale, else a division

    A row, or with GROUPED 128 columns, with NaN or infinity has the scale NaN and codes 0; rounded, it
    becomes NaN. With PDL (programmatic dependent launch) it starts while the kernel before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = SPAN // 2
    pair = tl.arange(0, KP // 2)
    column = pair // HALF * SPAN + pair % HALF
    first = tl.load(x + row * K + column, mask=column < K, other=0.0)
    second = tl.load(x + row * K + column + HALF, mask=column + HALF < K, other=0.0)
    values = tl.reshape(tl.join(first, second), (KP // 128, 128)).to(tl.float32)
    code, scale = quantized(values, scale_bits, ABSMAX, MANTISSA, SMALLEST, GROUPED, STATIC, FMA)
    block = tl.arange(0, KP // 128)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    if MOST > 0:
        tl.store(
            codes + row * STRIDE + at, multiplied(code, scale, MOST, codes.dtype.element_ty), mask=at < STRIDE
        )
    else:
        tl.store(codes + row * STRIDE + at, code.to(codes.dtype.element_ty), mask=at < STRIDE)
        if GROUPED:
            tl.store(scales + block[:, None] * M_STRIDE + row, scale, mask=block[:, None] < BLOCKS)
        else:
            tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
    if SUMS:
        total = tl.sum(code, 1, keep_dims=True)
        tl.store(sums + block[:, None] * M_STRIDE + row, total, mask=block[:, None] < BLOCKS)


@triton.jit
def quantized(
    values, scale_bits, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr,
    GROUPED: tl.constexpr, STATIC: tl.constexpr, FMA: tl.constexpr,
):  # fmt: skip
    """Quantize a row of float32 `values` [G, 128]: return (round(values / scale), scales), both float32.

    The row, G times 128 values, has one scale [1, 1], or with GROUPED one for each 128 values, [G, 1]. A
    row, or group, with NaN or infinity has the scale NaN and codes 0.

        ABSMAX               the largest code
        MANTISSA, SMALLEST   mantissa bits of codes, 0 for integers, and their smallest normal
        STATIC               the scale is the float32 whose bits are `scale_bits`, not absmax / ABSMAX; values
                             are clamped to its range: integers go down to -ABSMAX - 1
        FMA                  a * b + c is rounded once (not in Triton's interpreter): values / scale is then a
                             corrected product with 1 / scale, else a division
    """
    # Bits of magnitudes are ordered as magnitudes, with infinity and NaN last.
    largest = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1, keep_dims=True)
    if not GROUPED:
        largest = tl.max(largest, 0, keep_dims=True)
    broken = largest >= 0x7F800000
    largest = tl.where(broken, 0, largest).to(tl.float32, bitcast=True)
    values = tl.where(broken, 0.0, values)
    scale = tl.maximum(tl.div_rn(largest, ABSMAX), 1.1754943508222875e-38)
    if STATIC:
        scale = tl.zeros_like(scale) + scale_bits.to(tl.int32).to(tl.float32, bitcast=True)
        LOWEST: tl.constexpr = -ABSMAX if MANTISSA > 0 else -ABSMAX - 1.0
        values = tl.minimum(tl.maximum(values, LOWEST * scale), ABSMAX * scale)
    code = rounded_quotient(values, scale, tl.div_rn(1.0, scale), MANTISSA, SMALLEST, FMA)
    return code, tl.where(broken, float("nan"), scale)


@triton.jit
def rounded_quotient(
    x, scale, inverse, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, FMA: tl.constexpr
):  # fmt: skip
    """Return `x` / `scale` rounded to the values of an 8-bit format, float32 [...], ties to even.

    `inverse` is 1 / `scale`; both are broadcast. MANTISSA and SMALLEST are the mantissa bits of the format, 0
    for integers, and its smallest normal. With FMA, a * b + c is rounded once (not in Triton's interpreter):
    the quotient is then a product with `inverse`, corrected, and else a division.
    """
    if FMA:
        # A product with the inverse, corrected by its remainder, is the quotient correctly rounded.
        code = x * inverse
        code = tl.fma(tl.fma(-code, scale, x), inverse, code)
    else:
        code = tl.div_rn(x, scale)
    # Adding 1.5 * 2^23 spacings of the values around a number rounds it to a multiple, ties to even.
    spacing = 12582912.0
    if MANTISSA > 0:
        power = (code.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        spacing = tl.maximum(power, SMALLEST) * (12582912.0 / (1 << MANTISSA))
    return (code + spacing) - spacing


@triton.jit
def multiplied(code, scale, MOST: tl.constexpr, dtype: tl.constexpr):
    """Return `code` * `scale` [...] in `dtype`, clamped to +-MOST; NaN where `scale`, broadcast, is NaN."""
    # The largest values of float16 may round up to 65536.
    value = tl.minimum(tl.maximum(code * scale, -MOST), MOST)
    return tl.where(scale != scale, scale, value).to(dtype)


@triton.jit
def rounded(
    x, scale_bits, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, MOST: tl.constexpr,
    GROUPED: tl.constexpr, STATIC: tl.constexpr, FMA: tl.constexpr,
):  # fmt: skip
    """Round a row `x` [KP] to 8 bits and back, as a linear rounds its inputs: scale * round(x / scale).

    KP is a multiple of 128; the result has x's dtype. A row, or with GROUPED 128 values, with NaN or
    infinity becomes NaN.

        ABSMAX               the largest code: scale = absmax / ABSMAX
        MANTISSA, SMALLEST   mantissa bits of codes, 0 for integers, and their smallest normal
        MOST                 results are clamped to it, the largest number of x's dtype
        GROUPED              one scale per 128 values, else one for the row
        STATIC               the scale is the float32 whose bits are `scale_bits`
        FMA                  a * b + c is rounded once (not in Triton's interpreter): x / scale is then a
                             corrected product with 1 / scale, else a division
    """
    groups = tl.reshape(x.to(tl.float32), (x.shape[0] // 128, 128))
    code, scale = quantized(groups, scale_bits, ABSMAX, MANTISSA, SMALLEST, GROUPED, STATIC, FMA)
    return tl.reshape(multiplied(code, scale, MOST, x.dtype), (x.shape[0],))


@triton.jit
def store_codes(
    x, part, row, codes, scales, sums, M_STRIDE, scale_bits, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr, GROUPED: tl.constexpr, STATIC: tl.constexpr, FMA: tl.constexpr,
    STRIDE: tl.constexpr, BLOCKS: tl.constexpr, SPAN: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """Quantize B columns of row `row` of x; write codes, scale and sums of codes as `quantize_x` does.

    `x` [B] are columns `part` * B to `part` * B + B - 1, with zeros beyond K. B is a multiple of 128, and so
    of SPAN.

        codes                  output [M, STRIDE], int8 or e4m3
        scales                 output float32 [M_STRIDE], with GROUPED [BLOCKS, M_STRIDE]
        sums                   output float32 [BLOCKS, M_STRIDE], with SUMS: sum of each 128 codes
        GROUPED                one scale per 128 columns; else one per row, and B has all columns
        BLOCKS                 number of blocks of 128 columns
        ABSMAX                 the largest code
        MANTISSA, SMALLEST     mantissa bits of codes, 0 for integers, and their smallest normal
        STATIC, scale_bits     scales are the float32 with these bits, not absmax / ABSMAX
        FMA                    as in `quantized`: how x / scale is rounded
        SPAN                   codes of columns c and c + SPAN / 2 are stored next to each other
        SUMS                   write `sums`
    """
    G: tl.constexpr = x.shape[0] // 128
    HALF: tl.constexpr = SPAN // 2
    groups = tl.reshape(x.to(tl.float32), (G, 128))
    code, scale = quantized(groups, scale_bits, ABSMAX, MANTISSA, SMALLEST, GROUPED, STATIC, FMA)
    halves = tl.reshape(code.to(codes.dtype.element_ty), (G * 128 // SPAN, 2, HALF))
    block = part * G + tl.arange(0, G)
    at = block[:, None] * 128 + tl.arange(0, 128)[None, :]
    tl.store(codes + row * STRIDE + at, tl.reshape(tl.trans(halves, 0, 2, 1), (G, 128)), mask=at < STRIDE)
    inside = block[:, None] < BLOCKS
    if GROUPED:
        tl.store(scales + block[:, None] * M_STRIDE + row, scale, mask=inside)
    else:
        tl.store(scales + row + tl.zeros((1, 1), tl.int32), scale)
    if SUMS:
        tl.store(sums + block[:, None] * M_STRIDE + row, tl.sum(code, 1, keep_dims=True), mask=inside)
