"""The benchmark of transformers alone, on a CPU, for which it compiles nothing."""

import itertools
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest


def clock(*seconds: float) -> SimpleNamespace:
    """A `time` whose pairs of readings are `seconds` apart."""
    readings: Iterable[float] = itertools.chain.from_iterable((0.0, one) for one in seconds)
    return SimpleNamespace(perf_counter=iter(readings).__next__)


def test_transformers_alone_is_timed(
    benchmark: ModuleType,
    stories: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "decode.json"
    options = ["--device=cpu", "--prompt=8", "--new-tokens=3", "--repeats=2", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["", str(stories), *options, "--ways=eager"])
    # Three generations do not count; then those of three tokens and of one in turn.
    monkeypatch.setattr(benchmark, "time", clock(9, 9, 9, 3, 1, 5, 1))
    benchmark.main()
    assert json.loads(out.read_text()) == {"eager": [1.0, 0.5]}
    assert capsys.readouterr().out == "eager: 0.8 tokens/s (0.5 to 1.0)\n"
    monkeypatch.setattr(benchmark, "time", clock(9, 9, 9, 3, 1, 1, 2))
    with pytest.raises(SystemExit, match="give more --new-tokens"):
        benchmark.main()
    monkeypatch.setattr(benchmark, "time", clock(9, 9, 9))
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--ways=compiled"])
    with pytest.raises(SystemExit, match="transformers compiled no forward"):
        benchmark.main()
