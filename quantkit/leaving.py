"""End the process at once on a signal.

Imports little, because signals may come before other modules are loaded.
"""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

#: Signals that end a process: from a user, from a closing terminal, or from the parent process.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Function that says how to resume the current work; absent or None without resumable work.
_advice: "list[Callable[[], str | None]]" = []


def advise(advice: "Callable[[], str | None] | None") -> None:
    """Set the function that returns the advice on resuming, printed on a fatal signal."""
    _advice[:] = [] if advice is None else [advice]


def advised() -> str | None:
    """Return the current advice on resuming; None if nothing can be resumed."""
    try:
        return _advice[0]() if _advice else None
    except Exception:  # The process is ending: no one would see an error.
        return None


def handle(handler: "Callable[[int, FrameType | None], Any] | signal.Handlers") -> None:
    """Set `handler` for all `NUMBERS`, except for signals that the process ignores, as under `nohup`."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave(number: int, frame: "FrameType | None") -> "NoReturn":
    """End the process at once, with one line. Handler for the time when nothing needs to be cleaned up."""
    try:
        advice = advised()
        os.write(2, f"interrupted{f'; {advice}' if advice else ''}\n".encode())
    finally:
        os._exit(128 + number)
