"""The benchmark of cold and warm starts, on a CPU."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_cold_start_and_two_warm_ones(tmp_path: Path) -> None:
    out = tmp_path / "start.json"
    options = ["--device=cpu", "--prompt=8", "--new-tokens=2", f"--json={out}"]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "start.py", ROOT / "examples" / "stories260K", *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(out.read_text())
    assert (
        list(found)
        == ["cold", "warm", "warm again"]
        == [line.split(":")[0] for line in done.stdout.splitlines()]
    )
    for times in found.values():
        assert list(times)[:3] == ["imported", "loaded", "first token"]
        assert 0 < times["imported"] < times["loaded"] < times["first token"] < times["second generation"]
