"""A merge finds the original and the calibration text again that relative paths named, in any directory."""

import shutil
from pathlib import Path

import pytest

import quantkit
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.data.samples import Described
from quantkit.calibrate.data.texts import given_texts
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.errors import UsageError
from quantkit.merging import merge
from quantkit.runtime.saved_model import read_record

from .test_merging import EXAMPLES, MODEL, make_adapter

pytest.importorskip("peft", reason="adapters are made by PEFT, of the extra 'test'")

GPTQ = {"format": "int4", "method": "gptq", "check": False}


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a model, a text, and by relative paths a packed model; an adapter is beside them."""
    work = tmp_path_factory.mktemp("paths") / "work"
    for name in ("data", "out"):
        (work / name).mkdir(parents=True)
    shutil.copytree(MODEL, work / "model")
    shutil.copy(EXAMPLES / "stories.txt", work / "data" / "text.txt")
    data = CalibrationOptions("data/text.txt", 6, 64)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(work)
        quantkit.quantize("model", "out/packed", **GPTQ, calibration=data)
    make_adapter(work.parent / "adapter", work / "out" / "packed")
    return work


def test_what_relative_paths_named_is_found_in_any_directory(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed, adapter = made / "out" / "packed", made.parent / "adapter"
    assert str(made) not in (packed / MANIFEST_NAME).read_text()
    paths = {"model": "../../model", "data/text.txt": "../../data/text.txt"}
    assert read_record(packed).relative_paths == paths
    monkeypatch.chdir(tmp_path)
    # Links to directories do not count.
    (tmp_path / "link").symlink_to(packed)
    result = merge("link", adapter, "merged", check=False)
    assert set(result.methods.values()) == {"gptq"} and result.notes == ()
    manifest = read_manifest(tmp_path / "merged")
    assert manifest["merge"]["calibration"] == manifest["calibration"]
    found = manifest["relative_paths"].items()
    assert {name: (tmp_path / "merged" / path).resolve() for name, path in found} == {
        name: made / name for name in paths
    }


def test_what_has_moved_is_found_beside_the_packed_model_or_by_its_name(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter = made.parent / "adapter"
    shutil.copytree(made, tmp_path / "moved")
    text = tmp_path / "moved" / "data" / "text.txt"
    result = merge(tmp_path / "moved" / "out" / "packed", adapter, tmp_path / "one", check=False)
    assert set(result.methods.values()) == {"gptq"}
    assert read_record(tmp_path / "one").relative_paths["data/text.txt"] == "../moved/data/text.txt"
    shutil.copytree(made / "out" / "packed", tmp_path / "packed")
    monkeypatch.chdir(made)
    result = merge(tmp_path / "packed", adapter, tmp_path / "two", check=False)
    assert set(result.methods.values()) == {"gptq"}
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=r"names model, which is not there; .* with --source"):
        merge("packed", adapter, "three", check=False)
    text.write_text(text.read_text().replace("the", "a"))
    result = merge("moved/out/packed", adapter, "three", source=MODEL, check=False)
    assert set(result.methods.values()) == {"mse"}
    assert any("(data/text.txt:6) is no longer the same; --calibration names" in one for one in result.notes)


def test_texts_given_in_python_are_given_again(made: Path, tmp_path: Path) -> None:
    texts = [one for one in (EXAMPLES / "stories.txt").read_text().split("\n\n") if one.strip()]
    packed, adapter = tmp_path / "packed", made.parent / "adapter"
    quantkit.quantize(MODEL, packed, **GPTQ, calibration=CalibrationOptions(given_texts(texts), 6, 64))
    result = merge(packed, adapter, tmp_path / "one", check=False)
    assert set(result.methods.values()) == {"mse"}
    assert result.notes == (
        "model.layers.0.mlp.down_proj and 9 more: rounded by mse now, not by gptq, whose data was "
        f"{len(texts)} texts given in Python, and no file has them: give them again, as "
        "merge(calibration=TEXTS); --calibration names other texts",
    )
    result = merge(packed, adapter, tmp_path / "two", calibration=texts, check=False)
    assert set(result.methods.values()) == {"gptq"} and result.notes == ()
    manifest = read_manifest(tmp_path / "two")
    first, again = (Described.read(one["calibration"]) for one in (manifest, manifest["merge"]))
    assert again is not None and again == first
