"""Operand A of `fused-wgmma`: load codes of W, dequantize them and multiply them by their scales.

A consumer, a group of four warps, has four row tiles of 16 rows of W. A k_step is the columns whose codes a
consumer loads at once: C spans. A span is the columns whose codes are stored in the same registers.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.dequant_fragment import codes_layout, dequant_a_fragment
from quantkit.kernels.gluon.scales_smem import (
    dequant_scales,
    load_scales_global,
    scale_words_layout,
    unpack_scales,
)


@gluon.constexpr_function
def _of_block(blocks: tuple[str, ...], block_k: int) -> str:
    """Return entry `block_k` of `blocks`: PTX, or its constraints, for one block of a k_step.

    A k_step is the columns whose codes are loaded together, a block the part dequantized and multiplied at a
    time.
    """
    return blocks[block_k]


@gluon.jit
def dequant(
    k_step, lut, block_k: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr,
    FIELDS: gl.constexpr, FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, C: gl.constexpr,
    SUBTILES: gl.constexpr, BLOCKS_PER_STEP: gl.constexpr, REGISTERS: gl.constexpr, GROUPS: gl.constexpr,
    V: gl.constexpr, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, STORED: gl.constexpr, ZERO: gl.constexpr,
    WEIGHTS: gl.constexpr, OPERAND: gl.constexpr,
):  # fmt: skip
    """Dequantize block `block_k` of a k_step: (code - zero-point) * scale, a tuple of [64 rows, 128].

    The results are SUBTILES operands A. A k_step is the columns whose codes are loaded together: C spans, the
    columns stored in the same REGISTERS registers. A k_step has BLOCKS_PER_STEP blocks of SUBTILES times 128
    columns.

        k_step               codes, scales and zero-points: the result of `load_k_step`
        lut                  result of `fill_table`: values of codes
        ASM, CONSTRAINTS     PTX from codes to values of DTYPE, and its constraints, for each block
        TABLE, FIELDS        as in `dequant_codes`
        FRAGMENTS            fragments (16 columns) of a span
        GROUPS               groups of a row; 1: no group scales
        V                    groups of 128 columns
        SCALE                encoding of 8-bit scales
        STORED, ZERO         dtypes of scales and zero-points in memory
        HAS_ZERO             there are zero-points
        WEIGHTS, OPERAND     register layouts of [64, V groups, columns of a group], and of the results
    """
    words, s, z = k_step
    BLOCK_ASM: gl.constexpr = _of_block(ASM, block_k)
    BLOCK_CONSTRAINTS: gl.constexpr = _of_block(CONSTRAINTS, block_k)
    subtiles = dequant_a_fragment(
        words,
        lut,
        BLOCK_ASM,
        BLOCK_CONSTRAINTS,
        TABLE,
        FIELDS,
        FRAGMENTS // BLOCKS_PER_STEP,
        DTYPE,
        4,
        C,
        SUBTILES,
        REGISTERS,
    )
    weights = ()
    for subtile in gl.static_range(SUBTILES):
        q = gl.convert_layout(gl.reshape(subtiles[subtile], (64, V, 128 // V)), WEIGHTS, assert_trivial=True)
        if HAS_ZERO:
            row_zeros = unpack_scales(z[block_k * SUBTILES + subtile], ZERO, V, 4).to(DTYPE)
            q -= gl.expand_dims(
                gl.convert_layout(row_zeros, gl.SliceLayout(2, WEIGHTS), assert_trivial=True), 2
            )
        if GROUPS > 1:
            row_scales = dequant_scales(s[block_k * SUBTILES + subtile], STORED, SCALE, DTYPE, V, 4)
            q *= gl.expand_dims(
                gl.convert_layout(row_scales, gl.SliceLayout(2, WEIGHTS), assert_trivial=True), 2
            )
        weights = weights + (gl.convert_layout(gl.reshape(q, (64, 128)), OPERAND, assert_trivial=True),)
    return weights


@gluon.jit
def prologue(
    row_tile, step, codes, scale, zero, N, SPANS, C: gl.constexpr, STEP_SUBTILES: gl.constexpr,
    REGISTERS: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCKS, V: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """Load the first codes and scales of an output tile: (pointers, offsets of scales, ring of k_steps).

    A step of the tile is two k_steps, and `step` is the first one of this program. A k_step is C spans, the
    columns stored in the same REGISTERS registers. Pointers and offsets are those of `_pointers`. The ring
    has two results of `load_k_step`: codes int32 [4, C, 128], and scales. The consumer has four row tiles (16
    rows of W [N, K]) from `row_tile` on.

        codes, scale, zero     pointers to all of the weight
        SPANS                  spans of a row
        STEP_SUBTILES          128 columns of a k_step
        GROUPS                 groups of a row; 1: no group scales
        HAS_ZERO               there are zero-points
        BLOCKS, V, PER_BLOCK   scale blocks of a row, their groups and columns
    """
    words_at, scales_at = _pointers(row_tile, codes, N, SPANS, C, REGISTERS, BLOCKS)
    ring = ()
    for half in gl.static_range(2):
        k_step = gl.minimum(step * 2 + half, SPANS // C - 1)
        ring = ring + (
            load_k_step(
                words_at, scales_at, scale, zero, k_step,
                C, STEP_SUBTILES, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
            ),
        )  # fmt: skip
    return words_at, scales_at, ring


@gluon.jit
def _pointers(
    first, codes, N, SPANS, C: gl.constexpr, REGISTERS: gl.constexpr, BLOCKS,
):  # fmt: skip
    """Return pointers to codes of four row tiles, int32 [4, C, 128], and offsets of scales, int32 [4, 8].

    The row tiles, 16 rows of W [N, K] each, begin with row tile `first`. A row has SPANS spans, of which C
    are loaded at a time: the columns stored in the same REGISTERS registers. A row has BLOCKS scale blocks:
    the groups of 128 columns, or one longer group.
    """
    CODES: gl.constexpr = codes_layout(4, C)
    last = (N + 15) // 16 - 1
    tile = gl.minimum(first + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, CODES))), last)
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2).to(gl.int64)
    span = gl.expand_dims(gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0), 2)
    lane = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 1)
    LAYOUT: gl.constexpr = scale_words_layout(4, 1)
    tile_of_values = gl.minimum(first + gl.arange(0, 4, gl.SliceLayout(1, LAYOUT)), last)
    scales_at = gl.expand_dims(tile_of_values * (BLOCKS * 8), 1)
    return (
        codes.to(gl.pointer_type(gl.int32), bitcast=True) + (tile * SPANS + span) * (REGISTERS * 128) + lane,
        scales_at + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, LAYOUT)), 0),
    )


@gluon.jit
def load_k_step(
    words_at, scales_at, scale, zero, k_step, C: gl.constexpr, STEP_SUBTILES: gl.constexpr,
    REGISTERS: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCKS, V: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """Load the k_step of index `k_step` of four row tiles: (codes, scales, zero-points), tuples of [4, ...].

        codes                  REGISTERS tensors int32 [4, C, 128]
        scales, zero-points    for every 128 columns the words of `load_scales_global`; 0 without group scales
                               (GROUPS 1), or without zero-points (HAS_ZERO)

    A row tile is 16 rows of W. A k_step is C spans, the columns stored in the same REGISTERS registers, and
    STEP_SUBTILES times 128 columns. A row has BLOCKS scale blocks of V groups and PER_BLOCK columns.
    `words_at` and `scales_at` are from `_pointers`; `scale` and `zero` point to all of the weight.
    """
    words = ()
    for t in gl.static_range(REGISTERS):
        words = words + (gl.load(words_at + (k_step * (C * REGISTERS) + t) * 128),)
    s = ()
    z = ()
    for subtile in gl.static_range(STEP_SUBTILES):
        at = scales_at + gl.minimum((k_step * STEP_SUBTILES + subtile) * 128 // PER_BLOCK, BLOCKS - 1) * 8
        s = s + (load_scales_global(scale, at, V, 4) if GROUPS > 1 else 0,)
        z = z + (load_scales_global(zero, at, V, 4) if HAS_ZERO else 0,)
    return words, s, z
