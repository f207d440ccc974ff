"""What the page says of codes that no format has is what was stored, also before a GPU timed them."""

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

CODES = ("int2", "trellis", "pairs")


@pytest.fixture
def results(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Stored errors, and no times."""
    import performance_page

    for module in (benchmark, performance_page):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    (tmp_path / "guide").mkdir()
    errors = {"Gaussian": dict(zip(CODES, (0.13, 0.07, 0.08), strict=True))}
    counts = dict(zip(CODES, (2.0, 5.0, 3.0), strict=True))
    run = {"command": "python e.py", "machine": "a CPU", "instructions": counts, "weights": errors}
    (tmp_path / "guide" / "trellis-error.json").write_text(json.dumps(run))
    return tmp_path


def timed(shares: dict[str, tuple[float, float]]) -> dict[str, Any]:
    shapes = {
        name: {"codes": {code: {"us": 10 / found[i], "share": found[i]} for code, found in shares.items()}}
        for i, name in enumerate(("4096x4096", "4096x14336"))
    }
    return {"command": "python t.py", "machine": "a GPU", "shapes": shapes}


def test_a_page_without_times_says_so(benchmark: ModuleType, results: Path) -> None:
    assert benchmark.trellis().splitlines()[2:] == [
        "| int2 | 0.1300 | 2.00 |",
        "| trellis, a hash per weight (QTIP's 3INST) | 0.0700 | 5.00 |",
        "| trellis, a hash per two weights | 0.0800 | 3.00 |",
    ]
    assert benchmark.trellis_run().endswith("Times on a GPU are not stored yet.")


def test_times_and_shares_are_shown(benchmark: ModuleType, results: Path) -> None:
    shares = {"int2": (0.9, 0.8), "trellis": (0.3, 0.4), "pairs": (0.5, 0.7)}
    (results / "guide" / "trellis-decode.json").write_text(json.dumps(timed(shares)))
    head, _, int2, *_ = benchmark.trellis().splitlines()
    assert head.endswith("| 4096x4096, H200 | 4096x14336, H200 |")
    assert int2 == "| int2 | 0.1300 | 2.00 | 11.1 µs, 90% | 12.5 µs, 80% |"
    assert " ".join(benchmark.trellis_run().split()).startswith(
        "Of the bandwidth: int2 80% to 90%, a hash per weight (QTIP's 3INST) 30% to 40%, "
        "a hash per two weights 50% to 70%. Errors by `python e.py` on a CPU."
    )


def test_rows_without_a_divergence_have_none(benchmark: ModuleType, results: Path) -> None:
    row = {"way": "low-rank binary", "bits": 1.1241, "weights": 0.3, "weighted": 0.2, "outputs": 0.1}
    runs = [
        {"command": "python a.py", "machine": "a CPU", "about": "books-28m", "rows": [{**row, "kl": 2.5}]},
        {"command": "python b.py", "machine": "a CPU", "about": "other, layer 5", "rows": [row]},
    ]
    (results / "guide" / "low-rank-binary.json").write_text(json.dumps({"runs": runs}))
    assert benchmark.low_rank().splitlines()[2:] == [
        "| books-28m | low-rank binary | 1.124 | 0.300 | 0.200 | 0.100 | 2.500 |",
        "| other, layer 5 | low-rank binary | 1.124 | 0.300 | 0.200 | 0.100 | |",
    ]
    assert benchmark.low_rank_run() == "By `python a.py` on a CPU. By `python b.py` on a CPU."
