"""The tables of `benchmarks/gpu_experts.py`."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("gpu_experts")


def test_tables_have_a_column_per_number_of_tokens(benchmark: ModuleType) -> None:
    rows = [
        benchmark.Row("small", "int4 grouped", 1, 12.34),
        benchmark.Row("small", "int4 grouped", 4, 20.0),
        benchmark.Row("small", "dense eager", 4, None, "OutOfMemoryError"),
    ]
    assert benchmark.table(rows, [1, 4]).strip().splitlines() == [
        "small, us",
        "",
        "| | T=1 | T=4 |",
        "|---|---|---|",
        "| int4 grouped | 12.3 | 20.0 |",
        "| dense eager |  |  |",
    ]
