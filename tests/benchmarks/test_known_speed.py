"""Decoding of each width of a model."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quantkit.checkpoint.source import Checkpoint

SHORT = ("--device", "cpu", "--prompt", "8", "--new-tokens", "4", "--repeats", "1")


def test_the_original_and_each_row_are_timed_and_have_the_bytes_of_their_tensors(
    benchmark: ModuleType, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "new" / "speed.json"
    benchmark.main([str(stories), *SHORT, "--batch", "1,2", "--row", "int4", "--json", str(file)])
    found = json.loads(file.read_text())
    original, int4 = found["rows"]
    assert [row["label"] for row in found["rows"]] == ["original", "int4"]
    assert original["bytes"] == Checkpoint.open(stories).nbytes
    assert original["bytes"] / 5 < int4["bytes"] < original["bytes"] / 3
    assert original["stored_as"] == "dense" and int4["stored_as"].startswith("int4 g")
    for row in found["rows"]:
        assert [(cell["batch"], cell["prompt"], cell["mode"]) for cell in row["decode"]] == [
            (1, 8, "flat"),
            (2, 8, "flat"),
        ]
        assert all(0 < cell["low"] <= cell["median"] <= cell["high"] for cell in row["decode"])
        assert row["seconds"] > 0
    assert found["model"] == "stories260K" and (found["prompt"], found["new_tokens"]) == (8, 4)
    assert "torch" in found["machine"]
    assert capsys.readouterr().out.count(" tokens/s, ") == 2


def test_a_run_that_ends_early_keeps_what_it_has(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(benchmark, "quantize", ended)
    file = tmp_path / "speed.json"
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([str(stories), *SHORT, "--json", str(file)])
    assert [row["label"] for row in json.loads(file.read_text())["rows"]] == ["original"]


def test_random_weights_are_taken_without_a_model(
    benchmark: ModuleType, stories: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, str]] = []

    def write_source(directory: Path, layers: int, device: str) -> Path:
        asked.append((layers, device))
        return stories

    monkeypatch.setattr(benchmark, "write_source", write_source)
    packed: list[dict[str, object]] = []
    quantize = benchmark.quantize

    def noted(source: Path, out: Path, **given: object) -> None:
        packed.append(given)
        quantize(source, out, **given)

    monkeypatch.setattr(benchmark, "quantize", noted)
    file = tmp_path / "speed.json"
    given = ("--layers", "3", "--row", "int2", "--lm-head", "int8", "--batch", "1", "--json", str(file))
    benchmark.main([*SHORT, *given])
    assert asked == [(3, "cpu")] and "3 layers" in json.loads(file.read_text())["model"]
    assert packed == [{**benchmark.ROWS["int2"], "lm_head": "int8", "method": "rtn", "device": "cpu"}]


def test_rows_are_all_widths_without_a_method(benchmark: ModuleType) -> None:
    assert {"int8", "int4", "nvfp4", "binary"} <= set(benchmark.ROWS)
    assert not any("method" in given for given in benchmark.ROWS.values())
    widths = {given["format"] for given in benchmark.WIDTHS.values()}
    assert widths == {given["format"] for given in benchmark.ROWS.values()}


def test_without_a_gpu_it_says_so(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        benchmark.main(["--json", "out.json"])
    assert "there is no GPU here" in capsys.readouterr().err
