"""Kernels compiled side by side, where a run launches several that never were.

Triton compiles a kernel when it is first launched, and the launch waits for it: those of a model take more
than ten seconds one after the other, on a machine that has cores for all of them. Here a run that comes to
such a kernel goes on without launching, so that all that it needs are known; they are compiled, and it runs.
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

#: Kernels that are compiled at a time, by processes of more than 100 MB each.
MOST_AT_ONCE = 16

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
        is_promise = hasattr(found, "result")
        if needed:
            return found.result() if is_promise else found
        self.leave_out |= is_promise
        return None if self.leave_out else found


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
    device: torch.device,
    run: Callable[[], _Result],
    rewind: Callable[[], None] | None = None,
    ahead: Callable[[_Result], object] | None = None,
) -> _Result:
    """`run()`, which launches kernels on `device`; those that have to be compiled are, side by side, before.

    With all kernels in memory or in Triton's cache on the disk, `run` is called once. Else it is called
    twice, and what kernels write in the first call is undefined, but for indices (`launcher.IndexLaunch`)
    and layouts of weights (`building`). `rewind` takes back what that call changed. `ahead`, for what that
    call returned, launches what is soon to run: what it lacks is compiled as well, what it raises logged.
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
    """The result of `run`; None if it had to leave out launches, whose kernels are compiled now."""
    from quantkit.kernels.jit.side_by_side import SideBySide

    compilers = Compilers()
    COMPILERS.set(compilers)
    with ThreadPoolExecutor(min(cores(), MOST_AT_ONCE)) as pool:
        # Errors of the compiler come again where the kernel is launched.
        mode = SideBySide(pool, ignore_errors=True)
        try:
            mode.__enter__()
            result = _launched(compilers, run, rewind, ahead)
            # Not as a block, whose end would wait for what is cancelled, and that never ends.
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
    """The result of `run`, and then `ahead` for it, if launches are left out; None if `run` refused that."""
    try:
        result = run()
    except Exception:
        # It may have refused what is undefined.
        if not compilers.leave_out:
            raise
        return None
    if ahead is not None and compilers.leave_out:
        if rewind is not None:
            rewind()
        try:
            ahead(result)
        except Exception as error:
            # Of numbers that are undefined, say: it is compiled when it runs.
            logger.info("kernels of what comes next are not compiled yet: %s", error)
    return (result,)


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
