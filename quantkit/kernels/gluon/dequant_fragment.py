"""Device functions that several Gluon GEMM kernels call.

pdl_wait, pdl_launch_dependents     programmatic dependent launch (PDL): a kernel may start while
                                    the one before it ends
row_tile_of, row_tile_of_warp       which 16 weight rows a program or a warp computes
load_squares, stage_rstd            1 / RMS of rows of x, from sums of squares
fill_table, dequant_a_fragment      codes in registers to operand A of `mma`
"""
# mypy: ignore-errors

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.layouts.dequant_blocks import dequant_codes


@gluon.jit
def pdl_wait():
    """Wait until the kernels before this one have ended and their writes are visible.

    The wait of programmatic dependent launch (PDL): a kernel may start while the one before it ends.
    """
    gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def pdl_launch_dependents():
    """Let the next kernel start while this one runs (programmatic dependent launch, PDL)."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def row_tile_of(number, N, GATED: gl.constexpr):
    """Return the index, in weight [N, K], of the row tile (16 rows) at position `number` of the work.

    `number` and the result are int32 [...] or scalars. If not GATED, they are equal. If GATED, y is
    activation(gate) * up, and the weight has N / 2 rows of gate above N / 2 of up. Work then alternates:

        number    0         1       2         3       ...
        tile      gate 0    up 0    gate 1    up 1    ...       index of gate i: i, of up i: N / 32 + i
    """
    tile = number
    if GATED:
        tile = number // 2 + number % 2 * (N // 32)
    return tile


@gluon.jit
def row_tile_of_warp(warp, first, last, COUNT, N, GATED: gl.constexpr):
    """Return the index of the row tile (16 rows of W [N, K]) of each warp: int32 [...], like `warp`.

    `warp` are indices of warps in a program, which has COUNT row tiles. Warp i gets the row tile that
    `row_tile_of` returns for `number` = `first` + i; warps from COUNT on repeat that of warp COUNT - 1.
    `last` is the largest `number` of the weight: larger ones become `last`. If GATED, row tiles of gate and
    up alternate, as `row_tile_of` says.
    """
    return row_tile_of(gl.minimum(first + gl.minimum(warp, COUNT - 1), last), N, GATED)


@gluon.constexpr_function
def k_step_columns(FRAGMENTS: int, BLOCK_K: int = 128) -> int:
    """Return the number of columns of K that a warp dequantizes at a time, a k_step: max(BLOCK_K, span).

    A span is the 16 * FRAGMENTS columns whose codes are stored in the same registers.
    """
    return max(BLOCK_K, 16 * FRAGMENTS)


@gluon.constexpr_function
def _squares_layout(W: int, SIZE: int) -> gl.BlockedLayout:
    """Return the register layout of a float32 tensor [rows of x, SIZE] in W warps, for sums along its rows.

    A row lies within one warp, so `gl.sum` over SIZE needs no shared memory.
    """
    return gl.BlockedLayout([1, min(4, max(1, SIZE // 32))], [1, 32], [W, 1], [1, 0])


@gluon.jit
def load_squares(squares, M, K: gl.constexpr, BM: gl.constexpr, W: gl.constexpr):
    """Load sums of squares of x [M, K], which an earlier kernel wrote, to registers: float32 [BM, SIZE].

    SIZE is K / 16 rounded up to a power of two. The result is the argument of `stage_rstd`.

    squares   pointer to float32 [M, K / 16]: sums of x^2 over 16 columns each
    BM        rows of the result, at least M; rows from M on, and columns beyond K / 16, are 0
    W         warps of a program
    """
    COUNT: gl.constexpr = (K + 15) // 16
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    LAYOUT: gl.constexpr = _squares_layout(W, SIZE)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, LAYOUT)), 1)
    number = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(squares + m * COUNT + number, mask=(m < M) & (number < COUNT), other=0.0)


@gluon.jit
def stage_rstd(squares, K: gl.constexpr, EPS: gl.constexpr):
    """Write 1 / sqrt(mean(x^2) + EPS) of each row of x [BM, K] to shared memory; return its descriptor [BM].

    `squares` float32 [BM, SIZE] is the result of `load_squares`: sums of x^2 over 16 columns each.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rstd = gl.allocate_shared_memory(gl.float32, [squares.shape[0]], FLAT)
    rstd.store(gl.rsqrt(gl.sum(squares, 1) / K + EPS))
    return rstd


@gluon.jit
def fill_table(lut, FILL: gl.constexpr):
    """Return the address of the table of code values, copied to shared memory by PTX if FILL is not None.

    `lut` points to the value of each code, float32 [2**bits], in global memory. FILL is PTX that copies them
    (`Expression.fill`) and returns the address of the copy, int64. If FILL is None, return `lut`.
    """
    if FILL is not None:
        lut = gl.inline_asm_elementwise(FILL, "=l,l", [lut], gl.int64, False, 1)
    return lut


@gluon.constexpr_function
def codes_layout(W: int, C: int) -> gl.DistributedLinearLayout:
    """Return the register layout of codes int32 [W row tiles, C spans, 128]: one row tile per warp.

    A row tile is 16 weight rows, a span the columns whose codes are stored in the same registers. Of the 128
    words of a span, lane i has words 4 i to 4 i + 3: one 16-byte load per lane.
    """
    spans = [[0, 1 << bit, 0] for bit in range(C.bit_length() - 1)]
    pairs = [[0, 0, 1 << bit] for bit in range(7)]
    warps = [[1 << bit, 0, 0] for bit in range(W.bit_length() - 1)]
    return gl.DistributedLinearLayout(pairs[:2] + spans, pairs[2:], warps, [], [W, C, 128])


@gluon.jit
def dequant_a_fragment(
    words, lut, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr,
    FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, C: gl.constexpr, SUBTILES: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Dequantize codes, without scales, to operand A of `mma`: SUBTILES tensors DTYPE [16 * W, 128].

    words              tuple of REGISTERS tensors int32 [W, C, 128]: codes of W row tiles (16 rows) and C
                       spans (16 * FRAGMENTS columns whose codes are stored in the same REGISTERS registers)
    lut                result of `fill_table`: the address of the values of codes
    ASM, CONSTRAINTS   PTX from codes to 16-bit floats, and its constraints; None to do without PTX
    TABLE              PTX that loads the values of codes from `lut`; None for no lookup
    FIELDS             if ASM is None: a `CodeToFloat` per fragment, computed in float32
    SUBTILES           1 or 2: C spans are SUBTILES * 128 columns
    """
    q = dequant_codes(_split_words(words, REGISTERS), lut, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE)
    q = gl.reshape(q, (W, C, 8, 4, 2, 2, 2, FRAGMENTS // 2, 2))
    q = gl.reshape(gl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (16 * W, 128 * SUBTILES))
    if SUBTILES == 1:
        subtiles = (q,)
    else:
        subtiles = gl.split(gl.permute(gl.reshape(q, (16 * W, 2, 128)), (0, 2, 1)))
    return subtiles


@gluon.jit
def _split_words(words, REGISTERS: gl.constexpr):
    """Split each int32 of REGISTERS tensors [W, C, 128] into halfwords: a tuple of int16 [W, C, 256].

    Halfwords 2 i and 2 i + 1 are the low and the high half of word i. A tensor holds codes of W row tiles (16
    rows) and C spans. PTX splits words without copies; Triton would copy each halfword.
    """
    lanes = ()
    for t in gl.static_range(REGISTERS):
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words[t]], (gl.int16, gl.int16), True, 1
        )
        pairs = gl.join(low, high)
        lanes = lanes + (gl.reshape(pairs, (pairs.shape[0], pairs.shape[1], 256)),)
    return lanes
