"""How signals end work, also where the main thread shares locks with other threads."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


def terminate(number: int, frame: FrameType | None) -> None:
    """The handler that ends the process with the exit code that shells give a signal."""
    raise SystemExit(128 + number)


#: Handlers that end what the main thread does by an exception, wherever it is.
ENDING = (terminate, signal.default_int_handler)


class Interrupted(BaseException):
    """A held signal asks the work to end. What its handler raises comes when signals are held no longer."""


class HeldSignals:
    """Keeps SIGTERM and SIGINT from raising in the main thread where it shares locks with other threads.

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
            for number in (signal.SIGTERM, signal.SIGINT):
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
