"""The page of a model from 8 bits to 1."""

import importlib
import json
from pathlib import Path
from types import ModuleType

import pytest

TEXT = Path(__file__).parents[2] / "examples" / "stories.txt"
SHORT = ("--max-windows", "1", "--window", "128", "--no-speed")


@pytest.fixture
def peers(benchmark: ModuleType) -> ModuleType:
    """The module of other tools; the one that is measured with has put its folder on the path."""
    return importlib.import_module("peers")


def known(benchmark: ModuleType, model: Path, out: Path, *options: str) -> dict[str, object]:
    benchmark.main([str(model), "--text", str(TEXT), "--out", str(out), *SHORT, *options])
    found: dict[str, object] = json.loads((out / model.name / "known.json").read_text())
    return found


def test_a_row_is_measured_and_what_did_not_run_is_named(
    benchmark: ModuleType, peers: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers, "PEERS", (peers.Peer("Other", "not-installed", lambda *_: None),))
    options = ("--row", "int4", "--row", "int4 gptq", "--without", "gptq", "--peers", "--about", "Tiny.")
    found = known(benchmark, stories, tmp_path, *options)
    (row,) = found["rows"]
    assert row["label"] == "int4" and row["stored_as"].startswith("int4 g")
    metrics = row["texts"]["stories.txt"]
    # Four bits of so small a model move predictions, and leave most tokens as they are.
    assert 0.01 < metrics["kl_mean"] < 1 and 0.5 < metrics["same_top1"] < 1
    assert row["bytes"] < found["original"]["bytes"] / 3 and 4 < row["bits_per_weight"] < 5
    assert row["seconds"] > 0 and row["tokens_per_second"] is None
    assert found["command"].startswith("python benchmarks/known_models.py") and "torch" in found["machine"]
    assert "--about" not in found["command"] and "--out" not in found["command"]
    assert "decoding: not timed (`--no-speed`)" in found["notes"] and "Decoding" not in found["how"]
    assert "int4 gptq: not run (`--without gptq`)" in found["notes"] and "int8: not run" in found["notes"]
    assert "Other: not-installed is not installed (pip install not-installed)" in found["notes"]
    page = (tmp_path / stories.name / "known.md").read_text()
    assert f"| {row['label']} | {row['bits_per_weight']:.3f} |" in page
    assert f"{metrics['perplexity']:.5g}" in page and "Tiny." in page


def test_a_peer_has_the_bits_and_bytes_that_its_weights_stand_for(
    benchmark: ModuleType, peers: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(model: Path, out: Path, data: object) -> object:
        peers.rounded(model, out, lambda weight: (weight * 8).round() / 8)
        return peers.Made(3.5, 12_340_000, "its linears are coarse")

    monkeypatch.setattr(peers, "PEERS", (peers.Peer("Coarse", "torch", make),))
    found = known(benchmark, stories, tmp_path, "--row", "int8", "--peers")
    ours, coarse = found["rows"]
    assert (coarse["label"], coarse["bits_per_weight"], coarse["bytes"]) == ("Coarse", 3.5, 12_340_000)
    kl = [row["texts"]["stories.txt"]["kl_mean"] for row in (ours, coarse)]
    assert kl[1] > 10 * kl[0] and coarse["stored_as"] == "Coarse"
    assert f"Coarse: torch {peers.installed('torch')}; its linears are coarse" in found["notes"]
    assert "| Coarse | 3.500 | 12.34 MB |" in (tmp_path / stories.name / "known.md").read_text()


def test_what_a_peer_made_elsewhere_is_a_row_with_the_versions_there(
    benchmark: ModuleType, peers: ModuleType, stories: Path, tmp_path: Path
) -> None:
    made = {"coarse": peers.Made(3.5, 12_340_000, "its linears are coarse"), "packed": None}
    place = {name: tmp_path / "made" / name for name in made}
    peers.rounded(stories, place["coarse"], lambda weight: (weight * 8).round() / 8)
    benchmark.quantize(stories, place["packed"], format="int4")
    for name, stands_for in made.items():
        peers.Finished(name.title(), place[name], 7.5, "tool 1.2 with torch 2.99", stands_for).store()
    found = known(benchmark, stories, tmp_path, "--row", "int4", "--made", str(tmp_path / "made"))
    rows = {row["label"]: row for row in found["rows"]}
    assert list(rows) == ["int4", "Coarse", "Packed"]
    assert rows["Coarse"]["bits_per_weight"] == 3.5 and rows["Coarse"]["seconds"] == 7.5
    same = ("texts", "bits_per_weight", "bytes", "stored_as")
    assert all(rows["Packed"][key] == rows["int4"][key] for key in same)
    assert rows["Coarse"]["texts"] != rows["int4"]["texts"]
    assert "Coarse: tool 1.2 with torch 2.99; its linears are coarse" in found["notes"]
    assert "Packed: tool 1.2 with torch 2.99" in found["notes"]


def test_methods_with_data_take_the_calibration(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, object]] = {}
    quantize = benchmark.quantize

    def noted(source: Path, out: Path, **given: object) -> None:
        asked[out.name] = given
        quantize(source, out, **given)

    monkeypatch.setattr(benchmark, "quantize", noted)
    options = ("--row", "int2", "--row", "int2 awq", "--calibration", str(TEXT), "--samples", "2")
    found = known(benchmark, stories, tmp_path, *options)
    data = {"calibration": str(TEXT), "calibration_samples": 2}
    assert asked == {"int2": benchmark.WIDTHS["int2"], "int2-awq": {**benchmark.WIDTHS["int2 awq"], **data}}
    assert f"{TEXT}, 2 samples of 512 tokens" in found["how"]


def test_a_row_that_is_not_there_is_refused(
    benchmark: ModuleType, stories: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        benchmark.main([str(stories), "--text", str(TEXT), "--row", "int9"])
    assert "invalid choice: 'int9'" in capsys.readouterr().err
