"""x in shared memory, which all warps of a program have, and its products with what each has in registers.

Products are `mma` of each warp, done at once, or `wgmma` of four, which are under way until they are ended.
Written in Gluon, for `small_m_gemm`.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
)

from quantkit.kernels.gluon.compat import async_load, in_flight

#: Rows of x in shared memory: 256 bytes in places from which `ldmatrix` takes 16 of eight rows at once, or
#: 128 bytes where `wgmma` finds them.
ROWS_FOR_MMA = gl.constexpr(gl.SwizzledSharedLayout(8, 1, 8, [1, 0]))
ROWS_FOR_WGMMA = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.constexpr_function
def accumulator_layout(W: int, BM: int, WGMMA: bool) -> gl.NVMMADistributedLayout:
    """Sums [16 W, BM]: a warp has 16 rows."""
    if WGMMA:
        return gl.NVMMADistributedLayout([3, 0], [W, 1], [16, BM, 16])
    return gl.NVMMADistributedLayout([2, 0], [W, 1], [16, 8])


@gluon.jit
def stage_x_async(
    x, chunks, column, M, order, TOP_K: gl.constexpr, K: gl.constexpr, BLOCKS: gl.constexpr,
    BM: gl.constexpr, CHUNKS: gl.constexpr, W: gl.constexpr, WIDE: gl.constexpr,
):  # fmt: skip
    """Have x copied from `column` on, in chunks of BLOCKS times WIDE columns: rows [block, m] of WIDE, zeros
    from M on.
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
    """Until all chunks but the LATER ones are there, and what came with the first."""
    async_copy.wait_group(LATER)
    if WGMMA:
        # What reads x from now on is another unit than what wrote it.
        fence_async_shared()


@gluon.jit
def mma(total, q, row_scales, x, A: gl.constexpr, ON_SUMS: gl.constexpr):
    """Sums with the product of weights and 128 columns of x [BM, 128], ON_SUMS times the scales of rows."""
    q = gl.convert_layout(q, A, assert_trivial=True)
    columns = x.permute((1, 0)).load(gl.DotOperandLayout(1, A.parent, 2))
    if ON_SUMS:
        total += mma_v2(q, columns, gl.zeros_like(total)) * gl.expand_dims(row_scales, 1)
    else:
        total = mma_v2(q, columns, total)
    return total


@gluon.constexpr_function
def _in_place(count: int) -> str:
    """Constraints of PTX that takes `count` float32 registers and returns the same."""
    return ",".join([*["=f"] * count, *map(str, range(count))])


@gluon.jit
def _wait(product, BM: gl.constexpr):
    """Wait for the products that the warps of this group began; the sums of `product`, float32 [16 W, BM].

    Not `warpgroup_mma_wait`: from Triton 3.8 on that makes all W warps wait for each other, which took 1.07
    times as long (median of 48 products with 4 to 32 rows of x, an H200). Nobody writes x again.
    """
    # A thread has BM / 2 of the sums: 16 W * BM by 32 W threads.
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
    """A product that is under way, and the scales of its rows.

    Its 128 columns are multiplied in two halves, as the weights of all would take twice the registers.
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
    """Sums with a product that `start_mma` began."""
    product, row_scales = pending
    found = _wait(product, total.shape[1])
    if ON_SUMS:
        found = total + found * gl.expand_dims(row_scales, 1)
    return found
