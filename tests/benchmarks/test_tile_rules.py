"""`benchmarks/tile_rules.py` counts how the rules and the measured tiles of the H100 agree."""

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")


def test_the_rules_are_near_what_was_measured(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    benchmark.main()
    times, *fitted, taken = capsys.readouterr().out.splitlines()
    count, least, most, median = map(float, re.findall(r"[\d.]+\d", times))
    assert count > 900 and 0.9 < least <= median < 1.1 and most < 1.35
    for line in fitted:
        # A tile is only fitted where the rules say that it takes less than nine tenths of the time.
        assert all(float(part) <= 0.9 for part in re.findall(r"0\.\d+", line))
    assert re.fullmatch(r"\d+ problems take what was sooner for more rows of x: .*", taken)
