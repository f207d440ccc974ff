"""y = x W^T for many rows of x on Hopper: y^T = W x^T, in programs whose warps do one thing each.

One warp has x copied to shared memory, by the tensor memory accelerator, as far ahead as there is room. Two
or three groups of four warps have 64 rows of the weight each: they decode them in registers, as operand A,
and multiply. While one of them decodes, the tensor cores have the products of another. A program takes one
tile after the other. Tiles that are left when there are none for some programs may be shared out by columns:
stream-K, `gluon/stream_k.py`.

Written in Gluon, as Triton itself cannot say which warps do what. `portable_gemm` is its portable twin.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quantkit.kernels.gemm.portable.portable_gemm_kernel import place
from quantkit.kernels.gluon.compat import tma_load
from quantkit.kernels.gluon.dequant_fragment import (
    dequant_a_fragment,
    fill_registers,
    load_codes,
    pdl_launch_dependents,
    pdl_wait,
    unit_columns,
)
from quantkit.kernels.gluon.scales_smem import places_of, scales_of, values_of, words_of
from quantkit.kernels.gluon.stream_k import first_of, fixup, store_partials, work_range, work_tile
from quantkit.kernels.layouts.dequant_blocks import finish


@gluon.jit(do_not_specialize=["M", "FULL", "SHARE", "WIDTH", "SPANS", "BLOCKS", "TOKEN"])
def wgmma_gemm(
    x, codes, scale, zero, factor, lut, bias, y, sums, M, N, FULL, SHARE, WIDTH, SPANS, BLOCKS, TOKEN,
    TILES: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, V: gl.constexpr, SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FILL: gl.constexpr, FIELDS: gl.constexpr,
    PLANES: gl.constexpr, DTYPE: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr, AHEAD: gl.constexpr,
    STAGES: gl.constexpr, REGISTERS: gl.constexpr, RASTER: gl.constexpr, TURN: gl.constexpr,
    EVEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`x` describes [M, K] in parts of blocks [BM, 128], zeros beyond.

    A tile is ROWS rows of the weight times BM rows of x, a step two units, each of TURN columns, or of a
    span where that is longer. Codes are loaded AHEAD units before they are decoded, one or two. TURN columns,
    128 or 256, are decoded and multiplied at a time, with an expression for each turn of a unit. N is a
    multiple of EVEN, up to 8. GROUPS only says whether there are several. `sums` and the integers but M, N,
    SPANS and BLOCKS are for stream-K (`gluon/stream_k.py`).
    """
    PART: gl.constexpr = x.block_shape[0]
    held = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 128], x.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=BM // PART)
        mbarrier.init(free.index(stage), count=ROWS // 64)
    given = (
        held, ready, free, codes, scale, zero, factor, fill_registers(lut, FILL), bias, y, sums,
        M, N, FULL, SHARE, WIDTH, SPANS, BLOCKS, TOKEN,
    )  # fmt: skip
    # What is written out again could not be put together: constants stay such in the call itself only.
    if ROWS == 128:
        gl.warp_specialize([
            (_multiply, (
                0, given, TILES, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, ROWS, BM, AHEAD, STAGES, RASTER, TURN, EVEN, PDL,
            )),
            (_multiply, (
                1, given, TILES, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, ROWS, BM, AHEAD, STAGES, RASTER, TURN, EVEN, PDL,
            )),
            (_copy, (
                x, held, ready, free, M, N, FULL, SHARE, WIDTH, SPANS, PLANES, ROWS, BM, STAGES, RASTER,
                TURN, PDL,
            )),
        ], [4, 1], [REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_multiply, (
                0, given, TILES, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, ROWS, BM, AHEAD, STAGES, RASTER, TURN, EVEN, PDL,
            )),
            (_multiply, (
                1, given, TILES, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, ROWS, BM, AHEAD, STAGES, RASTER, TURN, EVEN, PDL,
            )),
            (_multiply, (
                2, given, TILES, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, ROWS, BM, AHEAD, STAGES, RASTER, TURN, EVEN, PDL,
            )),
            (_copy, (
                x, held, ready, free, M, N, FULL, SHARE, WIDTH, SPANS, PLANES, ROWS, BM, STAGES, RASTER,
                TURN, PDL,
            )),
        ], [4, 4, 1], [REGISTERS, REGISTERS, 24])  # fmt: skip


@gluon.jit
def _copy(
    x, held, ready, free, M, N, FULL, SHARE, WIDTH, SPANS, PLANES: gl.constexpr, ROWS: gl.constexpr,
    BM: gl.constexpr, STAGES: gl.constexpr, RASTER: gl.constexpr, TURN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Blocks of x to shared memory, in the order in which `_multiply` takes them.

    Parts without a row of x are left as they are, and become no output.
    """
    if PDL:
        pdl_launch_dependents()
        pdl_wait()
    PART: gl.constexpr = x.block_shape[0]
    UNIT: gl.constexpr = unit_columns(PLANES, TURN)
    BLOCKS_OF_STEP: gl.constexpr = 2 * UNIT // 128
    steps = gl.cdiv(SPANS * (16 * PLANES), 2 * UNIT)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, ROWS)
    whole, jobs, begin, end, left = work_range(M, N, FULL, SHARE, WIDTH, steps, ROWS, BM)
    count = 0
    for number in range(jobs):
        tile, first, last = work_tile(number, whole, begin, end, left, FULL, WIDTH, steps)
        pm, _ = place(tile, columns, rows, RASTER)
        for block in range(first * BLOCKS_OF_STEP, last * BLOCKS_OF_STEP):
            stage = count % STAGES
            mbarrier.wait(free.index(stage), count // STAGES % 2 ^ 1)
            for part in gl.static_range(BM // PART):
                row = pm * BM + part * PART
                mbarrier.expect(ready.index(stage), PART * 128 * 2, row < M)
                mbarrier.arrive(ready.index(stage), count=1, pred=row >= M)
                to = held.index(stage).slice(part * PART, PART, 0)
                tma_load(x, [row, block * 128], ready.index(stage), to, row < M)
            count += 1


@gluon.jit
def _multiply(
    which: gl.constexpr, given, TILES: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    V: gl.constexpr, SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr, PLANES: gl.constexpr,
    DTYPE: gl.constexpr, ROWS: gl.constexpr, BM: gl.constexpr, AHEAD: gl.constexpr, STAGES: gl.constexpr,
    RASTER: gl.constexpr, TURN: gl.constexpr, EVEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """64 rows of a tile, those of group number `which`."""
    (
        held, ready, free, codes, scale, zero, factor, lut, bias, y, sums,
        M, N, FULL, SHARE, WIDTH, SPANS, BLOCKS, TOKEN,
    ) = given  # fmt: skip
    UNIT: gl.constexpr = unit_columns(PLANES, TURN)
    C: gl.constexpr = UNIT // (16 * PLANES)
    PIECES: gl.constexpr = UNIT // 128
    TURNS: gl.constexpr = UNIT // TURN
    EACH: gl.constexpr = TURN // 128
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # Weights [64 rows, V groups, their columns] where operand A has them.
    like = gl.reshape(gl.full([64, 128], 0.0, DTYPE, OPERAND), (64, V, 128 // V))
    WEIGHTS: gl.constexpr = like.type.layout
    # Half a step may be left over: x is zero there, by whatever weights.
    last_unit = SPANS // C - 1
    steps = gl.cdiv(SPANS, 2 * C)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, ROWS)
    whole, jobs, begin, end, left = work_range(M, N, FULL, SHARE, WIDTH, steps, ROWS, BM)
    tile, first, last = work_tile(0, whole, begin, end, left, FULL, WIDTH, steps)
    # A program without a job loads what one would begin with all the same.
    pm, pn = place(gl.minimum(tile, columns * rows - 1), columns, rows, RASTER)
    words_at, values_at, units = _begin(
        pn * (ROWS // 16) + which * 4, first, codes, scale, zero, N, SPANS,
        C, PIECES, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
    )  # fmt: skip
    count = 0
    for number in range(jobs):
        total = gl.zeros([64, BM], gl.float32, SUMS)
        for step in range(first, last):
            # Two units, so that what one loads need not be copied, and so waited for, to be decoded next.
            for half in gl.static_range(2):
                for turn in gl.static_range(TURNS):
                    weights = _weights(
                        units[half], lut, turn, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE,
                        C, EACH, TURNS, TILES, GROUPS, V, SCALE, HAS_ZERO, scale.dtype.element_ty,
                        zero.dtype.element_ty, WEIGHTS, OPERAND,
                    )  # fmt: skip
                    if turn == TURNS - 1:
                        following = _load(
                            words_at, values_at, scale, zero, gl.minimum(step * 2 + half + AHEAD, last_unit),
                            C, PIECES, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
                        )  # fmt: skip
                        units = (following, units[1]) if (half + AHEAD) % 2 == 0 else (units[0], following)
                    for piece in gl.static_range(EACH):
                        stage = (count + piece) % STAGES
                        mbarrier.wait(ready.index(stage), (count + piece) // STAGES % 2)
                        x = held.index(stage).permute((1, 0))
                        total = warpgroup_mma(weights[piece], x, total, is_async=True)
                    # Weights stay in their registers until the products are done.
                    if EACH == 1:
                        total, _ = warpgroup_mma_wait(0, [total, weights[0]])
                    else:
                        total, _, _ = warpgroup_mma_wait(0, [total, weights[0], weights[1]])
                    for piece in gl.static_range(EACH):
                        mbarrier.arrive(free.index((count + piece) % STAGES), count=1)
                    count += EACH
        row, m = pn * ROWS + which * 64, pm * BM
        is_written, is_added = last == steps, first > 0
        before = first_of(tile, FULL, SHARE, WIDTH)
        # What the next tile begins with is on its way while this one is written.
        tile, first, last = work_tile(
            gl.minimum(number + 1, jobs - 1), whole, begin, end, left, FULL, WIDTH, steps
        )
        pm, pn = place(tile, columns, rows, RASTER)
        words_at, values_at, units = _begin(
            pn * (ROWS // 16) + which * 4, first, codes, scale, zero, N, SPANS,
            C, PIECES, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
        )  # fmt: skip
        if PDL:
            # The kernel before may still read what lies where this one writes.
            pdl_wait()
        if is_written:
            if is_added:
                total = fixup(total, sums, before, which, TOKEN, ROWS, BM, SUMS)
            _store(
                total, y, row, m, M, N, scale, factor, bias,
                BM, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS, SUMS, EVEN,
            )  # fmt: skip
        else:
            store_partials(total, sums, which, TOKEN, ROWS, BM)


@gluon.constexpr_function
def _of_turn(parts: tuple[str, ...], turn: int) -> str:
    return parts[turn]


@gluon.jit
def _weights(
    unit, lut, turn: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr,
    FIELDS: gl.constexpr, PLANES: gl.constexpr, DTYPE: gl.constexpr, C: gl.constexpr, EACH: gl.constexpr,
    TURNS: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr, V: gl.constexpr, SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, STORED: gl.constexpr, ZERO: gl.constexpr, WEIGHTS: gl.constexpr,
    OPERAND: gl.constexpr,
):  # fmt: skip
    """Operand A for each 128 columns of a turn of a unit, of what `_load` gave."""
    words, s, z = unit
    THESE: gl.constexpr = _of_turn(ASM, turn)
    OPERANDS: gl.constexpr = _of_turn(CONSTRAINTS, turn)
    pieces = dequant_a_fragment(
        words, lut, THESE, OPERANDS, TABLE, FIELDS, PLANES // TURNS, DTYPE, 4, C, EACH, TILES
    )
    weights = ()
    for piece in gl.static_range(EACH):
        q = gl.convert_layout(gl.reshape(pieces[piece], (64, V, 128 // V)), WEIGHTS, assert_trivial=True)
        if HAS_ZERO:
            less = values_of(z[turn * EACH + piece], ZERO, V, 4).to(DTYPE)
            q -= gl.expand_dims(gl.convert_layout(less, gl.SliceLayout(2, WEIGHTS), assert_trivial=True), 2)
        if GROUPS > 1:
            times = scales_of(s[turn * EACH + piece], STORED, SCALE, DTYPE, V, 4)
            q *= gl.expand_dims(gl.convert_layout(times, gl.SliceLayout(2, WEIGHTS), assert_trivial=True), 2)
        weights = weights + (gl.convert_layout(gl.reshape(q, (64, 128)), OPERAND, assert_trivial=True),)
    return weights


@gluon.jit
def _begin(
    row_tile, step, codes, scale, zero, N, SPANS, C: gl.constexpr, PIECES: gl.constexpr, TILES: gl.constexpr,
    GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCKS, V: gl.constexpr,
    HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """The addresses of four row tiles, and what `_load` gives for the two units of a step."""
    words_at, values_at = _addresses(row_tile, codes, N, SPANS, C, TILES, BLOCKS)
    units = ()
    for half in gl.static_range(2):
        unit = gl.minimum(step * 2 + half, SPANS // C - 1)
        units = units + (
            _load(
                words_at, values_at, scale, zero, unit,
                C, PIECES, TILES, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
            ),
        )  # fmt: skip
    return words_at, values_at, units


@gluon.jit
def _addresses(
    first, codes, N, SPANS, C: gl.constexpr, TILES: gl.constexpr, BLOCKS,
):  # fmt: skip
    """Where the codes of four row tiles from `first` on begin, and the words of their scales."""
    CODES: gl.constexpr = load_codes(4, C)
    last = (N + 15) // 16 - 1
    tile = gl.minimum(first + gl.arange(0, 4, gl.SliceLayout(1, gl.SliceLayout(2, CODES))), last)
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2).to(gl.int64)
    span = gl.expand_dims(gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0), 2)
    lane = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 1)
    PLACES: gl.constexpr = places_of(4, 1)
    tile_of_values = gl.minimum(first + gl.arange(0, 4, gl.SliceLayout(1, PLACES)), last)
    values_at = gl.expand_dims(tile_of_values * (BLOCKS * 8), 1)
    return (
        codes.to(gl.pointer_type(gl.int32), bitcast=True) + (tile * SPANS + span) * (TILES * 128) + lane,
        values_at + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, PLACES)), 0),
    )


@gluon.jit
def _load(
    words_at, values_at, scale, zero, unit, C: gl.constexpr, PIECES: gl.constexpr, TILES: gl.constexpr,
    GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, BLOCKS, V: gl.constexpr, HAS_ZERO: gl.constexpr,
):  # fmt: skip
    """Codes of a unit, scales and zero-points of its pieces of 128 columns; 0 for what there is none of."""
    words = ()
    for t in gl.static_range(TILES):
        words = words + (gl.load(words_at + (unit * (C * TILES) + t) * 128),)
    s = ()
    z = ()
    for piece in gl.static_range(PIECES):
        at = values_at + gl.minimum((unit * PIECES + piece) * 128 // PER_BLOCK, BLOCKS - 1) * 8
        s = s + (words_of(scale, at, V, 4) if GROUPS > 1 else 0,)
        z = z + (words_of(zero, at, V, 4) if HAS_ZERO else 0,)
    return words, s, z


@gluon.jit
def _store(
    sums, y, row, m, M, N, scale, factor, bias, BM: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr,
    HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, SUMS: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Finish sums of 64 rows from `row` on and write them to columns of y, for rows of x from `m` on."""
    rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, SUMS)), 1)
    out = finish(sums, rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    # A thread writes EVEN rows at once, threads side by side those beside them.
    BESIDE: gl.constexpr = min(64 // EVEN, 32)
    STORED: gl.constexpr = gl.BlockedLayout([EVEN, 1], [BESIDE, 32 // BESIDE], [1, 4], [0, 1])
    # Of N itself Triton knows whether it is a multiple of 16, and of no other number.
    N = N // EVEN * EVEN
    out = gl.convert_layout(out.to(y.dtype.element_ty), STORED)
    n = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, STORED)), 1)
    m = gl.expand_dims(m + gl.arange(0, BM, gl.SliceLayout(0, STORED)), 0)
    gl.store(y + m.to(gl.int64) * N + n, out, mask=(m < M) & (n < N))
