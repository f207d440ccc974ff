"""WGMMA GEMM of 8-bit operands for Hopper, any M: y^T = W x^T with x rounded to int8 or e4m3.

    producer, 1 warp         TMA: codes and scales of W, x, and scales or sums of x -> ring of STAGES buffers
    consumer 0, 4 warps      rows 0 to 63 of W: codes -> registers -> a byte each -> A of wgmma
    consumer 1, 4 warps      rows 64 to 127

Barriers, persistent tiles and stream-K are those of `wgmma_gemm`. Tensor cores multiply bytes, twice as many
a cycle as 16-bit values. Codes are not dequantized, only unpacked to a byte each:

    8 bits     the byte is the number: e4m3 as it is, int8 with its highest bit flipped
    4, 2       code c is the byte c: the integer c, or c * 2^-9 as e4m3, whose subnormals are evenly spaced

So weight = scale * (UNIT * byte + OFFSET), and the constant part is a product with a sum:

    y [n, m] = sum over groups g of  scale [n, g] * (UNIT * sum of byte * x + OFFSET * sum of x [m, g])

A register has four codes of a row in its bytes after each shift by BITS, the bits of a code. Their columns
lie half a span apart; a span is the columns stored in the same registers. So x has its columns in that order
(`ops.quantize_x`): c and c + span / 2 next to each other.

    int4, span 64      31..28 27..24 23..20 19..16 15..12 11..8  7..4  3..0      bits of a register
    (register >> 0)           c+33          c+1           c+32         c         & 0x0F0F0F0F: one A register
    (register >> 4)    c+49          c+17          c+48         c+16             & 0x0F0F0F0F: the next

Sums of e4m3 products have some 14 bits in the tensor cores. If PROMOTE, they are added to float32 sums every
128 columns, which a group or an offset needs as well.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quantkit.kernels.gemm.portable.portable_gemm_kernel import tile_coordinates
from quantkit.kernels.gemm.wgmma.wgmma_kernel import store
from quantkit.kernels.gluon.compat import tma_load
from quantkit.kernels.gluon.dequant_fragment import codes_layout, pdl_launch_dependents, pdl_wait
from quantkit.kernels.gluon.scales_smem import dequant_scales, scale_words_layout
from quantkit.kernels.gluon.stream_k import first_contributor, fixup, store_partials, work_range, work_tile

#: Rows of W of a tile: 64 per consumer.
BN = gl.constexpr(128)


@gluon.jit(do_not_specialize=["M", "WHOLE_TILES", "STEPS_PER_PROGRAM", "TILE_STRIDE", "STEPS", "TOKEN"])
def wgmma_8bit_gemm(
    x, codes, scales, block_values, x_scale, scale, bias, y, sums, M, N, WHOLE_TILES, STEPS_PER_PROGRAM,
    TILE_STRIDE, STEPS, TOKEN, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr, SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr, FRAGMENTS: gl.constexpr, FLIPPED: gl.constexpr, UNIT: gl.constexpr,
    OFFSET: gl.constexpr, X_GROUPS: gl.constexpr, PROMOTE: gl.constexpr, DTYPE: gl.constexpr,
    BM: gl.constexpr, MMA_M: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, STORE_VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Compute y [M, N] = x [M, K] W^T for any M, by output tiles of 128 rows of W times BM rows of x.

    x is quantized to DTYPE, int8 or e4m3. A step is BLOCKS times 128 columns. Grid: (programs,). TMA
    descriptors; x takes the place of one that is not needed:

        x              codes of x [M, K], DTYPE, box [rows, 128]
        codes          codes of W, of `bits` bits, int32 [N / 16, K * bits / 256, 128], box [8, bits / 2, 128]
        scales         of W if GROUPS > 1, as words int32 [N / 16, blocks * 8], box [8, 8]
        block_values   float32 [K / 128, rows of x], box [1, BM]: scales of x if X_GROUPS, or sums of its
                       codes if OFFSET is not 0

    Pointers:

        x_scale float32 [M]   one per row of x; read only if not X_GROUPS
        scale [N / 16 * 16]   one per row of W, in the order of the fragment layout; read only if GROUPS is 1
        bias [N]              read only if HAS_BIAS
        y [M, N]              output
        sums float32          partial sums and flags of stream-K (`gluon/stream_k.py`)

        WHOLE_TILES           number of output tiles that programs do not share
        STEPS_PER_PROGRAM     steps of shared tiles that each program computes
        TILE_STRIDE           steps from the first step of a shared tile to that of the next
        TOKEN                 value of the flags of this launch, which no other launch has
        GROUPS                1: one scale per row of W; 2: several
        PER_BLOCK             columns that share a scale
        SCALE                 encoding of 8-bit scales (`scale_kind`); "" for wider ones
        FRAGMENTS             codes of a 16-bit half of a register: 2, 4 or 8 for codes of 8, 4 or 2 bits
        FLIPPED               mask of bits of 8-bit codes that are flipped
        UNIT, OFFSET          a weight is scale * (UNIT * byte + OFFSET)
        X_GROUPS              True if x has a scale per row and 128 columns
        PROMOTE               True to add the sums of every 128 columns to float32 sums
        BM                    rows of x of an output tile
        MMA_M                 rows of x that are multiplied at a time
        STAGES                buffers of x and W in shared memory, of a step each
        STEPS                 steps of a row; codes of x beyond K are 0
        GROUP_M               output tiles with the same rows of W that run next to each other
        STORE_VECTOR          values that a thread stores at once; it divides N
        PDL                   True if launched with programmatic dependent launch
    """
    TMA_ROWS: gl.constexpr = x.block_shape[0]
    HAS_VALUES: gl.constexpr = X_GROUPS or OFFSET != 0.0
    x_smem = gl.allocate_shared_memory(DTYPE, [STAGES * BLOCKS, BM, 128], x.layout)
    codes_smem = gl.allocate_shared_memory(
        gl.int32, [STAGES * BLOCKS, BN // 16, codes.block_shape[1], 128], codes.layout
    )
    scales_smem = x_smem
    if GROUPS > 1:
        scales_smem = gl.allocate_shared_memory(gl.int32, [STAGES * BLOCKS, BN // 16, 8], scales.layout)
    values_smem = x_smem
    if HAS_VALUES:
        values_smem = gl.allocate_shared_memory(gl.float32, [STAGES * BLOCKS, 1, BM], block_values.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(full.index(stage), count=BLOCKS * (BM // TMA_ROWS + 1))
        mbarrier.init(empty.index(stage), count=BN // 64)
    smem = (x_smem, codes_smem, scales_smem, values_smem, full, empty)
    work = (M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS)
    operands = (x_scale, scale, bias, y, sums, TOKEN)
    # Arguments are repeated, because constexprs stay constexprs only in the call itself.
    gl.warp_specialize([
        (_consumer, (
            0, smem, work, operands, GROUPS, SCALE, HAS_BIAS, FRAGMENTS, FLIPPED, UNIT, OFFSET, X_GROUPS,
            PROMOTE, DTYPE, BM, MMA_M, BLOCKS, STAGES, GROUP_M, STORE_VECTOR, PDL,
        )),
        (_consumer, (
            1, smem, work, operands, GROUPS, SCALE, HAS_BIAS, FRAGMENTS, FLIPPED, UNIT, OFFSET, X_GROUPS,
            PROMOTE, DTYPE, BM, MMA_M, BLOCKS, STAGES, GROUP_M, STORE_VECTOR, PDL,
        )),
        (_producer, (
            x, codes, scales, block_values, smem, work, GROUPS, PER_BLOCK, HAS_VALUES, BM, BLOCKS, STAGES,
            GROUP_M, PDL,
        )),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def _producer(
    x, codes, scales, block_values, smem, work, GROUPS: gl.constexpr, PER_BLOCK: gl.constexpr,
    HAS_VALUES: gl.constexpr, BM: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: copy codes and scales of W, and codes of x [M, K], to shared memory by TMA.

    Blocks are copied in the order in which `_consumer` reads them. Boxes that begin beyond row M of x are not
    copied; their outputs are not stored.

        x, codes, scales     TMA descriptors, as in `wgmma_8bit_gemm`
        block_values         TMA descriptor of scales of x, or of sums; copied only if HAS_VALUES
        smem                 shared memory for these four, and barriers: a buffer is full, or empty
        work                 (M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS): how programs share
                             output tiles of y [M, N] (`gluon/stream_k.py`)
        GROUPS               1: one scale per row of W, which is not copied
        PER_BLOCK            columns that share a scale
        BM                   rows of x of an output tile
        GROUP_M              output tiles with the same rows of W that run next to each other
        BLOCKS               blocks of 128 columns of a buffer
        STAGES               buffers
        PDL                  True to wait for the kernel before (programmatic dependent launch)
    """
    x_smem, codes_smem, scales_smem, values_smem, full, empty = smem
    M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS = work
    if PDL:
        pdl_launch_dependents()
        pdl_wait()
    TMA_ROWS: gl.constexpr = x.block_shape[0]
    CODE_ROWS: gl.constexpr = codes.block_shape[1]
    BYTES: gl.constexpr = BN * (32 * CODE_ROWS + (2 if GROUPS > 1 else 0)) + (4 * BM if HAS_VALUES else 0)
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, BN)
    whole, work_items, begin, end, has_partial = work_range(
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS, BN, BM
    )
    count = 0
    for number in range(work_items):
        tile, first, last = work_tile(number, whole, begin, end, has_partial, WHOLE_TILES, TILE_STRIDE, STEPS)
        pm, pn = tile_coordinates(tile, columns, rows, GROUP_M)
        for step in range(first, last):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), count // STAGES % 2 ^ 1)
            for i in gl.static_range(BLOCKS):
                block, buffer = step * BLOCKS + i, stage * BLOCKS + i
                mbarrier.expect(full.index(stage), BYTES)
                at = [pn * (BN // 16), block * CODE_ROWS, 0]
                tma_load(codes, at, full.index(stage), codes_smem.index(buffer))
                if GROUPS > 1:
                    at = [pn * (BN // 16), block * 128 // PER_BLOCK * 8]
                    tma_load(scales, at, full.index(stage), scales_smem.index(buffer))
                if HAS_VALUES:
                    tma_load(block_values, [block, pm * BM], full.index(stage), values_smem.index(buffer))
                for box in gl.static_range(BM // TMA_ROWS):
                    row = pm * BM + box * TMA_ROWS
                    mbarrier.expect(full.index(stage), TMA_ROWS * 128, row < M)
                    mbarrier.arrive(full.index(stage), count=1, pred=row >= M)
                    to = x_smem.index(buffer).slice(box * TMA_ROWS, TMA_ROWS, 0)
                    tma_load(x, [row, block * 128], full.index(stage), to, row < M)
            count += 1


@gluon.jit
def _consumer(
    group: gl.constexpr, smem, work, operands, GROUPS: gl.constexpr, SCALE: gl.constexpr,
    HAS_BIAS: gl.constexpr, FRAGMENTS: gl.constexpr, FLIPPED: gl.constexpr, UNIT: gl.constexpr,
    OFFSET: gl.constexpr, X_GROUPS: gl.constexpr, PROMOTE: gl.constexpr, DTYPE: gl.constexpr,
    BM: gl.constexpr, MMA_M: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    GROUP_M: gl.constexpr, STORE_VECTOR: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """Run a consumer warp group: multiply its 64 rows of each tile of W [128, K] with x [BM, K].

    For every output tile the group waits for blocks of x and codes, unpacks codes to bytes, and multiplies.
    It writes y [M, N] or partial sums.

        group      index of the group, which has rows 64 * `group` to 64 * `group` + 63
        smem       buffers and barriers: the argument of `_producer`
        work       (M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS)
        operands   (x_scale, scale, bias, y, sums, TOKEN)
        PDL        True to write only after the kernel before has ended (programmatic dependent launch)

    The contents of `work` and `operands`, and the other constexprs, are those of `wgmma_8bit_gemm`.
    """
    x_smem, codes_smem, scales_smem, values_smem, full, empty = smem
    M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS = work
    x_scale, scale, bias, y, sums, TOKEN = operands
    SUM: gl.constexpr = gl.int32 if DTYPE == gl.int8 else gl.float32
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MMA_M, 32])
    PARTS: gl.constexpr = BM // MMA_M
    columns, rows = gl.cdiv(M, BM), gl.cdiv(N, BN)
    whole, work_items, begin, end, has_partial = work_range(
        M, N, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE, STEPS, BN, BM
    )
    count = 0
    for number in range(work_items):
        tile, first, last = work_tile(number, whole, begin, end, has_partial, WHOLE_TILES, TILE_STRIDE, STEPS)
        pm, pn = tile_coordinates(tile, columns, rows, GROUP_M)
        totals = ()
        for _ in gl.static_range(PARTS):
            totals = totals + (gl.zeros([64, MMA_M], gl.float32 if PROMOTE else SUM, ACC),)
        mbarrier.wait(full.index(count % STAGES), count // STAGES % 2)
        words = _load_codes(codes_smem.index(count % STAGES * BLOCKS), group, FRAGMENTS)
        for step in range(first, last):
            stage = count % STAGES
            for block in gl.static_range(BLOCKS):
                buffer = stage * BLOCKS + block
                kept = _unpack(words, FRAGMENTS, FLIPPED)
                x, weights = x_smem.index(buffer), _operand(kept, FRAGMENTS, DTYPE, ACC)
                if PROMOTE:
                    factor = _row_factor(
                        scales_smem, buffer, group, GROUPS, SCALE, scale.dtype.element_ty, ACC
                    )
                added = ()
                for i in gl.static_range(PARTS):
                    begin_sum = gl.zeros([64, MMA_M], SUM, ACC) if PROMOTE else totals[i]
                    rows_of_x = x.slice(i * MMA_M, MMA_M, 0).permute((1, 0))
                    part = warpgroup_mma(weights, rows_of_x, begin_sum, use_acc=not PROMOTE, is_async=True)
                    if PROMOTE:
                        x_values = _load_values(values_smem, buffer, i, MMA_M, X_GROUPS or OFFSET != 0.0, ACC)
                    if i == PARTS - 1:
                        # Load the next codes meanwhile.
                        following = buffer + 1
                        if block == BLOCKS - 1:
                            after = count + 1
                            if step + 1 < last:
                                mbarrier.wait(full.index(after % STAGES), after // STAGES % 2)
                            following = after % STAGES * BLOCKS
                        words = _load_codes(codes_smem.index(following), group, FRAGMENTS)
                    part = _wait(part, kept)
                    if i == PARTS - 1 and block == BLOCKS - 1:
                        mbarrier.arrive(empty.index(stage), count=1)
                    if PROMOTE:
                        part = _promote(totals[i], part, factor, x_values, UNIT, OFFSET, X_GROUPS)
                    added = added + (part,)
                totals = added
            count += 1
        row = pn * BN + group * 64
        before = first_contributor(tile, WHOLE_TILES, STEPS_PER_PROGRAM, TILE_STRIDE)
        if PDL:
            # The kernel before this one may still read the memory that this one writes.
            pdl_wait()
        for i in gl.static_range(PARTS):
            m = pm * BM + i * MMA_M
            total = totals[i].to(gl.float32)
            if last == STEPS:
                if first > 0:
                    total = fixup(total, sums, before, group * PARTS + i, TOKEN, BN * PARTS, MMA_M, ACC)
                if not X_GROUPS:
                    at = m + gl.arange(0, MMA_M, gl.SliceLayout(0, ACC))
                    total *= gl.expand_dims(gl.load(x_scale + at, mask=at < M, other=0.0), 0)
                store(
                    total, y, row, m, M, N, scale, None, bias,
                    MMA_M, GROUPS, SCALE, False, HAS_BIAS, ACC, STORE_VECTOR,
                )  # fmt: skip
            else:
                store_partials(total, sums, group * PARTS + i, TOKEN, BN * PARTS, MMA_M)


@gluon.jit
def _row_factor(
    scales_smem, buffer, group: gl.constexpr, GROUPS: gl.constexpr, SCALE: gl.constexpr, STORED: gl.constexpr,
    ACC: gl.constexpr,
):  # fmt: skip
    """Return the scales of 64 rows of W for the 128 columns of a buffer, float32 [64]; ones if GROUPS is 1.

    scales_smem    shared memory int32 [buffers, row tiles, 8]; a row tile is 16 rows
    buffer         index of the buffer
    group          warp group, which has rows 64 * `group` to 64 * `group` + 63
    STORED, SCALE  dtype of scales, and encoding of 8-bit scales
    ACC            register layout of the sums, which the result matches
    """
    ROWS: gl.constexpr = gl.SliceLayout(1, ACC)
    if GROUPS > 1:
        words = scales_smem.index(buffer).slice(group * 4, 4, 0).load(scale_words_layout(4, 1))
        values = gl.reshape(dequant_scales(words, STORED, SCALE, gl.float32, 1, 4), (64,))
        factor = gl.convert_layout(values, ROWS, assert_trivial=True)
    else:
        factor = gl.full([64], 1.0, gl.float32, ROWS)
    return factor


@gluon.jit
def _load_values(
    values_smem, buffer, i: gl.constexpr, MMA_M: gl.constexpr, HAS_VALUES: gl.constexpr, ACC: gl.constexpr
):
    """Return scales, or sums of codes, of MMA_M rows of x for the 128 columns of a buffer: float32 [MMA_M].

    `values_smem`, shared memory float32 [buffers, 1, BM], has either scales or sums. `buffer` is the index of
    the buffer; the rows begin at `i` * MMA_M. ACC is the register layout of the sums, which the result
    matches. If not HAS_VALUES, return 0.
    """
    if HAS_VALUES:
        row = values_smem.index(buffer).slice(i * MMA_M, MMA_M, 1).load(_values_layout(MMA_M))
        x_values = gl.convert_layout(gl.reshape(row, (MMA_M,)), gl.SliceLayout(0, ACC), assert_trivial=True)
    else:
        x_values = 0
    return x_values


@gluon.constexpr_function
def _values_layout(BM: int) -> gl.DistributedLinearLayout:
    """Return the register layout of one number per row of x, [1, BM], that matches accumulators [64, BM]."""
    registers = [[0, 1]] + [[0, 1 << bit] for bit in range(3, BM.bit_length() - 1)]
    lanes = [[0, 2], [0, 4], [0, 0], [0, 0], [0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, [[0, 0], [0, 0]], [], [1, BM])


@gluon.jit
def _promote(
    total, part, factor, x_values, UNIT: gl.constexpr, OFFSET: gl.constexpr, X_GROUPS: gl.constexpr
):  # fmt: skip
    """Return `total` [64 rows of W, MMA_M rows of x] plus the scaled product of 128 columns, in float32.

    A weight is factor * (UNIT * byte + OFFSET), so the sum is:

        total + factor * (UNIT * part * scales of x + OFFSET * sum of codes of x)

        part      products of bytes and codes of x, summed: int32 or float32, shaped like `total`
        factor    float32 [64]: scales of rows of W
        x_values  float32 [MMA_M]: scales of rows of x if X_GROUPS; sums of codes of x if OFFSET is not 0
    """
    part = part.to(gl.float32)
    if X_GROUPS:
        part *= gl.expand_dims(x_values, 0)
    total += part * gl.expand_dims(factor * UNIT, 1)
    if OFFSET != 0.0:
        total += gl.expand_dims(factor * OFFSET, 1) * gl.expand_dims(x_values, 0)
    return total


@gluon.jit
def _load_codes(codes_smem, group: gl.constexpr, FRAGMENTS: gl.constexpr):
    """Load the packed codes of 128 columns and 64 rows of W from shared memory: int32 [4, C, 128].

    Warp group `group` has four row tiles (16 rows of W each). C = 8 / FRAGMENTS is the number of spans: 16 *
    FRAGMENTS columns whose codes are stored in the same registers. `codes_smem` is one buffer.
    """
    return codes_smem.slice(group * 4, 4, 0).load(codes_layout(4, 8 // FRAGMENTS))


@gluon.jit
def _unpack(words, FRAGMENTS: gl.constexpr, FLIPPED: gl.constexpr):
    """Unpack codes to a byte each: `words` int32 [4, C, 128] to a tuple of FRAGMENTS / 2 such tensors.

    A word has FRAGMENTS codes in each half. Tensor i has the words shifted right by i codes and masked. Bytes
    of 8-bit codes are XORed with FLIPPED instead. C is the number of spans, the columns whose codes are
    stored in the same registers. For int4:

        bits of a word    31..28 27..24 23..20 19..16 15..12 11..8  7..4  3..0
        code              h      g      f      e      d      c      b     a
        tensor 0                 g             e             c            a        bytes
        tensor 1                 h             f             d            b        bytes
    """
    BITS: gl.constexpr = 16 // FRAGMENTS
    unpacked = ()
    for i in gl.static_range(FRAGMENTS // 2):
        unpacked = unpacked + ((words >> (i * BITS)) & _mask(BITS) if BITS < 8 else words ^ FLIPPED,)
    return unpacked


@gluon.jit
def _operand(unpacked, FRAGMENTS: gl.constexpr, DTYPE: gl.constexpr, ACC: gl.constexpr):
    """View unpacked bytes of weights as operand A of `wgmma`, DTYPE [64 rows, 128 columns].

    Bytes stay in their registers. `unpacked` is the result of `_unpack`: FRAGMENTS / 2 tensors int32 [4, C,
    128]. ACC is the register layout of the sums.
    """
    SHIFTS: gl.constexpr = FRAGMENTS // 2
    C: gl.constexpr = 8 // FRAGMENTS
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, ACC, 4)
    shifted = ()
    for i in gl.static_range(SHIFTS):
        shifted = shifted + (_bytes(unpacked[i], C),)
    if SHIFTS == 1:
        q = shifted[0]
    elif SHIFTS == 2:
        q = gl.join(shifted[0], shifted[1])
    elif SHIFTS == 4:
        q = gl.join(gl.join(shifted[0], shifted[2]), gl.join(shifted[1], shifted[3]))
    # (row tile, span, r, t, e1, row // 8, byte, shift) -> rows, columns
    q = gl.permute(gl.reshape(q, (4, C, 8, 4, 2, 2, 4, SHIFTS)), (0, 5, 2, 1, 7, 4, 3, 6))
    q = gl.reshape(q, (64, 128)).to(DTYPE, bitcast=True)
    return gl.convert_layout(q, OPERAND, assert_trivial=True)


@gluon.jit
def _wait(sums, kept):
    """Wait for the running `wgmma` that computes `sums` [64, MMA_M]; return the finished sums.

    `kept` are the 1, 2 or 4 tensors int32 [4, C spans, 128] of operand A. They are kept in their registers
    until the `wgmma` has read them.
    """
    if len(kept) == 1:
        sums, _ = warpgroup_mma_wait(0, [sums, kept[0]])
    elif len(kept) == 2:
        sums, _, _ = warpgroup_mma_wait(0, [sums, kept[0], kept[1]])
    else:
        sums, _, _, _, _ = warpgroup_mma_wait(0, [sums, kept[0], kept[1], kept[2], kept[3]])
    return sums


@gluon.constexpr_function
def _mask(BITS: int) -> int:
    """Return the int32 that masks the lowest BITS bits of each of its four bytes: 0x0F0F0F0F for 4."""
    mask = ((1 << BITS) - 1) * 0x01010101
    return mask - (1 << 32) if mask >> 31 else mask


@gluon.jit
def _bytes(words, C: gl.constexpr):
    """View words int32 [4, C, 128] as bytes int8 [4, C, 128, 4], lowest first, in the same registers."""
    # Inline PTX takes as many elements as it gives: four copies of a word for its four bytes.
    pairs = gl.join(words, words)
    four = gl.reshape(gl.join(pairs, pairs), (4, C, 128, 4))
    return gl.inline_asm_elementwise("mov.b32 $0, $1; // bytes", "=r,r,r,r,r", [four], gl.int8, True, 4)
