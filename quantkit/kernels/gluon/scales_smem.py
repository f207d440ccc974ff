"""Load scales and zero-points of a weight, directly or through shared memory, as tensors [16 * W, V].

W is the number of warps, V the number of groups. Each warp has a row tile, 16 rows of the weight: lane 4 r +
t (r 0 to 7, t 0 to 3) has rows r and r + 8. Values are stored in scale blocks: for each row the V groups of
128 columns, or one group if that is longer. The weight's scales are [row tiles, blocks, 8 r, V, 2]; the last
axis is row r, row r + 8. Until `unpack_scales` they stay packed in words of 16 or 32 bits.

For kernels that dequantize a tile of all warps as one tensor. Written in Gluon.
"""
# mypy: ignore-errors

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import async_load, reinterpret
from quantkit.kernels.gluon.dequant_fragment import row_tile_of_warp
from quantkit.kernels.layouts.dequant_blocks import bfloat16_of_bytes, scale_value


@gluon.constexpr_function
def scale_words_layout(W: int, WORDS: int) -> gl.DistributedLinearLayout:
    """Return the register layout of packed scales [W warps, 8 r, WORDS], or [W, 8] for one word.

    The words at (w, r) belong to rows r and r + 8 of warp w. All four lanes 4 r + t of that warp hold them.
    """
    rank = 2 if WORDS == 1 else 3
    words = [[0, 0, 1 << bit] for bit in range(WORDS.bit_length() - 1)]
    lanes = [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]]
    warps = [[1 << bit, 0] for bit in range(W.bit_length() - 1)]
    lanes, warps = ([[*one, 0][:rank] for one in some] for some in (lanes, warps))
    return gl.DistributedLinearLayout(words, lanes, warps, [], [W, 8, WORDS][:rank])


@gluon.jit
def load_scales_global(values, at, V: gl.constexpr, W: gl.constexpr):
    """Load scales or zero-points of a scale block from global memory: words [W, 8] or [W, 8, WORDS].

    A scale block is the V groups of 128 columns, or one longer group. Warp w has a row tile of 16 rows; words
    (w, r) hold the 2 V values of its rows r and r + 8.

        values    pointer to all scales, or zero-points, of the weight: [row tiles, blocks, 8 r, V, 2]
        at        int32 [W, 8]: which 2 V values to load, (row tile * blocks + block) * 8 + r
        words     [W, 8] int16 if 2 V values have 16 bits; [W, 8] int32 if they have 32 bits;
                  else [W, 8, WORDS] int32

    Values are loaded as words, because Triton would copy narrower values right after the load, and wait for
    it.
    """
    BITS: gl.constexpr = 2 * V * values.dtype.element_ty.primitive_bitwidth
    if BITS == 16:
        words = gl.load(values.to(gl.pointer_type(gl.int16), bitcast=True) + at)
    elif BITS == 32:
        words = gl.load(values.to(gl.pointer_type(gl.int32), bitcast=True) + at)
    else:
        WORDS: gl.constexpr = BITS // 32
        LAYOUT: gl.constexpr = scale_words_layout(W, WORDS)
        word = gl.arange(0, WORDS, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
        at = gl.convert_layout(at, gl.SliceLayout(2, LAYOUT), assert_trivial=True)
        at = gl.expand_dims(at, 2) * WORDS + gl.expand_dims(gl.expand_dims(word, 0), 1)
        words = gl.load(values.to(gl.pointer_type(gl.int32), bitcast=True) + at)
    return words


@gluon.constexpr_function
def _smem_type(STORED: gl.dtype, V: int) -> tuple[gl.dtype, int]:
    """Return (dtype, number) of the words in which shared memory holds the 2 V values of rows r and r + 8.

    STORED is the dtype of one value. The dtype is int16 if the 2 V values have 16 bits together, else int32.
    """
    bits = 2 * V * STORED.primitive_bitwidth
    return (gl.int16, 1) if bits == 16 else (gl.int32, bits // 32)


@gluon.jit
def stage_scales(
    values, first, last, COUNT, N, GATED: gl.constexpr, block, BLOCKS: gl.constexpr,
    STAGED_BLOCKS: gl.constexpr, V: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Start copying STAGED_BLOCKS scale blocks, from `block` on, to shared memory; return that memory.

    A scale block is the V groups of 128 columns, or one longer group. Zero-points are copied in the same way.

        values         pointer to all scales of weight [N, K]: [row tiles of 16 rows, BLOCKS, 8 r, V, 2]
        first, last    warp i < COUNT copies the row tile at position min(first + i, last); others nothing
        COUNT          number of row tiles of the program, at most W
        GATED          False: a position is the index of a row tile. True: row tiles of the first N / 2 rows
                       (gate) and of the other N / 2 rows (up) alternate.
        W              number of warps
        returns        int16 or int32 [STAGED_BLOCKS, W, words of a row tile], for `load_scales_smem`

    The first dimension is rounded up to a power of two. The caller commits the group of asynchronous copies,
    and waits for it.
    """
    KIND: gl.constexpr = _smem_type(values.dtype.element_ty, V)
    SIZE: gl.constexpr = triton.next_power_of_2(STAGED_BLOCKS)
    WORDS_PER_TILE: gl.constexpr = 8 * KIND[1]
    # A thread copies 16 bytes.
    VECTOR: gl.constexpr = 128 // KIND[0].primitive_bitwidth
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 1, VECTOR], [32 * VECTOR // WORDS_PER_TILE, 1, WORDS_PER_TILE // VECTOR], [1, W, 1], [2, 1, 0]
    )
    staged = gl.allocate_shared_memory(
        KIND[0], [SIZE, W, WORDS_PER_TILE], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    )
    number = gl.arange(0, SIZE, gl.SliceLayout(1, gl.SliceLayout(2, LAYOUT)))
    warp = gl.arange(0, W, gl.SliceLayout(0, gl.SliceLayout(2, LAYOUT)))
    word = gl.arange(0, WORDS_PER_TILE, gl.SliceLayout(0, gl.SliceLayout(1, LAYOUT)))
    tile = row_tile_of_warp(warp, first, last, COUNT, N, GATED)
    at = gl.expand_dims(tile * BLOCKS, 0) + gl.expand_dims(gl.minimum(block + number, BLOCKS - 1), 1)
    at = gl.expand_dims(at, 2) * WORDS_PER_TILE + gl.expand_dims(gl.expand_dims(word, 0), 1)
    mask = (gl.expand_dims(warp, 0) < COUNT) & (gl.expand_dims(number, 1) < STAGED_BLOCKS)
    async_load(
        staged,
        values.to(gl.pointer_type(KIND[0]), bitcast=True) + at,
        mask=gl.expand_dims(mask, 2),
    )
    return staged


@gluon.jit
def load_scales_smem(staged, block, STORED: gl.constexpr, V: gl.constexpr, W: gl.constexpr):
    """Load scales or zero-points of a scale block from shared memory: words [W, 8] or [W, 8, WORDS].

        staged    result of `stage_scales`; the copies must have arrived
        block     index of the scale block among those in `staged`
        STORED    dtype of one value
        V         groups of a scale block: those of 128 columns, or one longer group
        W         number of warps, each with a row tile of 16 rows

    Words (w, r) hold the 2 V values of rows r and r + 8 of warp w, to be unpacked by `unpack_scales`.
    """
    KIND: gl.constexpr = _smem_type(STORED, V)
    if KIND[1] == 1:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        words = (
            reinterpret(staged, KIND[0], [staged.shape[0], W, 8], FLAT)
            .index(block)
            .load(scale_words_layout(W, 1))
        )
    else:
        FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
        row_words = reinterpret(staged, KIND[0], [staged.shape[0], W, 8, KIND[1]], FLAT)
        words = row_words.index(block).load(scale_words_layout(W, KIND[1]))
    return words


@gluon.jit
def unpack_scales(words, DTYPE: gl.constexpr, V: gl.constexpr, W: gl.constexpr):
    """Unpack scales or zero-points from words, [W, 8] or [W, 8, WORDS], to values DTYPE [16 * W, V].

    `words` is the result of `load_scales_global` or `load_scales_smem`. W is the number of row tiles of 16
    rows, V of groups in a scale block.
    """
    BITS: gl.constexpr = DTYPE.primitive_bitwidth
    if BITS == 32:
        values = words.to(DTYPE, bitcast=True)
    elif BITS == 16 or V == 1:
        values = gl.join(_field(words, 0, DTYPE), _field(words, 1, DTYPE))
    else:
        values = gl.join(
            gl.join(_field(words, 0, DTYPE), _field(words, 2, DTYPE)),
            gl.join(_field(words, 1, DTYPE), _field(words, 3, DTYPE)),
        )
    return _rows_first(values, V, W)


@gluon.jit
def dequant_scales(
    words, STORED: gl.constexpr, KIND: gl.constexpr, DTYPE: gl.constexpr, V: gl.constexpr, W: gl.constexpr
):
    """Convert packed scales, words [W, 8] or [W, 8, WORDS], to floats: DTYPE [16 * W, V].

    `words` is the result of `load_scales_global` or `load_scales_smem`. W is the number of row tiles of 16
    rows, V of groups in a scale block. STORED is the dtype in memory. KIND is the encoding of 8-bit scales,
    such as "e8m0" (`fragment_scales.scale_kind`).
    """
    if DTYPE == gl.bfloat16 and (KIND == "e5m3" or KIND == "e8m0"):
        scales = _of_bytes(words, KIND, DTYPE, V, W)
    else:
        scales = scale_value(unpack_scales(words, STORED, V, W), KIND).to(DTYPE)
    return scales


@gluon.jit
def _of_bytes(words, KIND: gl.constexpr, DTYPE: gl.constexpr, V: gl.constexpr, W: gl.constexpr):
    """Convert packed 8-bit scales, words [W, 8] or [W, 8, WORDS], to bfloat16 [16 * W, V] by inline PTX.

    W is the number of row tiles of 16 rows, V of groups in a scale block. KIND is the encoding of the scales:
    "e5m3" or "e8m0". DTYPE is bfloat16.
    """
    ASM: gl.constexpr = bfloat16_of_bytes(KIND, "4140", "4342")
    word = words.to(gl.int32)
    first, second = gl.inline_asm_elementwise(ASM, "=r,=r,r", [word], (gl.int32, gl.int32), True, 1)
    return unpack_scales(first if V == 1 else gl.join(first, second), DTYPE, V, W)


@gluon.jit
def _rows_first(values, V: gl.constexpr, W: gl.constexpr):
    """Reorder values from [W row tiles, 8 r, V groups, 2] to [16 * W, V]: one row per row of the weight.

    The last axis of `values` is rows r and r + 8 of a row tile of 16 rows.
    """
    values = gl.reshape(values, (W, 8, V, 2))
    return gl.reshape(gl.permute(values, (0, 3, 1, 2)), (16 * W, V))


@gluon.jit
def _field(words, NUMBER: gl.constexpr, DTYPE: gl.constexpr):
    """Extract value NUMBER, counted from the lowest bits, of each of `words` int16 or int32 [...].

    DTYPE, of 8 or 16 bits, is the dtype of the values. The result is [...]: DTYPE if that has 16 bits, else
    the 8 bits as int8.
    """
    bits = words >> (NUMBER * DTYPE.primitive_bitwidth)
    if DTYPE.primitive_bitwidth == 16:
        value = bits.to(gl.int16).to(DTYPE, bitcast=True)
    else:
        value = bits.to(gl.int8)
    return value
