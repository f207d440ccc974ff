"""What `benchmarks/gpu_steps.py` prints and stores."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

pytest.importorskip("triton")


def test_what_was_timed_is_there_when_a_run_is_cut_off(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = {
        "bf16": benchmark.Row("bf16", 1, 4000.4, 120, 0.9),
        "int4": benchmark.Row("int4", 16, 1000, 51.5, 0.52),
    }

    def measure(name, sources, options):
        assert list(sources) == [6, 3] and options.batch == [1, 16]
        yield rows[name]

    stored = tmp_path / "steps.json"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(benchmark, "machine", lambda: "a GPU")
    monkeypatch.setattr(benchmark, "made", lambda directory, layers: directory)
    monkeypatch.setattr(benchmark, "measure", measure)
    options = ["--formats", "bf16,int4,int8", "--batch", "1,16", "--layers", "6", "--json", str(stored)]
    monkeypatch.setattr(sys, "argv", ["gpu_steps.py", *options])
    with pytest.raises(KeyError, match="int8"):
        benchmark.main()
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "| bf16 | 1 | 4000 | 120.0 | 90% |",
        "| int4 | 16 | 1000 | 51.5 | 52% |",
    ]
    assert [row["step_us"] for row in json.loads(stored.read_text())] == [4000.4, 1000]
