"""Two small Gluon kernels with every operation of the GEMM kernels, to test if the installed Gluon compiles.

They are compiled only, never launched (`triton_support`). Written in Gluon.
"""
# mypy: ignore-errors

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from quantkit.kernels.gluon.compat import async_load, barrier, reinterpret

_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
_WIDE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_MMA = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8]))
_WGMMA = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))


@gluon.jit
def copy_and_multiply(x, y):
    """Compute y [64, 8] = x [64, 16] times ones [16, 8], by cp.async, reinterpreted smem and mma.sync.

    `x` points to int32, two bfloat16 in each; `y` points to float32. The kernel is compiled, never launched.
    """
    THREADS: gl.constexpr = gl.BlockedLayout([4], [32], [4], [0])
    A: gl.constexpr = gl.DotOperandLayout(0, _MMA, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, _MMA, 2)
    memory = gl.allocate_shared_memory(gl.int32, [512], _FLAT)
    async_load(memory, x + gl.arange(0, 512, THREADS))
    async_copy.commit_group()
    async_copy.wait_group(0)
    barrier()
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a = reinterpret(memory, gl.bfloat16, [64, 16], rows).load(A)
    b = gl.full([16, 8], 1.0, gl.bfloat16, B)
    total = mma_v2(a, b, gl.zeros([64, 8], gl.float32, _MMA))
    row = gl.arange(0, 64, gl.SliceLayout(1, _MMA))
    column = gl.arange(0, 8, gl.SliceLayout(0, _MMA))
    gl.store(y + gl.expand_dims(row, 1) * 8 + gl.expand_dims(column, 0), total)


@gluon.jit
def _fill(memory, ready):
    """Write bfloat16 ones to shared memory [64, 64], then arrive at the mbarrier `ready`, for `_multiply`."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    memory.store(gl.full([64, 64], 1.0, gl.bfloat16, LAYOUT))
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _multiply(memory, ready, y):
    """Wait for the mbarrier `ready`, multiply shared memory A [64, 64] by itself, and write y [64, 64] = A A.

    `y` points to float32.
    """
    mbarrier.wait(ready, 0)
    total = warpgroup_mma(memory, memory, gl.zeros([64, 64], gl.float32, _WGMMA), is_async=True)
    total = warpgroup_mma_wait(0, [total])
    row = gl.arange(0, 64, gl.SliceLayout(1, _WGMMA))
    column = gl.arange(0, 64, gl.SliceLayout(0, _WGMMA))
    gl.store(y + gl.expand_dims(row, 1) * 64 + gl.expand_dims(column, 0), total)


@gluon.jit
def specialize(x, y):
    """Compute y [64, 64] = A A, with A [64, 64] bfloat16 ones in shared memory, by warp specialization.

    One warp writes A, four multiply (mbarrier, wgmma). `y` points to float32; `x` is not read. The kernel is
    compiled, never launched.
    """
    memory = gl.allocate_shared_memory(gl.bfloat16, [64, 64], _WIDE)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    gl.warp_specialize([(_multiply, (memory, ready, y)), (_fill, (memory, ready))], [1], [24])
