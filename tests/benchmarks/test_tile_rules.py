"""`benchmarks/tile_rules.py` counts what docs/kernels.md says of tiles between what was measured."""

import re
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("triton")


def test_the_docs_have_its_figures(
    benchmark: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = Path(__file__).parents[2]
    benchmark.main()
    times, *fitted, taken = capsys.readouterr().out.splitlines()
    docs = " ".join((root / "docs/kernels.md").read_text().split())
    count, least, most, median = re.findall(r"[\d.]+\d", times)
    assert f"of the {count} times that its table has for that kernel are {least} to {most} times" in docs
    assert f"by a median of {median})" in docs
    counts, gains = [], []
    for line in fitted:
        counts.append(re.findall(r"(\d+) of (\d+) weights", line)[0])
        parts = [round(100 - 100 * float(part)) for part in re.findall(r"0\.\d+", line)]
        gains.append(f"{parts[1]} to {parts[0]} %")
    assert f"{' of '.join(counts[0])} weights should gain {gains[0]}" in docs
    assert f"{' of '.join(counts[1])} {gains[1]} from" in docs
    assert f"and {counts[2][0]} of them {gains[2]} from" in docs
    assert f"these are {taken.split()[0]} problems" in docs
