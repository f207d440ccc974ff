"""Device functions that Gluon kernels share: PDL, row tiles, sums of squares, dequantized operand A.

PDL is programmatic dependent launch: a kernel may start while the one before it ends.
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
    """Return the row tile of W [N, K] with number `number`: int32 [...] or scalar.

    A row tile is 16 rows, and programs take row tiles in the order of their numbers. Without GATED, a tile's
    number is its index. With GATED, number 2 i is tile i of the gate, the first half of all N rows. Number 2
    i + 1 is tile i of up, the second half. y is activation(gate) * up then.
    """
    tile = number
    if GATED:
        tile = number // 2 + number % 2 * (N // 32)
    return tile


@gluon.jit
def row_tile_of_warp(warp, first, last, COUNT, N, GATED: gl.constexpr):
    """Return the row tile (16 rows of W [N, K]) of each warp, int32 [...], for warp numbers `warp` [...].

    The program has COUNT row tiles, one per warp, from number `first` on (`row_tile_of`). Warps from COUNT on
    get the tile of the last such warp. No number exceeds `last`. With GATED, tiles of gate and up alternate.
    """
    return row_tile_of(gl.minimum(first + gl.minimum(warp, COUNT - 1), last), N, GATED)


@gluon.constexpr_function
def k_step_columns(FRAGMENTS: int, BLOCK_K: int = 128) -> int:
    """Return the number of columns of a k_step, which a warp dequantizes at a time.

    It is BLOCK_K, or a span if that is longer. A span is 16 * FRAGMENTS columns, whose codes share registers.
    """
    return max(BLOCK_K, 16 * FRAGMENTS)


@gluon.constexpr_function
def _squares_layout(W: int, SIZE: int) -> gl.BlockedLayout:
    """Return the layout of sums of squares [rows of x, SIZE] in W warps: a warp has whole rows."""
    return gl.BlockedLayout([1, min(4, max(1, SIZE // 32))], [1, 32], [W, 1], [1, 0])


@gluon.jit
def load_squares(squares, M, K: gl.constexpr, BM: gl.constexpr, W: gl.constexpr):
    """Load the sums of squares of x [M, K] to registers: `squares` float32 [M, K / 16] as [BM, SIZE].

    Each is the sum over 16 columns. SIZE is K / 16 rounded up to a power of two, BM at least M. Rows from M
    on and padding are 0. W is the number of warps. `stage_rms` takes the result.
    """
    COUNT: gl.constexpr = (K + 15) // 16
    SIZE: gl.constexpr = triton.next_power_of_2(COUNT)
    LAYOUT: gl.constexpr = _squares_layout(W, SIZE)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(1, LAYOUT)), 1)
    number = gl.expand_dims(gl.arange(0, SIZE, gl.SliceLayout(0, LAYOUT)), 0)
    return gl.load(squares + m * COUNT + number, mask=(m < M) & (number < COUNT), other=0.0)


@gluon.jit
def stage_rms(squares, K: gl.constexpr, EPS: gl.constexpr):
    """Return shared memory, float32 [BM], with 1 / sqrt(mean(x^2) + EPS) of each row of x [BM, K].

    `squares`, float32 [BM, SIZE], is the result of `load_squares`: sums of squares of 16 columns each.
    """
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rms = gl.allocate_shared_memory(gl.float32, [squares.shape[0]], FLAT)
    rms.store(gl.rsqrt(gl.sum(squares, 1) / K + EPS))
    return rms


@gluon.jit
def fill_table(lut, FILL: gl.constexpr):
    """Return the address at which PTX looks up the value of a code, to use in place of `lut`.

    `lut` points to the value of each code, float32 [2**bits]. If FILL, an `Expression.fill`, is not None, its
    PTX copies them to shared memory, and the address is that of the copy. Else it is `lut`.
    """
    if FILL is not None:
        lut = gl.inline_asm_elementwise(FILL, "=l,l", [lut], gl.int64, False, 1)
    return lut


@gluon.constexpr_function
def codes_layout(W: int, C: int) -> gl.DistributedLinearLayout:
    """Return the layout of codes int32 [W row tiles, C spans, 128] in W warps.

    A row tile is 16 rows of the weight, a span the columns whose codes share registers. A thread has 16
    adjacent bytes of each span: four int32.
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
    """Dequantize a slice of columns, without scales, as operand A of `mma`: DTYPE [16 * W, 128 * SUBTILES].

    `words` is a tuple of REGISTERS tensors int32 [W, C, 128], for W row tiles of 16 rows and C spans. A span
    is 16 * FRAGMENTS columns, whose codes share REGISTERS registers. Returns a tuple of SUBTILES (1 or 2)
    tensors [16 * W, 128].

    `lut` is the result of `fill_table`. ASM, CONSTRAINTS, TABLE and FIELDS say how codes become numbers, as
    in `dequant_codes`.
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
    """Split each int32 of REGISTERS tensors into its 16-bit halves: [W, C, 128] to int16 [W, C, 256].

    `words` are codes of W times 16 rows, and of C times the columns whose codes share registers.
    `dequant_codes` takes halves. PTX splits them in place; Triton would copy them one by one at the end.
    """
    lanes = ()
    for t in gl.static_range(REGISTERS):
        low, high = gl.inline_asm_elementwise(
            "mov.b32 {$0, $1}, $2;", "=h,=h,r", [words[t]], (gl.int16, gl.int16), True, 1
        )
        pairs = gl.join(low, high)
        lanes = lanes + (gl.reshape(pairs, (pairs.shape[0], pairs.shape[1], 256)),)
    return lanes
