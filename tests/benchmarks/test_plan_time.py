"""The benchmark of planning."""

import json
from pathlib import Path
from types import ModuleType

import pytest


def test_a_plan_is_timed(
    benchmark: ModuleType, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.json"
    benchmark.main([str(stories), "--repeats", "1", "--json", str(out)])
    found = json.loads(out.read_text())
    (seconds,) = found["seconds"]["stories260K"]
    assert 0.5 < seconds < 120
    assert {"torch", "transformers", "quantkit", "others"} <= found["imports"].keys()
    assert f"stories260K: {seconds:.2f} s" in capsys.readouterr().out


def test_modules_are_added_up_by_package(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "LISTED", 1)
    said = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      2000 |       3000 |   torch.nn\n"
        "import time:   1000000 |    1003000 | torch\n"
        "import time:       500 |        500 | re\nnote: a word\n"
    )
    faster = said.replace("1000000 ", " 500000 ")
    assert benchmark.imports([said]) == {"torch": 1.002, "others": pytest.approx(0.0005)}
    assert benchmark.imports([said, faster]) == {"torch": 0.502, "others": pytest.approx(0.0005)}
