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

        codes                [M, STRIDE], zeros beyond K; columns c and c + SPAN / 2 of every SPAN are
                             adjacent
        scales               float32, one per row [M_STRIDE]; if GROUPED, one per row and 128 columns
                             [BLOCKS, M_STRIDE]
        sums                 float32 [BLOCKS, M_STRIDE], the sum of each 128 codes; written if SUMS
        M_STRIDE             length of a row of scales and sums, at least M
        BLOCKS               number of blocks of 128 columns
        KP                   128 * BLOCKS rounded up to a power of two
        MOST                 if above 0, round(x / scale) * scale is written to `codes`, in the dtype of x,
                             whose largest number is MOST, and no scales
        ABSMAX               the largest code: scale = absmax of x / ABSMAX
        MANTISSA, SMALLEST   mantissa bits and smallest normal of e4m3; 0 for int8
        STATIC               if True, scale is the float32 whose bits are `scale_bits`
        FMA                  True if tl.fma rounds once, as on GPUs, see `rounded_quotient`
        PDL                  if True, start before the previous kernel ends (programmatic dependent launch)

    A scale of values with NaN or infinity is NaN. Their codes are 0, or NaN if MOST is above 0.
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
    """Quantize a row of float32 `values` [G, 128]: return (round(values / scale), scale), both float32.

    The row has G * 128 values. A scale of values with NaN or infinity is NaN, and their codes are 0.

        GROUPED              if True, one scale for each 128 values, [G, 1], else one for the row, [1, 1]
        ABSMAX               the largest code: scale = absmax of values / ABSMAX
        MANTISSA, SMALLEST   mantissa bits and smallest normal of float codes; 0 for integers
        STATIC               if True, scale is the float32 whose bits are `scale_bits`, and values are clamped
                             to its range: integers from -ABSMAX - 1 to ABSMAX, floats from -ABSMAX to ABSMAX
        FMA                  True if tl.fma rounds once, as on GPUs, see `rounded_quotient`
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
    """Return `x` / `scale` rounded to the nearest value of an 8-bit format, ties to even, float32 [...].

    scale, inverse       scale and 1 / scale, broadcast to x
    MANTISSA, SMALLEST   mantissa bits and smallest normal of a float format; 0 for integers
    FMA                  True if tl.fma rounds once, as on GPUs but not in Triton's interpreter: x *
                         inverse is then corrected to the quotient; else x is divided
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
    """Return `code` * `scale` [...] in `dtype`, clamped to -MOST to MOST; NaN where `scale` is NaN.

    `scale` is broadcast to `code`.
    """
    # The largest values of float16 may round up to 65536.
    value = tl.minimum(tl.maximum(code * scale, -MOST), MOST)
    return tl.where(scale != scale, scale, value).to(dtype)


@triton.jit
def rounded(
    x, scale_bits, ABSMAX: tl.constexpr, MANTISSA: tl.constexpr, SMALLEST: tl.constexpr, MOST: tl.constexpr,
    GROUPED: tl.constexpr, STATIC: tl.constexpr, FMA: tl.constexpr,
):  # fmt: skip
    """Round a row `x` [KP] to 8 bits and back, as a linear rounds its inputs: scale * round(x / scale).

    KP is a multiple of 128; the result has x's dtype. Values that share a scale with NaN or infinity become
    NaN.

        GROUPED              if True, one scale per 128 values, else one for the row
        ABSMAX               the largest code: scale = absmax of x / ABSMAX
        MANTISSA, SMALLEST   mantissa bits and smallest normal of float codes; 0 for integers
        MOST                 largest number of x's dtype, to which results are clamped
        STATIC               if True, scale is the float32 whose bits are `scale_bits`
        FMA                  True if tl.fma rounds once, as on GPUs, see `rounded_quotient`
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
    """Quantize B columns of row `row` of an x [M, K] to int8 or e4m3; write codes, scales and sums of codes.

        x                    [B], columns part * B to part * B + B - 1 of the row, zeros beyond K; B is a
                             multiple of 128
        codes                [M, STRIDE], columns c and c + SPAN / 2 of every SPAN columns are adjacent
        scales               float32, one per row [M_STRIDE], where B must have all columns; if GROUPED, one
                             per row and 128 columns [BLOCKS, M_STRIDE]
        sums                 float32 [BLOCKS, M_STRIDE], the sum of each 128 codes; written if SUMS
        BLOCKS               number of blocks of 128 columns of the whole row

    For `scale_bits`, ABSMAX, MANTISSA, SMALLEST, STATIC and FMA see `quantized`.
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
