"""The benchmark of the ways that a model is loaded and run, on a CPU, where only its calls are tried."""

import argparse
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quantkit


@pytest.mark.parametrize("way", ["generate", "pipeline"])
def test_a_way_is_timed(
    benchmark: ModuleType, stories: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    model = quantkit.load(stories, device="cpu")
    monkeypatch.setitem(benchmark.SIZES, "vocab_size", 500)
    run = (
        benchmark._generate(model, disable_compile=True)
        if way == "generate"
        else benchmark._pipeline(model, "cpu")
    )
    row = benchmark.measure(way, run, 2, argparse.Namespace(device="cpu", prompt=8, new_tokens=3, repeats=1))
    assert row.batch == 2 and row.first_ms > 0 and str(row).startswith(f"| {way} | 2 | ")


def test_without_a_gpu_it_says_so(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["front_door.py"])
    with pytest.raises(SystemExit, match="there is no GPU here"):
        benchmark.main()
