"""How long work tells how far it is."""

import threading
from collections.abc import Callable

#: Is called with what is done, all there is to do, in one unit, and what is at work.
Progress = Callable[[int, int, str], None]
#: Is called with what has been done since the last call, and what is at work.
Advance = Callable[[int, str], None]


def counting(total: int, progress: Progress | None) -> Advance:
    """What adds up what is done of `total` and tells `progress`, if there is any; threads may share it."""
    done = 0
    mutex = threading.Lock()

    def advance(count: int, label: str) -> None:
        nonlocal done
        with mutex:
            done += count
            if progress is not None:
                progress(done, total, label)

    return advance
