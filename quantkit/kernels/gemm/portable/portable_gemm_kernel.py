"""Portable GEMM with `tl.dot` for tens to hundreds of rows of x: y^T = W x^T, W dequantized in registers.

A row tile is 16 rows of W. An accumulator has RT row tiles times BM rows of x.

    program     [16 * RT * ACCUMULATORS rows of W] x [BM rows of x], all columns or one split of them
    step        128 columns, or a longer span: load codes and x -> dequantize -> tl.dot, W as operand A

A span is the columns whose codes are stored in the same registers. Scales multiply the weights, in the dtype
of x. For BM <= 32 and groups of whole steps they multiply the float32 sums of a step, which are fewer than
its weights.

With two accumulators, the weights of one are dequantized while the tensor cores multiply those of the other.
The programs of the last wave may be split by columns (split-K): they store float32 sums, which
`reduce_splits` adds up.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.layouts.dequant_blocks import (
    apply_scale_and_bias,
    dequant_codes,
    load_expert_block,
    load_scales,
    output_rows,
    scales_by_lane,
    select_matrix,
    values_per_weight,
)


@triton.jit(do_not_specialize=["M", "UNSPLIT"])
def portable_gemm(
    x, codes, scale, zero, factor, lut, bias, y, sums, M, N, UNSPLIT, order, expert_blocks,
    K: tl.constexpr, SPANS: tl.constexpr, REGISTERS: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
    ON_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_FACTOR: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
    RT: tl.constexpr, BM: tl.constexpr, ACCUMULATORS: tl.constexpr, SPLIT_K: tl.constexpr,
    SPLIT_LAST_WAVE: tl.constexpr, STAGES: tl.constexpr, GROUP_M: tl.constexpr, FP16_SCALE: tl.constexpr,
    SYNC_MMA: tl.constexpr, WAIT_PTX: tl.constexpr, TILES_OF_BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    MATRICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] W^T for any M, by output tiles of rows of W times BM rows of x.

    A span is the columns whose codes are stored in the same registers. A step is 128 columns, or a longer
    span. Output tiles from UNSPLIT on are split along K: SPLIT_K programs each write float32 sums of their
    columns to `sums`. Grid: (UNSPLIT + split tiles * SPLIT_K,).

        x [M, K], y                    bfloat16 or float16
        bias [N]                       dtype of x; read only if HAS_BIAS
        codes int16                    [row tiles, SPANS, REGISTERS, 256] of W (`layouts.fragment_layout`)
        scale                          scales [row tiles, BLOCKS, 8, V, 2]
        zero                           zero-points, in the shape of `scale`; read only if HAS_ZERO
        lut float32 [2**bits]          value of each code
        factor float32 [matrices]      one per matrix; y is divided by it; read only if HAS_FACTOR
        sums float32                   [SPLIT_K, split tiles, BM, rows of W in a tile]
        order int32                    with experts, the routed tokens (token-expert pairs), else None
        expert_blocks int32 [.., 3]    expert, first routed token and number of them of each block, or None

        SPANS                          spans of a row
        FRAGMENTS                      fragments of a span, 16 columns each
        REGISTERS                      registers in which the codes of a span are stored
        GROUP                          columns of a group, which share a scale
        GROUPS                         groups of a row
        BLOCKS                         scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK                      columns of a scale block
        V                              groups of a scale block
        ON_WEIGHTS                     True if scales must multiply weights, not sums
        SCALE                          encoding of 8-bit scales (`scale_kind`); "" for wider ones
        ASM, CONSTRAINTS               PTX that dequantizes a span, with its constraints; None for no PTX
        TABLE                          PTX that loads the values of codes from `lut`; None for no lookup
        FIELDS                         instructions for each fragment, used if ASM is None (`dequant_codes`)
        DTYPE                          dtype of x and of dequantized weights
        RT                             row tiles (16 rows of W each) of an accumulator
        ACCUMULATORS                   accumulators of a program: 1 or 2
        BM                             rows of x of an output tile
        SPLIT_LAST_WAVE                True if only tiles of the last wave are split; False if all are
        STAGES                         stages of Triton's software pipeline
        GROUP_M                        output tiles with the same rows of W that run next to each other
        FP16_SCALE                     factor of weights to sum a step in float16; None to sum in float32
        SYNC_MMA                       True to wait for each product at once
        WAIT_PTX                       PTX that waits until registers of earlier weights are free, or None
        TILES_OF_BLOCK                 output tiles along M of an expert block
        TOP_K, MATRICES                experts of a token, and matrices of an expert; 1 and 1 without experts
        PDL                            True to let the next kernel start before this one ends

    DOT is not read. If `expert_blocks` is given, M is BM * TILES_OF_BLOCK times the number of blocks, and no
    tile is split. Routed token p has row p // TOP_K of x. The outputs of an expert's matrices are side by
    side: y [routed tokens, MATRICES * N].
    """
    SPAN: tl.constexpr = 16 * FRAGMENTS
    COLUMNS: tl.constexpr = 128 if SPAN < 128 else SPAN
    C: tl.constexpr = COLUMNS // SPAN
    KP: tl.constexpr = SPANS * SPAN
    STEPS: tl.constexpr = KP // COLUMNS
    ROWS: tl.constexpr = 16 * RT * ACCUMULATORS
    # Scales of whole steps multiply sums, if these are fewer than weights.
    ON_SUMS: tl.constexpr = (
        GROUPS > 1
        and not ON_WEIGHTS
        and GROUP % COLUMNS == 0
        and BM <= 32
        and SYNC_MMA
        and FP16_SCALE is None
    )
    program = tl.program_id(0)
    tile = program
    split = 0
    steps = STEPS
    if SPLIT_K > 1:
        split_tiles = tl.cdiv(M, BM) * tl.cdiv(N, ROWS) - UNSPLIT
        split = (program - UNSPLIT) // split_tiles
        tile = UNSPLIT + (program - UNSPLIT) % split_tiles
        steps = STEPS // SPLIT_K
        if SPLIT_LAST_WAVE:
            whole = (program < UNSPLIT).to(tl.int32)
            tile = whole * program + (1 - whole) * tile
            split = (1 - whole) * split
            steps = (1 + whole * (SPLIT_K - 1)) * (STEPS // SPLIT_K)
    begin = split * (STEPS // SPLIT_K)
    pm, pn = tile_coordinates(tile, tl.cdiv(M, BM), tl.cdiv(N, ROWS) * MATRICES, GROUP_M)
    last_tile = (N + 15) // 16 - 1
    if expert_blocks is not None:
        expert, first, M = load_expert_block(expert_blocks, pm // TILES_OF_BLOCK)
        pm = pm % TILES_OF_BLOCK
        if pm * BM >= M:
            return
        which = pn // tl.cdiv(N, ROWS)
        pn = pn % tl.cdiv(N, ROWS)
        codes, scale, zero, factor, lut = select_matrix(
            codes,
            scale,
            zero,
            factor,
            lut,
            expert * MATRICES + which,
            N,
            SPANS,
            REGISTERS,
            FRAGMENTS,
            BLOCKS,
            V,
        )
        y += which * N
        order += first
    row_tiles = ()
    at = ()
    accs = ()
    for number in tl.static_range(ACCUMULATORS):
        tiles_of_acc = tl.minimum((pn * ACCUMULATORS + number) * RT + tl.arange(0, RT), last_tile)
        spans = tiles_of_acc.to(tl.int64)[:, None] * SPANS + begin * C + tl.arange(0, C)[None, :]
        row_tiles = row_tiles + (tiles_of_acc,)
        at = at + (codes + (spans * (REGISTERS * 256))[:, :, None] + tl.arange(0, 256),)
        accs = accs + (tl.zeros((16 * RT, BM), tl.float32),)
    m = pm * BM + tl.arange(0, BM)
    row_of_x = tl.minimum(m, M - 1)
    if expert_blocks is not None:
        row_of_x = tl.load(order + row_of_x) // TOP_K
    k = begin * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    xs = x + row_of_x.to(tl.int64)[None, :] * K + k
    for i in tl.range(0, steps, num_stages=STAGES):
        if K == KP:
            columns = tl.load(xs)
        else:
            columns = tl.load(xs, mask=k + i * COLUMNS < K, other=0.0)
        next_accs = ()
        next_at = ()
        for number in tl.static_range(ACCUMULATORS):
            q = _dequant(
                at[number], row_tiles[number], begin + i, scale, zero, lut, RT, C, SPAN, REGISTERS,
                1 if ON_SUMS else GROUPS, PER_BLOCK, BLOCKS, V, SCALE, HAS_ZERO, ASM, CONSTRAINTS, TABLE,
                FIELDS, FRAGMENTS, DTYPE, WAIT_PTX,
            )  # fmt: skip
            if ON_SUMS:
                s = load_scales(scale, row_tiles[number], begin + i, BLOCKS, V, 1, PER_BLOCK, COLUMNS, False)
                s = _per_sum(scales_by_lane(s, SCALE, tl.float32), RT, BM)
                added = accs[number] + tl.dot(q, columns) * s
            elif FP16_SCALE is None:
                added = tl.dot(q, columns, accs[number])
            else:
                added = accs[number] + _fp16_dot(q, columns, FP16_SCALE)
            if SYNC_MMA:
                # Reading the result waits for the product.
                added = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=f,f", [added], tl.float32, False, 1)
            next_accs = next_accs + (added,)
            next_at = next_at + (at[number] + C * REGISTERS * 256,)
        accs = next_accs
        at = next_at
        xs += COLUMNS
    if PDL:
        # Let the next kernel start. This kernel is launched without PDL, because its programs would occupy
        # whichever multiprocessors are free, three on one and one on another.
        tl.extra.cuda.gdc_launch_dependents()
    to_rows = output_rows(order, m, M)
    for number in tl.static_range(ACCUMULATORS):
        local = number * (16 * RT) + tl.arange(0, 16 * RT)
        if SPLIT_K == 1 or (SPLIT_LAST_WAVE and program < UNSPLIT):
            store(
                accs[number], y, pn * ROWS + local, m, to_rows, N * MATRICES, M, N, scale, factor, bias,
                GROUPS, SCALE, HAS_FACTOR, HAS_BIAS,
            )  # fmt: skip
        else:
            to = sums + (split * split_tiles + tile - UNSPLIT).to(tl.int64) * (BM * ROWS)
            tl.store(to + tl.arange(0, BM)[None, :] * ROWS + local[:, None], accs[number])


@triton.jit
def tile_coordinates(tile, column_tiles, row_programs, GROUP_M: tl.constexpr):
    """Return the position of output tile `tile`, two scalars: (block of rows of x, block of rows of W).

    There are `column_tiles` blocks of rows of x and `row_programs` blocks of rows of W. Up to GROUP_M tiles
    with the same rows of W have adjacent indices, so that they run together and share W in L2.
    """
    first = tile // (GROUP_M * row_programs) * GROUP_M
    width = tl.minimum(column_tiles - first, GROUP_M)
    within = tile % (GROUP_M * row_programs)
    return first + within % width, within // width


@triton.jit
def _dequant(
    at, row_tiles, step, scale, zero, lut, RT: tl.constexpr, C: tl.constexpr, SPAN: tl.constexpr,
    REGISTERS: tl.constexpr, GROUPS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
    V: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr, ASM: tl.constexpr,
    CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr, FRAGMENTS: tl.constexpr,
    DTYPE: tl.constexpr, WAIT_PTX: tl.constexpr,
):  # fmt: skip
    """Dequantize one step of columns of RT row tiles: (code - zero-point) * scale, DTYPE [16 * RT, C * SPAN].

    A step is C spans. A span is SPAN columns whose codes are stored in the same registers. A row tile is 16
    rows of W.

        at                     pointers to the codes of the step, [RT, C, 256]
        row_tiles              [RT]: indices of row tiles
        step                   index of the step along K
        scale, zero, lut       pointers to all scales and zero-points, and to the value of each code

        REGISTERS              registers in which the codes of a span are stored
        GROUPS                 groups of a row; if 1, no scale is applied
        BLOCKS                 scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK              columns of a scale block
        V                      groups of a scale block
        SCALE                  encoding of 8-bit scales (`scale_kind`); "" for wider ones
        HAS_ZERO               True to subtract zero-points
        ASM, CONSTRAINTS       PTX that dequantizes a span, with its constraints; None for no PTX
        TABLE                  PTX that loads the values of codes from `lut`; None for no lookup
        FIELDS                 instructions for each fragment, used if ASM is None (`dequant_codes`)
        FRAGMENTS              fragments of a span, 16 columns each
        WAIT_PTX               PTX that waits until registers of earlier weights are free, or None
    """
    COLUMNS: tl.constexpr = C * SPAN
    # Blocks of scales in a step.
    B: tl.constexpr = COLUMNS // 128
    registers = ()
    for t in tl.static_range(REGISTERS):
        registers = registers + (tl.load(at + t * 256),)
    q = dequant_codes(registers, lut, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE)
    q = tl.reshape(q, (RT, C, 8, 4, 2, 2, 2, SPAN // 32, 2))
    q = tl.reshape(tl.permute(q, (0, 5, 2, 1, 7, 8, 4, 3, 6)), (16 * RT, COLUMNS))
    if HAS_ZERO:
        z = load_scales(zero, row_tiles, step, BLOCKS, V, B, PER_BLOCK, COLUMNS, False)
        q -= values_per_weight(z, RT, COLUMNS).to(DTYPE)
    if GROUPS > 1:
        s = load_scales(scale, row_tiles, step, BLOCKS, V, B, PER_BLOCK, COLUMNS, ASM is not None)
        s = scales_by_lane(s, SCALE, DTYPE)
        q *= values_per_weight(s * _one_after_wait(WAIT_PTX).to(DTYPE), RT, COLUMNS)
    elif WAIT_PTX is not None:
        q *= _one_after_wait(WAIT_PTX).to(DTYPE)
    return q


@triton.jit
def _per_sum(v, RT: tl.constexpr, BM: tl.constexpr):
    """Return one scale per row of W, broadcast to an accumulator: [16 * RT, BM].

    The accumulator has RT row tiles (16 rows of W) times BM rows of x. `v` [4, 8, RT, 1, 1, 2] is the result
    of `load_scales`, converted by `scales_by_lane`.
    """
    v = tl.permute(tl.reshape(v, (4, 8, RT, 2)), (2, 3, 1, 0))
    # Warp lane t has columns 2 t and 2 t + 1 of eight.
    v = tl.reshape(v, (16 * RT, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(v, (16 * RT, BM // 8, 4, 2)), (16 * RT, BM))


@triton.jit
def _one_after_wait(WAIT_PTX: tl.constexpr):
    """Return the scalar 1; if WAIT_PTX is not None, only after earlier products have ended.

    New weights are multiplied by it, so that they depend on the wait. Without that, Triton 3.6 would write
    them to registers from which running products still read older weights.
    """
    one = tl.full((), 1.0, tl.float32)
    if WAIT_PTX is not None:
        one = tl.inline_asm_elementwise(WAIT_PTX, "=f,f", [one], tl.float32, False, 1)
    return one


@triton.jit
def _fp16_dot(q, columns, FP16_SCALE: tl.constexpr):
    """Return weights `q` [16 * RT, C] @ x^T `columns` [C, BM], summed in float16, as float32 [16 * RT, BM].

    C are the columns of a step. So that sums do not overflow, weights are multiplied by FP16_SCALE before,
    and the result is divided by it.
    """
    return tl.dot(q * FP16_SCALE, columns, out_dtype=tl.float16).to(tl.float32) * (1 / FP16_SCALE)


@triton.jit
def store(
    sums, y, rows, m, to_rows, stride, M, N, scale, factor, bias, GROUPS: tl.constexpr, SCALE: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Write y = `sums` * scale / factor + bias: sums[i, j] goes to y[to_rows[j], rows[i]].

    sums             float32 [R rows of W, C rows of x]
    y                pointer to the output, whose rows are `stride` elements apart
    rows             [R]: output features; features from N on are not stored
    m                [C]: rows of the product; rows from M on are not stored
    to_rows          [C]: the row of y for each row of the product
    scale            one per output feature, encoded as SCALE; read only if GROUPS, groups of a row, is 1
    factor [1]       divides sums; read only if HAS_FACTOR
    bias [N]         read only if HAS_BIAS
    """
    sums = apply_scale_and_bias(
        sums, rows[:, None], scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS
    )
    to = y + to_rows.to(tl.int64)[None, :] * stride + rows[:, None]
    tl.store(to, sums.to(y.dtype.element_ty), mask=(rows < N)[:, None] & (m < M)[None, :])


@triton.jit(do_not_specialize=["M", "UNSPLIT"])
def reduce_splits(
    sums, scale, factor, bias, y, M, N, UNSPLIT,
    GROUPS: tl.constexpr, SCALE: tl.constexpr, HAS_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    BM: tl.constexpr, ROWS: tl.constexpr, SPLIT_K: tl.constexpr, GROUP_M: tl.constexpr,
    REDUCE_M: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Add the partial sums of split-K; write y [M, N] = sums * scale / factor + bias, from tile UNSPLIT on.

    A tile is ROWS rows of W times BM rows of x. Sums are added in the order of splits. A program has REDUCE_M
    rows of x of a tile. Grid: (tiles, BM / REDUCE_M).

        sums         float32 [SPLIT_K, tiles from UNSPLIT on, BM, ROWS]
        scale        one per output feature, encoded as SCALE; read only if GROUPS, groups of a row, is 1
        factor [1]   read only if HAS_FACTOR
        bias [N]     read only if HAS_BIAS
        GROUP_M      tiles with the same rows of W that have adjacent numbers, as in `portable_gemm`
        PDL          True if launched with programmatic dependent launch
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(0)
    pm, pn = tile_coordinates(UNSPLIT + tile, tl.cdiv(M, BM), tl.cdiv(N, ROWS), GROUP_M)
    local = tl.program_id(1) * REDUCE_M + tl.arange(0, REDUCE_M)
    within = local[None, :] * ROWS + tl.arange(0, ROWS)[:, None]
    total = tl.load(sums + tile.to(tl.int64) * (BM * ROWS) + within)
    for split in tl.static_range(1, SPLIT_K):
        at = (split * tl.num_programs(0) + tile).to(tl.int64) * (BM * ROWS)
        total += tl.load(sums + at + within)
    rows = pn * ROWS + tl.arange(0, ROWS)
    m = pm * BM + local
    store(total, y, rows, m, m, N, M, N, scale, factor, bias, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
