"""Stage x in shared memory for all warps of a program, and multiply each warp's weights with it.

Products are `mma.m16n8k16` of one warp, which are synchronous, or `wgmma` of four warps, which are
asynchronous. For `small_m_gemm`. Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from quantkit.kernels.gluon.compat import async_load, in_flight

#: Swizzles of x in shared memory: rows of 256 bytes, of which `ldmatrix` reads 16 bytes of eight rows at
#: once, and rows of 128 bytes as `wgmma` requires.
ROWS_FOR_MMA = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ROWS_FOR_WGMMA = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.constexpr_function
def accumulator_layout(W: int, BM: int, WGMMA: bool) -> gl.NVMMADistributedLayout:
    """Return the register layout of the accumulator float32 [16 * W, BM]: 16 rows of the weight per warp.

    W is the number of warps, BM the number of rows of x. The layout is that of `wgmma` if WGMMA, else of
    `mma`.
    """
    if WGMMA:
        return gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BM, 16])
    return gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])


@gluon.jit
def stage_x_async(
    x, chunks, column, M, order, TOP_K: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr,
    BM: gl.constexpr, CHUNKS: gl.constexpr, W: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Start copying CHUNKS chunks of x [M, K], from `column` on, to shared memory `chunks`.

    A chunk is BLOCKS * WIDE columns of BM rows of x, cut into blocks of WIDE columns.

        chunks    shared memory [CHUNKS, BLOCKS * BM, WIDE]: row b * BM + m of a chunk is block b of row m
        M         rows from M on are zeros
        K         columns of x; columns from K on are zeros
        order     int32 [M]: routed tokens to copy; token p reads row p // TOP_K of x. None without experts
        W         number of warps

    Each chunk is one group of asynchronous copies; call `wait_for_x` before reading.
    """
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // WIDE, WIDE // 8], [W, 1], [1, 0])
    row = gl.expand_dims(gl.arange(0, BLOCKS * BM, gl.SliceLayout(1, LAYOUT)), 1)
    column += row // BM * WIDE + gl.expand_dims(gl.arange(0, WIDE, gl.SliceLayout(0, LAYOUT)), 0)
    m = gl.minimum(row % BM, M - 1)
    if order is not None:
        m = gl.load(order + m) // TOP_K
    at = x + m.to(gl.int64) * K + column
    for chunk in gl.static_range(CHUNKS):
        inside = (column + chunk * (BLOCKS * WIDE) < K) & (row % BM < M)
        async_load(chunks.index(chunk), at + chunk * (BLOCKS * WIDE), mask=inside)
        async_copy.commit_group()


@gluon.jit
def wait_for_x(LATER: gl.constexpr, WGMMA: gl.constexpr):
    """Wait until all chunks of `stage_x_async` have been copied, except the last LATER ones.

    Copies that were started before `stage_x_async` have ended too. If WGMMA, a fence follows, so that `wgmma`
    may read the chunks.
    """
    async_copy.wait_group(LATER)
    if WGMMA:
        # wgmma reads shared memory through another proxy than the one that wrote it.
        fence_async_shared()


@gluon.jit
def mma(total, q, row_scales, x, A: gl.constexpr, ON_SUMS: gl.constexpr):
    """Return `total` + `q` x^T, float32 [16 * W, BM], for 128 columns of K, by `mma` of W warps.

    total         accumulator float32 [16 * W, BM]
    q             dequantized weights [16 * W, 128] in registers
    x             shared memory [BM, 128]
    row_scales    float32 [16 * W]: if ON_SUMS, the result is `total` + row_scales * (`q` x^T)
    A             register layout of operand A, `q`
    """
    q = gl.convert_layout(q, A, assert_trivial=True)
    columns = x.permute((1, 0)).load(gl.DotOperandLayout(1, A.parent, 2))
    if ON_SUMS:
        total += mma_v2(q, columns, gl.zeros_like(total)) * gl.expand_dims(row_scales, 1)
    else:
        total = mma_v2(q, columns, total)
    return total


@gluon.constexpr_function
def _in_place(count: int) -> str:
    """Return constraints for inline PTX with `count` float32 registers that are both inputs and outputs."""
    return ",".join([*["=f"] * count, *map(str, range(count))])


@gluon.jit
def _wait(product, BM: gl.constexpr):
    """Wait for the running `wgmma` of this warp group; return its accumulator, float32 [16 * W, BM].

    Use the result in place of `product`, the accumulator of the call that started the `wgmma`.

    Not `warpgroup_mma_wait`: from Triton 3.8 on it synchronizes all W warps. That took 1.07 times as long
    (H200, median of 48 products with 4 to 32 rows of x). x is not overwritten, so no barrier is needed.
    """
    # A thread has BM / 2 sums: 16 W * BM over 32 W threads.
    return gl.inline_asm_elementwise(
        "wgmma.wait_group.sync.aligned 0;",
        _in_place(BM // 2),
        [in_flight(product)],
        gl.float32,
        is_pure=False,
        pack=BM // 2,
    )


@gluon.jit
def start_mma(total, q, row_scales, x_smem, at, A: gl.constexpr, ON_SUMS: gl.constexpr):
    """Start `total` + `q` x^T for 128 columns of K by `wgmma` of W warps; return the arguments of `wait_mma`.

        total         accumulator float32 [16 * W, BM]; if ON_SUMS, `wait_mma` adds it instead
        q             dequantized weights [16 * W, 128] in registers
        row_scales    float32 [16 * W]: if ON_SUMS, `wait_mma` multiplies the product by it
        x_smem        x in shared memory, [blocks, BM, 64]
        at            the 128 columns of x are blocks 2 * at and 2 * at + 1
        A             register layout of operand A, half of `q`

    Returns (the running product, float32 [16 * W, BM], `row_scales`). The 128 columns are multiplied in two
    halves. Only the second is still running: operand A of all columns would take twice the registers.
    """
    first, second = gl.split(gl.permute(gl.reshape(q, (q.shape[0], 2, 64)), (0, 2, 1)))
    first = gl.convert_layout(first, A, assert_trivial=True)
    x = x_smem.index(2 * at).permute((1, 0))
    if ON_SUMS:
        product = warpgroup_mma(first, x, gl.zeros_like(total), use_acc=False, is_async=True)
    else:
        product = warpgroup_mma(first, x, total, is_async=True)
    product = _wait(product, total.shape[1])
    second = gl.convert_layout(second, A, assert_trivial=True)
    product = warpgroup_mma(second, x_smem.index(2 * at + 1).permute((1, 0)), product, is_async=True)
    return product, row_scales


@gluon.jit
def wait_mma(total, pending, ON_SUMS: gl.constexpr):
    """Wait for the product that `start_mma` started; return the new accumulator, float32 [16 * W, BM].

        total      the accumulator [16 * W, BM] that `start_mma` was given
        pending    result of `start_mma`: the running product [16 * W, BM], and row scales [16 * W]

    If ON_SUMS, the result is `total` + row scales * product. Otherwise it is the product, which already
    contains `total`.
    """
    product, row_scales = pending
    found = _wait(product, total.shape[1])
    if ON_SUMS:
        found = total + found * gl.expand_dims(row_scales, 1)
    return found
