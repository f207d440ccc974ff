"""y = x W^T for many rows of x on Hopper: y^T = W x^T, in programs whose warps do one thing each.

One warp has x copied to shared memory, by the tensor memory accelerator, as far ahead as there is room. Two
groups of four warps have half of the rows of the weight each: they decode them in registers, as operand A,
and multiply. While one of them decodes, the tensor cores have the products of the other. A program takes one
tile after the other until there are none.

Written in Gluon, as Triton itself has no way to say which warps do what. `tiled` is its portable twin.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from quantkit.kernels.fused.blocks import decode, finish, scale_value
from quantkit.kernels.fused.tiled import place


@gluon.jit
def hopper(
    x, codes, scale, zero, factor, lut, bias, y, M, N,
    SPANS: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    BLOCKS: gl.constexpr, V: gl.constexpr, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr,
    HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr,
    TABLE: gl.constexpr, FIELDS: gl.constexpr, PLANES: gl.constexpr, DTYPE: gl.constexpr,
    PARTS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, REGISTERS: gl.constexpr,
    RASTER: gl.constexpr,
):  # fmt: skip
    """`x` describes [M, SPANS * span] in the order of the fragments, by `order_columns`, in blocks [BM, 128].

    A tile is 2 * PARTS * 64 rows of the weight times BM rows of x, a step 128 columns.
    """
    STEPS: gl.constexpr = SPANS * 16 * PLANES // 128
    held = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 128], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    gl.warp_specialize(
        [
            (_multiply, (
                0, held, ready, free, codes, scale, zero, factor, lut, bias, y, M, N, STEPS, SPANS, TILES,
                GROUPS, PER_BLOCK, BLOCKS, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM, CONSTRAINTS, TABLE,
                FIELDS, PLANES, DTYPE, PARTS, BM, STAGES, RASTER,
            )),
            (_multiply, (
                1, held, ready, free, codes, scale, zero, factor, lut, bias, y, M, N, STEPS, SPANS, TILES,
                GROUPS, PER_BLOCK, BLOCKS, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM, CONSTRAINTS, TABLE,
                FIELDS, PLANES, DTYPE, PARTS, BM, STAGES, RASTER,
            )),
            (_copy, (x, held, ready, free, M, N, STEPS, PARTS, BM, STAGES, RASTER)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def _copy(
    x, held, ready, free, M, N, STEPS: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr,
    STAGES: gl.constexpr, RASTER: gl.constexpr,
):  # fmt: skip
    """Blocks of x to shared memory, in the order in which `_multiply` takes them."""
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, 128 * PARTS)
    count = 0
    for tile in range(gl.program_id(0), columns * rows, gl.num_programs(0)):
        pm, _ = place(tile, columns, rows, RASTER)
        for step in range(STEPS):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES % 2 ^ 1)
            mbarrier.expect(ready.index(stage), BM * 128 * 2)
            tma.async_copy_global_to_shared(x, [pm * BM, step * 128], ready.index(stage), held.index(stage))
            count += 1


@gluon.jit
def _multiply(
    which: gl.constexpr, held, ready, free, codes, scale, zero, factor, lut, bias, y, M, N,
    STEPS: gl.constexpr, SPANS: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr, PLANES: gl.constexpr,
    DTYPE: gl.constexpr, PARTS: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, RASTER: gl.constexpr,
):  # fmt: skip
    """PARTS times 64 rows of a tile, those of group number `which`."""
    SPAN: gl.constexpr = 16 * PLANES
    C: gl.constexpr = 128 // SPAN
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    CODES: gl.constexpr = _codes(C)
    # Weights [64 rows, V groups, their columns] where operand A has them.
    like = gl.reshape(gl.full([64, 128], 0.0, DTYPE, OPERAND), (64, V, 128 // V))
    WEIGHTS: gl.constexpr = like.type.layout
    tile_of = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, CODES))), 1), 2
    )
    span = gl.expand_dims(gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0), 2)
    lane = gl.expand_dims(
        gl.expand_dims(gl.arange(0, 256, gl.SliceLayout(0, gl.SliceLayout(1, CODES))), 0), 1
    )
    row = gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(1, gl.SliceLayout(2, WEIGHTS))), 1)
    group = gl.expand_dims(gl.arange(0, V, gl.SliceLayout(0, gl.SliceLayout(2, WEIGHTS))), 0)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, 128 * PARTS)
    last = (N + 15) // 16 - 1
    count = 0
    for tile in range(gl.program_id(0), columns * rows, gl.num_programs(0)):
        pm, pn = place(tile, columns, rows, RASTER)
        first = (pn * 2 + which) * (4 * PARTS)
        words_at = ()
        values_at = ()
        sums = ()
        for part in gl.static_range(PARTS):
            mine = gl.minimum(first + part * 4 + tile_of, last).to(gl.int64)
            words_at = words_at + (codes + (mine * SPANS + span) * (TILES * 256) + lane,)
            mine = gl.minimum(first + part * 4 + row // 16, last)
            values_at = values_at + (mine * (BLOCKS * 16 * V) + row % 8 * (2 * V) + group * 2 + row // 8 % 2,)
            sums = sums + (gl.zeros([64, BM], gl.float32, SUMS),)
        words, s, z = _load(
            words_at, values_at, scale, zero, 0, PARTS, C, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO
        )
        for step in range(STEPS):
            # The last step loads itself again, which nobody reads.
            next_words, next_s, next_z = _load(
                words_at, values_at, scale, zero, gl.minimum(step + 1, STEPS - 1),
                PARTS, C, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
            )  # fmt: skip
            stage = count % STAGES
            mbarrier.wait(ready.index(stage), count // STAGES % 2)
            flying = ()
            for part in gl.static_range(PARTS):
                tiles = ()
                for t in gl.static_range(TILES):
                    tiles = tiles + (words[part * TILES + t],)
                q = decode(tiles, lut, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE)
                q = gl.reshape(q, (4, C, 8, 4, 2, 2, 2, SPAN // 32, 2))
                q = gl.reshape(gl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (64, V, 128 // V))
                q = gl.convert_layout(q, WEIGHTS, assert_trivial=True)
                if HAS_ZERO:
                    q -= gl.expand_dims(z[part].to(DTYPE), 2)
                if GROUPS > 1:
                    q *= gl.expand_dims(scale_value(s[part], SCALE).to(DTYPE), 2)
                q = gl.convert_layout(gl.reshape(q, (64, 128)), OPERAND, assert_trivial=True)
                x = held.index(stage).permute((1, 0))
                product = warpgroup_mma(q, x, warpgroup_mma_init(sums[part]), is_async=True)
                flying = flying + (product, q)
            # Weights stay in their registers until the products are done.
            if PARTS == 1:
                one, _ = warpgroup_mma_wait(0, [flying[0], flying[1]])
                sums = (one,)
            else:
                one, _, two, _ = warpgroup_mma_wait(0, [flying[0], flying[1], flying[2], flying[3]])
                sums = (one, two)
            mbarrier.arrive(free.index(stage), count=1)
            words = next_words
            s = next_s
            z = next_z
            count += 1
        _store(
            sums, y, first * 16, pm * BM, M, N, scale, factor, bias, PARTS, BM, GROUPS, SCALE, HAS_FACTOR,
            HAS_BIAS, SUMS,
        )  # fmt: skip


@gluon.constexpr_function
def _codes(C: int) -> gl.DistributedLinearLayout:
    """Codes [4 row tiles, C spans, 256 lanes]: a warp has a row tile, a thread 16 bytes of each span."""
    spans = [[0, 1 << bit, 0] for bit in range(C.bit_length() - 1)]
    lanes = [[0, 0, 1 << bit] for bit in range(8)]
    return gl.DistributedLinearLayout(lanes[:3] + spans, lanes[3:], [[1, 0, 0], [2, 0, 0]], [], [4, C, 256])


@gluon.jit
def _load(
    words_at, values_at, scale, zero, step, PARTS: gl.constexpr, C: gl.constexpr, TILES: gl.constexpr,
    GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """Codes, scales and zero-points of a step; 0 for what there is none of."""
    block = gl.minimum(step * 128 // PER_BLOCK, BLOCKS - 1) * (16 * V)
    words = ()
    s = ()
    z = ()
    for part in gl.static_range(PARTS):
        for t in gl.static_range(TILES):
            words = words + (gl.load(words_at[part] + (step * (C * TILES) + t) * 256),)
        s = s + (gl.load(scale + values_at[part] + block) if GROUPS > 1 else 0,)
        z = z + (gl.load(zero + values_at[part] + block) if HAS_ZERO else 0,)
    return words, s, z


@gluon.jit
def _store(
    sums, y, first, begin, M, N, scale, factor, bias, PARTS: gl.constexpr, BM: gl.constexpr,
    GROUPS: gl.constexpr, SCALE: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr,
    SUMS: gl.constexpr,
):  # fmt: skip
    """Finish sums of rows from `first` on and write them to columns of y, for rows of x from `begin` on."""
    # Threads side by side write rows side by side.
    STORED: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    m = gl.expand_dims(begin + gl.arange(0, BM, gl.SliceLayout(0, STORED)), 0)
    for part in gl.static_range(PARTS):
        rows = gl.expand_dims(first + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), 1)
        out = finish(sums[part], rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
        out = gl.convert_layout(out.to(y.dtype.element_ty), STORED)
        n = gl.expand_dims(first + part * 64 + gl.arange(0, 64, gl.SliceLayout(1, STORED)), 1)
        gl.store(y + m.to(gl.int64) * N + n, out, mask=(m < M) & (n < N))
