"""Compile all kernels of a run, such as a forward pass, in parallel, before they are launched.

Triton compiles a kernel at its first launch, and the launch waits. The kernels of a model take more than 10 s
one after the other, on machines with cores for all of them.

So a run that meets an uncompiled kernel goes on without launching, to find all kernels that it needs. They
are compiled in a pool, and the run starts again.
"""

import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any, TypeVar

import torch

from quantkit.kernels.problem import device_features

logger = logging.getLogger("quantkit.kernels")

#: Most kernels compiled at once; each takes a process of more than 100 MB.
MOST_AT_ONCE = 16

_Result = TypeVar("_Result")


class Compilers:
    """State of a run, such as a forward pass, whose kernels are compiled in parallel.

    While `leave_out` is True, launches are skipped: results are wrong, and the run has to be repeated.
    """

    def __init__(self) -> None:
        #: True once launches are skipped, because a kernel of the run is being compiled.
        self.leave_out = False

    def kernel(self, known: Any, compile_kernel: Callable[[], Any], needed: bool) -> Any:
        """Return the compiled kernel to launch; None to skip the launch.

            known            the compiled kernel if it is in memory, else None
            compile_kernel   returns the kernel from Triton's cache, or a future while it is being compiled
            needed           True to wait for the future and return its kernel, so that no launch is skipped

        Once a kernel that is not `needed` is still being compiled, its launch and all later ones are skipped.
        """
        found = compile_kernel() if known is None else known
        is_promise = hasattr(found, "result")
        if needed:
            return found.result() if is_promise else found
        self.leave_out |= is_promise
        return None if self.leave_out else found


#: State of the current run; None if launches wait for their kernel.
COMPILERS: ContextVar[Compilers | None] = ContextVar("compilers", default=None)


@contextmanager
def nothing_left_out() -> Iterator[None]:
    """Context manager: launches inside wait for their kernels and none is skipped (`compiled_first`).

    For launches whose results are kept after the run.
    """
    token = COMPILERS.set(None)
    try:
        yield
    finally:
        COMPILERS.reset(token)


def compiled_first(
    device: torch.device,
    run: Callable[[], _Result],
    rewind: Callable[[], None] | None = None,
    ahead: Callable[[_Result], object] | None = None,
) -> _Result:
    """Call `run`, which launches kernels on `device`, and return its result; compile its kernels in parallel.

    If all kernels are in memory or in Triton's cache on disk, `run` is called once. Otherwise it is called
    twice: the first call finds the kernels to compile, the second one computes the result.

    The first call skips launches from the first missing kernel on, so its tensors have undefined values.
    Never skipped are launches that compute indices (`launcher.IndexLaunch`) or build kernel layouts of
    weights (`building.building`).

        rewind    undoes what the first call changed; None if that is nothing
        ahead     takes the result of the first call and launches the kernels that follow `run`, so that they
                  are compiled too; exceptions of `ahead` are logged
    """
    if device.type != "cuda" or "triton" not in device_features(device) or COMPILERS.get() is not None:
        return run()
    try:
        from triton import knobs
        from triton.runtime._async_compile import active_mode
    except ImportError:
        # This Triton compiles one kernel after the other.
        return run()
    if knobs.runtime.interpret or active_mode.get() is not None:
        return run()
    # In a separate context, so that Triton's mode ends with it in any case.
    found = copy_context().run(_attempt, run, rewind, ahead)
    if found is not None:
        return found[0]
    if rewind is not None:
        rewind()
    return run()


def _attempt(
    run: Callable[[], _Result],
    rewind: Callable[[], None] | None,
    ahead: Callable[[_Result], object] | None,
) -> tuple[_Result] | None:
    """Call `run` once and compile its kernels; return (its result,), or None if launches were skipped.

    `rewind` and `ahead` are those of `compiled_first`.
    """
    from quantkit.kernels.jit.side_by_side import SideBySide

    compilers = Compilers()
    COMPILERS.set(compilers)
    with ThreadPoolExecutor(min(cores(), MOST_AT_ONCE)) as pool:
        # Compiler errors are raised again at the launch.
        mode = SideBySide(pool, ignore_errors=True)
        try:
            mode.__enter__()
            result = _launched(compilers, run, rewind, ahead)
            # Not a `with` block: its end would wait forever for cancelled jobs.
            mode.__exit__(None, None, None)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return None if compilers.leave_out else result


def _launched(
    compilers: Compilers,
    run: Callable[[], _Result],
    rewind: Callable[[], None] | None,
    ahead: Callable[[_Result], object] | None,
) -> tuple[_Result] | None:
    """Call `run` and return (its result,); None if `run` raised an exception after launches were skipped.

    If launches were skipped, `rewind` and then `ahead` are called; both are those of `compiled_first`.
    """
    try:
        result = run()
    except Exception:
        # `run` may have refused undefined results.
        if not compilers.leave_out:
            raise
        return None
    if ahead is not None and compilers.leave_out:
        if rewind is not None:
            rewind()
        try:
            ahead(result)
        except Exception as error:
            # For example because of undefined numbers: those kernels are compiled when they run.
            logger.info("kernels of what comes next are not compiled yet: %s", error)
    return (result,)


def cores() -> int:
    """Return the number of cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
