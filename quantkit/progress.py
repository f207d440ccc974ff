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
