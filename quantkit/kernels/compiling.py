"""Kernels compiled side by side, where a run launches several that never were.

Triton compiles a kernel when it is first launched, and the launch waits for it: those of a model take more
than ten seconds one after the other, on a machine that has cores for all of them. Here a run that comes to
such a kernel goes on without launching, so that all that it needs are known; they are compiled, and it runs.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import torch

#: Seconds in which Triton has read a kernel from its cache on the disk.
WAIT = 0.1

_Result = TypeVar("_Result")


class Compilers:
    """What compiles the kernels of one run."""

    def __init__(self) -> None:
        #: Whether launches are left out, as a kernel of the run is being compiled.
        self.leave_out = False

    def kernel(self, known: Any, compile_kernel: Callable[[], Any], needed: bool) -> Any:
        """The kernel to launch: what is `known`, else what `compile_kernel` gives, or promises.

        None where it is not to be launched; what is `needed` is waited for.
        """
        found = compile_kernel() if known is None else known
        if self.leave_out and not needed:
            return None
        if not hasattr(found, "future"):
            return found
        try:
            found.future.result(None if needed else WAIT)
        except TimeoutError:
            self.leave_out = True
            return None
        return found.result()


#: What compiles the kernels of the run that this is part of; None where launches wait for their kernel.
COMPILERS: ContextVar[Compilers | None] = ContextVar("compilers", default=None)


def compiled_first(
    device: torch.device, run: Callable[[], _Result], rewind: Callable[[], None] | None = None
) -> _Result:
    """`run()`, which launches kernels on `device`; those that have to be compiled are, side by side, before.

    With all kernels in memory or in Triton's cache `run` is called once. Else it is called twice, and what
    kernels write in the first call is undefined, but for indices (`launcher.IndexLaunch`). `rewind` takes
    back what that call changed.
    """
    if device.type != "cuda" or COMPILERS.get() is not None:
        return run()
    from triton import knobs

    if knobs.runtime.interpret:
        return run()
    # A context of its own, which Triton's mode does not outlive, whatever ends it.
    found = copy_context().run(_attempt, run)
    if found is not None:
        return found[0]
    if rewind is not None:
        rewind()
    return run()


def _attempt(run: Callable[[], _Result]) -> tuple[_Result] | None:
    """The result of `run`; None if it had to leave out launches, whose kernels are compiled now."""
    from triton import AsyncCompileMode

    compilers = Compilers()
    COMPILERS.set(compilers)
    # Errors of the compiler come again where the kernel is launched.
    with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
        try:
            result = run()
        except Exception:
            # It may have refused what is undefined.
            if not compilers.leave_out:
                raise
            return None
    return None if compilers.leave_out else (result,)
