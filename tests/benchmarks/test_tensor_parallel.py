"""The benchmark of tensor parallelism on a CPU, without ranks."""

import argparse
from pathlib import Path
from types import ModuleType
from typing import Any

from quantkit.runtime.replace import packed_modules


def test_it_writes_a_packed_model_and_times_it(benchmark: ModuleType, tmp_path: Path) -> None:
    for name in ("one", "again"):
        benchmark.write_model(tmp_path / name, 1, benchmark.TINY, "cpu")
    first, again = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "again"))
    assert first == again
    model = benchmark.load(tmp_path / "one", "cpu", shared=False)
    assert len(list(packed_modules(model))) == 7
    found: list[Any] = []
    options = argparse.Namespace(prompt=4, new_tokens=3, rounds=1)
    benchmark.measure(model, ["one-eager", "one"], options, found.append)
    lines = benchmark.table([*found, {"sum_us": 1.5}])
    assert lines[2] == "| tensor-eager | not measured | | | |"
    assert lines[4].startswith("| one-eager | ") and " | 1.00 | " in lines[4]
    assert lines[5].endswith(" | 3 |") and lines[-1] == "sum_us 1.50"
