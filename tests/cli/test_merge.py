"""`quantkit merge`: what it says of methods and of KL, before and after."""

import json
import re
from pathlib import Path

import pytest

import quantkit
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.merging import merge

from ..quantization.test_merging import make_adapter
from .conftest import SOURCE, STORIES, Run

pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two directories: stories260K in int4 by gptq, and an adapter of it."""
    work = tmp_path_factory.mktemp("merge")
    data = CalibrationOptions(str(STORIES), 4, 64)
    quantkit.quantize(SOURCE, work / "packed", format="int4", method="gptq", calibration=data)
    make_adapter(work / "adapter", work / "packed")
    return work


def test_methods_and_kl_are_said(calibrated: Path, run: Run, tmp_path: Path) -> None:
    packed, adapter, text = calibrated / "packed", calibrated / "adapter", tmp_path / "text.txt"
    text.write_text(STORIES.read_text()[:3000])
    done = run("merge", packed, adapter, tmp_path / "out", "--text", text)
    assert done.code == 0 and "note" not in done.err
    assert "10 linears merged, rounded by gptq\n" in done.out
    found = re.search(
        r"KL from the original with the adapter, \d+ tokens: mean (\S+) nats before, with the adapter beside "
        r"the packed model, and (\S+) after\n"
        r"against the adapter beside the packed model, \d+ tokens: KL mean ",
        done.out,
    )
    assert found is not None
    again = run("merge", packed, adapter, tmp_path / "out", "--text", text, "--resume", "--json")
    told = json.loads(again.out)
    assert (f"{told['before']['kl_mean']:.3g}", f"{told['after']['kl_mean']:.3g}") == found.groups()
    assert set(told["methods"].values()) == {"gptq"}
    result = merge(packed, adapter, tmp_path / "out2", text=text)
    assert result.after is not None and result.after.to_dict()["kl_mean"] == told["after"]["kl_mean"]


def test_other_texts_may_be_named_and_nothing_measured(calibrated: Path, run: Run, tmp_path: Path) -> None:
    packed, adapter = calibrated / "packed", calibrated / "adapter"
    texts = f"{STORIES}:3"
    done = run("merge", packed, adapter, tmp_path / "out", "--calibration", texts, "--no-check", "--json")
    told = json.loads(done.out)
    assert (told["before"], told["after"], told["text"]) == (None, None, None)
    assert set(told["methods"].values()) == {"gptq"}
    manifest = json.loads((tmp_path / "out" / "quantkit_manifest.json").read_text())
    assert manifest["merge"]["calibration"].startswith(f"3 samples of 64 tokens from {STORIES}:3, sha256 ")
