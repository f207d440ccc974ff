"""What kernels in Gluon have in common: units of columns, from codes as they lie in memory to operand A."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.layouts.dequant_blocks import dequant_codes


@gluon.jit
def pdl_wait():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch_dependents():
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def row_tile_of(number, N, GATED: gl.constexpr):
    """The row tile of a number. With GATED, those that gate others and these take turns: tile i of the first
    half of all N rows is number 2 i, tile i of the second half 2 i + 1.
    """
    tile = number
    if GATED:
        tile = number // 2 + number % 2 * (N // 32)
    return tile


@gluon.jit
def row_tile_of_warp(warp, first, last, COUNT, N, GATED: gl.constexpr):
    """The row tile of a warp, of COUNT from number `first` on up to `last`; warps beyond have the last."""
    return row_tile_of(gl.minimum(first + gl.minimum(warp, COUNT - 1), last), N, GATED)


@gluon.constexpr_function
def k_step_columns(PLANES: int, BLOCK_K: int = 128) -> int:
    """Columns whose codes are loaded at a time: so many, or a span where that is longer."""
    return max(BLOCK_K, 16 * PLANES)


@gluon.constexpr_function
def _squares_layout(W: int, SIZE: int) -> gl.BlockedLayout:
    """Sums of squares [rows of x, SIZE]: a warp has all of a row."""
    return gl.BlockedLayout([1, min(4, max(1, SIZE // 32))], [1, 32], [W, 1], [1, 0])


@gluon.jit
def load_squares(squares, M, K: gl.constexpr, BM: gl.constexpr, W: gl.constexpr):
    """Sums of squares of BM rows of x [M, K], for `stage_rms` to take when they are there."""
    COUNT: gl.constexpr = (K + 15) // 16
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    LAYOUT: gl.constexpr = _squares_layout(W, SIZE)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, LAYOUT)), 1)
    number = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(squares + m * COUNT + number, mask=(m < M) & (number < COUNT), other=0.0)


@gluon.jit
def stage_rms(squares, K: gl.constexpr, EPS: gl.constexpr):
    """1 / sqrt(mean(x^2) + EPS) of rows of x [BM, K] with such sums of `squares`, in shared memory."""
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rms = gl.allocate_shared_memory(gl.float32, [squares.shape[0]], FLAT)
    rms.store(gl.rsqrt(gl.sum(squares, 1) / K + EPS))
    return rms


@gluon.jit
def fill_table(lut, FILL: gl.constexpr):
    """The address that the `TABLE` of an expression takes: that of values, or of a table filled with them."""
    if FILL is not None:
        lut = gl.inline_asm_elementwise(FILL, "=l,l", [lut], gl.int64, False, 1)
    return lut


@gluon.constexpr_function
def codes_layout(W: int, C: int) -> gl.DistributedLinearLayout:
    """Codes [W row tiles, C spans, 128 pairs]: a warp has a row tile, a thread 16 bytes of each span."""
    spans = [[0, 1 << bit, 0] for bit in range(C.bit_length() - 1)]
    pairs = [[0, 0, 1 << bit] for bit in range(7)]
    warps = [[1 << bit, 0, 0] for bit in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(pairs[:2] + spans, pairs[2:], warps, [], [W, C, 128])


@gluon.jit
def dequant_a_fragment(
    words, lut, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr,
    PLANES: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, C: gl.constexpr, SUBTILES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """The weights of a unit, [16 * W, 128] for each piece of it, in units of their scales."""
    q = dequant_codes(_split_words(words, TILES), lut, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE)
    q = gl.reshape(q, (W, C, 8, 4, 2, 2, 2, PLANES // 2, 2))
    q = gl.reshape(gl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (16 * W, 128 * SUBTILES))
    if SUBTILES == 1:
        subtiles = (q,)
    else:
        subtiles = gl.split(gl.permute(gl.reshape(q, (16 * W, 2, 128)), (0, 2, 1)))
    return subtiles


@gluon.jit
def _split_words(words, TILES: gl.constexpr):
    """The lanes of 16 bits that `decode` takes of pairs, which stay in their registers from step to step.

    Lanes would be copied one by one at the end of a step, before the products are begun.
    """
    lanes = ()
    for t in gl.static_range(TILES):
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words[t]], (gl.int16, gl.int16), True, 1
        )
        pairs = gl.join(low, high)
        lanes = lanes + (gl.reshape(pairs, (pairs.shape[0], pairs.shape[1], 256)),)
    return lanes
