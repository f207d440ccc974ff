"""The benchmark of the ways that a model is loaded and run, on a CPU, where only its calls are tried."""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch

import quantkit


def test_ways_are_timed_in_turn(
    benchmark: ModuleType, stories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = quantkit.load(stories, device="cpu")
    monkeypatch.setitem(benchmark.SIZES, "vocab_size", 500)
    order: list[str] = []

    def noted(way: str, run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        return lambda *given: (order.append(way), run(*given))[1]

    ways = {
        "eager": benchmark._generate(model, disable_compile=True),
        "pipeline": benchmark._pipeline(model, "cpu"),
    }
    runs = {way: noted(way, run) for way, run in ways.items()}
    options = argparse.Namespace(device="cpu", prompt=8, new_tokens=3, repeats=2, against="pipeline")
    rows = benchmark.measure(runs, 2, options)
    assert [row.way for row in rows] == ["eager", "pipeline"] and rows[1].ratio == 1
    assert all(row.batch == 2 and row.first_ms > 0 and row.low <= row.high for row in rows)
    assert str(rows[0]).startswith("| eager | 2 | ")
    # Four calls of each before the rounds, and two in each round.
    assert order[:8] == ["eager"] * 4 + ["pipeline"] * 4
    assert all(
        sorted(order[8 + 4 * one : 12 + 4 * one]) == ["eager"] * 2 + ["pipeline"] * 2 for one in (0, 1)
    )
    assert len(benchmark.host_ms()) == 5


def test_without_a_gpu_it_says_so(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["front_door.py"])
    with pytest.raises(SystemExit, match="there is no GPU here"):
        benchmark.main()
