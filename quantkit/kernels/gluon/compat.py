"""Names of Gluon that moved between Triton 3.6 and 3.9; only this module uses both names of each.

Names that are the same in all of them are imported from Triton where they are used.

Kernels use the names of the newest version:

    newest                  until      older
    async_copy.async_load   3.7        async_copy.async_copy_global_to_shared
    tma.async_load          3.7        tma.async_copy_global_to_shared
    memory.reinterpret      3.8        memory._reinterpret
    gl.barrier              3.6        gl.thread_barrier

The names are looked up in the library, not derived from its version.
"""
# mypy: ignore-errors

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import tma

#: `async_load(shared memory, pointers, mask=)`: each thread copies, cp.async.
async_load = getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
#: `tma_load(descriptor, at, barrier, shared memory, pred)`: the TMA unit copies, cp.async.bulk.tensor.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

#: Barrier of the threads of a program, or of one partition of its warps: bar.sync.
barrier = getattr(gl, "barrier", None) or gl.thread_barrier

_REINTERPRET = "reinterpret" if hasattr(gl.shared_memory_descriptor, "reinterpret") else "_reinterpret"


@builtin
def reinterpret(memory, dtype, shape, layout, _semantic=None):
    """View shared memory with another `dtype`, `shape` and `layout` of the same number of bytes."""
    return getattr(memory, _REINTERPRET)(dtype, shape, layout, _semantic=_semantic)


@builtin
def in_flight(accumulator, _semantic=None):
    """Return the accumulator of a running `wgmma` as a tensor of the same shape, without waiting.

    Pass the result to inline PTX that waits for the `wgmma`. The values are valid only after that wait.
    """
    return gl.tensor(accumulator.handle, accumulator.type.tensor_type)
