"""Warp-specialized WGMMA GEMM for Hopper, any M: y^T = W x^T, persistent over tiles, optional stream-K.

An output tile is BN rows of W times BM rows of x.

    producer, 1 warp         TMA: x [BM, 128] global -> ring of STAGES buffers in shared memory
    consumer 0, 4 warps      rows 0 to 63 of W: codes -> registers -> dequantize -> A of wgmma
    consumer 1, 4 warps      rows 64 to 127
    (consumer 2, 4 warps     rows 128 to 191, if BN is 192)

    full[stage]              the producer's copy has arrived
    empty[stage]             all consumers have multiplied with the copy

While one consumer dequantizes, the tensor cores run the products of another. A program computes one output
tile after the other. The tiles of the last wave may be shared by columns: stream-K, `gluon/stream_k.py`.

Written in Gluon: plain Triton cannot assign roles to warps. `portable_gemm` computes the same without roles.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quantkit.kernels.gemm.portable.portable_gemm_kernel import tile_coordinates
from quantkit.kernels.gemm.wgmma.wgmma_operand import dequant, load_k_step, prologue
from quantkit.kernels.gluon.compat import tma_load
from quantkit.kernels.gluon.dequant_fragment import (
    fill_table,
    k_step_columns,
    pdl_launch_dependents,
    pdl_wait,
)
from quantkit.kernels.gluon.stream_k import first_contributor, fixup, store_partials, work_range, work_tile
from quantkit.kernels.layouts.dequant_blocks import apply_scale_and_bias


@gluon.jit(
    do_not_specialize=["M", "WHOLE_TILES", "STEPS_PER_PROGRAM", "TILE_STRIDE", "SPANS", "BLOCKS", "TOKEN"]
)
def wgmma_gemm(
    x, codes, scale, zero, factor, lut, bias, y, sums, M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE,
    SPANS, BLOCKS, TOKEN, REGISTERS: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    V: gl.constexpr, SCALE: gl.constexpr, HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr,
    HAS_BIAS: gl.constexpr, ASM: gl.constexpr, CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr,
    FILL: gl.constexpr, FIELDS: gl.constexpr, FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, BN: gl.constexpr,
    BM: gl.constexpr, PREFETCH: gl.constexpr, STAGES: gl.constexpr, MMA_REGISTERS: gl.constexpr,
    GROUP_M: gl.constexpr, BLOCK_K: gl.constexpr, STORE_VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] W^T for any M, by output tiles of BN rows of W times BM rows of x.

    A span is the columns whose codes are stored in the same registers. A k_step is BLOCK_K columns, or a
    longer span. A step is two k_steps. Grid: (programs,).

        x                              TMA descriptor of [M, K], box [rows, 128], zeros beyond
        codes, scale, zero             W [N, K] in the fragment layout (`layouts.fragment_layout`)
        lut float32 [2**bits]          value of each code
        factor float32 [1]             y is divided by it; read only if HAS_FACTOR
        bias [N]                       read only if HAS_BIAS
        y [M, N]                       output
        sums float32                   partial sums and flags of stream-K (`gluon/stream_k.py`)

        WHOLE_TILES                    number of output tiles that programs do not share
        STEPS_PER_PROGRAM              steps of shared tiles that each program computes
        TILE_STRIDE                    steps from the first step of a shared tile to that of the next
        TOKEN                          value of the flags of this launch, which no other launch has
        SPANS                          spans of a row
        FRAGMENTS                      fragments of a span, 16 columns each
        REGISTERS                      registers in which the codes of a span are stored
        GROUPS                         1: one scale per row; 2: several
        BLOCKS                         scale blocks of a row: 128 columns each, or one longer group
        PER_BLOCK                      columns of a scale block
        V                              groups of a scale block
        SCALE                          encoding of 8-bit scales (`scale_kind`); "" for wider ones
        HAS_ZERO                       True if there are zero-points
        ASM, CONSTRAINTS               tuples of PTX and its constraints, for each BLOCK_K of a k_step
        TABLE                          PTX that loads the values of codes; None for no lookup
        FILL                           PTX that fills a lookup table in shared memory (`fill_table`), or None
        FIELDS                         not used, because ASM is given
        DTYPE                          dtype of x and of dequantized weights
        BN                             rows of W of an output tile: 128 or 192
        BM                             rows of x of an output tile
        BLOCK_K                        columns dequantized and multiplied at a time: 128 or 256
        PREFETCH                       k_steps by which loads of codes run ahead: 1 or 2
        STAGES                         buffers of x
        MMA_REGISTERS                  registers of a consumer thread; the producer keeps 24
        STORE_VECTOR                   values that a thread stores at once; it divides N
        GROUP_M                        output tiles with the same rows of W that run next to each other
        PDL                            True if launched with programmatic dependent launch
    """
    TMA_ROWS: gl.constexpr = x.block_shape[0]
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 128], x.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=BM // TMA_ROWS)
        mbarrier.init(empty.index(stage), count=BN // 64)
    operands = (
        x_smem, full, empty, codes, scale, zero, factor, fill_table(lut, FILL), bias, y, sums,
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, SPANS, BLOCKS, TOKEN,
    )  # fmt: skip
    # Arguments are repeated, because constexprs stay constexprs only in the call itself.
    if BN == 128:
        gl.warp_specialize([
            (_consumer, (
                0, operands, REGISTERS, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, BN, BM, PREFETCH, STAGES, GROUP_M, BLOCK_K,
                STORE_VECTOR, PDL,
            )),
            (_consumer, (
                1, operands, REGISTERS, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, BN, BM, PREFETCH, STAGES, GROUP_M, BLOCK_K,
                STORE_VECTOR, PDL,
            )),
            (_producer, (
                x, x_smem, full, empty, M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, SPANS, FRAGMENTS,
                BN, BM, STAGES, GROUP_M, BLOCK_K, PDL,
            )),
        ], [4, 1], [MMA_REGISTERS, 24])  # fmt: skip
    else:
        gl.warp_specialize([
            (_consumer, (
                0, operands, REGISTERS, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, BN, BM, PREFETCH, STAGES, GROUP_M, BLOCK_K,
                STORE_VECTOR, PDL,
            )),
            (_consumer, (
                1, operands, REGISTERS, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, BN, BM, PREFETCH, STAGES, GROUP_M, BLOCK_K,
                STORE_VECTOR, PDL,
            )),
            (_consumer, (
                2, operands, REGISTERS, GROUPS, PER_BLOCK, V, SCALE, HAS_ZERO, HAS_FACTOR, HAS_BIAS, ASM,
                CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE, BN, BM, PREFETCH, STAGES, GROUP_M, BLOCK_K,
                STORE_VECTOR, PDL,
            )),
            (_producer, (
                x, x_smem, full, empty, M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, SPANS, FRAGMENTS,
                BN, BM, STAGES, GROUP_M, BLOCK_K, PDL,
            )),
        ], [4, 4, 1], [MMA_REGISTERS, MMA_REGISTERS, 24])  # fmt: skip


@gluon.jit
def _producer(
    x, x_smem, full, empty, M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, SPANS, FRAGMENTS: gl.constexpr,
    BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP_M: gl.constexpr, BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: copy blocks of x [BM rows, 128 columns] to shared memory by TMA.

    Blocks are copied in the order in which `_consumer` reads them. Boxes that begin beyond row M of x are not
    copied; their outputs are not stored.

        x                     TMA descriptor of x [M, K], box [rows, 128]
        x_smem                shared memory, [STAGES, BM, 128]: a ring of buffers
        full                  a barrier per buffer: its copy has arrived
        empty                 a barrier per buffer: all consumers have used it
        WHOLE_TILES           number of output tiles that programs do not share (`gluon/stream_k.py`)
        STEPS_PER_PROGRAM     steps of shared tiles that each program computes
        TILE_STRIDE           steps from the first step of a shared tile to that of the next
        SPANS                 spans of a row: columns whose codes are stored in the same registers
        FRAGMENTS             fragments of a span, 16 columns each
        BN, BM                rows of W and of x of an output tile
        GROUP_M               output tiles with the same rows of W that run next to each other
        BLOCK_K               columns multiplied at a time
        PDL                   True to wait for the kernel before (programmatic dependent launch)
    """
    if PDL:
        pdl_launch_dependents()
        pdl_wait()
    TMA_ROWS: gl.constexpr = x.block_shape[0]
    K_STEP: gl.constexpr = k_step_columns(FRAGMENTS, BLOCK_K)
    X_BLOCKS_PER_STEP: gl.constexpr = 2 * K_STEP // 128
    steps = gl.cdiv(SPANS * (16 * FRAGMENTS), 2 * K_STEP)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, BN)
    whole, work_items, begin, end, has_partial = work_range(
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, steps, BN, BM
    )
    count = 0
    for number in range(work_items):
        tile, first, last = work_tile(number, whole, begin, end, has_partial, WHOLE_TILES, TILE_STRIDE, steps)
        pm, _ = tile_coordinates(tile, columns, rows, GROUP_M)
        for block in range(first * X_BLOCKS_PER_STEP, last * X_BLOCKS_PER_STEP):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES % 2 ^ 1)
            for box in gl.static_range(BM // TMA_ROWS):
                row = pm * BM + box * TMA_ROWS
                mbarrier.expect(full.index(stage), TMA_ROWS * 128 * 2, row < M)
                mbarrier.arrive(full.index(stage), count=1, pred=row >= M)
                to = x_smem.index(stage).slice(box * TMA_ROWS, TMA_ROWS, 0)
                tma_load(x, [row, block * 128], full.index(stage), to, row < M)
            count += 1


@gluon.jit
def _consumer(
    group: gl.constexpr, operands, REGISTERS: gl.constexpr, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    V: gl.constexpr, SCALE: gl.constexpr,
    HAS_ZERO: gl.constexpr, HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ASM: gl.constexpr,
    CONSTRAINTS: gl.constexpr, TABLE: gl.constexpr, FIELDS: gl.constexpr, FRAGMENTS: gl.constexpr,
    DTYPE: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, PREFETCH: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, BLOCK_K: gl.constexpr, STORE_VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run a consumer warp group: multiply its 64 rows of each tile of W [BN, K] with x [BM, K].

    For every output tile of the program, the group waits for blocks of x, multiplies them with dequantized
    codes, and frees the buffers. Sums are float32 [64, BM]. The group writes y [M, N] in x's dtype, or
    partial sums in float32.

        group       index of the group, which has rows 64 * `group` to 64 * `group` + 63
        operands    (x in shared memory, barriers `full` and `empty` of `_producer`, arguments of `wgmma_gemm`
                    from `codes` to TOKEN, with the result of `fill_table` as `lut`)
        PDL         True to write only after the kernel before has ended (programmatic dependent launch)

    The other constexprs are those of `wgmma_gemm`.
    """
    (
        x_smem, full, empty, codes, scale, zero, factor, lut, bias, y, sums,
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, SPANS, BLOCKS, TOKEN,
    ) = operands  # fmt: skip
    K_STEP: gl.constexpr = k_step_columns(FRAGMENTS, BLOCK_K)
    C: gl.constexpr = K_STEP // (16 * FRAGMENTS)
    STEP_SUBTILES: gl.constexpr = K_STEP // 128
    BLOCKS_PER_STEP: gl.constexpr = K_STEP // BLOCK_K
    SUBTILES: gl.constexpr = BLOCK_K // 128
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    # Layout of weights [64 rows, V groups, columns of a group] in the registers of operand A.
    like = gl.reshape(gl.full([64, 128], 0.0, DTYPE, OPERAND), (64, V, 128 // V))
    WEIGHTS: gl.constexpr = like.type.layout
    # The second half of the last step may be padding: x is zero there, so weights may have any value.
    last_k_step = SPANS // C - 1
    steps = gl.cdiv(SPANS, 2 * C)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, BN)
    whole, work_items, begin, end, has_partial = work_range(
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, steps, BN, BM
    )
    tile, first, last = work_tile(0, whole, begin, end, has_partial, WHOLE_TILES, TILE_STRIDE, steps)
    # A program without work items still loads the first codes of some tile.
    pm, pn = tile_coordinates(gl.minimum(tile, columns * rows - 1), columns, rows, GROUP_M)
    words_at, scales_at, ring = prologue(
        pn * (BN // 16) + group * 4, first, codes, scale, zero, N, SPANS,
        C, STEP_SUBTILES, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
    )  # fmt: skip
    count = 0
    for number in range(work_items):
        total = gl.zeros([64, BM], gl.float32, ACC)
        for step in range(first, last):
            # Two k_steps, so that loaded codes stay in their registers: copying them would wait for the
            # loads.
            for half in gl.static_range(2):
                for block_k in gl.static_range(BLOCKS_PER_STEP):
                    weights = dequant(
                        ring[half], lut, block_k, ASM, CONSTRAINTS, TABLE, FIELDS, FRAGMENTS, DTYPE,
                        C, SUBTILES, BLOCKS_PER_STEP, REGISTERS, GROUPS, V, SCALE, HAS_ZERO,
                        scale.dtype.element_ty, zero.dtype.element_ty, WEIGHTS, OPERAND,
                    )  # fmt: skip
                    if block_k == BLOCKS_PER_STEP - 1:
                        following = load_k_step(
                            words_at, scales_at, scale, zero,
                            gl.minimum(step * 2 + half + PREFETCH, last_k_step),
                            C, STEP_SUBTILES, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
                        )  # fmt: skip
                        ring = (following, ring[1]) if (half + PREFETCH) % 2 == 0 else (ring[0], following)
                    for subtile in gl.static_range(SUBTILES):
                        stage = (count + subtile) % STAGES
                        mbarrier.wait(full.index(stage), (count + subtile) // STAGES % 2)
                        x = x_smem.index(stage).permute((1, 0))
                        total = warpgroup_mma(weights[subtile], x, total, is_async=True)
                    # Keep weights in their registers until the products are done.
                    if SUBTILES == 1:
                        total, _ = warpgroup_mma_wait(0, [total, weights[0]])
                    else:
                        total, _, _ = warpgroup_mma_wait(0, [total, weights[0], weights[1]])
                    for subtile in gl.static_range(SUBTILES):
                        mbarrier.arrive(empty.index((count + subtile) % STAGES), count=1)
                    count += SUBTILES
        row, m = pn * BN + group * 64, pm * BM
        is_written, is_added = last == steps, first > 0
        before = first_contributor(tile, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE)
        # Load the first codes of the next tile while this one is written.
        tile, first, last = work_tile(
            gl.minimum(number + 1, work_items - 1),
            whole,
            begin,
            end,
            has_partial,
            WHOLE_TILES,
            TILE_STRIDE,
            steps,
        )
        pm, pn = tile_coordinates(tile, columns, rows, GROUP_M)
        words_at, scales_at, ring = prologue(
            pn * (BN // 16) + group * 4, first, codes, scale, zero, N, SPANS,
            C, STEP_SUBTILES, REGISTERS, GROUPS, PER_BLOCK, BLOCKS, V, HAS_ZERO,
        )  # fmt: skip
        if PDL:
            # The kernel before this one may still read the memory that this one writes.
            pdl_wait()
        if is_written:
            if is_added:
                total = fixup(total, sums, before, group, TOKEN, BN, BM, ACC)
            store(
                total, y, row, m, M, N, scale, factor, bias,
                BM, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS, ACC, STORE_VECTOR,
            )  # fmt: skip
        else:
            store_partials(total, sums, group, TOKEN, BN, BM)


@gluon.jit
def store(
    sums, y, row, m, M, N, scale, factor, bias, BM: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr,
    HAS_FACTOR: gl.constexpr, HAS_BIAS: gl.constexpr, ACC: gl.constexpr, STORE_VECTOR: gl.constexpr,
):  # fmt: skip
    """Write y [M, N] = `sums` * scale / factor + bias for 64 outputs and BM rows of x.

    sums           float32 [64, BM] in layout ACC
    row            first output feature of the sums
    m              first row of x of the sums
    scale          one per output, encoded as SCALE; read only if GROUPS, groups of a row, is 1
    factor         float32 [1]: divides sums; read only if HAS_FACTOR
    bias [N]       read only if HAS_BIAS
    STORE_VECTOR   output features that a thread writes at once; it divides N
    """
    rows = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, ACC)), 1)
    out = apply_scale_and_bias(sums, rows, scale, factor, bias, N, GROUPS, SCALE, HAS_FACTOR, HAS_BIAS)
    # A thread writes STORE_VECTOR adjacent outputs, adjacent threads write adjacent vectors.
    THREADS_N: gl.constexpr = min(64 // STORE_VECTOR, 32)
    STORED: gl.constexpr = gl.BlockedLayout([STORE_VECTOR, 1], [THREADS_N, 32 // THREADS_N], [1, 4], [0, 1])
    # Tell Triton that N is a multiple of STORE_VECTOR; it only detects multiples of 16.
    N = N // STORE_VECTOR * STORE_VECTOR
    out = gl.convert_layout(out.to(y.dtype.element_ty), STORED)
    n = gl.expand_dims(row + gl.arange(0, 64, gl.SliceLayout(1, STORED)), 1)
    m = gl.expand_dims(m + gl.arange(0, BM, gl.SliceLayout(0, STORED)), 0)
    gl.store(y + m.to(gl.int64) * N + n, out, mask=(m < M) & (n < N))
