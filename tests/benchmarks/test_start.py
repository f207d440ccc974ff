"""The benchmark of cold and warm starts, on a CPU."""

import json
import sys
from pathlib import Path
from types import ModuleType

import pytest


def test_a_start_is_timed(
    benchmark: ModuleType,
    stories: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(benchmark, "STARTS", ("cold",))
    out = tmp_path / "start.json"
    options = ["--device=cpu", "--prompt=8", "--new-tokens=2", f"--json={out}"]
    monkeypatch.setattr(sys, "argv", ["start.py", str(stories), *options])
    benchmark.main()
    found = json.loads(out.read_text())
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["cold"]
    assert list(found) == ["cold"]
    for times in found.values():
        assert list(times)[:4] == ["torch", "transformers", "loaded", "first token"]
        assert 0 < times["torch"] < times["transformers"] < times["loaded"] < times["first token"]
        assert times["first token"] < times["second generation"]
