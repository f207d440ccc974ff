"""Deadlines and size limits for answers of the hub, and the error for answers that exceed them."""

import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import NoReturn, TypeVar

from quantkit.errors import EnvironmentProblem

_T = TypeVar("_T")
#: Most bytes of other answers that are read whole.
MAX_ANSWER_BYTES = 32 << 20
SLOWEST_BYTES_PER_SECOND = 16_384
_REMEDY = (
    "If the network asks for a login, log in there first; check HF_ENDPOINT and the proxy settings, and run "
    "the command again."
)


class BadAnswer(EnvironmentProblem):
    """A server gave an invalid answer."""


class Deadline:
    """Latest time of an answer: some seconds from now, extended by each byte that comes."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.began = time.monotonic()
        self.end = self.began + seconds
        self.received = 0

    def add(self, nbytes: int) -> None:
        """Count received bytes; raise `TimeoutError` if it is too late."""
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
    """Raise `BadAnswer`: the server of `url` answered `found` in place of `expected`, and the remedy."""
    raise BadAnswer(f"{url}: the server answered {found}; expected {expected}. {remedy}")


def within(deadline: Deadline, call: Callable[[], _T]) -> _T:
    """Return `call()`, or raise `TimeoutError` at a deadline, which the call may extend.

    The timeouts of an HTTP client cover single steps only, and not the DNS lookup.
    """
    outcomes: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            value = call()
            outcomes.put(lambda: value)
        except Exception as error:
            outcomes.put(partial(_raise, error))

    # A daemon thread, so that a blocked call does not keep the process alive.
    threading.Thread(target=run, daemon=True).start()
    while (left := deadline.left) > 0:
        try:
            return outcomes.get(timeout=left)()
        except queue.Empty:
            continue
    raise TimeoutError(f"no answer within {deadline.end - deadline.began:g} seconds")


def _raise(error: Exception) -> NoReturn:
    raise error
