"""Load scales and zero-points of a weight from global memory to registers, in the lanes that `mma` reads.

For kernels in which a warp has a row tile, 16 weight rows: lane 4 r + t (r 0 to 7, t 0 to 3) needs the values
of rows r and r + 8. Values are stored in scale blocks: for each row the V groups of 128 columns, or one group
if that is longer. The weight's scales are [row tiles, blocks, 8 r, V, 2]; the last axis is row r, row r + 8.

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

    The values are scales or zero-points of rows r and r + 8 for the V groups of a scale block. `S` holds the
    kernel's compile-time constants (`DecodeConfig`).
    """
    return max(1, 2 * S.in_block * DTYPE.primitive_bitwidth // 32)


@gluon.jit
def load_scale_words(values, at, mask, S: gl.constexpr):
    """Load the scales or zero-points of a scale block: words int32 [W, 32] or [W, 32, WORDS].

    A scale block is the V groups of 128 columns, or one longer group. Lane 4 r + t of each of W warps gets
    the 2 V values of rows r and r + 8, in WORDS words. For one word there is no third dimension.

        values          pointer to all scales, or zero-points, of the weight: [row tiles, blocks, 8 r, V, 2]
        at              int32 [W, 32]: which 2 V values a lane loads, (row tile * blocks + block) * 8 + r
        mask            [W, 32]: False for lanes that load nothing

    Values are loaded as words, because Triton copies narrower ones before their first use. `S` holds the
    kernel's compile-time constants (`DecodeConfig`).
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
    """Return word NUMBER of the COUNT words of each lane: int32 [W, 32].

    `words` is the result of `load_scale_words`: [W warps, 32 lanes, COUNT], or [W, 32] for one word. Gluon
    cannot index a tensor in registers, so halves are split.
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
    """Unpack the scales of group v of a scale block: two float32 [W, 32], for rows r and for rows r + 8.

        words    result of `load_scale_words`; lane 4 r + t of each of W warps has rows r and r + 8
        v        index of the group in the scale block: 128 columns, or one longer group
        DTYPE    dtype of the stored values

    Zero-points are unpacked in the same way. `S` holds the kernel's compile-time constants (`DecodeConfig`).
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
    """Return PTX that converts two bytes of a word of 8-bit scales to bfloat16, each twice in a register.

    Byte 2 * NUMBER (row r) goes to the first register, byte 2 * NUMBER + 1 (row r + 8) to the second. KIND is
    the encoding of the scales, "e5m3" or "e8m0".
    """
    return bfloat16_of_bytes(KIND, f"444{2 * NUMBER}", f"444{2 * NUMBER + 1}", TWICE=True)


@gluon.jit
def scales_for_accumulator(low, high, W: gl.constexpr):
    """Arrange scales of rows like the accumulator of an m16n8 `mma`: float32 [W warps, 32 lanes, 4].

    `low` and `high`, float32 [W, 32], are the scales of rows r and r + 8 in lane 4 r + t. The four sums of a
    lane are (row r, 2 columns), (row r + 8, 2 columns). Their scales are low, low, high, high.
    """
    vec4s = gl.reshape(gl.join(gl.join(low, high), gl.join(low, high)), (W, 32, 4))
    return gl.convert_layout(vec4s, vec4_layout(W), assert_trivial=True)


@gluon.jit
def scales_for_a_fragment(words, v: gl.constexpr, STORED: gl.constexpr, S: gl.constexpr):
    """Arrange scales of a group like operand A of an `mma` in registers: int32 [W warps, 32 lanes, 4].

    The four registers of lane 4 r + t get the scales of rows r, r + 8, r, r + 8. Each register has the scale
    twice, as two 16-bit floats of `S.dtype`, so that one instruction multiplies two weights.

        words     result of `load_scale_words`: a scale block, which is 128 columns or one longer group
        v         index of the group in the scale block
        STORED    dtype of the stored values

    Zero-points are arranged in the same way. `S` holds the kernel's compile-time constants (`DecodeConfig`).
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
