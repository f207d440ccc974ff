"""Gluon's names in Triton 3.6 to 3.9, which moved: the only place that knows more than one of them.

Kernels are written in the words of the newest version. Older ones have other names for the same:

    newest                  until      older
    async_copy.async_load   3.7        async_copy.async_copy_global_to_shared
    tma.async_load          3.7        tma.async_copy_global_to_shared
    memory.reinterpret      3.8        memory._reinterpret
    gl.barrier              3.6        gl.thread_barrier

Which one there is is asked of the library, never read from its version.
"""

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: Copies of each thread, `async_load(shared memory, pointers, mask=)`: cp.async.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: Copies of the TMA unit, `tma_load(descriptor, at, barrier, shared memory, pred)`: cp.async.bulk.tensor.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

#: A barrier of the threads of a program, or of its warps that do the same: bar.sync.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_REINTERPRET = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """The shared memory `memory` seen as `dtype` in `shape` and `layout`, of as many bytes; none moves."""
    return getattr(memory, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)


@builtin
def in_flight(accumulator, _semantic=None):
    """The tensor of sums that an asynchronous product writes, before it is waited for."""
    return gl.tensor(accumulator.handle, accumulator.type.tensor_type)
