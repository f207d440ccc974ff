"""A merge believes of a manifest what it checked, and keeps its result where a comparison fails."""

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.calibrate.data import texts
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.manifest import MANIFEST_NAME, pretty_json, read_manifest
from quantkit.errors import UsageError
from quantkit.eval.evaluate import evaluate
from quantkit.merging import merge

from .test_merging import EXAMPLES, MODEL, TARGETS, make_adapter, tensors_of

pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")

STORIES = EXAMPLES / "stories.txt"


@pytest.fixture(autouse=True)
def small_products(one_thread: None, few_windows: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A packed directory by gptq, and an adapter of all its linears."""
    work = tmp_path_factory.mktemp("made")
    quantkit.quantize(
        MODEL,
        work / "packed",
        format="int4",
        method="gptq",
        calibration=CalibrationOptions(str(STORIES), 6, 64),
        check=False,
    )
    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    return work / "packed", make_adapter(work / "all", work / "packed", target_modules=every)


def with_calibration(packed: Path, out: Path, calibration: str) -> Path:
    """A copy of a packed directory whose manifest names another calibration, with a hash that is right."""
    shutil.copytree(packed, out)
    manifest: dict[str, Any] = {**read_manifest(out), "calibration": calibration}
    manifest.pop("manifest_sha256", None)
    manifest["manifest_sha256"] = hashlib.sha256(pretty_json(manifest)).hexdigest()
    (out / MANIFEST_NAME).write_bytes(pretty_json(manifest))
    return out


@pytest.mark.parametrize(
    ("samples", "origin", "said"),
    [
        ("6 samples of 64", "hf:some/set:6", "(hf:some/set:6) is on the hub, and was not asked for"),
        ("999999999 samples of 64", f"{STORIES}:999999999", "is more than 134217728 tokens by the manifest"),
        ("6 samples of 0", f"{STORIES}:6", "cannot be read again (calibration length is 0"),
        ("6 samples of 64", "a\0b.txt:6", "cannot be read again"),
    ],
)
def test_samples_of_a_manifest_are_read_within_bounds(
    samples: str,
    origin: str,
    said: str,
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "open_data_set", lambda name: pytest.fail(f"{name} was opened"))
    named = f"{samples} tokens from {origin}, sha256 {'0' * 64}"
    packed = with_calibration(made[0], tmp_path / "packed", named)
    notes = merge(packed, made[1], tmp_path / "out", check=False).notes
    assert any("rounded by mse now" in note for note in notes)
    assert any(said in note for note in notes)


def test_a_foreign_file_is_no_calibration(made: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps([{"text": "Once upon a time. " * 400}]))
    named = f"6 samples of 64 tokens from {other}:6, sha256 {'0' * 64}"
    packed = with_calibration(made[0], tmp_path / "packed", named)
    merged = merge(packed, made[1], tmp_path / "out", check=False)
    assert set(merged.methods.values()) == {"mse"}
    assert any("is no longer the same" in note for note in merged.notes)


def test_a_second_adapter_is_refused_as_the_first_would_be_lost(
    made: tuple[Path, Path], tmp_path: Path
) -> None:
    merge(*made, tmp_path / "one", check=False)
    with pytest.raises(UsageError, match=r"merged into it already.*--source, or use --from-packed"):
        merge(tmp_path / "one", made[1], tmp_path / "two", check=False)
    assert not (tmp_path / "two").exists()
    merge(tmp_path / "one", made[1], tmp_path / "three", from_packed=True, check=False)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), ValueError("no such module")])
def test_a_comparison_that_fails_leaves_the_result(
    error: Exception, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("quantkit.merging.compare", fail)
    merged = merge(*made, tmp_path / "out")
    assert merged.after is None and f"KL was not measured: {error}" in merged.notes
    assert read_manifest(tmp_path / "out")["merge"]["linears"]


def test_text_of_the_calibration_is_said_of_a_merge(made: tuple[Path, Path], tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text(STORIES.read_text())
    merge(*made, tmp_path / "out", calibration=str(other), check=False)
    found = evaluate(tmp_path / "out", texts=[other], window=32, max_windows=1, device="cpu")
    assert "out was calibrated on this text: other.txt" in found.notes


def test_kl_on_the_bundled_text_is_said_to_be_of_the_calibration(tmp_path: Path) -> None:
    packed, few = tmp_path / "packed", CalibrationOptions(None, 16, 64)
    quantkit.quantize(MODEL, packed, format="int4", method="gptq", calibration=few, check=False)
    adapter = make_adapter(tmp_path / "some", packed, target_modules=TARGETS)
    said = "KL was measured on the text of the calibration; --text FILE takes another"
    assert said in merge(packed, adapter, tmp_path / "one").notes
    assert said not in merge(packed, adapter, tmp_path / "two", text=STORIES).notes
    assert tensors_of(tmp_path / "one").keys() == tensors_of(tmp_path / "two").keys()
