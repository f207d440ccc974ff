"""Garbage is not collected while a short command runs, and is afterwards."""

import gc
import weakref

import pytest

from quantkit.cli.collector import collector_paused

from ..conftest import freeze


class Cycle:
    """An object that only the collector can free."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _unfrozen():
    yield
    gc.unfreeze()
    # Tests that come later collect in an instant again.
    freeze()


def test_cycles_within_stay_and_later_ones_go() -> None:
    with collector_paused():
        assert not gc.isenabled()
        within = weakref.ref(Cycle())
    assert gc.isenabled()
    after = weakref.ref(Cycle())
    gc.collect()
    assert within() is not None and after() is None


def test_an_error_passes_and_the_collector_is_as_it_was() -> None:
    with pytest.raises(ValueError, match="within"), collector_paused():
        raise ValueError("within")
    assert gc.isenabled()
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
