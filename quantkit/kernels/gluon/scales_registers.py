"""Load scales and zero-points of rows r and r + 8 into registers, in the layout that products need.

For kernels in which a warp has a row tile: 16 rows of the weight. Its lane 4 r + t has rows r and r + 8. The
scales of a row come in scale blocks: V groups each, the groups of 128 columns, or one group if that is
longer.

`S` is the `DecodeConfig` of `gemm.decode.decode_config`, and V is `S.in_block`. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.x_rows import pack2, unpack2, vec4_layout
from quantkit.kernels.layouts.dequant_blocks import bfloat16_of_bytes, scale_value


@gluon.constexpr_function
def _word_count(DTYPE, S):  # type: ignore[no-untyped-def]
    """Return the number of 32-bit words that hold 2 V values of dtype DTYPE, at least 1.

    They are the scales or zero-points of the V groups of a scale block, for rows r and r + 8. `S` is a
    `DecodeConfig`: all compile-time constants.
    """
    return max(1, 2 * S.in_block * DTYPE.primitive_bitwidth // 32)


@gluon.jit
def load_scale_words(values, at, mask, S: gl.constexpr):
    """Load the scales or zero-points of a scale block for each warp lane: int32 [W, 32] or [W, 32, WORDS].

    A scale block is 128 columns, or one longer group; a row tile is 16 rows. Lane 4 r + t of each of W warps
    gets those of rows r and r + 8. It gets those of all groups of the block, in WORDS words. There is no
    third dimension for one word.

        values          pointer to all those of the weight, [row tiles, blocks, 8 r, V groups, 2]
        at, mask        [W, 32]: which of the places r of `values` a lane loads, and whether it loads

    Narrower values would be copied before their first use. `S` is a `DecodeConfig`: all compile-time
    constants.
    """
    WORDS: gl.constexpr = _word_count(values.dtype.element_ty, S)
    if 2 * S.in_block * values.dtype.element_ty.primitive_bitwidth == 16:
        words = gl.load(values.to(gl.pointer_type(gl.int16), bitcast=True) + at, mask=mask).to(gl.int32)
    elif WORDS == 1:
        words = gl.load(values.to(gl.pointer_type(gl.int32), bitcast=True) + at, mask=mask)
    else:
        LAYOUT: gl.constexpr = vec4_layout(S.warps, WORDS)
        at = gl.convert_layout(at, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        mask = gl.convert_layout(mask, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        at = gl.expand_dims(at * WORDS, 2) + gl.expand_dims(gl.expand_dims(word, 0), 1)
        values = values.to(gl.pointer_type(gl.int32), bitcast=True)
        words = gl.load(values + at, mask=gl.expand_dims(mask, 2))
    return words


@gluon.jit
def _word(words, NUMBER: gl.constexpr, COUNT: gl.constexpr, W: gl.constexpr):
    """Return word number NUMBER of each warp lane, int32 [W, 32], of the COUNT words that it has.

    `words` is the result of `load_scale_words`: [W warps, 32 lanes, COUNT], or [W, 32] for one word.
    """
    if COUNT == 1:
        word = words
    elif COUNT == 2:
        word = gl.split(words)[NUMBER]
    elif COUNT == 4:
        word = gl.split(gl.split(gl.reshape(words, (W, 32, 2, 2)))[NUMBER % 2])[NUMBER // 2]
    elif COUNT == 8:
        halves = gl.split(gl.reshape(words, (W, 32, 2, 2, 2)))
        word = gl.split(gl.split(halves[NUMBER % 2])[NUMBER // 2 % 2])[NUMBER // 4]
    else:
        # 32-bit values of 8 groups of 16 columns.
        halves = gl.split(gl.reshape(words, (W, 32, 2, 2, 2, 2)))
        halves = gl.split(gl.split(halves[NUMBER % 2])[NUMBER // 2 % 2])
        word = gl.split(halves[NUMBER // 4 % 2])[NUMBER // 8]
    return word


@gluon.jit
def row_scales(words, v: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return the scales of group v of a scale block, for rows r and r + 8 of lanes: two float32 [W, 32].

    A scale block is 128 columns, or one longer group. `words` is the result of `load_scale_words` for values
    stored as DTYPE. Zero-points are unpacked in the same way. `S` is a `DecodeConfig`: all compile-time
    constants.
    """
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    KIND: gl.constexpr = S.scale_kind
    COUNT: gl.constexpr = _word_count(DTYPE, S)
    word = _word(words, v * 2 * BITS // 32, COUNT, S.warps)
    if BITS == 32:
        low = word.to(DTYPE, bitcast=True)
        high = _word(words, v * 2 + 1, COUNT, S.warps).to(DTYPE, bitcast=True)
    elif BITS == 16:
        low, high = unpack2(word, DTYPE)
    else:
        low = scale_value((word >> (v * 16 % 32)).to(gl.int8), KIND)
        high = scale_value((word >> (v * 16 % 32 + 8)).to(gl.int8), KIND)
    return low, high


@gluon.constexpr_function
def _twice(KIND, NUMBER):  # type: ignore[no-untyped-def]
    """Return PTX from a word of 8-bit scales to two registers: value NUMBER of row r, and that of row r + 8.

    Each register holds two copies as bfloat16. KIND is the encoding of the scales, "e5m3" or "e8m0".
    """
    return bfloat16_of_bytes(KIND, f"444{2 * NUMBER}", f"444{2 * NUMBER + 1}", TWICE=True)


@gluon.jit
def scales_for_accumulator(low, high, W: gl.constexpr):
    """Arrange scales of rows like the sums of an `mma`: float32 [W warps, 32 lanes, 4].

    `low` and `high` [W, 32] are those of rows r and r + 8 of lane 4 r + t. The lane has four sums, (row // 8,
    column): they get `low`, `low`, `high`, `high`.
    """
    vec4s = gl.reshape(gl.join(gl.join(low, high), gl.join(low, high)), (W, 32, 4))
    return gl.convert_layout(vec4s, vec4_layout(W), assert_trivial=True)


@gluon.jit
def scales_for_a_fragment(words, v: gl.constexpr, STORED: gl.constexpr, S: gl.constexpr):
    """Arrange scales of group v of a scale block like operand A of an `mma`: int32 [W warps, 32 lanes, 4].

    A scale block is 128 columns, or one longer group. `words` is the result of `load_scale_words` for values
    stored as STORED. The four registers of lane 4 r + t are for rows r, r + 8, r and r + 8. The first two are
    for columns 0 to 7 of 16, the others for 8 to 15. Both 16-bit halves are the scale, in `S.dtype`.
    Zero-points are arranged in the same way. `S` is a `DecodeConfig`: all compile-time constants.
    """
    if STORED == S.dtype:
        word = _word(words, v, _word_count(STORED, S), S.warps)
        low = gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x1010;", "=r,r", [word], gl.int32, True, 1)
        high = gl.inline_asm_elementwise("prmt.b32 $0, $1, $1, 0x3232;", "=r,r", [word], gl.int32, True, 1)
    elif STORED == gl.int8:
        word = _word(words, v // 2, _word_count(STORED, S), S.warps)
        ASM: gl.constexpr = _twice(S.scale_kind, v % 2)
        low, high = gl.inline_asm_elementwise(ASM, "=r,=r,r", [word], (gl.int32, gl.int32), True, 1)
    else:
        low, high = row_scales(words, v, STORED, S)
        low, high = pack2(low, low, S.dtype), pack2(high, high, S.dtype)
    vec4s = gl.reshape(gl.join(gl.join(low, low), gl.join(high, high)), (S.warps, 32, 4))
    return gl.convert_layout(vec4s, vec4_layout(S.warps), assert_trivial=True)
