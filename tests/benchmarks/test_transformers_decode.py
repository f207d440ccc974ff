"""The benchmark of transformers alone, on a CPU, for which it compiles nothing."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


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
    benchmark.main()
    (times,) = json.loads(out.read_text()).values()
    assert len(times) == 2 and min(times) > 0
    assert capsys.readouterr().out.startswith("eager: ")
    monkeypatch.setattr(sys, "argv", [*sys.argv[:-1], "--ways=compiled"])
    with pytest.raises(SystemExit, match="transformers compiled no forward"):
        benchmark.main()
