"""Distillation of a run: the loss falls, a resumed run is the same, the result is an ordinary directory."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.quantization.distill import distill, training
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantizing import QuantizeResult, quantize
from quantkit.verification.verify import verify

from ...tiny.calibrated import data, files_of, interrupted_at, write

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"
#: stories260K in few samples and steps.
SMALL: dict[str, Any] = {
    "format": "int2",
    "group_size": 32,
    "method": "distill",
    "device": "cpu",
    "calibration": CalibrationOptions(None, 24, 64),
}


def steps(count: int, **changes: Any) -> dict[str, Any]:
    return {"distillation": DistillOptions(count, batch=4, **changes)}


def facts_of(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = read_manifest(directory)["distillation"]
    return found


def test_the_divergence_falls_and_the_directory_is_an_ordinary_one(tmp_path: Path) -> None:
    result = quantize(STORIES, tmp_path / "out", check=True, **SMALL, **steps(40))
    facts = facts_of(tmp_path / "out")
    assert facts["kl_after"] < 0.9 * facts["kl_before"]
    assert facts["steps"] == 40 and facts["tokens"] == 40 * 4 * 64
    assert facts["sequences"] == {"length": 64, "text": 4693, "own": 16 + 40 * 3}
    assert all(one.output_error is None for one in result.measured.values())
    assert all(not one.problems for one in verify(tmp_path / "out", reload=False))
    quantize(STORIES, tmp_path / "best", **{**SMALL, "method": "best"})
    ours, theirs = (Checkpoint.of_files([tmp_path / one / "model.safetensors"]) for one in ("out", "best"))
    assert ours.tensors.keys() == theirs.tensors.keys()
    differ = {
        name.rpartition(".")[2]
        for name in ours.tensors
        if not torch.equal(ours.read(name), theirs.read(name))
    }
    assert differ == {"weight", "weight_scale"}
    dense = read_manifest(tmp_path / "out")["dense"]
    assert dense["model.norm.weight"] == "a norm, changed: trained"
    assert dense["model.embed_tokens.weight"] == "an embedding"


def test_interrupted_anywhere_and_resumed_it_is_the_same_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    options = {**SMALL, **steps(6)}
    calls: list[str] = []
    quantize(STORIES, tmp_path / "whole", progress=lambda done, total, text: calls.append(text), **options)
    expected = files_of(tmp_path / "whole")
    first = next(i for i, text in enumerate(calls) if text.startswith("step 1 of 6"))
    resumed: list[str] = []
    for stop in (first, first + 4):
        out = tmp_path / f"out{stop}"
        resumed.clear()
        with pytest.raises(KeyboardInterrupt):
            quantize(STORIES, out, progress=interrupted_at(stop + 1), **options)
        assert not (out / "config.json").exists()
        quantize(STORIES, out, resume=True, progress=lambda *call: resumed.append(call[2]), **options)
        assert files_of(out) == expected
        if stop > first:
            assert not any(text.startswith("step 2 of 6") for text in resumed)


def test_a_time_decides_the_number_of_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "MEASURED", 5)
    options = {**SMALL, "distillation": DistillOptions(seconds=3.0, batch=2)}
    quantize(STORIES, tmp_path / "out", **options)
    assert facts_of(tmp_path / "out")["steps"] > 5


@pytest.mark.parametrize(
    "options",
    [
        {"format": "binary-residual", "method": "mse,distill"},
        {"format": "int4", "method": "smoothquant,distill", "activations": "int8"},
        {"format": "int3", "zero_point": "float", "method": "gptq,distill", "lm_head": "int4:32"},
        {"format": "book4", "rotate": True},
        {"format": "ternary", "packing": "radix", "embeddings": "int8"},
    ],
    ids=lambda options: options["format"],
)
def test_other_starts_and_what_is_packed_beside(tmp_path: Path, options: dict[str, Any]) -> None:
    given = {**SMALL, "group_size": 16, **options}
    quantize(STORIES, tmp_path / "out", check=True, **given, **steps(8, code_rate=2e-3))
    facts = facts_of(tmp_path / "out")
    assert facts["kl_after"] < facts["kl_before"]
    assert all(not one.problems for one in verify(tmp_path / "out", reload=False))


def test_the_divergence_before_is_that_of_the_start(tmp_path: Path) -> None:
    """Without rates nothing moves, and the directory is that of the method before."""
    still = DistillOptions(2, batch=2, code_rate=0.0, scale_rate=0.0, norm_rate=0.0)
    quantize(STORIES, tmp_path / "out", **SMALL, distillation=still)
    quantize(STORIES, tmp_path / "best", **{**SMALL, "method": "best"})
    facts = facts_of(tmp_path / "out")
    assert facts["kl_after"] == facts["kl_before"]
    files = [(tmp_path / one / "model.safetensors").read_bytes() for one in ("out", "best")]
    assert files[0] == files[1]


def test_experts_keep_their_codes_and_that_is_said(tmp_path: Path, text: Path) -> None:
    source = write(tmp_path, "mixtral", num_hidden_layers=1)
    given = {"format": "int2", "group_size": 16, "method": "distill", "calibration": data(text)}
    result: QuantizeResult = quantize(source, tmp_path / "out", device="cpu", **given, **steps(2))
    noted = {name.rpartition(".")[2] for name, one in result.measured.items() if one.note}
    assert noted == {"gate_up_proj", "down_proj"}


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"steps": 0}, "0 steps of distillation train nothing"),
        ({"seconds": 0.0}, "a distillation of 0 s trains nothing; give a time such as 30m or 2h"),
        ({"steps": 1, "seconds": 1.0}, "either a number of steps or a time"),
    ],
)
def test_budgets_that_train_nothing(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        DistillOptions(**options)


def test_refusals_come_before_any_work(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(UsageError, match=r"no method of the recipe trains.*--method distill"):
        quantize(STORIES, out, **{**SMALL, "method": "best"}, **steps(5))
    short = tmp_path / "short.txt"
    short.write_text("too short")
    with pytest.raises(UsageError, match="less than one calibration sample of 64"):
        quantize(STORIES, out, **{**SMALL, "calibration": CalibrationOptions(str(short), 24, 64)}, **steps(5))
    with pytest.raises(UsageError, match="'best,best' cannot be combined"):
        quantize(STORIES, out, **{**SMALL, "method": "best,best"})
    assert not out.exists()


def test_another_time_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(STORIES, tmp_path / "out", **SMALL, **steps(5), progress=interrupted_at(3))
    with pytest.raises(Exception, match="distillation"):
        quantize(STORIES, tmp_path / "out", resume=True, **SMALL, **steps(6))
    shutil.rmtree(tmp_path / "out")
