"""y = x W^T for some rows of x, up to 32: warps have 16 rows of the weight each, and one x in shared memory.

Each warp decodes its own codes, which it loads some units of columns ahead, as operand A, and multiplies them
with x as all warps have it. Nothing is added up between warps, and after x has come nobody waits for another,
but for three that multiply with it. Where a weight has few rows its columns are divided into parts, whose
sums `quantkit.kernels.gluon.split_k_reduce` adds up.

With `expert_blocks`, it is y [pair] = x [pair // SLOTS] W^T for the pairs of a segment, which
`quantkit.kernels.moe.permute_kernels` describes, and MATRICES matrices of its expert, whose rows are those of
one.

Written in Gluon, as Triton itself has no way to say that warps share operand B but no operand A.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.compat import reinterpret
from quantkit.kernels.gluon.dequant_fragment import (
    dequant_a_fragment,
    fill_registers,
    load_codes,
    load_squares,
    pdl_launch_dependents,
    pdl_wait,
    row_tile_of,
    row_tile_of_warp,
    stage_rms,
    unit_columns,
)
from quantkit.kernels.gluon.scales_smem import (
    load_staged_scales,
    places_of,
    scales_of,
    stage_scales,
    values_of,
    words_of,
)
from quantkit.kernels.gluon.stage_x_shared import (
    ROWS_FOR_MMA,
    ROWS_FOR_WGMMA,
    added,
    stage_x_async,
    start_mma,
    sums_of,
    wait_for_x,
    wait_mma,
)
from quantkit.kernels.layouts.dequant_blocks import expert_block, finish, of_matrix, row_of_y
from quantkit.kernels.ops.activation_kernel import gated


@gluon.jit(do_not_specialize=["M", "ROW_TILES"])
def small_m_gemm(
    x, squares, codes, scale, zero, factor, lut, bias, y, sums, M, N, ROW_TILES, order, expert_blocks,
    K: gl.constexpr, SPANS: gl.constexpr, TILES: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, ON_WEIGHTS: gl.constexpr,
    SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FILL: gl.constexpr,
    FIELDS: gl.constexpr, PLANES: gl.constexpr, DTYPE: gl.constexpr, ENDS: gl.constexpr, GATE: gl.constexpr,
    W: gl.constexpr, BM: gl.constexpr, PARTS: gl.constexpr, UNITS: gl.constexpr, CHUNK: gl.constexpr,
    SPARE: gl.constexpr, AHEAD: gl.constexpr, LOOP: gl.constexpr, EVEN: gl.constexpr, HELD: gl.constexpr,
    WGMMA: gl.constexpr, TOP_K: gl.constexpr, MATRICES: gl.constexpr, CHAINED: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """A program has ROW_TILES row tiles, up to one for each of its W warps, and UNITS units of columns.

    x comes in chunks of CHUNK units, zeros beyond K, for which shared memory has room, and for SPARE more.
    Codes are loaded AHEAD units before they are decoded. With LOOP chunks after the first are one loop, which
    waits for all of x; without, there is code for each. Scales of HELD blocks come to shared memory with the
    first chunk; if HELD is 0, each warp loads them a chunk ahead. Parts are EVEN if they have as many units
    each, and whole blocks of scales: offsets in them are constants then. With WGMMA warps decode while what
    they decoded before is multiplied.
    Where there are several PARTS, `sums` is float32 [PARTS, row tiles, BM, 16], for each segment. With GATE
    row tiles are pairs of what gates and what is gated. With ENDS, its eps, the norm that x was begun to
    become is ended.
    """
    UNIT: gl.constexpr = unit_columns(PLANES)
    PIECES: gl.constexpr = UNIT // 128
    C: gl.constexpr = UNIT // (16 * PLANES)
    CHUNKS: gl.constexpr = UNITS // CHUNK
    LAST_UNIT: gl.constexpr = SPANS // C - 1
    CODES: gl.constexpr = load_codes(W, C)
    STORED: gl.constexpr = scale.dtype.element_ty
    ZERO: gl.constexpr = zero.dtype.element_ty
    if PDL and expert_blocks is None:
        pdl_launch_dependents()
    program = gl.program_id(0)
    if expert_blocks is not None:
        if PDL and not CHAINED:
            # The kernel before this one may have written the segments.
            pdl_wait()
        expert, its_first, M = expert_block(expert_blocks, program, CHAINED)
        if PDL and CHAINED:
            # If no segment has pairs, some program has to have waited before all end.
            if (M == 0) & (program == 0):
                pdl_wait()
        if M == 0:
            return
        codes, scale, zero, factor, lut = of_matrix(
            codes, scale, zero, factor, lut, expert * MATRICES, N // MATRICES, SPANS, TILES, PLANES, BLOCKS, V
        )
        order += its_first
        sums += program.to(gl.int64) * (PARTS * ((N + 15) // 16) * (BM * 16))
        program = gl.program_id(1)
    part = program % PARTS
    first = program // PARTS * ROW_TILES
    begin = part * UNITS
    last = (N + 15) // 16 - 1
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    tile = row_tile_of_warp(warp, first, last, ROW_TILES, N, GATE != "")
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2).to(gl.int64)
    span = gl.expand_dims(gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0), 2)
    lane = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 1)
    words_at = codes.to(gl.pointer_type(gl.int32), bitcast=True) + lane
    words_at += (tile * SPANS + begin * C + span) * (TILES * 128)
    # Warps without rows load nothing.
    there = gl.expand_dims(gl.expand_dims(warp < ROW_TILES, 1), 2)
    # No part loads what another has.
    end = UNITS - 1 if EVEN else gl.minimum(UNITS - 1, LAST_UNIT - begin)
    tile = gl.arange(0, W, gl.SliceLayout(1, places_of(W, 1)))
    tile = row_tile_of_warp(tile, first, last, ROW_TILES, N, GATE != "")
    block_at = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, places_of(W, 1))), 0)
    block_at += gl.expand_dims(tile, 1) * (BLOCKS * 8)
    block = gl.minimum(begin * UNIT // PER_BLOCK, BLOCKS - 1)
    scales, zeros = scale, zero
    if HELD and GROUPS > 1:
        scales = stage_scales(scale, first, last, ROW_TILES, N, GATE != "", block, BLOCKS, HELD, V, W)
    if HELD and HAS_ZERO:
        zeros = stage_scales(zero, first, last, ROW_TILES, N, GATE != "", block, BLOCKS, HELD, V, W)
    if EVEN:
        block_at += block * 8
    given = (words_at, there, block_at, scales, zeros, begin, block, end)
    units = ()
    for ahead in gl.static_range(AHEAD):
        units = units + (_codes(given, gl.minimum(ahead, end), TILES, C),)
    values = ((), ())
    if not HELD:
        values = _values(
            given, 0, CHUNK, PIECES, GROUPS, PER_BLOCK, BLOCKS, V, STORED, ZERO, HAS_ZERO, EVEN, HELD, W
        )
    given = given + (fill_registers(lut, FILL),)
    if PDL and (expert_blocks is None or CHAINED):
        # Only x, and sums of its squares, are written by kernels before this one.
        pdl_wait()
    if PDL and expert_blocks is not None:
        # A chained kernel, or one that adds up parts, reads the segments at once, as this one has waited.
        pdl_launch_dependents()
    if ENDS is not None:
        of_norm = load_squares(squares, M, K, BM, W)
    WIDE: gl.constexpr = 64 if WGMMA else 128
    OF_X: gl.constexpr = ROWS_FOR_WGMMA if WGMMA else ROWS_FOR_MMA
    EACH: gl.constexpr = CHUNK * UNIT // WIDE
    chunks = gl.allocate_shared_memory(DTYPE, [CHUNKS, EACH * BM, WIDE], OF_X)
    if SPARE:
        spare = gl.allocate_shared_memory(DTYPE, [SPARE, EACH * BM, WIDE], OF_X)
    stage_x_async(x, chunks, begin * UNIT, M, order, TOP_K, K, EACH, BM, CHUNKS, W, WIDE)
    if ENDS is not None:
        held_roots = stage_rms(of_norm, K, ENDS)
    held = reinterpret(chunks, DTYPE, [UNITS * UNIT // WIDE, BM, WIDE], OF_X)
    SUMS: gl.constexpr = sums_of(W, BM, WGMMA)
    total = gl.zeros([16 * W, BM], gl.float32, SUMS)
    if LOOP:
        wait_for_x(CHUNKS - 1, WGMMA)
        total, units, values = _multiply(
            total, units, values, held, given, 0, TILES, GROUPS, PER_BLOCK, BLOCKS, V, ON_WEIGHTS, STORED,
            SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, W, BM, CHUNK, AHEAD, UNITS,
            EVEN, HELD, False, WGMMA,
        )  # fmt: skip
        wait_for_x(0, WGMMA)
        for chunk in range(1, CHUNKS):
            total, units, values = _multiply(
                total, units, values, held, given, chunk * CHUNK, TILES, GROUPS, PER_BLOCK, BLOCKS, V,
                ON_WEIGHTS, STORED, SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, W,
                BM, CHUNK, AHEAD, UNITS, EVEN, HELD, False, WGMMA,
            )  # fmt: skip
    else:
        for chunk in gl.static_range(CHUNKS):
            wait_for_x(CHUNKS - 1 - chunk, WGMMA)
            total, units, values = _multiply(
                total, units, values, held, given, chunk * CHUNK, TILES, GROUPS, PER_BLOCK, BLOCKS, V,
                ON_WEIGHTS, STORED, SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, W,
                BM, CHUNK, AHEAD, UNITS, EVEN, HELD, chunk == CHUNKS - 1, WGMMA,
            )  # fmt: skip
    if ENDS is not None:
        total *= gl.expand_dims(held_roots.load(gl.SliceLayout(0, SUMS)), 0)
    local = gl.arange(0, 16 * W, gl.SliceLayout(1, SUMS))
    number = first + local // 16
    rows = gl.expand_dims(row_tile_of(number, N, GATE != "") * 16 + local % 16, 1)
    mine = gl.expand_dims((local < 16 * ROW_TILES) & (number <= last), 1) & (rows < N)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, SUMS)), 0)
    if MATRICES > 1:
        factor += gl.minimum(rows, N - 1) // (N // MATRICES)
    if PARTS == 1 or expert_blocks is not None:
        total = finish(total, rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    if PARTS > 1:
        to = sums + (part.to(gl.int64) * (last + 1) + rows // 16) * (BM * 16) + m * 16 + rows % 16
        gl.store(to, total, mask=(m < BM) & mine)
    elif GATE == "":
        out = total.to(y.dtype.element_ty)
        gl.store(y + row_of_y(order, m, M) * N + rows, out, mask=(m < M) & mine)
    else:
        out = total.to(y.dtype.element_ty)
        _write_gated(out, first, last, y, M, N, ROW_TILES, order, GATE, W, BM)
    if SPARE:
        # Nobody reads it, but Triton gives back what is not used to the end.
        spare._keep_alive()


@gluon.jit
def _write_gated(
    out, first, last, y, M, N, ROW_TILES, order, GATE: gl.constexpr, W: gl.constexpr, BM: gl.constexpr
):  # fmt: skip
    """Write y [M, N / 2] of what gates and what is gated, row tile after row tile [16 W, BM]."""
    PAIRS: gl.constexpr = _pairs_of(W, BM)
    pairs = gl.reshape(gl.convert_layout(out, PAIRS), (W // 2, 2, 16, BM))
    x, up = gl.split(gl.permute(pairs, (0, 2, 3, 1)))
    out = gated(x, up, GATE)
    OUT: gl.constexpr = out.type.layout
    pair = gl.arange(0, W // 2, gl.SliceLayout(1, gl.SliceLayout(2, OUT)))
    pair = gl.expand_dims(gl.expand_dims(pair, 1), 2)
    row = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, OUT)))
    row = gl.expand_dims(gl.expand_dims(row, 0), 2)
    m = gl.arange(0, BM, gl.SliceLayout(0, gl.SliceLayout(1, OUT)))
    m = gl.expand_dims(gl.expand_dims(m, 0), 1)
    mine = (2 * pair < ROW_TILES) & (first + 2 * pair < last) & (m < M)
    gl.store(y + row_of_y(order, m, M) * (N // 2) + (first // 2 + pair) * 16 + row, out, mask=mine)


@gluon.constexpr_function
def _pairs_of(W: int, BM: int) -> gl.DistributedLinearLayout:
    """[16 W, BM]: a thread has a row of every second row tile, and that of the next one."""
    rows = [[1 << bit, 0] for bit in range((16 * W).bit_length() - 1)]
    columns = [[0, 1 << bit] for bit in range(BM.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [rows[4], *columns[2:]], [*rows[:4], columns[0]], [*rows[5:], columns[1]], [], [16 * W, BM]
    )


@gluon.jit
def _codes(given, unit, TILES: gl.constexpr, C: gl.constexpr):
    """Codes of a unit."""
    words_at, there = given[0], given[1]
    words = ()
    for t in gl.static_range(TILES):
        words = words + (gl.load(words_at + (unit * (C * TILES) + t) * 128, mask=there),)
    return words


@gluon.jit
def _values(
    given, unit, COUNT: gl.constexpr, PIECES: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    BLOCKS: gl.constexpr, V: gl.constexpr, STORED: gl.constexpr, ZERO: gl.constexpr, HAS_ZERO: gl.constexpr,
    EVEN: gl.constexpr, HELD: gl.constexpr, W: gl.constexpr,
):  # fmt: skip
    """Words of scales and zero-points for the pieces of COUNT units; 0 for what there is none of."""
    block_at, scales, zeros, begin, first_block = given[2], given[3], given[4], given[5], given[6]
    s = ()
    z = ()
    for piece in gl.static_range(COUNT * PIECES):
        if EVEN:
            block = (unit * PIECES + piece) * 128 // PER_BLOCK
        else:
            # Beyond the last column x is zero, by whatever weights.
            block = gl.minimum(((begin + unit) * PIECES + piece) * 128 // PER_BLOCK, BLOCKS - 1)
            if HELD:
                block -= first_block
        s = s + (_words(scales, block, block_at, STORED, HELD, V, W) if GROUPS > 1 else 0,)
        z = z + (_words(zeros, block, block_at, ZERO, HELD, V, W) if HAS_ZERO else 0,)
    return s, z


@gluon.jit
def _words(
    values, block, block_at, STORED: gl.constexpr, HELD: gl.constexpr, V: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Words of a block, from shared memory if they are HELD there."""
    if HELD:
        words = load_staged_scales(values, block, STORED, V, W)
    else:
        words = words_of(values, block_at + block * 8, V, W)
    return words


@gluon.jit
def _multiply(
    total, units, values, held, given, number, TILES: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, ON_WEIGHTS: gl.constexpr,
    STORED: gl.constexpr, SCALE: gl.constexpr, ZERO: gl.constexpr, HAS_ZERO: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr,
    PLANES: gl.constexpr, DTYPE: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, CHUNK: gl.constexpr,
    AHEAD: gl.constexpr, UNITS: gl.constexpr, EVEN: gl.constexpr, HELD: gl.constexpr,
    IS_LAST: gl.constexpr, WGMMA: gl.constexpr,
):  # fmt: skip
    """Add the products of the units of a chunk, from `number` on; `units` and `values` become those after."""
    PIECES: gl.constexpr = unit_columns(PLANES) // 128
    C: gl.constexpr = unit_columns(PLANES) // (16 * PLANES)
    SUMS: gl.constexpr = sums_of(W, BM, WGMMA)
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    # Weights [16 W rows, V groups, their columns] where operand A has them.
    like = gl.reshape(gl.full([16 * W, 128], 0.0, DTYPE, A), (16 * W, V, 128 // V))
    WEIGHTS: gl.constexpr = like.type.layout
    ON_SUMS: gl.constexpr = GROUPS > 1 and not ON_WEIGHTS and V == 1
    s, z = values
    if not HELD and not IS_LAST:
        following = gl.minimum(number + CHUNK, UNITS - CHUNK)
        values = _values(
            given, following, CHUNK, PIECES, GROUPS, PER_BLOCK, BLOCKS, V, STORED, ZERO, HAS_ZERO, EVEN, HELD,
            W,
        )  # fmt: skip
        _keep_order()
    end, lut = given[7], given[8]
    for unit in gl.static_range(CHUNK):
        pieces = dequant_a_fragment(
            units[0], lut, ASM, CONSTRAINTS, TABLE, FIELDS, PLANES, DTYPE, W, C, PIECES, TILES
        )
        following = units[0]
        if not IS_LAST or unit + AHEAD < CHUNK:
            after = gl.minimum(number + unit + AHEAD, end)
            following = _codes(given, after, TILES, C)
            _keep_order()
        units = (units[1], following) if AHEAD == 2 else (units[1], units[2], units[3], following)
        if HELD:
            own_s, own_z = _values(
                given, number + unit, 1, PIECES, GROUPS, PER_BLOCK, BLOCKS, V, STORED, ZERO, HAS_ZERO, EVEN,
                HELD, W,
            )  # fmt: skip
            s, z = s + own_s, z + own_z
        for piece in gl.static_range(PIECES):
            q = gl.reshape(gl.convert_layout(pieces[piece], A, assert_trivial=True), (16 * W, V, 128 // V))
            if HAS_ZERO:
                of_rows = values_of(z[unit * PIECES + piece], ZERO, V, W).to(DTYPE)
                of_rows = gl.convert_layout(of_rows, gl.SliceLayout(2, WEIGHTS), assert_trivial=True)
                q -= gl.expand_dims(of_rows, 2)
            times = 0
            if GROUPS > 1:
                word = s[unit * PIECES + piece]
                of_rows = scales_of(word, STORED, SCALE, gl.float32 if ON_SUMS else DTYPE, V, W)
                if ON_SUMS:
                    times = gl.convert_layout(
                        gl.reshape(of_rows, (16 * W,)), gl.SliceLayout(1, SUMS), assert_trivial=True
                    )
                else:
                    of_rows = gl.convert_layout(of_rows, gl.SliceLayout(2, WEIGHTS), assert_trivial=True)
                    q *= gl.expand_dims(of_rows, 2)
            q = gl.reshape(q, (16 * W, 128))
            at = (number + unit) * PIECES + piece
            if WGMMA:
                # While these weights were decoded, those before them were multiplied.
                if unit + piece > 0:
                    total = wait_mma(total, begun, ON_SUMS)  # noqa: F821
                begun = start_mma(total, q, times, held, at, A, ON_SUMS)
            else:
                total = added(total, q, times, held.index(at), A, ON_SUMS)
    if WGMMA:
        total = wait_mma(total, begun, ON_SUMS)
    return total, units, values


@gluon.jit
def _keep_order():
    """What is loaded above is asked for before anything below: ptxas would put it off until it is needed."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )
