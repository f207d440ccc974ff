"""What kernels in Gluon have in common: units of columns, from codes as they lie in memory to operand A."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.fused.blocks import decode


@gluon.jit
def wait_for_kernel_before():
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def let_next_start():
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


@gluon.constexpr_function
def unit_columns(PLANES: int) -> int:
    """Columns that are decoded at a time: 128, or a span where that is longer."""
    return max(128, 16 * PLANES)


@gluon.constexpr_function
def codes_of(W: int, C: int) -> gl.DistributedLinearLayout:
    """Codes [W row tiles, C spans, 128 pairs]: a warp has a row tile, a thread 16 bytes of each span."""
    spans = [[0, 1 << bit, 0] for bit in range(C.bit_length() - 1)]
    pairs = [[0, 0, 1 << bit] for bit in range(7)]
    warps = [[1 << bit, 0, 0] for bit in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(pairs[:2] + spans, pairs[2:], warps, [], [W, C, 128])


@gluon.jit
def decoded(
    words, lut, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr,
    PLANES: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, C: gl.constexpr, PIECES: gl.constexpr,
    TILES: gl.constexpr,
):  # fmt: skip
    """The weights of a unit, [16 * W, 128] for each piece of it, in units of their scales."""
    q = decode(_halves(words, TILES), lut, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE)
    q = gl.reshape(q, (W, C, 8, 4, 2, 2, 2, PLANES // 2, 2))
    q = gl.reshape(gl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (16 * W, 128 * PIECES))
    if PIECES == 1:
        pieces = (q,)
    else:
        pieces = gl.split(gl.permute(gl.reshape(q, (16 * W, 2, 128)), (0, 2, 1)))
    return pieces


@gluon.jit
def _halves(words, TILES: gl.constexpr):
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
