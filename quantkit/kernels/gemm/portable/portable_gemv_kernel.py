"""Portable GEMV with `tl.dot` for M <= 32: every packed byte goes from memory to registers once.

A program computes 16 * RT rows of y^T [N, M]: RT row tiles of 16 weight rows. Its W warps divide columns K.
One batched `tl.dot` multiplies a step, whose batch is slices of DOT columns, DOTS per warp:

    batch        DOTS * W products of [16 * RT weight rows, DOT] x [DOT, BM rows of x]
    step         W * DOTS * DOT columns
    at the end   sums over the batch, scale, bias, store: no second launch, one order of additions

Scales multiply the float32 sums of their columns, or weights for groups of 16.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.layouts.dequant_blocks import (
    apply_scale_and_bias,
    dequant_codes,
    load_by_lane,
    load_code_words,
    load_expert_block,
    output_rows,
    scales_by_lane,
    select_matrix,
)


@triton.jit
def portable_gemv(
    x, codes, scale, zero, factor, lut, bias, y, M, N, order, expert_blocks,
    K: tl.constexpr, SPANS: tl.constexpr, REGISTERS: tl.constexpr, DOT: tl.constexpr,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr,
    ON_WEIGHTS: tl.constexpr, SCALE: tl.constexpr, HAS_ZERO: tl.constexpr,
    HAS_FACTOR: tl.constexpr, HAS_BIAS: tl.constexpr,
    ASM: tl.constexpr, CONSTRAINTS: tl.constexpr, TABLE: tl.constexpr, FIELDS: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
    W: tl.constexpr, DOTS: tl.constexpr, RT: tl.constexpr, BM: tl.constexpr, PREFETCH: tl.constexpr,
    UNROLL: tl.constexpr, PREDICATE_X: tl.constexpr, ONE_ACCUMULATOR: tl.constexpr, TOP_K: tl.constexpr,
    MATRICES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] weight^T, packed weight [N, K], M <= BM <= 32 (`fused-portable-gemv`).

    A span is the columns whose codes are stored in the same registers. A step is DOTS * DOT columns of each
    warp. Grid: (programs,), or (expert blocks, programs * MATRICES).

        x [M, K], y                    bfloat16 or float16
        bias [N]                       dtype of x; read only if HAS_BIAS
        codes int16                    [row tiles, SPANS, REGISTERS, 256] (`layouts.fragment_layout`)
        scale                          scales [row tiles, BLOCKS, 8, V, 2]
        zero                           zero-points, in the shape of `scale`; read only if HAS_ZERO
        lut float32 [2**bits]          value of each code
        factor float32 [matrices]      one per matrix; y is divided by it; read only if HAS_FACTOR
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
        ON_WEIGHTS                     True if scales multiply weights, not sums
        SCALE                          encoding of 8-bit scales (`scale_kind`); "" for wider ones
        ASM, CONSTRAINTS               PTX that dequantizes a span, with its constraints; None for no PTX
        TABLE                          PTX that loads the values of codes from `lut`; None for no lookup
        FIELDS                         instructions for each fragment, used if ASM is None (`dequant_codes`)
        DTYPE                          dtype of x and of dequantized weights
        W                              warps of a program, which divide the columns
        DOTS                           products of a warp per step
        DOT                            columns of such a product
        RT                             row tiles (16 weight rows) of a program
        BM                             rows of x, padded
        PREFETCH                       True to load the codes of the next step before this one is multiplied
        UNROLL                         steps per loop iteration
        PREDICATE_X                    True to mask loads of rows from M on; else the last row is repeated
        ONE_ACCUMULATOR                True to add a warp's DOTS products once scaled: fewer registers
        TOP_K, MATRICES                experts of a token, and matrices of an expert; 1 and 1 without experts
        PDL                            True if launched with programmatic dependent launch

    If `expert_blocks` is given, routed token p has row p // TOP_K of x. The outputs of an expert's matrices
    are side by side: y [routed tokens, MATRICES * N].
    """
    SPAN: tl.constexpr = 16 * FRAGMENTS
    # Steps are padded to whole iterations of UNROLL.
    STEPS: tl.constexpr = (SPANS * SPAN // DOT + W * DOTS * UNROLL - 1) // (W * DOTS * UNROLL) * UNROLL
    EVEN_K: tl.constexpr = SPANS * SPAN == STEPS * W * DOTS * DOT
    WHOLE: tl.constexpr = EVEN_K and K == SPANS * SPAN
    # Spans of a dot, or dots of a span.
    C: tl.constexpr = DOT // SPAN if DOT > SPAN else 1
    B2: tl.constexpr = SPAN // DOT if SPAN > DOT else 1
    B1: tl.constexpr = DOTS // B2
    PER_CHANNEL: tl.constexpr = GROUPS == 1
    # Groups of a dot.
    GROUPS_PER_DOT: tl.constexpr = DOT // GROUP if ON_WEIGHTS and GROUP < DOT else 1
    HALVES: tl.constexpr = GROUP == 16
    # Dots of a block of scales.
    IN_BLOCK: tl.constexpr = 128 // DOT
    if PDL and expert_blocks is None:
        # The next kernel may start loading its weights.
        tl.extra.cuda.gdc_launch_dependents()
    last_tile = (N + 15) // 16 - 1
    rows_of_x = order
    if expert_blocks is None:
        program = tl.program_id(0)
    else:
        if PDL:
            # The kernel before this one may have written the expert blocks, which the next may read at once.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        expert, first, M = load_expert_block(expert_blocks, tl.program_id(0))
        if M == 0:
            return
        programs = last_tile // RT + 1
        which = tl.program_id(1) // programs
        program = tl.program_id(1) % programs
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
        rows_of_x = _rows_of_x(order, M, TOP_K, BM)
    w = tl.arange(0, W)[:, None]
    in_warp = tl.arange(0, B1 * C * RT)
    blocks = tl.arange(0, RT * DOTS // IN_BLOCK)
    code_rows = tl.minimum(program * RT + in_warp % RT, last_tile)
    block_rows = tl.minimum(program * RT + blocks // (DOTS // IN_BLOCK), last_tile)
    # Scaled sums of all dots of a warp can share registers.
    ACCUMULATORS: tl.constexpr = DOTS if ON_WEIGHTS or PER_CHANNEL or not ONE_ACCUMULATOR else 1
    acc = tl.zeros((ACCUMULATORS * W, 16 * RT, BM), tl.float32)
    span = w * (B1 * C) + (in_warp // RT)[None, :]
    dot = w * DOTS + (blocks % (DOTS // IN_BLOCK) * IN_BLOCK)[None, :]
    registers, s, z = _load_step(
        codes, code_rows, span, scale, zero, block_rows, dot * DOT // PER_BLOCK, SPANS, REGISTERS, EVEN_K,
        BLOCKS, V, PER_CHANNEL, HAS_ZERO, ASM is not None,
    )  # fmt: skip
    if PDL and expert_blocks is None:
        # The kernel before this one writes only x.
        tl.extra.cuda.gdc_wait()
    for outer in tl.range(0, STEPS // UNROLL):
        for inner in tl.static_range(UNROLL):
            step = outer * UNROLL + inner
            # The last step of the loop loads its own codes again, unused.
            following = step + 1 if inner + 1 < UNROLL else tl.minimum(step + 1, STEPS - 1)
            if PREFETCH and (inner + 1 < UNROLL or UNROLL < STEPS):
                next_registers, next_s, next_z = _load_step(
                    codes, code_rows, span + following * (W * B1 * C), scale, zero, block_rows,
                    (dot + following * (W * DOTS)) * DOT // PER_BLOCK, SPANS, REGISTERS, EVEN_K, BLOCKS, V,
                    PER_CHANNEL, HAS_ZERO, ASM is not None,
                )  # fmt: skip
            # Keep the loads above ahead of all uses; ptxas would spread them among the uses.
            tl.debug_barrier()
            columns = _activations(x, rows_of_x, step, M, K, WHOLE, DOT, W, DOTS, BM, PREDICATE_X).to(DTYPE)
            q = dequant_codes(registers, lut, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE)
            q = tl.reshape(q, (W, B1, C, RT, 8, 4, 2, 2, 2, B2, (DOT if DOT < SPAN else SPAN) // 32, 2))
            # Columns of a run in the order (e1, t, p0, e0), so that warp lane t has four adjacent ones.
            q = tl.permute(q, (1, 9, 0, 3, 7, 4, 2, 10, 6, 5, 11, 8))
            q = tl.reshape(q, (DOTS * W, 16 * RT, DOT))
            if HAS_ZERO:
                q -= _per_weight(z, W, DOTS, RT, GROUPS_PER_DOT, HALVES, DOT).to(DTYPE)
            if ON_WEIGHTS:
                q *= _per_weight(scales_by_lane(s, SCALE, DTYPE), W, DOTS, RT, GROUPS_PER_DOT, HALVES, DOT)
            if ON_WEIGHTS or PER_CHANNEL:
                acc = tl.dot(q, columns, acc, input_precision="ieee")
            else:
                sums = tl.dot(q, columns, input_precision="ieee")
                sums *= _per_sum(scales_by_lane(s, SCALE, tl.float32), W, DOTS, RT, BM)
                acc += tl.sum(tl.reshape(sums, (DOTS, W, 16 * RT, BM)), axis=0) if ONE_ACCUMULATOR else sums
            if inner + 1 < UNROLL or UNROLL < STEPS:
                if PREFETCH:
                    registers = next_registers
                    s = next_s
                    z = next_z
                else:
                    registers, s, z = _load_step(
                        codes, code_rows, span + following * (W * B1 * C), scale, zero, block_rows,
                        (dot + following * (W * DOTS)) * DOT // PER_BLOCK, SPANS, REGISTERS, EVEN_K, BLOCKS,
                        V, PER_CHANNEL, HAS_ZERO, ASM is not None,
                    )  # fmt: skip
    out = tl.sum(acc, axis=0)
    rows = program * (16 * RT) + tl.arange(0, 16 * RT)
    m = tl.arange(0, BM)
    out = apply_scale_and_bias(
        out, rows[:, None], scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS
    )
    mask = (rows < N)[:, None] & (m < M)[None, :]
    to = y + output_rows(order, m, M)[None, :] * (N * MATRICES) + rows[:, None]
    tl.store(to, out.to(y.dtype.element_ty), mask=mask)


@triton.jit
def _load_step(
    codes, code_rows, span, scale, zero, block_rows, block, SPANS: tl.constexpr, REGISTERS: tl.constexpr,
    EVEN_K: tl.constexpr, BLOCKS: tl.constexpr, V: tl.constexpr, PER_CHANNEL: tl.constexpr,
    HAS_ZERO: tl.constexpr, INLINE: tl.constexpr,
):  # fmt: skip
    """Load one step, a slice of columns per warp, of packed weights: return (codes, scales, zero-points).

        codes              tuple of REGISTERS tensors int16 [W, L, 256]: W warps load L spans each
        scales             [4, 8, W, B, V, 2] from `load_by_lane`, B scale blocks per warp; 0 if PER_CHANNEL
        zero-points        the same for zero-points; 0 if not HAS_ZERO

    The arguments `codes`, `scale` and `zero` are pointers to those of the whole weight. A span is the columns
    whose codes are stored in the same REGISTERS registers.

        code_rows          [L]: indices of the row tiles (16 rows of the weight) whose codes to load
        span               [W, L]: indices of spans
        block_rows         [B]: indices of the row tiles whose scales to load
        block              [W, B]: indices of scale blocks (V groups of 128 columns, or one longer group)
        SPANS              spans of a row
        EVEN_K             True if all spans of `span` exist
        BLOCKS             scale blocks of a row: 128 columns each, or one longer group
        PER_CHANNEL        True if a row has one scale
        INLINE             True if inline PTX is allowed
    """
    registers = load_code_words(codes, code_rows, span, SPANS, REGISTERS, EVEN_K)
    s = 0
    z = 0
    if not PER_CHANNEL:
        s = load_by_lane(scale, block_rows, block, BLOCKS, V, INLINE)
    if HAS_ZERO:
        z = load_by_lane(zero, block_rows, block, BLOCKS, V)
    return registers, s, z


@triton.jit
def _per_sum(v, W: tl.constexpr, DOTS: tl.constexpr, RT: tl.constexpr, BM: tl.constexpr):
    """Return scales of weight rows, broadcast to the sums of products: [DOTS * W, 16 * RT, BM].

    A program has W warps, each with DOTS products of RT row tiles (16 rows of the weight) and BM rows of x.
    `v` [4, 8, W, L, V, 2] is the result of `load_by_lane`, with L * V = RT * DOTS.
    """
    v = tl.permute(tl.reshape(v, (4, 8, W, RT, DOTS, 2)), (4, 2, 3, 5, 1, 0))
    # Warp lane t has columns 2 t and 2 t + 1 of eight.
    v = tl.reshape(v, (DOTS * W, 16 * RT, 1, 4, 1))
    return tl.reshape(tl.broadcast_to(v, (DOTS * W, 16 * RT, BM // 8, 4, 2)), (DOTS * W, 16 * RT, BM))


@triton.jit
def _per_weight(
    v, W: tl.constexpr, DOTS: tl.constexpr, RT: tl.constexpr, GROUPS_PER_DOT: tl.constexpr,
    HALVES: tl.constexpr, DOT: tl.constexpr,
):  # fmt: skip
    """Return scales or zero-points of groups, broadcast to a value per weight: [DOTS * W, 16 * RT, DOT].

    A program has W warps, each with DOTS products of RT row tiles (16 rows of the weight) and DOT columns.

        v                [4, 8, W, L, V, 2] from `load_by_lane`, with L * V = RT * DOTS * GROUPS_PER_DOT
        GROUPS_PER_DOT   groups in DOT columns
        HALVES           True if groups have 16 columns: the halves of a run of 32
    """
    # Halves of a run alternate within a warp lane.
    H: tl.constexpr = 2 if HALVES else 1
    v = tl.permute(tl.reshape(v, (4, 8, W, RT, DOTS, GROUPS_PER_DOT // H, H, 2)), (4, 2, 3, 7, 1, 5, 0, 6))
    v = tl.reshape(v, (DOTS * W, 16 * RT, GROUPS_PER_DOT // H, 1, 4, H, 1))
    REPEATS: tl.constexpr = DOT * H // (16 * GROUPS_PER_DOT)
    v = tl.broadcast_to(v, (DOTS * W, 16 * RT, GROUPS_PER_DOT // H, REPEATS, 4, 2, 2))
    return tl.reshape(v, (DOTS * W, 16 * RT, DOT))


@triton.jit
def _rows_of_x(order, M, TOP_K: tl.constexpr, BM: tl.constexpr):
    """Return the row of x for each of BM rows of a program, in the shape int32 [8, BM / 8].

    Row m is at [m % 8, m // 8]. `order` int32 [M] has the indices of the program's routed tokens
    (token-expert pairs). Routed token p reads row p // TOP_K of x. Rows from M on repeat the last one.
    """
    m = tl.arange(0, BM // 8)[None, :] * 8 + tl.arange(0, 8)[:, None]
    return tl.load(order + tl.minimum(m, M - 1)) // TOP_K


@triton.jit
def _activations(
    x, rows, step, M, K: tl.constexpr, EVEN_K: tl.constexpr, DOT: tl.constexpr, W: tl.constexpr,
    DOTS: tl.constexpr, BM: tl.constexpr, PREDICATE_X: tl.constexpr,
):  # fmt: skip
    """Load the columns of x [M, K] of step `step` as operand B: the transpose, [DOTS * W, DOT, BM].

    A step is W * DOTS slices of DOT columns, DOTS per warp. Columns beyond K are zeros. A slice is runs of 32
    columns, each with the index 16 p0 + 8 e1 + 2 t + e0: t is 0 to 3, the others 0 or 1. Columns are stored
    in the order (e1, t, p0, e0), like the columns of weights.

        rows          with experts, int32 [8, BM / 8] from `_rows_of_x`: the rows of x to load; else None
        EVEN_K        True if no column is beyond K
        BM            M, padded: rows from M on repeat the last row
        PREDICATE_X   if True and EVEN_K, rows from M on are undefined instead
    """
    RUNS: tl.constexpr = DOT // 32
    MH: tl.constexpr = BM // 8
    # Warp lanes (t, m) are the first axes; the last axis is the two adjacent columns of a warp lane.
    t = tl.arange(0, 4)[:, None, None, None, None, None]
    m = tl.arange(0, 8)[:, None, None, None, None]
    w = tl.arange(0, W)[:, None, None, None]
    i = tl.arange(0, DOTS * RUNS * MH)[:, None, None]
    run = ((step * W + w) * DOTS + i // (RUNS * MH)) * RUNS + i // MH % RUNS
    k = run * 32 + tl.arange(0, 4)[:, None] * 8 + t * 2 + tl.arange(0, 2)
    WHERE: tl.constexpr = PREDICATE_X and EVEN_K
    if rows is not None:
        row = tl.broadcast_to(tl.reshape(rows, (1, 8, 1, 1, MH, 1, 1)), (1, 8, 1, DOTS * RUNS, MH, 1, 1))
        row = tl.reshape(row, (1, 8, 1, DOTS * RUNS * MH, 1, 1)).to(tl.int64)
    elif WHERE:
        row = i % MH * 8 + m
    else:
        row = tl.minimum(i % MH * 8 + m, M - 1)
    if WHERE:
        # Masked rows may have any values.
        v = tl.load(x + row * K + k, mask=row < M)
    elif EVEN_K:
        v = tl.load(x + row * K + k)
    else:
        v = tl.load(x + row * K + k, mask=k < K, other=0.0)
    # t, m, warp, group, run, m // 8, p0, e1, e0
    v = tl.reshape(v, (4, 8, W, DOTS, RUNS, MH, 2, 2, 2))
    return tl.reshape(tl.permute(v, (3, 2, 4, 7, 0, 6, 8, 5, 1)), (DOTS * W, DOT, BM))
