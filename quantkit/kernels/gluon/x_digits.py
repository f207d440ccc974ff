"""Split each value of x into three int8 digits, so that int8 `mma` multiplies it with int8 codes exactly.

    x = unit * (65536 d2 + 256 d1 + d0)     unit a power of two, |x| <= unit * 2**22

Each row of x has a unit per warp, from the largest magnitude among the columns of the warp. x is thus rounded
to 2**-23 of that magnitude. `S` is the `DecodeConfig` of `gemm.decode.decode_config`. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import reinterpret
from quantkit.kernels.gluon.smem_layouts import x_smem_layout
from quantkit.kernels.gluon.x_rows import (
    largest_of_warps,
    per_lane,
    split_words,
    transpose_words,
    unpack2,
    vec4_layout,
)

#: 1.5 * 2**23, added to a float32 so that its last place counts 1; and the bits of that, less 0x808080.
ROUNDING = gl.constexpr(12582912.0)
ROUNDED = gl.constexpr(0x4B400000 - 0x808080)
#: PTX from four 24-bit numbers, plus 0x808080 each, to three words: their highest, middle and lowest digits.
#: The bytes of such a number are its digits plus 0x80.
_SPLIT = gl.constexpr("""{
.reg .b32 t<4>;
prmt.b32 t0, $3, $4, 0x5140;
prmt.b32 t1, $5, $6, 0x5140;
prmt.b32 t2, $3, $4, 0x0062;
prmt.b32 t3, $5, $6, 0x0062;
prmt.b32 $0, t2, t3, 0x5410;
prmt.b32 $1, t0, t1, 0x7632;
prmt.b32 $2, t0, t1, 0x5410;
xor.b32 $0, $0, 0x80808080;
xor.b32 $1, $1, 0x80808080;
xor.b32 $2, $2, 0x80808080;}""")


@gluon.jit
def stage_digits(words, x_smem, S: gl.constexpr):
    """Split x into int8 digits and store them in shared memory `x_smem`; return the unit of each row of x.

    A value is split into the digits d2, d1, d0: x = unit * (65536 d2 + 256 d1 + d0). Units are float32
    [warps, rows], powers of two: each warp has its own columns and therefore its own units. `words` is x, a
    tuple of int32 [warps, 32 lanes, 4 words] with two 16-bit floats in a word. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
    """
    GROUPS: gl.constexpr = S.column_groups
    PASSES: gl.constexpr = S.padded_mma_pairs // S.mma_pairs_per_pass
    SIZES: gl.constexpr = S.digit_shape
    x_scale, inverse_scale = _x_scales(words, S)
    for number in gl.static_range(PASSES):
        first, second = words[2 * number], words[2 * number + 1]
        if S.fragment_distance == 1:
            first, second = transpose_words(first), transpose_words(second)
        digits = _digits(first, second, inverse_scale, S)
        high = gl.join(digits[0], digits[2])
        low = gl.join(digits[1], gl.zeros_like(digits[1]))
        # Axis 4 (digits) becomes column groups and columns n of a group.
        value = gl.reshape(
            gl.join(high, low), (S.warps, S.mma_pairs_per_pass, S.rows, 4, 4, GROUPS, 2 // GROUPS, 2)
        )
        value = gl.permute(value, (1, 5, 0, 6, 7, 2, 3, 4))
        x_passes = reinterpret(
            x_smem, gl.int32, [PASSES, S.mma_pairs_per_pass * S.warps * S.rows * 64], x_smem.type.layout
        )
        reinterpret(x_passes.index(number), gl.int32, SIZES, x_smem_layout(SIZES, S)).store(value)
    return x_scale


@gluon.jit
def _x_scales(words, S: gl.constexpr):
    """Return the unit of each row of x, float32 [warps, rows], and 1 / unit per lane, float32 [warps, 32, 1].

    With int8 digits d2, d1 and d0, x = unit * (65536 d2 + 256 d1 + d0). The unit is a power of two, chosen
    from the largest magnitude of the row among the columns of a warp; if that is infinite or NaN, the unit is
    NaN. `words` is x, a tuple of int32 [warps, 32 lanes, 4], two 16-bit floats in each. `S` holds the
    kernel's compile-time constants (`DecodeConfig`).
    """
    most = largest_of_warps(words, S)
    # Keep unit and 1 / unit normal floats.
    exponent = gl.minimum(gl.maximum(most >> 23, 30), 254)
    x_scale = ((exponent - 21) << 23).to(gl.float32, bitcast=True)
    x_scale = gl.where(most < 0x7F800000, x_scale, float("nan"))
    inverse_scale = ((275 - exponent) << 23).to(gl.float32, bitcast=True)
    return x_scale, per_lane(inverse_scale, S)


@gluon.jit
def _digits(first, second, inverse_scale, S: gl.constexpr):
    """Return the highest, middle and lowest int8 digits of x: three int32 [warps, 32, 4], four to a word.

        first, second    run 0 and run 1, each 32 columns of x: int32 [warps, 32 lanes, 4 words]; a word has
                         two 16-bit floats
        inverse_scale    1 / unit, float32 [warps, 32, 1], where x = unit * (65536 d2 + 256 d1 + d0)

    The order of columns depends on `S.fragment_distance`: the distance, in fragments (16 columns), of two
    codes that become bytes of one register. Lane 4 n + t has row n of x. With p0, e1 and e0 of 0 or 1:

        distance 1    word 2 p0 + e1 of a run has columns 16 p0 + 8 e1 + 2 t + e0 (words were transposed).
                      Their digits go to word 2 run + e1, byte 2 e0 + p0.
        else          word i of a run has columns 8 t + 2 i + e0 (as loaded). Their digits go to word i,
                      byte 2 e0 + run.

    `S` holds the kernel's compile-time constants (`DecodeConfig`).
    """
    first_low, first_high = _fixed_point(first, inverse_scale, S.dtype)
    second_low, second_high = _fixed_point(second, inverse_scale, S.dtype)
    if S.fragment_distance == 1:
        a, b = split_words(first_low, S.warps)
        c, d = split_words(first_high, S.warps)
        of_first = _split_digits(a, b, c, d)
        a, b = split_words(second_low, S.warps)
        c, d = split_words(second_high, S.warps)
        of_second = _split_digits(a, b, c, d)
        digits = ()
        for digit in gl.static_range(3):
            vec4 = gl.permute(gl.join(of_first[digit], of_second[digit]), (0, 1, 3, 2))
            vec4 = gl.reshape(vec4, (S.warps, 32, 4))
            digits = digits + (gl.convert_layout(vec4, vec4_layout(S.warps), assert_trivial=True),)
    else:
        digits = _split_digits(first_low, second_low, first_high, second_high)
    return digits


@gluon.jit
def _fixed_point(words, inverse_scale, DTYPE: gl.constexpr):
    """Convert the floats of x to integers round(x / unit) + 0x808080: (of low halves, of high halves).

        words            int32 [warps, 32 lanes, 4], each two 16-bit floats of DTYPE, in its low and high half
        inverse_scale    1 / unit, float32 [warps, 32, 1]
        returns          two int32 [warps, 32, 4]

    The lower three bytes of a result are the int8 digits of a value of x, each plus 0x80: d2 (highest), d1,
    d0.
    """
    low, high = unpack2(words, DTYPE)
    low = (low * inverse_scale + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    high = (high * inverse_scale + ROUNDING).to(gl.int32, bitcast=True) - ROUNDED
    return low, high


@gluon.jit
def _split_digits(a, b, c, d):
    """Gather the highest, the middle and the lowest int8 digits of `a`, `b`, `c`, `d`: three int32 [...].

    The arguments are int32 [...] from `_fixed_point`. The four bytes of a result are the digits of `a`, `b`,
    `c`, `d`, from the lowest byte on.
    """
    return gl.inline_asm_elementwise(
        _SPLIT, "=&r,=&r,=&r,r,r,r,r", [a, b, c, d], (gl.int32, gl.int32, gl.int32), True, 1
    )
