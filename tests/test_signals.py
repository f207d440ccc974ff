"""A signal ends work where that leaves nobody waiting."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quantkit.signals import HeldSignals, Interrupted, terminate

BOTH = pytest.mark.parametrize(
    ("number", "ends"), [(signal.SIGTERM, SystemExit), (signal.SIGINT, KeyboardInterrupt)]
)


@contextmanager
def handled(handler: object) -> Iterator[None]:
    """With this handler of SIGTERM, and Python's own of SIGINT."""
    before = signal.signal(signal.SIGTERM, handler), signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before[0])
        signal.signal(signal.SIGINT, before[1])


@BOTH
def test_a_held_signal_raises_where_it_is_asked_for_and_at_the_end(
    number: signal.Signals, ends: type[BaseException]
) -> None:
    with handled(terminate):
        held = HeldSignals()
        with pytest.raises(ends) as raised, held:
            held.check()
            signal.raise_signal(number)
            with pytest.raises(Interrupted):
                held.check()
        assert ends is KeyboardInterrupt or raised.value.code == 128 + number
        assert signal.getsignal(signal.SIGTERM) is terminate
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with pytest.raises(ends):
            signal.raise_signal(number)


def test_work_that_is_done_before_it_asks_ends_with_the_signal_too() -> None:
    done = False
    with handled(terminate), pytest.raises(SystemExit), HeldSignals():
        os.kill(os.getpid(), signal.SIGTERM)
        done = True
    assert done


@BOTH
def test_a_second_signal_is_not_held(number: signal.Signals, ends: type[BaseException]) -> None:
    with handled(terminate), pytest.raises(KeyboardInterrupt), HeldSignals():
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(ends):
            signal.raise_signal(number)
        raise Interrupted


def test_a_handler_of_the_caller_is_called_at_once() -> None:
    seen = []
    with handled(lambda number, _: seen.append(number)), HeldSignals() as held:
        signal.raise_signal(signal.SIGTERM)
        assert seen == [signal.SIGTERM]
        held.check()


def test_a_thread_that_gets_no_signals_holds_none() -> None:
    def hold() -> None:
        with HeldSignals() as held:
            found.append(signal.getsignal(signal.SIGTERM))
            held.check()

    found: list[object] = []
    with handled(terminate):
        thread = threading.Thread(target=hold)
        thread.start()
        thread.join()
    assert found == [terminate]
