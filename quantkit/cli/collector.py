"""Spare short commands the garbage collector, which otherwise takes a third of their time.

It looks for cycles among all objects again and again while torch and transformers are imported, and once more
at the end: a million objects that stay until the process ends.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """Collect no cycles within, and none of the objects made within later.

    For commands that import, read headers and end. Work on weights needs the collector: cycles hold tensors.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        leave_all()
        if was:
            gc.enable()


def leave_all() -> None:
    """Have the collector skip all objects that there are: at exit the system takes them back at once."""
    gc.freeze()
