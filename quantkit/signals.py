"""End work on a signal, also during imports and while the main thread shares locks with other threads."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from quantkit.leaving import NUMBERS, advise, advised, leave

#: Seconds between checks if an import has ended.
_LOOK = 0.02
#: Seconds to wait for imports to end. On a busy machine the imports of a command may take a minute.
_PATIENCE = 5.0
_IMPORT = "<frozen importlib._bootstrap>"

#: Signals that wait for the end of an import, with the deadline of each.
_waiting: dict[int, float] = {}


def terminate(number: int, frame: FrameType | None) -> None:
    """Signal handler: raise an exception in the main thread, with the exit code of shells for the signal.

    It waits for a running import: C code that imports a module may lose the exception, or crash on it. A
    second signal meanwhile, or `_PATIENCE` seconds, ends the process at once.
    """
    if _is_importing(frame):
        if _waiting:
            leave(number, frame)
        _waiting[number] = time.monotonic() + _PATIENCE
        _call_soon(number)
        return
    _waiting.pop(number, None)
    raise _ending(number)


@contextmanager
def advising(advice: Callable[[], str | None]) -> Iterator[None]:
    """Context manager: a signal that ends the block prints `advice()`, called at that moment.

    None prints nothing.
    """
    advise(advice)
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        if text := advised():
            error.add_note(text)
        raise
    advise(None)


def wait_no_longer() -> None:
    """Raise the exception of a signal that still waits for the end of an import, if there is one."""
    signal.setitimer(signal.ITIMER_REAL, 0)
    if _waiting:
        number = next(iter(_waiting))
        _waiting.clear()
        raise _ending(number)


def _ending(number: int) -> BaseException:
    return KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number)


def raise_again(unraisable: "sys.UnraisableHookArgs") -> None:
    """Send a signal again if its exception was lost, as in `__del__`; a `sys.unraisablehook`."""
    error = unraisable.exc_value
    if isinstance(error, KeyboardInterrupt):
        _call_soon(signal.SIGINT)
    elif isinstance(error, SystemExit) and error.code in {128 + number for number in NUMBERS}:
        _call_soon(int(error.code) - 128)
    else:
        sys.__unraisablehook__(unraisable)


def _is_importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT:
            return True
        frame = frame.f_back
    return False


def _call_soon(number: int) -> None:
    """Call the handler of a signal a little later, in the main thread."""

    def call(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(number)
        if not callable(handler):
            return
        # The wait has ended, or goes on below.
        end = _waiting.pop(number, None)
        if end is not None and end < time.monotonic() and handler is terminate and _is_importing(frame):
            leave(number, frame)
        handler(number, frame)
        if end is not None and number in _waiting:
            _waiting[number] = end

    signal.signal(signal.SIGALRM, call)
    signal.setitimer(signal.ITIMER_REAL, _LOOK)


@contextmanager
def kept_from_children() -> Iterator[None]:
    """Context manager: child processes started in the block never get the SIGINT of a terminal.

    Children ignore SIGINT from their first instruction on; this process ends them. In this process, a SIGINT
    is delayed until the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: Handlers that end the main thread's work by raising an exception anywhere.
ENDING = (terminate, signal.default_int_handler)


class Interrupted(BaseException):
    """A held signal asks the work to end. The exception of its handler follows when signals are released."""


class HeldSignals:
    """Context manager that holds back `NUMBERS` while the main thread shares locks with other threads.

    Handlers raise between any two instructions. Inside a condition or an executor of Python, that leaves a
    lock taken or loses a wake-up, and other threads wait forever.

    In the block, a signal makes `check` raise `Interrupted`; its handler is called at the end. A second
    signal is not held back. Only handlers in `ENDING` are replaced.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._holding = False
        self._held: int | None = None

    def check(self) -> None:
        """Raise `Interrupted` if a signal is held; any thread may call this."""
        if self._held is not None:
            raise Interrupted

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in NUMBERS:
                handler = signal.getsignal(number)
                if callable(handler) and handler in ENDING:
                    self._handlers[number] = handler
                    signal.signal(number, self._hold)
        self._holding = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._restore()
        finally:
            # A handler that was restored already may have raised before the other was restored.
            self._restore()
            self._holding = False
        if self._held is not None:
            self._handlers[self._held](self._held, None)

    def _restore(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _hold(self, number: int, frame: FrameType | None) -> None:
        if self._holding and self._held is None:
            self._held = number
        else:
            self._handlers[number](number, frame)
