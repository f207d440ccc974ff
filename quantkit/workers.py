"""The threads that arithmetic on a CPU is shared out to, and that keep a GPU busy."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from quantkit.signals import HeldSignals

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """Threads of one core each. Once a signal is held, jobs that have not begun end with `Interrupted`."""

    def __init__(self, count: int, name: str, signals: HeldSignals) -> None:
        super().__init__(count, name, initializer=torch.set_num_threads, initargs=(1,))
        self._signals = signals

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """A job, as of any executor."""

        def job() -> T:
            self._signals.check()
            return fn(*args, **kwargs)

        return super().submit(job)


def cpu_workers() -> int:
    """How many keep the cores busy: as many as torch would use threads, which the caller of quantkit sets."""
    return torch.get_num_threads()


@contextmanager
def working(count: int, name: str) -> Iterator[Workers]:
    """So many workers. A signal ends the block at its next job, and the jobs in work are waited for."""
    threads = torch.get_num_threads()
    with HeldSignals() as signals:
        workers = Workers(count, name, signals)
        try:
            yield workers
        finally:
            workers.shutdown(cancel_futures=True)
            # A worker sets its own number and the one that threads to come start with.
            torch.set_num_threads(threads)
