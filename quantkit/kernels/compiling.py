"""Kernels compiled side by side, where a run launches several that never were.

Triton compiles a kernel when it is first launched, and the launch waits for it: those of a model take more
than ten seconds one after the other, on a machine that has cores for all of them. Here a run that comes to
such a kernel goes on without launching, so that all that it needs are known; they are compiled, and it runs.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import torch

from quantkit.kernels.problem import device_features

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
        if needed:
            return found.result() if hasattr(found, "result") else found
        if self.leave_out or not hasattr(found, "result"):
            return None if self.leave_out else found
        self.leave_out = not wait([found.future], WAIT).done
        return None if self.leave_out else found.result()


#: What compiles the kernels of the run that this is part of; None where launches wait for their kernel.
COMPILERS: ContextVar[Compilers | None] = ContextVar("compilers", default=None)


@contextmanager
def nothing_left_out() -> Iterator[None]:
    """A block all of whose launches are made, as what they write is kept after the run."""
    token = COMPILERS.set(None)
    try:
        yield
    finally:
        COMPILERS.reset(token)


def compiled_first(
    device: torch.device, run: Callable[[], _Result], rewind: Callable[[], None] | None = None
) -> _Result:
    """`run()`, which launches kernels on `device`; those that have to be compiled are, side by side, before.

    With all kernels in memory, or read from Triton's cache within `WAIT`, `run` is called once. Else it is
    called twice, and what kernels write in the first call is undefined, but for indices
    (`launcher.IndexLaunch`) and layouts of weights (`building`). `rewind` takes back what that call changed.
    """
    if device.type != "cuda" or "triton" not in device_features(device) or COMPILERS.get() is not None:
        return run()
    try:
        from triton import knobs
        from triton.runtime._async_compile import active_mode
    except ImportError:
        # It compiles one kernel after the other.
        return run()
    if knobs.runtime.interpret or active_mode.get() is not None:
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
    result = None
    with _Pool(cores()) as pool:
        # Errors of the compiler come again where the kernel is launched.
        mode = AsyncCompileMode(pool, ignore_errors=True)
        try:
            mode.__enter__()
            try:
                result = (run(),)
            except Exception:
                # It may have refused what is undefined.
                if not compilers.leave_out:
                    raise
            # Not as a block, whose end would wait for what is cancelled, and that never ends.
            mode.__exit__(None, None, None)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return None if compilers.leave_out else result


class _Pool(ThreadPoolExecutor):
    """Threads that compile kernels, and after each what launches it: C, which is cached on the disk too."""

    def submit(self, compile_kernel: Callable[[], Any], /, *_: Any, **__: Any) -> Future[Any]:
        return super().submit(_with_launcher, compile_kernel)


def _with_launcher(compile_kernel: Callable[[], Any]) -> Any:
    from triton.runtime.driver import driver

    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)
    return kernel


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
