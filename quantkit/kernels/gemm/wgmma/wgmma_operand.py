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

    A k_step is the columns whose codes are loaded together, a block those dequantized and multiplied
    together.
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
    """Return block `block_k` of a k_step, dequantized: a tuple of SUBTILES operands A, DTYPE [64 rows, 128].

    A value is (code - zero-point) * scale. A k_step is the columns whose codes are loaded together: C spans,
    or BLOCKS_PER_STEP blocks of SUBTILES times 128 columns. A span is the columns whose codes are stored in
    the same REGISTERS registers.

        k_step               codes, scales and zero-points: the result of `load_k_step`
        lut                  values of codes: the result of `fill_table`
        ASM, CONSTRAINTS     tuples of PTX that dequantizes a block, and its constraints, for each block
        TABLE                PTX that loads the values of codes; None for no lookup
        FIELDS               not used, because ASM is given
        FRAGMENTS            fragments of a span, 16 columns each
        GROUPS               groups of a row; if 1, no scale is applied
        V                    groups of 128 columns
        SCALE                encoding of 8-bit scales (`scale_kind`); "" for wider ones
        STORED               dtype of scales in memory
        ZERO                 dtype of zero-points in memory
        HAS_ZERO             True to subtract zero-points
        WEIGHTS              register layout of operand A as [64, V groups, columns of a group]
        OPERAND              register layout of operand A as [64, 128]
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

    Pointers and offsets are those of `_pointers`. The ring has two results of `load_k_step`: codes int32 [4,
    C, 128], and scales. A k_step is C spans; a span is the columns whose codes are stored in the same
    REGISTERS registers.

        row_tile               first of the consumer's four row tiles, 16 rows of W [N, K] each
        step                   index of the first step of this program: two k_steps
        codes, scale, zero     pointers to all of the weight
        SPANS                  spans of a row
        STEP_SUBTILES          number of 128-column parts of a k_step
        GROUPS                 groups of a row; if 1, no scales are loaded
        PER_BLOCK              columns of a scale block
        BLOCKS                 scale blocks of a row: 128 columns each, or one longer group
        V                      groups of a scale block
        HAS_ZERO               True if there are zero-points
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

    The row tiles, 16 rows of W [N, K] each, begin with row tile `first`. A row has SPANS spans: the columns
    whose codes are stored in the same REGISTERS registers. C of them are loaded at a time. A row has BLOCKS
    scale blocks: the groups of 128 columns, or one longer group.
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
    """Load k_step `k_step` of four row tiles (16 rows of W each): tuples of codes, scales, zero-points.

        codes            REGISTERS tensors int32 [4, C, 32 lanes * 4 words]
        scales           for every 128 columns a result of `load_scales_global`, [4, ...]; 0 if GROUPS is 1
        zero-points      the same for zero-points; 0 if not HAS_ZERO

    A k_step is C spans, or STEP_SUBTILES times 128 columns. A span is the columns whose codes are stored in
    the same REGISTERS registers.

        words_at         pointers to codes, from `_pointers`
        scales_at        offsets of scales, from `_pointers`
        scale, zero      pointers to all scales and zero-points of the weight
        GROUPS           groups of a row
        PER_BLOCK        columns of a scale block
        BLOCKS           scale blocks of a row: 128 columns each, or one longer group
        V                groups of a scale block
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
