"""The script that a file of tests is about."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def stories() -> Path:
    """The model that comes with the project."""
    return BENCHMARKS.parent / "examples" / "stories260K"


@pytest.fixture
def benchmark(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/NAME.py`, for tests in `test_NAME.py`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(request.path.stem.removeprefix("test_"))
