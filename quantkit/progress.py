"""Report progress of long work."""

import re
import threading
from collections.abc import Callable

#: Called with the amount done, the total in the same unit, and the name of the current work.
Progress = Callable[[int, int, str], None]
#: Called with the amount done since the last call, and the name of the current work.
Advance = Callable[[int, str], None]

_LEFT = re.compile(r"(.*), (\d+(?::\d\d)+) left")


def time_left(label: str) -> tuple[str, str]:
    """Return `label` without the time left at its end, and that time: "" without one."""
    found = _LEFT.fullmatch(label)
    return (found[1], found[2]) if found else (label, "")


def duration_text(seconds: float) -> str:
    """Return `1:02:03`, or `2:03` below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def part_of(progress: Progress | None, before: int, amount: int, total: int) -> Progress | None:
    """Return a function that reports work of any unit as `amount` of `total`, after `before`."""
    if progress is None:
        return None

    def report(done: int, of: int, label: str) -> None:
        progress(before + done * amount // max(1, of), total, label)

    return report


def counting(total: int, progress: Progress | None) -> Advance:
    """Return a function that sums up amounts done and reports them to `progress`, if given. Thread-safe."""
    done = 0
    mutex = threading.Lock()

    def advance(count: int, label: str) -> None:
        nonlocal done
        with mutex:
            done += count
            if progress is not None:
                progress(done, total, label)

    return advance
