"""Workers end at a signal, whatever the thread that waits for them does at that moment."""

import signal
import threading

import pytest
import torch

from quantkit.signals import Interrupted
from quantkit.workers import working


def test_workers_have_one_thread_each_and_the_caller_keeps_its_own() -> None:
    before = torch.get_num_threads()
    with working(2, "test") as workers:
        assert list(workers.map(lambda _: torch.get_num_threads(), range(8))) == [1] * 8
        assert workers.submit(divmod, 7, 4).result() == (1, 3)
    assert torch.get_num_threads() == before


def test_after_a_signal_no_job_begins_and_those_in_work_end() -> None:
    begun, go, ended = threading.Event(), threading.Event(), []

    def at_work() -> None:
        begun.set()
        assert go.wait(60)
        ended.append("at work")

    with pytest.raises(KeyboardInterrupt), working(1, "test") as workers:
        first = workers.submit(at_work)
        assert begun.wait(60)
        queued = workers.submit(ended.append, "queued")
        signal.raise_signal(signal.SIGINT)
        late = workers.submit(ended.append, "late")
        go.set()
        first.result()
        for job in (queued, late):
            with pytest.raises(Interrupted):
                job.result()
    assert ended == ["at work"]
