"""Every command and report gives one size for one model: that of its tensors."""

import json
import re
from pathlib import Path

import pytest

from quantkit.bench import machine, worker
from quantkit.bench.speed import measure_speed
from quantkit.checkpoint.source import Checkpoint
from quantkit.files import size_text

from .conftest import SOURCE, Run

pytest.importorskip("matplotlib")
TEXT = Path(__file__).parents[2] / "examples" / "stories.txt"


def sizes(text: str) -> set[str]:
    """All sizes in kB, as which no memory is printed."""
    return set(re.findall(r"[\d.]+ kB", text))


def test_commands_and_reports_agree_on_the_size(
    packed: Path, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "speed_of", measure_speed)
    monkeypatch.setattr(machine, "_READ_BYTES", 1 << 20)
    expected = {size_text(Checkpoint.open(packed).nbytes)}
    assert sizes(run("plan", SOURCE, "--format", "int4").out) == expected
    assert sizes(run("quantize", SOURCE, tmp_path / "out", "--format", "int4", "--no-check").out) == expected
    assert sizes(run("inspect", packed).out) == expected
    report = tmp_path / "report"
    asked = ("--text", TEXT, "--window", 32, "--max-windows", 1, "--no-noise-floor", "--no-per-block")
    done = run("eval", packed, "--against", SOURCE, *asked, "--report", report)
    assert done.code == 0 and sizes(done.out) == expected
    assert expected <= sizes((report / "report.md").read_text())
    assert (
        json.loads((report / "report.json").read_text())["reports"][0]["bytes"]["model"]
        == Checkpoint.open(packed).nbytes
    )
    done = run("bench", packed, "--prompt", 4, "--new-tokens", 2, "--batch", 1, "--repeats", 1)
    assert done.code == 0 and expected <= sizes(done.out)
