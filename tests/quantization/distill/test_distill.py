"""Distillation of a run: the loss falls, a resumed run is the same, the result is an ordinary directory."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MixtralForCausalLM

from quantkit import quantizing
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import UsageError
from quantkit.quantization.distill import distill, stacking, training
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.student import Student
from quantkit.quantization.distill.training import Training
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.runtime.replace import unpack_modules
from quantkit.verification import check_output
from quantkit.verification.verify import verify

from ...tiny.calibrated import data, files_of, interrupted_at, write

EXAMPLES = Path(__file__).parents[3] / "examples"
STORIES = EXAMPLES / "stories260K"
#: stories260K in few samples and steps.
SMALL: dict[str, Any] = {
    "format": "int2",
    "group_size": 32,
    "method": "distill",
    "device": "cpu",
    "calibration": CalibrationOptions(str(EXAMPLES / "stories.txt"), 24, 64),
}
#: The same from a start that takes no data.
PLAIN = {**SMALL, "method": "mse,distill"}


#: A tiny random model in few samples.
TINY: dict[str, Any] = {"format": "int2", "group_size": 16, "method": "mse,distill", "device": "cpu"}


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
    assert facts["sequences"] == {"length": 64, "text": 227, "own": 136, "own_repeating": 0, "own_chats": 0}
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
    monkeypatch.setattr(distill, "STATE_PART", math.inf)
    options = {**SMALL, "method": "gptq,distill", **steps(6)}
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


def test_stacks_of_linears_train_like_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks: list[int] = []
    build = distill.build_student

    def counted(*given: Any) -> Any:
        student = build(*given)
        stacks.append(len({rows.stack for rows in student.rows.values()}))
        return student

    monkeypatch.setattr(distill, "build_student", counted)
    options = {**PLAIN, **steps(3)}
    quantize(STORIES, tmp_path / "stacked", **options)
    for most in (0, 10_000):
        monkeypatch.setattr(stacking, "STACK_WEIGHTS", most)
        quantize(STORIES, tmp_path / str(most), **options)
        assert files_of(tmp_path / str(most)) == files_of(tmp_path / "stacked")
    # Its 35 linears have two widths.
    assert stacks[0] == 2 < stacks[2] < stacks[1] == 35


def test_interrupted_at_the_end_the_manifest_has_what_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Discarded are work files of the calibration too.
    options = {**SMALL, "method": "gptq,distill", **steps(2), "check": True}
    quantize(STORIES, tmp_path / "whole", **options)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    for resume, module, where in ((False, quantizing, "discard_work"), (True, check_output, "run_prompt")):
        with monkeypatch.context() as patched:
            patched.setattr(module, where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                quantize(STORIES, tmp_path / "out", resume=resume, **options)
        assert not (tmp_path / "out" / "config.json").exists()
    quantize(STORIES, tmp_path / "out", resume=True, **options)
    assert facts_of(tmp_path / "out")["steps"] == 2
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")


def test_a_resumed_run_counts_the_time_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, left = [0.0], list[float]()
    write_samples = distill.own_samples

    def slowly(*given: Any) -> Any:
        for samples in write_samples(*given):
            clock[0] += 100.0
            yield samples

    def run(training: Training, seconds_left: Any, on_step: Any) -> None:
        left.append(seconds_left())
        raise KeyboardInterrupt

    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(distill, "own_samples", slowly)
    monkeypatch.setattr(Training, "run", run)
    options = {**PLAIN, "distillation": DistillOptions(seconds=1500.0, batch=2)}
    for resume in (False, True):
        with pytest.raises(KeyboardInterrupt):
            quantize(STORIES, tmp_path / "out", resume=resume, **options)
    # A fifth of the time is for samples.
    assert left == [1200.0, 1200.0] and clock == [300.0]


@pytest.mark.parametrize(("loops", "own", "left_out"), [(8, 0, 16), (6, 6, 18), (2, 16, 6)])
def test_samples_that_repeat_themselves_are_replaced_by_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    loops: int,
    own: int,
    left_out: int,
) -> None:
    """Of each batch of 8 some are loops; 16 samples are wanted, and at most so many may be left out."""
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(distill, "STATE_PART", math.inf)

    def own_samples(*_: Any) -> Any:
        while True:
            yield torch.cat([torch.full((loops, 64), 5), torch.randint(3, 500, (8 - loops, 64))])

    monkeypatch.setattr(distill, "own_samples", own_samples)
    monkeypatch.setattr(distill, "HELD_OUT", 10)
    options, calls = {**PLAIN, **steps(2)}, list[str]()
    quantize(STORIES, tmp_path / "out", progress=lambda *call: calls.append(call[2]), **options)
    facts = facts_of(tmp_path / "out")
    assert (facts["sequences"]["own"], facts["sequences"]["own_repeating"]) == (own, left_out)
    said = f"{left_out} were left out, and the training takes the other {own} beside the calibration text"
    assert caplog.text.count(said) == (left_out > own)
    stop = next(at for at, text in enumerate(calls) if text.startswith("step 1 of 2"))
    with pytest.raises(KeyboardInterrupt):
        quantize(STORIES, tmp_path / "again", progress=interrupted_at(stop + 1), **options)
    quantize(STORIES, tmp_path / "again", resume=True, **options)
    assert facts_of(tmp_path / "again")["sequences"] == facts["sequences"]


def test_storing_the_state_takes_a_small_part_of_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, stored = [0.0], list[int]()

    def run(training: Training, _: Any, on_step: Any) -> None:
        for step in range(1, 41):
            clock[0] += 100.0
            training.at.step, training.at.total = step, 40
            on_step(training.at)

    def store(training: Training, *_: Any) -> None:
        clock[0] += 60.0
        stored.append(training.at.step)

    monkeypatch.setattr(distill, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(distill, "_store", store)
    monkeypatch.setattr(Training, "run", run)
    quantize(STORIES, tmp_path / "out", **PLAIN, **steps(40, own=0.0))
    # Two minutes after the start; then 60 s are a twentieth of 1200.
    assert stored == [2, 14, 26, 38]


def test_a_time_decides_the_number_of_steps_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, step = [0.0], Training._step

    def slowly(one: Training) -> None:
        clock[0] += 1.0
        step(one)

    for module in (distill, training):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(Training, "_step", slowly)
    monkeypatch.setattr(training, "MEASURED", 5)
    options = {**PLAIN, "distillation": DistillOptions(seconds=12.0, batch=2, own=0.0)}
    quantize(STORIES, tmp_path / "out", **options)
    assert facts_of(tmp_path / "out")["steps"] == 12


@pytest.mark.parametrize(
    "options",
    [
        {"format": "binary-residual"},
        {"format": "int4", "method": "smoothquant,distill", "activations": "int8"},
        {"format": "int3", "zero_point": "float", "method": "gptq,distill", "lm_head": "int4:32"},
        {"format": "book4", "rotate": True},
        {"format": "ternary", "packing": "radix", "embeddings": "int8"},
    ],
    ids=lambda options: options["format"],
)
def test_other_starts_and_what_is_packed_beside(tmp_path: Path, options: dict[str, Any]) -> None:
    given = {**SMALL, "group_size": 16, **options}
    result = quantize(STORIES, tmp_path / "out", check=True, **given, **steps(16, code_rate=1e-3))
    methods = {one.fate.method.name for one in result.plan.layers if one.fate.method is not None}
    start = "mse,distill" if options["format"] == "binary-residual" else options.get("method", "distill")
    assert start in methods
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


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("mixtral", {}),
        # Every second row is of gate, matrices are turned, and there are biases.
        ("gpt_oss", {"format": "ternary"}),
        # One product for all experts, which takes the whole parameter.
        ("llama4", {"method": "mse,distill"}),
        ("tied", {}),
        ("tied", {"embeddings": "int8:32", "lm_head": None}),
        ("tied", {"lm_head": "int8:32"}),
        ("qwen3_moe", {"activations": "int8", "method": "mse,distill"}),
    ],
)
def test_the_student_is_what_is_loaded(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch, family: str, options: dict[str, Any]
) -> None:
    students: list[Student] = []
    build = distill.build_student

    def kept(*given: Any) -> Student:
        students.append(build(*given))
        return students[-1]

    monkeypatch.setattr(distill, "build_student", kept)
    source = write(tmp_path, family, num_hidden_layers=2)
    given = {**TINY, "calibration": data(text), **options}
    quantize(source, tmp_path / "out", **given, **steps(20, code_rate=2e-2))
    facts = facts_of(tmp_path / "out")
    assert facts["kl_after"] < facts["kl_before"]
    loaded = load(tmp_path / "out", device="cpu", dtype=torch.float32)
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        found, expected = loaded(input_ids=tokens).logits, students[0].logits(tokens)
    if "activations" not in options:
        torch.testing.assert_close(found, expected, rtol=0.0, atol=1e-6)
    unpack_modules(loaded, torch.float32)
    of_student = dict(students[0].network.named_parameters(remove_duplicate=False))
    for name, weight in loaded.named_parameters(remove_duplicate=False):
        assert torch.equal(weight, of_student[name].view(weight.shape)), name


def codes_of(directory: Path) -> dict[str, torch.Tensor]:
    """The words of packed matrices, and dense weights, by name."""
    files = Checkpoint.of_files(sorted(directory.glob("*.safetensors")))
    return {name: files.read(name) for name in files.tensors if name.endswith(".weight")}


def test_experts_are_trained_but_for_those_that_no_token_reaches(
    tmp_path: Path, text: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(distill, "STATE_SECONDS", 0.0)
    monkeypatch.setattr(distill, "STATE_PART", math.inf)
    source = write(tmp_path, "mixtral", num_hidden_layers=1, num_experts_per_tok=1)
    # The logit of expert 3 is the mean of those of the others, and one is chosen.
    tensors = load_file(source / "model.safetensors")
    (router,) = (name for name in tensors if name.endswith("gate.weight"))
    tensors[router][3] = tensors[router][:3].mean(0)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    given = {**TINY, "calibration": data(text), **steps(12, code_rate=2e-2)}
    result = quantize(source, tmp_path / "out", **given)
    quantize(source, tmp_path / "mse", **{**TINY, "method": "mse"})
    ours, theirs = codes_of(tmp_path / "out"), codes_of(tmp_path / "mse")
    experts = [name for name in ours if ".experts." in name]
    assert len(experts) == 4 * 3
    same = {name for name in experts if torch.equal(ours[name], theirs[name])}
    assert same == {name for name in experts if ".experts.3." in name}
    # The errors of all matrices of a parameter are added up.
    loaded = load(tmp_path / "out", device="cpu", dtype=torch.float32)
    unpack_modules(loaded, torch.float32)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    original = MixtralForCausalLM.from_pretrained(source, dtype=torch.float32).get_parameter(name)
    with torch.no_grad():
        error = (loaded.get_parameter(name) - original).square().sum() / original.square().sum()
    assert result.measured[name].relative_error == pytest.approx(float(error), rel=1e-4)
    assert not result.measured[name].note
    calls: list[str] = []
    quantize(source, tmp_path / "again", progress=lambda *call: calls.append(call[2]), **given)
    stop = next(i for i, text in enumerate(calls) if text.startswith("step 6 of 12"))
    out = tmp_path / "interrupted"
    with pytest.raises(KeyboardInterrupt):
        quantize(source, out, progress=interrupted_at(stop + 1), **given)
    quantize(source, out, resume=True, **given)
    assert files_of(out) == files_of(tmp_path / "out")


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


@pytest.mark.parametrize("family", ["t5", "embedding"])
def test_models_that_predict_no_tokens_are_refused(tmp_path: Path, text: Path, family: str) -> None:
    source = write(tmp_path, family)
    with pytest.raises(UsageError, match=r"models of type '\w+' make none.*--method signround"):
        quantize(source, tmp_path / "out", **TINY, calibration=data(text), **steps(2))
    assert not (tmp_path / "out").exists()


def test_another_time_is_another_run(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        quantize(STORIES, tmp_path / "out", **PLAIN, **steps(5), progress=interrupted_at(3))
    with pytest.raises(Exception, match="distillation"):
        quantize(STORIES, tmp_path / "out", resume=True, **PLAIN, **steps(6))
    shutil.rmtree(tmp_path / "out")
