"""Deadlines and size limits of what the hub answers, and the error for an answer that keeps neither."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from quantkit.errors import EnvironmentProblem

_T = TypeVar("_T")
#: For all other answers that are read whole.
MAX_ANSWER_BYTES = 32 << 20
SLOWEST_BYTES_PER_SECOND = 16_384
_REMEDY = (
    "If the network asks for a login, log in there first; check HF_ENDPOINT and the proxy settings, and run "
    "the command again."
)


class BadAnswer(EnvironmentProblem):
    """A server answered what is no answer."""


class Deadline:
    """The latest time of an answer: a number of seconds from now, and more for each byte that comes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.received = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that came; `TimeoutError` if it is too late."""
        self.received += nbytes
        self.end += nbytes / SLOWEST_BYTES_PER_SECOND
        if self.left <= 0:
            seconds = time.monotonic() - self.began
            raise TimeoutError(
                f"{self.received} bytes in {seconds:.0f} s; expected {SLOWEST_BYTES_PER_SECOND} a second"
            )

    @property
    def left(self) -> float:
        return self.end - time.monotonic()


def fail(url: str, found: str, expected: str, remedy: str = _REMEDY) -> NoReturn:
    """Raise `BadAnswer`."""
    raise BadAnswer(f"{url}: the server answered {found}; expected {expected}. {remedy}")


def within(deadline: Deadline, call: Callable[[], _T]) -> _T:
    """`call()`, or `TimeoutError` at a deadline, which the call may put off.

    The timeouts of an HTTP client cover one step each and looking up the host's name not at all.
    """
    outcomes: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            value = call()
            outcomes.put(lambda: value)
        except Exception as error:
            outcomes.put(partial(_raise, error))

    # A daemon, so that one that still waits does not keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    while (left := deadline.left) > 0:
        try:
            return outcomes.get(timeout=left)()
        except queue.Empty:
            continue
    raise TimeoutError(f"no answer within {deadline.end - deadline.began:g} seconds")


def _raise(error: Exception) -> NoReturn:
    raise error
