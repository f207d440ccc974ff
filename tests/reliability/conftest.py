"""What the tests of faults share."""

import os
import time
from collections.abc import Iterator

import pytest
import torch

from .faults import out, sharded, source
from .sweep import END, NO_TIME

__all__ = ["out", "sharded", "source"]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A sweep has an end: tests that are still to run then are not."""
    if time.monotonic() > float(os.environ.get(END, "inf")):
        pytest.skip(NO_TIME)


@pytest.fixture(autouse=True)
def unsynced() -> None:
    """Here files are synced: what fails and who is killed may be just there."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Calls come in the same order in each run, and children are forked, which threads do not survive."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
