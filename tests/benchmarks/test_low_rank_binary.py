"""Ways of a weight are compared at equal bits, and a run replaces that of the same command."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def test_all_ways_have_as_many_bits(benchmark: ModuleType) -> None:
    weight = torch.randn(128, 256)
    inputs = torch.randn(300, 256)
    hessian = benchmark.Hessian(inputs.T @ inputs / 300, 300)
    for bits in (1.125, 2.25):
        for name, way in benchmark.ways(bits, 2, 0).items():
            made, stored = way(weight, hessian)
            assert made.shape == weight.shape
            assert bits - 0.02 < stored < bits + 0.01, name
            assert benchmark.errors(weight, made, hessian)["weights"] < 0.7, name


def test_a_run_is_stored_once(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, stored = tmp_path / "texts.jsonl", tmp_path / "runs.json"
    texts.write_text(json.dumps({"text": "Once upon a time there was a little dog. " * 400}))
    for name, value in (("SAMPLES", 2), ("LENGTH", 64), ("WINDOWS", 1)):
        monkeypatch.setattr(benchmark, name, value)
    arguments = [str(stories), str(texts), "--layers", "0", "--bits", "1.125", "--ways", "low", "--text"]
    arguments += [str(texts), "--iterations", "1", "--json", str(stored)]
    monkeypatch.setattr(sys, "argv", ["low_rank_binary.py", *arguments])
    for _ in range(2):
        benchmark.main(arguments)
    (run,) = json.loads(stored.read_text())["runs"]
    assert run["about"] == f"{stories.name}, layer 0"
    assert [row["way"] for row in run["rows"]] == ["low-rank binary", "low-rank binary, weighted"]
    assert all(row["kl"] > 0 and row["bits"] <= 1.125 for row in run["rows"])
