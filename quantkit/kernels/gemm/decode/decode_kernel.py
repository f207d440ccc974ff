"""y = x W^T for up to 16 rows of x: codes stream through registers past an x that stays in shared memory.

The warps of a program share its row tiles and divide the columns among themselves: each has the x of its own
columns in shared memory, and loads codes some units of columns ahead, of one row tile after the other, or of
two that are multiplied with what is loaded of x once. What warps have of a row tile goes to shared memory,
too, and is added up once all have read their last code.

Products are those of 16-bit floats, or of 8-bit integers and the digits of x
(`quantkit.kernels.gluon.stage_x_per_warp`), which are exact, and for which codes take a third of the
instructions. Written in Gluon, which says what each lane has: the tensors of the loop are quads [W warps, 32
lanes, 4 registers], or words [W, 32].

`S` is the `DecodeConfig` of `quantkit.kernels.gemm.decode.decode_config`: all that is known at compile time.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gluon.dequant_fragment import (
    fill_registers,
    load_squares,
    pdl_launch_dependents,
    pdl_wait,
    row_tile_of,
    stage_rms,
)
from quantkit.kernels.gluon.epilogue import load_outputs, store_epilogue
from quantkit.kernels.gluon.scales_registers import for_operand, for_sums, of_rows, words_of
from quantkit.kernels.gluon.stage_x_per_warp import load_b_fragment, norm_weights, pair, quads_of, stage_x
from quantkit.kernels.layouts.dequant_blocks import expert_block, of_matrix

#: Products: operand A is a quad, B a half of one.
_INTEGERS = gl.constexpr("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 ")
_BFLOATS = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 ")
_HALVES = gl.constexpr("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 ")
_OPERANDS = gl.constexpr(
    (
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$12, $13, $14, $15};",
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$10, $11}, {$12, $13, $14, $15};",
    )
)
#: -0 twice as 16-bit floats: adding it keeps the sign of a zero, xor flips signs.
_MINUS_ZEROS = gl.constexpr(-0x7FFF8000)


@gluon.jit(do_not_specialize=["M", "EACH", "MORE"])
def decode_gemm(
    x, other, norm, total, squares, codes, scale, zero, factor, lut, bias, y, M, N, EACH, MORE, order,
    expert_blocks, S: gl.constexpr,
):  # fmt: skip
    """A program has EACH row tiles, the first MORE programs have one more, and each of its warps `S.units`
    units of their columns. With `S.gate` these are pairs of row tiles, of what gates and what is gated.

    A turn is that of `S.together` row tiles. Codes are loaded `S.ahead` units before they are multiplied;
    where there are several turns, those of a turn are a multiple of that: units have registers of their own.
    `other`, `norm`, `total` and `squares` are those of the part of a norm that is done
    (`quantkit.kernels.problem.Normed`); `norm` are its weights. With `expert_blocks`, rows of x and y are
    those of the routed tokens of a block (`quantkit.kernels.moe.permute_kernels`), and the weight is the
    `S.matrices` matrices of its expert, whose rows are those of one.
    """
    AHEAD: gl.constexpr = S.ahead
    FILL: gl.constexpr = S.fill
    if S.overlap and expert_blocks is None:
        pdl_launch_dependents()
    program = gl.program_id(0)
    if expert_blocks is not None:
        if S.overlap and not S.chained:
            # The kernel before this one may have written the segments.
            pdl_wait()
        expert, its_first, M = expert_block(expert_blocks, program, S.chained)
        if S.overlap and S.chained:
            # If no segment has pairs, some program has to have waited before all end.
            if (M == 0) & (program == 0):
                pdl_wait()
        if M == 0:
            return
        codes, scale, zero, factor, lut = of_matrix(
            codes, scale, zero, factor, lut, expert * S.matrices, N // S.matrices,
            S.spans, S.tiles, S.planes, S.blocks, S.in_block,
        )  # fmt: skip
        order += its_first
        program = gl.program_id(1)
    first = row_tile_of((program * EACH + gl.minimum(program, MORE)) * S.step, N, S.gate != "")
    count = (EACH + (program < MORE).to(gl.int32)) * S.step
    given = _addresses(codes, scale, zero, first, count, N, S)
    ring = ()
    for number in gl.static_range(AHEAD):
        ring = ring + (_load(given, first * 0, number, S),)
    table = lut
    if S.table is not None:
        # No tensor in truth: each lane of a warp has its own.
        table = gl.inline_asm_elementwise(S.table, "=r,l", [fill_registers(lut, FILL)], gl.int32, True, 1)
    of_norm = norm_weights(norm, S)
    times = ()
    if S.begins:
        times = (load_outputs(norm, first, count, 1, N, S),)
    if S.overlap and (expert_blocks is None or S.chained):
        # Only x, and what norms are of, is written by kernels before this one.
        pdl_wait()
    if S.overlap and expert_blocks is not None:
        # A chained kernel reads the segments at once, as this one has waited.
        pdl_launch_dependents()
    of_x = ()
    if S.ends:
        of_x = (load_squares(squares, M, S.k, S.rows, S.warps),)
    added = ()
    if S.begins:
        added = (load_outputs(other, first, count, M, N, S),)
    if S.spare_rows:
        spare = gl.allocate_shared_memory(
            gl.int32, [S.spare_rows, S.row_words], gl.SwizzledSharedLayout(1, 1, 1, [0])
        )
    held, unit_of_x = stage_x(x, other, of_norm, total, M, order, S)
    if S.ends:
        of_x = (stage_rms(of_x[0], S.k, S.norm.eps),)
    weights = ()
    if S.weighed:
        weights = _weights(unit_of_x, S)
    parts = gl.allocate_shared_memory(
        gl.float32, [S.row_tile_room, S.warps * S.rows * 16], gl.SwizzledSharedLayout(1, 1, 1, [0])
    )
    if S.once:
        _turn(given, ring, first * 0, table, held, weights, parts, scale, zero, S)
    else:
        for turn in range((count + S.together - 1) // S.together):
            ring = _turn(given, ring, turn * S.together, table, held, weights, parts, scale, zero, S)
    store_epilogue(
        parts, first, count, scale, factor, bias, y, of_x, added, times, total, squares, M, N, order, S
    )
    if S.spare_rows:
        # Nobody reads it, but Triton gives back what is not used to the end.
        spare._keep_alive()


@gluon.jit
def _turn(given, ring, row_tile, table, held, weights, parts, scale, zero, S: gl.constexpr):
    """What warps have of the row tiles of a turn, to shared memory; the units that are loaded after those."""
    TOGETHER: gl.constexpr = S.together
    UNITS: gl.constexpr = S.units
    totals = ()
    for _ in gl.static_range(TOGETHER):
        totals = totals + (_nothing(gl.int32 if S.whole else gl.float32, S),)
    for unit in gl.static_range(UNITS):
        loaded = ring[0]
        ring = _rest(ring)
        if unit + S.ahead < S.units or not S.once:
            ring = ring + (_load(given, row_tile, unit + S.ahead, S),)
        totals = _multiply(totals, loaded, table, held, unit, scale, zero, S)
    for number in gl.static_range(TOGETHER):
        # Beyond the last row tile nobody reads what is written.
        parts.index(gl.minimum(row_tile + number, S.row_tile_room - 1)).store(
            _sums(totals[number], weights, S)
        )
    return ring


@gluon.jit
def _nothing(DTYPE: gl.constexpr, S: gl.constexpr):
    """Sums of each group of columns to begin with."""
    GROUPS: gl.constexpr = S.column_groups
    sums = ()
    for _ in gl.static_range(GROUPS):
        sums = sums + (gl.full([S.warps, 32, 4], 0, DTYPE, quads_of(S.warps)),)
    return sums


@gluon.jit
def _rest(ring):
    """The units of a ring after its first."""
    units = ()
    for number in gl.static_range(1, len(ring)):
        units = units + (ring[number],)
    return units


@gluon.jit
def _addresses(codes, scale, zero, first, count, N, S: gl.constexpr):
    """Where the quads [W, 32, 4] of warps begin; scales, zero-points, and the place of their words [W, 32];
    the first unit of each warp, how many row tiles the program has, and all rows.
    """
    QUADS: gl.constexpr = quads_of(S.warps)
    LANES: gl.constexpr = gl.SliceLayout(2, QUADS)
    warp = gl.expand_dims(gl.arange(0, S.warps, gl.SliceLayout(1, LANES)), 1)
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, LANES)), 0)
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, QUADS)))
    quads_at = codes.to(gl.pointer_type(gl.int32), bitcast=True)
    quads_at += first.to(gl.int64) * (S.spans * S.tiles * 128)
    quads_at += gl.expand_dims(warp * (S.units * S.unit_quads * 128) + lane * 4, 2)
    quads_at += gl.expand_dims(gl.expand_dims(word, 0), 1)
    return quads_at, scale, zero, first * (S.blocks * 8) + lane // 4, warp * S.units, count, N


@gluon.jit
def _load(given, row_tile, number: gl.constexpr, S: gl.constexpr):
    """A unit of each warp, of all row tiles of a turn that begins with `row_tile`, or of a later one, where
    `number` is as many as a turn has or more.
    """
    TOGETHER: gl.constexpr = S.together
    first = row_tile + number // S.units * S.together
    loaded = ()
    for one in gl.static_range(TOGETHER):
        loaded = loaded + (_load_of(given, first + one, number % S.units, S),)
    return loaded


@gluon.jit
def _load_of(given, row_tile, number: gl.constexpr, S: gl.constexpr):
    """Quads of a unit of each warp, and for each 128 columns the words of scales and of zero-points.

    What is beyond the last row tile of the program or the last column is not read.
    """
    QUADS: gl.constexpr = S.unit_quads
    PARTS: gl.constexpr = S.unit // 128
    quads_at, scale, zero, words_at, unit, count, N = given
    unit += number
    there = (unit < S.all_units) & (row_tile < count)
    row_tile = row_tile_of(row_tile, N, S.gate != "")
    quads_at += row_tile.to(gl.int64) * (S.spans * S.tiles * 128) + number * (S.unit_quads * 128)
    quads = ()
    for quad in gl.static_range(QUADS):
        quads = quads + (gl.load(quads_at + quad * 128, mask=gl.expand_dims(there, 2)),)
    s = ()
    z = ()
    for part in gl.static_range(PARTS):
        block = gl.minimum((unit * S.unit + part * 128) // S.per_block, S.blocks - 1)
        at = words_at + (row_tile * S.blocks + block) * 8
        s = s + (words_of(scale, at, there, S) if S.groups > 1 else 0,)
        z = z + (words_of(zero, at, there, S) if S.has_zero else 0,)
    return quads, s, z


@gluon.jit
def _scaled(a, scales, zeros, v: gl.constexpr, scale, zero, S: gl.constexpr):
    """Operand A less zero-points v, times scales v where those are on weights."""
    FMA: gl.constexpr = (
        "fma.rn.bf16x2 $0, $1, $2, $3;" if S.dtype == gl.bfloat16 else "fma.rn.f16x2 $0, $1, $2, $3;"
    )
    if S.has_zero:
        less = for_operand(zeros, v, zero.dtype.element_ty, S) ^ _MINUS_ZEROS
        one = gl.full([S.warps, 32, 4], 1.0, gl.float32, quads_of(S.warps))
        one = pair(one, one, S.dtype)
        a = gl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, one, less], gl.int32, True, 1)
    if S.on_weights:
        times = for_operand(scales, v, scale.dtype.element_ty, S)
        nothing = gl.full([S.warps, 32, 4], _MINUS_ZEROS, gl.int32, quads_of(S.warps))
        a = gl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, times, nothing], gl.int32, True, 1)
    return a


@gluon.jit
def _registers(words, S: gl.constexpr):
    """The registers that the expression makes of a register of each part."""
    if S.made == 1:
        made = (gl.inline_asm_elementwise(S.asm, S.constraints, words, gl.int32, True, 1),)
    else:
        made = gl.inline_asm_elementwise(S.asm, S.constraints, words, S.made_types, True, 1)
    return made


@gluon.jit
def _decoded(loaded, span: gl.constexpr, table, S: gl.constexpr):
    """What the codes of a span become, of each row tile."""
    TOGETHER: gl.constexpr = S.together
    TILES: gl.constexpr = S.tiles
    made = ()
    for one in gl.static_range(TOGETHER):
        words = ()
        for tile in gl.static_range(TILES):
            words = words + (loaded[one][0][span * TILES + tile],)
        if S.table is not None:
            words = words + (table,)
        made = made + (_registers(words, S),)
    return made


@gluon.jit
def _multiply(totals, loaded, table, held, unit: gl.constexpr, scale, zero, S: gl.constexpr):
    """Add the products of a unit, of each row tile of a turn."""
    TOGETHER: gl.constexpr = S.together
    PRODUCTS: gl.constexpr = S.unit // S.product
    GROUPS: gl.constexpr = S.column_groups
    sums = totals
    made = ()
    for number in gl.static_range(PRODUCTS):
        if number % (PRODUCTS * S.tiles // S.unit_quads) == 0:
            made = _decoded(loaded, S.products[number].span, table, S)
        x = ()
        for group in gl.static_range(GROUPS):
            x = x + (
                load_b_fragment(held, (unit * S.unit_pieces + number // 2) * S.column_groups + group, S),
            )
        after = ()
        ended = ()
        for one in gl.static_range(TOGETHER):
            _, s, z = loaded[one]
            so_far = sums[one]
            if S.on_sums and number * S.product % S.dot == 0:
                so_far = _nothing(gl.int32 if S.integers else gl.float32, S)
            a = made[one][S.products[number].register]
            if not S.integers:
                a = _scaled(
                    a,
                    s[S.products[number].part],
                    z[S.products[number].part],
                    S.products[number].value,
                    scale,
                    zero,
                    S,
                )
            so_far = _products(a, x, so_far, number % 2, S)
            after = after + (so_far,)
            if S.on_sums and (number + 1) * S.product % S.dot == 0:
                low, high = of_rows(
                    s[S.products[number].part], S.products[number].value, scale.dtype.element_ty, S
                )
                ended = ended + (_with_scales(totals[one], so_far, for_sums(low, high, S.warps), S),)
        sums = after
        if S.on_sums and (number + 1) * S.product % S.dot == 0:
            totals = ended
    return totals if S.on_sums else sums


@gluon.jit
def _products(a, x, sums, HALF: gl.constexpr, S: gl.constexpr):
    """`sums` plus the products of operand A with a half of the quads of x, for each group of columns."""
    GROUPS: gl.constexpr = S.column_groups
    after = ()
    for group in gl.static_range(GROUPS):
        after = after + (_mma(a, x[group], sums[group], HALF, S),)
    return after


@gluon.jit
def _with_scales(total, sums, scales, S: gl.constexpr):
    """`total` plus the sums of a dot times the scales of rows, for each group of columns."""
    GROUPS: gl.constexpr = S.column_groups
    after = ()
    for group in gl.static_range(GROUPS):
        after = after + (total[group] + sums[group].to(gl.float32) * scales,)
    return after


@gluon.jit
def _mma(a, b, sums, HALF: gl.constexpr, S: gl.constexpr):
    """`sums` plus the product of operand A with a half of the quads of x."""
    if S.integers:
        made = gl.inline_asm_elementwise(
            _INTEGERS + _OPERANDS[HALF], "=r,=r,=r,=r,r,r,r,r,r,r,r,r,r,r,r,r", [a, b, sums], gl.int32,
            True, 4,
        )  # fmt: skip
    else:
        made = gl.inline_asm_elementwise(
            (_BFLOATS if S.dtype == gl.bfloat16 else _HALVES) + _OPERANDS[HALF],
            "=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f", [a, b, sums], gl.float32, True, 4,
        )  # fmt: skip
    return made


@gluon.jit
def _weights(unit, S: gl.constexpr):
    """What sums [W, 32, (row // 8, column)] of each group of columns count in y: digits, and nothing but the
    first of what is there several times.
    """
    QUADS: gl.constexpr = quads_of(S.warps)
    GROUPS: gl.constexpr = S.column_groups
    # Of sums: r, column // bm, column % bm // 2, row // 8, column % 2.
    SUMS: gl.constexpr = gl.BlockedLayout(
        [1, 1, 1, 1, 2, 2], [1, 8, 8 // S.bm, S.bm // 2, 1, 1], [S.warps, 1, 1, 1, 1, 1], [5, 4, 3, 2, 1, 0]
    )
    lane = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, QUADS)))
    word = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, QUADS)))
    column = gl.expand_dims(gl.expand_dims(lane % 4 * 2, 0), 2)
    column += gl.expand_dims(gl.expand_dims(word % 2, 0), 1)
    unit = gl.reshape(unit, (S.warps, 1, 1, 1, 1, 1) if S.rows == 1 else (S.warps, 1, 1, S.bm // 2, 1, 2))
    unit = gl.convert_layout(unit, SUMS)
    unit, _ = gl.broadcast(unit, gl.full([S.warps, 8, 8 // S.bm, S.bm // 2, 2, 2], 0, gl.float32, SUMS))
    unit = gl.convert_layout(gl.reshape(unit, (S.warps, 32, 4)), QUADS, assert_trivial=True)
    weights = ()
    for group in gl.static_range(GROUPS):
        part = (group * 8 + column) // S.bm
        if S.integers:
            counts = gl.where(part == 1, 256.0 * S.worth, gl.where(part == 2, 1.0 * S.worth, 0.0))
            counts = gl.where(part == 0, 65536.0 * S.worth, counts)
        else:
            counts = gl.where(part == 0, 1.0, 0.0)
        weights = weights + (unit * counts,)
    return weights


@gluon.jit
def _sums(total, weights, S: gl.constexpr):
    """Sums of each warp, row of x and row of a tile, [W * rows * 16]."""
    GROUPS: gl.constexpr = S.column_groups
    if not S.weighed:
        # r, column // 2, row // 8, column % 2, and group.
        whole = gl.reshape(gl.join(total[0], total[1]), (S.warps, 8, 4, 2, 2, 2))
        whole = gl.permute(whole, (0, 5, 2, 4, 3, 1))
    else:
        whole = total[0].to(gl.float32) * weights[0]
        for group in gl.static_range(1, GROUPS):
            whole += total[group].to(gl.float32) * weights[group]
        # r, column // bm, column % bm // 2, row // 8, column % 2
        whole = gl.reshape(whole, (S.warps, 8, 8 // S.bm, S.bm // 2, 2, 2))
        if S.rows == 1:
            whole, _ = gl.split(whole)
            whole = gl.permute(gl.sum(whole, axis=2), (0, 2, 3, 1))
        else:
            whole = gl.permute(gl.sum(whole, axis=2), (0, 2, 4, 3, 1))
    return gl.reshape(whole, (S.warps * S.rows * 16,))
