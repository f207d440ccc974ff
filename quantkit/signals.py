"""How signals end work, also during imports and where the main thread shares locks with others."""

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from quantkit.leaving import NUMBERS, advise, advised, leave

#: Seconds until it is looked again whether an import is over.
_LOOK = 0.02
#: Seconds that imports are waited for. A machine with other work may be at those of a command for a minute.
_PATIENCE = 5.0
_IMPORT = "<frozen importlib._bootstrap>"

#: Signals that wait for the end of an import, and until when.
_waiting: dict[int, float] = {}


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler that ends what the main thread does by an exception, with the exit code that shells give.

    An import is waited for: C code that imports a module may lose the exception, or end the process with it.
    A second signal meanwhile, or `_PATIENCE`, ends the process at once.
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
    """A signal that ends the block, or the process in it, has `advice` in its line, asked for at that moment.

    None says nothing.
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
    """`sys.unraisablehook`: a signal that came where no exception can leave, as in `__del__`, comes again."""
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
    """Have the handler of a signal called a little later, in the main thread, wherever that is then."""

    def call(_: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(number)
        if not callable(handler):
            return
        # It waits no longer, or goes on waiting.
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
    """Processes that are started in the block never get the SIGINT of a terminal: who started them ends them.

    That holds from their first instruction on. The signal waits for the end of the block in this process.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


#: Handlers that end what the main thread does by an exception, wherever it is.
ENDING = (terminate, signal.default_int_handler)


class Interrupted(BaseException):
    """A held signal asks the work to end. What its handler raises comes when signals are held no longer."""


class HeldSignals:
    """Keeps `NUMBERS` from raising in the main thread where it shares locks with other threads.

    Handlers raise between any two instructions. Among those of a condition or an executor of Python this
    leaves a lock taken, or has a thread miss its wake-up, and whoever waits for it waits for ever.

    In the `with` block a signal makes `check` raise `Interrupted`, and its handler is called at the end. A
    second one is not held. Handlers that are not among `ENDING` stay as they are.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._holding = False
        self._held: int | None = None

    def check(self) -> None:
        """`Interrupted` if a signal is held; any thread may ask."""
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
            # A handler that is there again may have raised before the other one was.
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
