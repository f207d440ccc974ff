"""Products of `fused-small-m`: dequantize a chunk of codes and multiply it by x, one `mma` after another.

row tile      16 weight rows; each of W warps owns one
span          the columns whose codes are stored in the same registers
k_step        what a warp dequantizes at a time: 128 columns, or C spans
chunk         the k_steps whose columns of x are copied to shared memory together
split         all k_steps of a program
scale block   the scales of the V groups of 128 columns, or of one longer group
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.dequant_fragment import dequant_a_fragment, k_step_columns
from quantkit.kernels.gluon.scales_smem import (
    dequant_scales,
    load_scales_global,
    load_scales_smem,
    unpack_scales,
)
from quantkit.kernels.gluon.stage_x_shared import accumulator_layout, mma, start_mma, wait_mma


@gluon.jit
def load_codes(pointers, k_step, REGISTERS: gl.constexpr, C: gl.constexpr):
    """Load the packed codes of k_step `k_step`: a tuple of REGISTERS tensors int32 [W, C, 128].

    A k_step is C spans; a span is the columns whose codes are stored in the same REGISTERS registers. Each of
    W warps has a row tile of 16 rows. `pointers` are those of `multiply`: the first are to the codes of
    k_step 0, the second is a mask.
    """
    words_at, mask = pointers[0], pointers[1]
    words = ()
    for t in gl.static_range(REGISTERS):
        words = words + (gl.load(words_at + (k_step * (C * REGISTERS) + t) * 128, mask=mask),)
    return words


@gluon.jit
def load_scales(
    pointers, k_step, COUNT: gl.constexpr, SUBTILES: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, STORED: gl.constexpr, ZERO: gl.constexpr,
    HAS_ZERO: gl.constexpr, ALIGNED_SPLITS: gl.constexpr, STAGED_BLOCKS: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Load the scales and zero-points of COUNT k_steps, from index `k_step` on: two tuples of packed words.

    A k_step is SUBTILES times 128 columns. A tuple has a tensor for every 128 columns: [W, 8] or [W, 8,
    WORDS] words with the values of W warps, 16 rows each, as of `load_scales_global`. If GROUPS is 1, scales
    are applied to y, and the first tuple has zeros. If not HAS_ZERO, the second has zeros.

        pointers         (codes, mask, offsets of scales, scales, zero-points, first k_step, first scale
                         block)
        GROUPS           groups of a row
        PER_BLOCK        columns of a scale block
        BLOCKS           scale blocks of a row: 128 columns each, or one longer group
        V                groups of a scale block
        STORED           dtype of scales in memory
        ZERO             dtype of zero-points in memory
        ALIGNED_SPLITS   True if the program's columns begin at a scale block
        STAGED_BLOCKS    scale blocks in shared memory; 0: scales are loaded from global memory
    """
    scales_at, scales, zeros, begin, first_block = (
        pointers[2],
        pointers[3],
        pointers[4],
        pointers[5],
        pointers[6],
    )
    s = ()
    z = ()
    for subtile in gl.static_range(COUNT * SUBTILES):
        if ALIGNED_SPLITS:
            block = (k_step * SUBTILES + subtile) * 128 // PER_BLOCK
        else:
            # Beyond the last column x is zero, so weights may have any value.
            block = gl.minimum(((begin + k_step) * SUBTILES + subtile) * 128 // PER_BLOCK, BLOCKS - 1)
            if STAGED_BLOCKS:
                block -= first_block
        s = s + (
            _load_block_scales(scales, block, scales_at, STORED, STAGED_BLOCKS, V, W) if GROUPS > 1 else 0,
        )
        z = z + (_load_block_scales(zeros, block, scales_at, ZERO, STAGED_BLOCKS, V, W) if HAS_ZERO else 0,)
    return s, z


@gluon.jit
def _load_block_scales(
    values, block, scales_at, STORED: gl.constexpr, STAGED_BLOCKS: gl.constexpr, V: gl.constexpr,
    W: gl.constexpr
):  # fmt: skip
    """Load the scales or zero-points of scale block `block`, packed: words [W, 8] or [W, 8, WORDS].

    A scale block is the V groups of 128 columns, or one longer group. Each of W warps has 16 rows.

        values          if STAGED_BLOCKS > 0, shared memory filled by `stage_scales`; else a pointer to all
                        values of the weight
        scales_at       int32 [W, 8]: offset of block 0 of each row; read only if STAGED_BLOCKS is 0
        STORED          dtype of a value
        STAGED_BLOCKS   scale blocks in shared memory
    """
    if STAGED_BLOCKS:
        words = load_scales_smem(values, block, STORED, V, W)
    else:
        words = load_scales_global(values, scales_at + block * 8, V, W)
    return words


@gluon.jit
def multiply(
    total, ring, values, x_smem, pointers, number, REGISTERS: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, ON_WEIGHTS: gl.constexpr,
    STORED: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr, HAS_ZERO: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr,
    FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, CHUNK: gl.constexpr,
    PREFETCH: gl.constexpr, K_STEPS: gl.constexpr, ALIGNED_SPLITS: gl.constexpr, STAGED_BLOCKS: gl.constexpr,
    IS_LAST: gl.constexpr, WGMMA: gl.constexpr,
):  # fmt: skip
    """Return (`total` + products of a chunk, next ring, next values); products are weight x^T [16 * W, BM].

    A chunk is CHUNK k_steps, from index `number` of the program on. A k_step is 128 columns, or a longer
    span: 16 * FRAGMENTS columns whose codes are in the same REGISTERS registers. Each of W warps has 16 rows
    of the weight. The next ring and values are the arguments for the next chunk.

        total                  float32 [16 * W, BM]: sums so far
        ring                   tuple of PREFETCH k_steps of codes, loaded early by `load_codes`
        values                 (scales, zero-points) of the chunk, from `load_scales`; empty if STAGED_BLOCKS,
                               as `pointers` then has the shared memory
        x_smem                 x in shared memory, [blocks, BM, 128 columns], or 64 columns if WGMMA
        pointers               (codes, mask, offsets of scales, scales, zero-points, first k_step, first scale
                               block, last k_step, lookup table)
        GROUPS                 groups of a row; if 1, no scale is applied here
        BLOCKS                 scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK              columns of a scale block
        V                      groups of a scale block
        ON_WEIGHTS             True if scales must multiply weights, not sums
        STORED, ZERO           dtypes of scales and of zero-points in memory
        SCALE                  encoding of 8-bit scales (`scale_kind`); "" for wider ones
        HAS_ZERO               True if there are zero-points
        ASM, CONSTRAINTS       PTX that dequantizes a span, with its constraints
        TABLE                  PTX that loads the values of codes; None for no lookup
        FIELDS                 not used, because ASM is given
        DTYPE                  dtype of dequantized weights
        BM                     rows of x
        K_STEPS                k_steps of the program
        ALIGNED_SPLITS         True if the program's columns begin at a scale block
        STAGED_BLOCKS          scale blocks in shared memory; 0: scales are loaded one chunk early
        IS_LAST                True for the last chunk, which loads nothing for a next one
        WGMMA                  True to use `wgmma` instead of `mma`
    """
    SUBTILES: gl.constexpr = k_step_columns(FRAGMENTS) // 128
    C: gl.constexpr = k_step_columns(FRAGMENTS) // (16 * FRAGMENTS)
    ACC: gl.constexpr = accumulator_layout(W, BM, WGMMA)
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # Layout of weights [16 W rows, V groups, columns of a group] in the registers of operand A.
    like = gl.reshape(gl.full([16 * W, 128], 0.0, DTYPE, A), (16 * W, V, 128 // V))
    WEIGHTS: gl.constexpr = like.type.layout
    ON_SUMS: gl.constexpr = GROUPS > 1 and not ON_WEIGHTS and V == 1
    s, z = values
    if not STAGED_BLOCKS and not IS_LAST:
        following = gl.minimum(number + CHUNK, K_STEPS - CHUNK)
        values = load_scales(
            pointers, following, CHUNK, SUBTILES, GROUPS, PER_BLOCK, BLOCKS, V, STORED, ZERO, HAS_ZERO,
            ALIGNED_SPLITS, STAGED_BLOCKS, W,
        )  # fmt: skip
        _keep_order()
    end, lut = pointers[7], pointers[8]
    for k_step in gl.static_range(CHUNK):
        subtiles = dequant_a_fragment(
            ring[0], lut, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, W, C, SUBTILES, REGISTERS
        )
        following = ring[0]
        if not IS_LAST or k_step + PREFETCH < CHUNK:
            after = gl.minimum(number + k_step + PREFETCH, end)
            following = load_codes(pointers, after, REGISTERS, C)
            _keep_order()
        ring = (ring[1], following) if PREFETCH == 2 else (ring[1], ring[2], ring[3], following)
        if STAGED_BLOCKS:
            step_s, step_z = load_scales(
                pointers, number + k_step, 1, SUBTILES, GROUPS, PER_BLOCK, BLOCKS, V, STORED, ZERO, HAS_ZERO,
                ALIGNED_SPLITS, STAGED_BLOCKS, W,
            )  # fmt: skip
            s, z = s + step_s, z + step_z
        for subtile in gl.static_range(SUBTILES):
            q = gl.reshape(
                gl.convert_layout(subtiles[subtile], A, assert_trivial=True), (16 * W, V, 128 // V)
            )
            if HAS_ZERO:
                of_rows = unpack_scales(z[k_step * SUBTILES + subtile], ZERO, V, W).to(DTYPE)
                of_rows = gl.convert_layout(of_rows, gl.SliceLayout(2, WEIGHTS), assert_trivial=True)
                q -= gl.expand_dims(of_rows, 2)
            row_scales = 0
            if GROUPS > 1:
                word = s[k_step * SUBTILES + subtile]
                of_rows = dequant_scales(word, STORED, SCALE, gl.float32 if ON_SUMS else DTYPE, V, W)
                if ON_SUMS:
                    row_scales = gl.convert_layout(
                        gl.reshape(of_rows, (16 * W,)), gl.SliceLayout(1, ACC), assert_trivial=True
                    )
                else:
                    of_rows = gl.convert_layout(of_rows, gl.SliceLayout(2, WEIGHTS), assert_trivial=True)
                    q *= gl.expand_dims(of_rows, 2)
            q = gl.reshape(q, (16 * W, 128))
            at = (number + k_step) * SUBTILES + subtile
            if WGMMA:
                # The previous weights were multiplied while these were dequantized.
                if k_step + subtile > 0:
                    total = wait_mma(total, pending, ON_SUMS)  # noqa: F821
                pending = start_mma(total, q, row_scales, x_smem, at, A, ON_SUMS)
            else:
                total = mma(total, q, row_scales, x_smem.index(at), A, ON_SUMS)
    if WGMMA:
        total = wait_mma(total, pending, ON_SUMS)
    return total, ring, values


@gluon.jit
def _keep_order():
    """Emit a warp barrier; without it, ptxas moves loads that come before it past the code after it."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
