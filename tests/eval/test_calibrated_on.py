"""Notes on texts that a model was calibrated or trained on."""

from pathlib import Path

import pytest

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.cli.figures import print_reports
from quantkit.eval.evaluate import evaluate
from quantkit.eval.results import EvalReport
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import quantize

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


def evaluated(model: Path, *texts: Path) -> EvalReport:
    return evaluate(model, texts=texts, window=32, max_windows=1, device="cpu")


@pytest.mark.parametrize(("method", "how"), [("gptq", "calibrated"), ("mse,distill", "trained")])
def test_a_note_says_that_the_text_is_that_of_the_calibration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], method: str, how: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("other").mkdir()
    for path in (Path("a.txt"), Path("b.txt"), Path("other/a.txt"), Path("c.txt")):
        path.write_text(f"Once upon a time there was {path}. " * 40)
    given = {"format": "int2", "group_size": 32, "device": "cpu", "check": False, "method": method}
    options = CalibrationOptions("a.txt:2,b.txt:2", length=32)
    trained = {"distillation": DistillOptions(1, batch=2)} if how == "trained" else {}
    quantize(STORIES, tmp_path / "out", calibration=options, **given, **trained)
    found = evaluated(tmp_path / "out", tmp_path / "b.txt", tmp_path / "c.txt", tmp_path / "a.txt")
    said = [f"out was {how} on this text: {name}" for name in ("a.txt", "b.txt")]
    assert [note for note in found.notes if "text" in note] == said
    assert set(said) <= set(found.to_dict()["notes"])
    print_reports([found])
    assert said[0] in " ".join(capsys.readouterr().err.split())
    if how == "trained":
        return
    # Another file of that name says nothing while the file of the manifest is there.
    assert not any("was" in note for note in evaluated(tmp_path / "out", Path("other/a.txt")).notes)
    monkeypatch.chdir("other")
    assert said[0] in evaluated(tmp_path / "out", tmp_path / "a.txt").notes
    assert not any("was" in note for note in evaluated(tmp_path / "out", Path("a.txt")).notes)
    monkeypatch.chdir(tmp_path)
    Path("a.txt").unlink()
    found = evaluated(tmp_path / "out", Path("other/a.txt"))
    assert f"out was {how} on a text of this name: a.txt" in found.notes


def test_models_without_calibration_get_no_note(tmp_path: Path) -> None:
    text = tmp_path / "a.txt"
    text.write_text("Once upon a time. " * 40)
    quantize(STORIES, tmp_path / "out", format="int4", group_size=32, device="cpu", check=False)
    for model in (tmp_path / "out", STORIES):
        assert not any("was" in note for note in evaluated(model, text).notes)
