"""Run threads that share the arithmetic of a CPU, or keep a GPU busy."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import ParamSpec, TypeVar

import torch

from quantkit.signals import HeldSignals

P = ParamSpec("P")
T = TypeVar("T")


class Workers(ThreadPoolExecutor):
    """Executor with one core per thread. Once a signal is held, jobs not yet begun end with `Interrupted`."""

    def __init__(self, count: int, name: str, signals: HeldSignals) -> None:
        super().__init__(count, name, initializer=torch.set_num_threads, initargs=(1,))
        self._signals = signals

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Submit a job, as to any executor."""

        def job() -> T:
            self._signals.check()
            return fn(*args, **kwargs)

        return super().submit(job)


def cpu_workers() -> int:
    """Return the number of workers that keep all cores busy: torch's number of threads, set by the caller."""
    return torch.get_num_threads()


@contextmanager
def working(count: int, name: str) -> Iterator[Workers]:
    """Context manager: `count` workers. A signal ends the block at its next job; running jobs are awaited."""
    threads = torch.get_num_threads()
    with HeldSignals() as signals:
        workers = Workers(count, name, signals)
        try:
            yield workers
        finally:
            workers.shutdown(cancel_futures=True)
            # A worker sets its own number of threads, and with it the number for threads created later.
            torch.set_num_threads(threads)
