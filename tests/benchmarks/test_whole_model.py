"""The benchmark of a whole model asks for what it says, and the performance page shows what it stores."""

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from quantkit.bench.figures import Cell, Machine, Memory, Speed, Spread, to_json

SIZES = ["--layers", "1", "--device", "cpu", "--batch", "1,16"]


def speed(label: str, batches: list[int]) -> Speed:
    """Figures of a model, which reads 2 of 4 bytes a second."""
    one = Spread(0.5, 0.25, 1.0)
    cells = tuple(
        Cell(batch, 512, "flat", one, one, 0.125, 0.25, Spread(8, 7, 9), 2, None) for batch in batches
    )
    host = Machine("cpu", "a CPU", 1, 4, "0", "0", "0")
    return Speed(label, f"/tmp/{label}", "", "", 1, 1, 1, Memory(1, 1, 1), host, cells, 128, 3, "", ())


def test_each_format_is_measured_and_shown(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[str]] = []

    def quantkit(*given: Any) -> None:
        arguments = [str(one) for one in given]
        calls.append(arguments)
        if arguments[0] == "bench":
            batches = [int(one) for one in arguments[arguments.index("--batch") + 1].split(",")]
            found = [speed(Path(arguments[1]).name, batches)]
            found += [speed("bf16", batches)] if "--against" in arguments else []
            Path(arguments[-1]).write_text(to_json(found))

    monkeypatch.setattr(benchmark, "quantkit", quantkit)
    monkeypatch.setattr(benchmark, "write_source", lambda directory, layers, device: directory)
    path = tmp_path / "cpu-bench.json"
    benchmark.main([*SIZES, "--formats", "int4,fp6", "--json", str(path)])
    assert [one[0] for one in calls] == ["quantize", "bench", "quantize", "bench"]
    stored = json.loads(path.read_text())
    assert [one["model"] for one in stored["speed"]] == ["int4", "bf16", "fp6"]
    assert stored["command"].startswith("python benchmarks/") and "torch" in stored["machine"]
    page = importlib.import_module("performance_page")
    monkeypatch.setattr(page, "RESULTS", tmp_path)
    title, text, table = page.whole_models()
    assert title == "## A whole model" and "`cpu-bench.json`" in text and "mode flat" in text
    assert table.splitlines()[2:] == [
        f"| {name} | 512 | 500 | 8 | 50% | 500 | 8 | 50% | |" for name in ("int4", "bf16", "fp6")
    ]


def test_the_source_is_one_that_transformers_reads(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sizes = dict(zip(benchmark.SIZES, (32, 48, 2, 1, 40, 64), strict=True))
    monkeypatch.setattr(benchmark, "SIZES", sizes)
    config = json.loads((benchmark.write_source(tmp_path / "bf16", 1, "cpu") / "config.json").read_text())
    assert config["dtype"] == "bfloat16" and config["num_hidden_layers"] == 1


def test_without_a_gpu_it_says_so(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["--json", "out.json"])
    assert "there is no GPU here" in capsys.readouterr().err


def test_schemes_and_further_prompts_are_asked_for(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    calls: list[list[str]] = []

    def quantkit(*given: Any) -> None:
        calls.append([str(one) for one in given])
        if given[0] == "bench":
            Path(given[-1]).write_text(to_json([speed("one", [1])]))

    monkeypatch.setattr(benchmark, "quantkit", quantkit)
    monkeypatch.setattr(benchmark, "write_source", lambda directory, layers, device: directory)
    given = ["--formats", "W4AFP8", "--batch", "1,64", "--prompt", "512,4096", "--device", "cpu"]
    benchmark.main([*given, "--json", str(tmp_path / "out.json")])
    quantizing, first, second = calls
    assert quantizing[3:5] == ["--scheme", "W4AFP8"]
    asked = [(one[one.index("--prompt") + 1], one[one.index("--batch") + 1]) for one in (first, second)]
    assert asked == [("512", "1,64"), ("4096", "1")]
