"""Device functions on rows of x in registers, for kernels in which each warp has its own columns of K.

A word is int32 with two 16-bit floats of x. `S` is the `DecodeConfig` of
`quantkit.kernels.gemm.decode.decode_config`. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.ops.quantize_x_kernel import multiplied, rounded_quotient

#: PTX that transposes the words of warp lanes 4 n + t: word i of lane t becomes word t of lane i.
_EXCHANGE = gl.constexpr("""{
.reg .b32 lane, bit<2>, give<2>, own<4>;
.reg .pred p<2>;
mov.u32 lane, %laneid;
and.b32 bit0, lane, 1; setp.ne.u32 p0, bit0, 0;
and.b32 bit1, lane, 2; setp.ne.u32 p1, bit1, 0;
selp.b32 give0, $4, $5, p0; shfl.sync.bfly.b32 give0, give0, 1, 31, 0xFFFFFFFF;
selp.b32 give1, $6, $7, p0; shfl.sync.bfly.b32 give1, give1, 1, 31, 0xFFFFFFFF;
selp.b32 own0, give0, $4, p0; selp.b32 own1, $5, give0, p0;
selp.b32 own2, give1, $6, p0; selp.b32 own3, $7, give1, p0;
selp.b32 give0, own0, own2, p1; shfl.sync.bfly.b32 give0, give0, 2, 31, 0xFFFFFFFF;
selp.b32 give1, own1, own3, p1; shfl.sync.bfly.b32 give1, give1, 2, 31, 0xFFFFFFFF;
selp.b32 $0, give0, own0, p1; selp.b32 $1, give1, own1, p1;
selp.b32 $2, own2, give0, p1; selp.b32 $3, own3, give1, p1;}""")


@gluon.constexpr_function
def vec4_layout(W: int, WORDS: int = 4) -> gl.DistributedLinearLayout:
    """Return the register layout of int32 [W warps, 32 lanes, WORDS]: each thread holds WORDS words."""
    words = [[0, 0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 1 << bit, 0] for bit in range(5)]
    warps = [[1 << bit, 0, 0] for bit in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(words, lanes, warps, [], [W, 32, WORDS])


@gluon.jit
def unpack2(words, DTYPE: gl.constexpr):
    """Unpack the lower and the upper 16-bit float (DTYPE) of `words` int32 [...]: two float32 [...]."""
    if DTYPE == gl.bfloat16:
        low = (words << 16).to(gl.float32, bitcast=True)
        high = (words & -65536).to(gl.float32, bitcast=True)
    else:
        low = words.to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
        high = (words >> 16).to(gl.int16).to(DTYPE, bitcast=True).to(gl.float32)
    return low, high


@gluon.jit
def pack2(low, high, DTYPE: gl.constexpr):
    """Round float32 `low` and `high` [...] to 16 bits (DTYPE); pack them into the halves of int32 [...]."""
    low = low.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
    return low | high.to(DTYPE).to(gl.int16, bitcast=True).to(gl.int32) << 16


@gluon.constexpr_function
def row_layout(S):  # type: ignore[no-untyped-def]
    """Return the register layout of [warps, mma pairs, rows of x, 4] with one value per thread.

    Lane (pair * rows + row) * 4 + t of a warp has the value at (pair, row, t), as when x is loaded. An mma
    pair is two consecutive mmas; there are `S.mma_pairs_per_pass`. `S` holds the kernel's compile-time
    constants (`DecodeConfig`).
    """
    return gl.BlockedLayout(
        [1, 1, 1, 1], [1, S.mma_pairs_per_pass, S.rows, 4], [S.warps, 1, 1, 1], [3, 2, 1, 0]
    )


@gluon.jit
def per_lane(of_rows, S: gl.constexpr):
    """Give each lane the value of the row of x that it holds: float32 [warps, 32, 1].

    `of_rows` float32 [warps or 1, rows] are the values. Lane (pair * rows + row) * 4 + t holds `row`. `S`
    holds the kernel's compile-time constants (`DecodeConfig`).
    """
    ROW_LAYOUT: gl.constexpr = row_layout(S)
    of_rows = gl.expand_dims(gl.expand_dims(of_rows, 1), 3)
    of_rows, _ = gl.broadcast(
        of_rows, gl.full([S.warps, S.mma_pairs_per_pass, S.rows, 4], 0, gl.float32, ROW_LAYOUT)
    )
    of_rows = gl.convert_layout(
        gl.reshape(of_rows, (S.warps, 32)), gl.SliceLayout(2, vec4_layout(S.warps)), assert_trivial=True
    )
    return gl.expand_dims(of_rows, 2)


@gluon.jit
def largest_of_warps(words, S: gl.constexpr):
    """Return the largest magnitude of each row of x among the columns of each warp: int32 [warps, rows].

    The integers are the bits of float32 magnitudes, which have the same order as the magnitudes. `words` is
    x, a tuple of int32 [warps, 32 lanes, 4] with two 16-bit floats in each word. `S` holds the kernel's
    compile-time constants (`DecodeConfig`).
    """
    ROW_LAYOUT: gl.constexpr = row_layout(S)
    largest = gl.full([S.warps, 32, 4], 0, gl.int32, vec4_layout(S.warps))
    for number in gl.static_range(len(words)):
        low, high = unpack2(words[number], S.dtype)
        low, high = low.to(gl.int32, bitcast=True), high.to(gl.int32, bitcast=True)
        # As integers, magnitudes of floats have the same order.
        largest = gl.maximum(largest, gl.maximum(low & 0x7FFFFFFF, high & 0x7FFFFFFF))
    most = gl.reshape(gl.max(largest, axis=2), (S.warps, S.mma_pairs_per_pass, S.rows, 4))
    most = gl.convert_layout(most, ROW_LAYOUT, assert_trivial=True)
    return gl.max(gl.max(most, axis=3), axis=1)


@gluon.jit
def round_rows(words, S: gl.constexpr):
    """Round x to int8 or e4m3 (`S.rounding`) and back, with one scale per row: scale * round(x / scale).

    `words` is x: a tuple of int32 [warps, 32 lanes, 4], two 16-bit floats in each word. The result is a tuple
    of the same kind. Its values equal those of `quantkit.kernels.ops.quantize_x_kernel.rounded`. `S` holds
    the kernel's compile-time constants (`DecodeConfig`).
    """
    most = gl.max(largest_of_warps(words, S), axis=0)
    broken = most >= 0x7F800000
    largest = gl.where(broken, 0, most).to(gl.float32, bitcast=True)
    scale = gl.maximum(gl.div_rn(largest, S.rounding.absmax), 1.1754943508222875e-38)
    inverse = per_lane(gl.expand_dims(gl.div_rn(1.0, scale), 0), S)
    scale = per_lane(gl.expand_dims(gl.where(broken, float("nan"), scale), 0), S)
    found = ()
    for number in gl.static_range(len(words)):
        low, high = unpack2(words[number], S.dtype)
        found = found + (pack2(_round(low, scale, inverse, S), _round(high, scale, inverse, S), S.dtype),)
    return found


@gluon.jit
def _round(x, scale, inverse, S: gl.constexpr):
    """Round float32 `x` [warps, 32, 4] to the format of `S.rounding` and back: scale * round(x / scale).

    `scale` and its `inverse` are float32 [warps, 32 lanes, 1]. `S` holds the kernel's compile-time constants
    (`DecodeConfig`).
    """
    code = rounded_quotient(x, scale, inverse, S.rounding.mantissa, S.rounding.smallest, S.rounding.fma)
    return multiplied(code, scale, S.rounding.most, gl.float32)


@gluon.jit
def transpose_words(words):
    """Transpose words int32 [warps, 32 lanes, 4] of x among the four lanes t that share a row of x.

        word i of lane t  ->  word t of lane i

    Each word has two 16-bit floats. As loaded, a lane has adjacent columns; afterwards it has the columns for
    operand B of an `mma`. Of a run of 32 columns, with p0 and e1 of 0 or 1:

        word 2 p0 + e1 of lane t    columns 16 p0 + 8 e1 + 2 t + (0, 1)
    """
    return gl.inline_asm_elementwise(_EXCHANGE, "=r,=r,=r,=r,r,r,r,r", [words], gl.int32, True, 4)


@gluon.jit
def split_words(vec4s, W: gl.constexpr):
    """Split a lane's words of a run of 32 columns: (words of columns 0 to 15, words of columns 16 to 31).

    `vec4s` is int32 [W warps, 32 lanes, 4], each word of one or two columns, in the order of
    `transpose_words`. The results are int32 [W, 32, 2]. With p0 and e1 of 0 or 1:

        word 2 p0 + e1 of lane t    one or both of columns 16 p0 + 8 e1 + 2 t + (0, 1)
        result p0                   words 2 p0 and 2 p0 + 1
    """
    return gl.split(gl.permute(gl.reshape(vec4s, (W, 32, 2, 2)), (0, 1, 3, 2)))
