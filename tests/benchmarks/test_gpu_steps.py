"""The table of `benchmarks/gpu_steps.py`."""

import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_the_table_has_a_row_for_each_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    benchmark = importlib.import_module("gpu_steps")
    rows = [benchmark.Row("bf16", 1, 4000.4, 120, 0.9), benchmark.Row("int4", 16, 1000, 51.5, 0.52)]
    assert benchmark.text(rows).splitlines()[2:] == [
        "| bf16 | 1 | 4000 | 120.0 | 90% |",
        "| int4 | 16 | 1000 | 51.5 | 52% |",
    ]
