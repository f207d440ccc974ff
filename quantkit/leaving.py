"""How a signal ends the process at once. Little is imported: signals may come before the rest is there."""

import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType
    from typing import Any, NoReturn

#: What a user, a terminal that closes, or whoever started a process ends it with.
NUMBERS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

#: Says how to go on with what is at work; None where nothing is there to go on with.
_advice: "list[Callable[[], str | None]]" = []


def advise(advice: "Callable[[], str | None] | None") -> None:
    """Have `advice` asked, once a signal ends the process, how the work goes on."""
    _advice[:] = [] if advice is None else [advice]


def advised() -> str | None:
    """How the work goes on, as it is at this moment."""
    try:
        return _advice[0]() if _advice else None
    except Exception:  # A process that ends has nobody to tell.
        return None


def handle(handler: "Callable[[int, FrameType | None], Any] | signal.Handlers") -> None:
    """Handle all `NUMBERS` so, but for those that the process is to ignore, as under `nohup`."""
    for number in NUMBERS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def leave(number: int, frame: "FrameType | None") -> "NoReturn":
    """The handler for when nothing needs to be cleaned up: ends the process at once, with a line."""
    try:
        advice = advised()
        os.write(2, f"interrupted{f'; {advice}' if advice else ''}\n".encode())
    finally:
        os._exit(128 + number)
