"""Small-M GEMM for M <= 32, with optional split-K: y [M, N] = x [M, K] weight^T; warps share x.

Each warp of a program owns a row tile, 16 weight rows, and all columns of the program's split of K. A k_step
is what it dequantizes at a time: 128 columns, or a longer span. A span is the columns whose codes are stored
in the same registers.

    shared memory   x [M, K / SPLIT_K], copied by cp.async in chunks of CHUNK k_steps
    warp 0          row tile 0: codes -> registers, PREFETCH k_steps early -> dequantize -> mma or wgmma
    warp 1          row tile 1: ...
    SPLIT_K > 1     float32 sums go to `sums`, which `gluon/split_k_reduce.py` adds up in a second launch

No sums are added across warps. Once x has arrived, no warp waits for another, except that the four warps of a
`wgmma` start it together.

Written in Gluon: in plain Triton, warps cannot share operand B while each has its own operand A.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from quantkit.kernels.gemm.small_m.small_m_product import load_codes, load_scales, multiply
from quantkit.kernels.gluon.compat import reinterpret
from quantkit.kernels.gluon.dequant_fragment import (
    codes_layout,
    fill_table,
    k_step_columns,
    load_squares,
    pdl_launch_dependents,
    pdl_wait,
    row_tile_of,
    row_tile_of_warp,
    stage_rstd,
)
from quantkit.kernels.gluon.scales_smem import scale_words_layout, stage_scales
from quantkit.kernels.gluon.stage_x_shared import (
    ROWS_FOR_MMA,
    ROWS_FOR_WGMMA,
    accumulator_layout,
    stage_x_async,
    wait_for_x,
)
from quantkit.kernels.layouts.dequant_blocks import (
    apply_scale_and_bias,
    load_expert_block,
    output_rows,
    select_matrix,
)
from quantkit.kernels.ops.activation_kernel import gated


@gluon.jit(do_not_specialize=["M", "ROW_TILES"])
def small_m_gemm(
    x, squares, codes, scale, zero, factor, lut, bias, y, sums, M, N, ROW_TILES, order, expert_blocks,
    K: gl.constexpr, SPANS: gl.constexpr, REGISTERS: gl.constexpr, GROUPS: gl.constexpr,
    PER_BLOCK: gl.constexpr, BLOCKS: gl.constexpr, V: gl.constexpr, ON_WEIGHTS: gl.constexpr,
    SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr,
    ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FILL: gl.constexpr,
    FIELDS: gl.constexpr, FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, NORM_EPS: gl.constexpr,
    GATE: gl.constexpr, W: gl.constexpr, BM: gl.constexpr, SPLIT_K: gl.constexpr, K_STEPS: gl.constexpr,
    CHUNK: gl.constexpr, PADDING_CHUNKS: gl.constexpr, PREFETCH: gl.constexpr, ROLLED: gl.constexpr,
    ALIGNED_SPLITS: gl.constexpr, STAGED_BLOCKS: gl.constexpr, WGMMA: gl.constexpr, TOP_K: gl.constexpr,
    MATRICES: gl.constexpr, CHAINED: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] weight^T, packed weight [N, K], for M up to 32 (`fused-small-m`).

    A row tile is 16 rows of the weight. A program computes ROW_TILES of them, at most one per warp, over its
    split of K. A span is the columns whose codes are stored in the same registers. A k_step is 128 columns,
    or a longer span. Grid: (programs * SPLIT_K,), or (expert blocks, programs * SPLIT_K).

        x [M, K], y                    bfloat16 or float16
        bias [N]                       dtype of x; read only if HAS_BIAS
        squares [M, K / 16] float32    sums of squares of x; read only if NORM_EPS is not None
        codes, scale, zero             the weight in the fragment layout (`layouts.fragment_layout`)
        lut float32 [2**bits]          value of each code
        factor float32 [MATRICES]      one per matrix; y is divided by it; read only if HAS_FACTOR
        sums float32                   output if SPLIT_K > 1: [expert blocks, SPLIT_K, row tiles, BM, 16]
        order int32                    with experts, the routed tokens (token-expert pairs), else None
        expert_blocks int32 [.., 3]    expert, first routed token and number of them of each block, or None

        SPANS                          spans of a row
        FRAGMENTS                      fragments of a span, 16 columns each
        REGISTERS                      registers in which the codes of a span are stored
        GROUPS                         groups of a row; a group of columns has one scale
        BLOCKS                         scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK                      columns of a scale block
        V                              groups of a scale block
        ON_WEIGHTS                     True if scales multiply weights, not sums
        SCALE                          encoding of 8-bit scales (`scale_kind`); "" for wider ones
        HAS_ZERO                       True if there are zero-points
        ASM, CONSTRAINTS               PTX that dequantizes a span, with its constraints
        TABLE                          PTX that loads the values of codes; None for no lookup
        FILL                           PTX that fills a lookup table in shared memory (`fill_table`), or None
        FIELDS                         not used, because ASM is given
        DTYPE                          dtype of x and of dequantized weights
        BM                             rows of x, padded
        W                              warps of a program
        SPLIT_K                        programs that share a row tile, each with a split of K
        K_STEPS                        k_steps of a split; x beyond K counts as zeros
        CHUNK                          k_steps of a chunk, which is copied and waited for together
        PADDING_CHUNKS                 chunks allocated for the lookup table, which Triton does not count
        PREFETCH                       k_steps by which loads of codes run ahead: 2 or 4
        ROLLED                         True if chunks after the first are a loop; else they are unrolled
        STAGED_BLOCKS                  scale blocks copied to shared memory; 0: loaded one chunk early
        ALIGNED_SPLITS                 True if splits have equal k_steps and whole scale blocks
        WGMMA                          True to use `wgmma`: dequantize while it multiplies the fragment before
        NORM_EPS                       None, or eps: y is divided by the RMS of x, sqrt(mean(x^2) + eps)
        GATE                           f, if y [M, N / 2] = f(gate) * up for the halves of rows; "" for none
        TOP_K, MATRICES                experts of a token, and matrices of an expert; 1 and 1 without experts
        CHAINED                        True to read expert blocks before `pdl_wait` (`Grouping.chained`)
        PDL                            True if launched with programmatic dependent launch

    If `expert_blocks` is given, rows of x and y are routed tokens, row p // TOP_K of x for token p. The
    weight is the MATRICES matrices of the block's expert, one above the other.
    """
    K_STEP: gl.constexpr = k_step_columns(FRAGMENTS)
    SUBTILES: gl.constexpr = K_STEP // 128
    C: gl.constexpr = K_STEP // (16 * FRAGMENTS)
    CHUNKS: gl.constexpr = K_STEPS // CHUNK
    LAST_K_STEP: gl.constexpr = SPANS // C - 1
    CODES: gl.constexpr = codes_layout(W, C)
    STORED: gl.constexpr = scale.dtype.element_ty
    ZERO: gl.constexpr = zero.dtype.element_ty
    if PDL and expert_blocks is None:
        pdl_launch_dependents()
    program = gl.program_id(0)
    if expert_blocks is not None:
        if PDL and not CHAINED:
            # The kernel before this one may have written the expert blocks.
            pdl_wait()
        expert, its_first, M = load_expert_block(expert_blocks, program, CHAINED)
        if PDL and CHAINED:
            # If no block has routed tokens, one program must wait before all end.
            if (M == 0) & (program == 0):
                pdl_wait()
        if M == 0:
            return
        codes, scale, zero, factor, lut = select_matrix(
            codes,
            scale,
            zero,
            factor,
            lut,
            expert * MATRICES,
            N // MATRICES,
            SPANS,
            REGISTERS,
            FRAGMENTS,
            BLOCKS,
            V,
        )
        order += its_first
        sums += program.to(gl.int64) * (SPLIT_K * ((N + 15) // 16) * (BM * 16))
        program = gl.program_id(1)
    split = program % SPLIT_K
    first = program // SPLIT_K * ROW_TILES
    begin = split * K_STEPS
    last = (N + 15) // 16 - 1
    warp = gl.arange(0, W, gl.SliceLayout(1, gl.SliceLayout(2, CODES)))
    tile = row_tile_of_warp(warp, first, last, ROW_TILES, N, GATE != "")
    tile = gl.expand_dims(gl.expand_dims(tile, 1), 2).to(gl.int64)
    span = gl.expand_dims(gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, gl.SliceLayout(2, CODES))), 0), 2)
    lane = gl.arange(0, 128, gl.SliceLayout(0, gl.SliceLayout(1, CODES)))
    lane = gl.expand_dims(gl.expand_dims(lane, 0), 1)
    words_at = codes.to(gl.pointer_type(gl.int32), bitcast=True) + lane
    words_at += (tile * SPANS + begin * C + span) * (REGISTERS * 128)
    # Warps without a row tile load nothing.
    mask = gl.expand_dims(gl.expand_dims(warp < ROW_TILES, 1), 2)
    # A split loads no k_steps of another split.
    end = K_STEPS - 1 if ALIGNED_SPLITS else gl.minimum(K_STEPS - 1, LAST_K_STEP - begin)
    tile = gl.arange(0, W, gl.SliceLayout(1, scale_words_layout(W, 1)))
    tile = row_tile_of_warp(tile, first, last, ROW_TILES, N, GATE != "")
    scales_at = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, scale_words_layout(W, 1))), 0)
    scales_at += gl.expand_dims(tile, 1) * (BLOCKS * 8)
    block = gl.minimum(begin * K_STEP // PER_BLOCK, BLOCKS - 1)
    scales, zeros = scale, zero
    if STAGED_BLOCKS and GROUPS > 1:
        scales = stage_scales(
            scale, first, last, ROW_TILES, N, GATE != "", block, BLOCKS, STAGED_BLOCKS, V, W
        )
    if STAGED_BLOCKS and HAS_ZERO:
        zeros = stage_scales(zero, first, last, ROW_TILES, N, GATE != "", block, BLOCKS, STAGED_BLOCKS, V, W)
    if ALIGNED_SPLITS:
        scales_at += block * 8
    pointers = (words_at, mask, scales_at, scales, zeros, begin, block, end)
    ring = ()
    for stage in gl.static_range(PREFETCH):
        ring = ring + (load_codes(pointers, gl.minimum(stage, end), REGISTERS, C),)
    values = ((), ())
    if not STAGED_BLOCKS:
        values = load_scales(
            pointers,
            0,
            CHUNK,
            SUBTILES,
            GROUPS,
            PER_BLOCK,
            BLOCKS,
            V,
            STORED,
            ZERO,
            HAS_ZERO,
            ALIGNED_SPLITS,
            STAGED_BLOCKS,
            W,
        )
    pointers = pointers + (fill_table(lut, FILL),)
    if PDL and (expert_blocks is None or CHAINED):
        # Kernels before this one write only x and the sums of its squares.
        pdl_wait()
    if PDL and expert_blocks is not None:
        # A chained kernel or split-K reduction reads the expert blocks at once, because this one has waited.
        pdl_launch_dependents()
    if NORM_EPS is not None:
        squares_x = load_squares(squares, M, K, BM, W)
    WIDE: gl.constexpr = 64 if WGMMA else 128
    X_LAYOUT: gl.constexpr = ROWS_FOR_WGMMA if WGMMA else ROWS_FOR_MMA
    BLOCKS_PER_CHUNK: gl.constexpr = CHUNK * K_STEP // WIDE
    chunks = gl.allocate_shared_memory(DTYPE, [CHUNKS, BLOCKS_PER_CHUNK * BM, WIDE], X_LAYOUT)
    if PADDING_CHUNKS:
        padding = gl.allocate_shared_memory(DTYPE, [PADDING_CHUNKS, BLOCKS_PER_CHUNK * BM, WIDE], X_LAYOUT)
    stage_x_async(x, chunks, begin * K_STEP, M, order, TOP_K, K, BLOCKS_PER_CHUNK, BM, CHUNKS, W, WIDE)
    if NORM_EPS is not None:
        rstd = stage_rstd(squares_x, K, NORM_EPS)
    x_smem = reinterpret(chunks, DTYPE, [K_STEPS * K_STEP // WIDE, BM, WIDE], X_LAYOUT)
    ACC: gl.constexpr = accumulator_layout(W, BM, WGMMA)
    total = gl.zeros([16 * W, BM], gl.float32, ACC)
    if ROLLED:
        wait_for_x(CHUNKS - 1, WGMMA)
        total, ring, values = multiply(
            total, ring, values, x_smem, pointers, 0, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V, ON_WEIGHTS,
            STORED, SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, W, BM, CHUNK,
            PREFETCH, K_STEPS, ALIGNED_SPLITS, STAGED_BLOCKS, False, WGMMA,
        )  # fmt: skip
        wait_for_x(0, WGMMA)
        for chunk in range(1, CHUNKS):
            total, ring, values = multiply(
                total, ring, values, x_smem, pointers, chunk * CHUNK, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V,
                ON_WEIGHTS, STORED, SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE,
                W, BM, CHUNK, PREFETCH, K_STEPS, ALIGNED_SPLITS, STAGED_BLOCKS, False, WGMMA,
            )  # fmt: skip
    else:
        for chunk in gl.static_range(CHUNKS):
            wait_for_x(CHUNKS - 1 - chunk, WGMMA)
            total, ring, values = multiply(
                total, ring, values, x_smem, pointers, chunk * CHUNK, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V,
                ON_WEIGHTS, STORED, SCALE, ZERO, HAS_ZERO, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE,
                W, BM, CHUNK, PREFETCH, K_STEPS, ALIGNED_SPLITS, STAGED_BLOCKS, chunk == CHUNKS - 1, WGMMA,
            )  # fmt: skip
    if NORM_EPS is not None:
        total *= gl.expand_dims(rstd.load(gl.SliceLayout(0, ACC)), 0)
    local = gl.arange(0, 16 * W, gl.SliceLayout(1, ACC))
    number = first + local // 16
    rows = gl.expand_dims(row_tile_of(number, N, GATE != "") * 16 + local % 16, 1)
    valid = gl.expand_dims((local < 16 * ROW_TILES) & (number <= last), 1) & (rows < N)
    m = gl.expand_dims(gl.arange(0, BM, gl.SliceLayout(0, ACC)), 0)
    if MATRICES > 1:
        factor += gl.minimum(rows, N - 1) // (N // MATRICES)
    if SPLIT_K == 1 or expert_blocks is not None:
        total = apply_scale_and_bias(total, rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    if SPLIT_K > 1:
        to = sums + (split.to(gl.int64) * (last + 1) + rows // 16) * (BM * 16) + m * 16 + rows % 16
        gl.store(to, total, mask=(m < BM) & valid)
    elif GATE == "":
        out = total.to(y.dtype.element_ty)
        gl.store(y + output_rows(order, m, M) * N + rows, out, mask=(m < M) & valid)
    else:
        out = total.to(y.dtype.element_ty)
        _store_gated(out, first, last, y, M, N, ROW_TILES, order, GATE, W, BM)
    if PADDING_CHUNKS:
        # Unused, but Triton would free it before the end.
        padding._keep_alive()


@gluon.jit
def _store_gated(
    out, first, last, y, M, N, ROW_TILES, order, GATE: gl.constexpr, W: gl.constexpr, BM: gl.constexpr
):  # fmt: skip
    """Write y [M, N / 2] = f(gate) * up for the row tiles (16 weight rows) of a program.

    out         sums [16 * W, BM] of W warps: row tile 2 i is of the gate, 2 i + 1 of up
    first       index of the program's first row tile
    ROW_TILES   number of the program's row tiles
    last        index of the last row tile of the weight
    order       with experts, the row of y of each routed token (token-expert pair), else None
    GATE        the activation f
    BM          rows of x, padded
    """
    PAIRS: gl.constexpr = _gate_up_layout(W, BM)
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
    valid = (2 * pair < ROW_TILES) & (first + 2 * pair < last) & (m < M)
    gl.store(y + output_rows(order, m, M) * (N // 2) + (first // 2 + pair) * 16 + row, out, mask=valid)


@gluon.constexpr_function
def _gate_up_layout(W: int, BM: int) -> gl.DistributedLinearLayout:
    """Return the register layout of [16 * W, BM] in which a thread has gate and up of the same output.

    The 16-row tiles of W warps alternate between gate and up. BM is the rows of x.
    """
    rows = [[1 << bit, 0] for bit in range((16 * W).bit_length() - 1)]
    columns = [[0, 1 << bit] for bit in range(BM.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [rows[4], *columns[2:]], [*rows[:4], columns[0]], [*rows[5:], columns[1]], [], [16 * W, BM]
    )
