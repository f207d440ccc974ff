"""Tasks through lm-eval, offline, on a real model: the same as lm-eval's own, and compared item by item."""

import builtins
import json
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.hub.deadline import MAX_ANSWER_BYTES
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate_many
from quantkit.eval.result_cache import Partial
from quantkit.eval.tasks import TaskRun, Tasks, _run_task, jsonable, task_manager, task_metrics
from quantkit.quantizing import quantize

from ..support.hub_answers import Answer, answering

EXAMPLES = Path(__file__).parents[2] / "examples"
STORIES = EXAMPLES / "stories260K"
NAMES = ("arc_easy_file", "lambada_file", "winogrande_file")


@pytest.fixture
def questions(tmp_path, monkeypatch) -> Path:
    """The working directory, with data for `NAMES` in files."""
    choices = ["the park with her mom", "a big red ball", "the dog was happy", "one day"]
    rows = {
        "arc_easy": [
            {"question": f"Where did Lily {verb}?", "choices": choices, "label": i % 4}
            for i, verb in enumerate(["play", "go", "run", "sleep", "sing", "jump", "look", "hide"])
        ],
        "winogrande": [
            {"question": f"Lily saw Tom {verb}, so _ was happy.", "choices": ["Lily", "Tom"], "label": i % 2}
            for i, verb in enumerate(["play", "run", "sing", "jump"])
        ],
        "lambada": [{"text": "Once upon a time"}, {"text": "Lily and her mom"}, {"text": "She was very"}],
    }
    for name, items in rows.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    monkeypatch.chdir(tmp_path)
    if find_spec("datasets") is not None:
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return tmp_path


@pytest.fixture(scope="module")
def lossless(tmp_path_factory) -> tuple[Path, Path]:
    """stories260K with linears on a grid of int8, and the same packed: nothing is lost."""
    root = tmp_path_factory.mktemp("lossless")
    dense = root / "dense"
    shutil.copytree(STORIES, dense)
    tensors = load_file(STORIES / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            # Scales that are powers of two are exact, and a row with the code 127 is given that scale.
            scale = torch.exp2(torch.ceil(torch.log2(tensor.abs().amax(1, keepdim=True) / 127)))
            codes = torch.round(tensor / scale)
            codes[:, 0] = 127.0
            tensors[name] = codes * scale
    (dense / "model.safetensors").unlink()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    quantize(dense, root / "int8", format="int8", method="rtn", device="cpu")
    return dense, root / "int8"


def test_a_lossless_format_answers_as_lm_eval_does_on_the_dense_model(lossless, questions):
    lm_eval = pytest.importorskip("lm_eval")
    dense, packed = lossless
    tasks = Tasks(NAMES, path=EXAMPLES / "tasks", batch=2)
    report = evaluate_many([packed], EvalOptions(against=dense, tasks=tasks, device="cpu"))[0]
    assert {(m.task, m.metric) for m in report.tasks} == {
        ("arc_easy_file", "acc"),
        ("arc_easy_file", "acc_norm"),
        ("lambada_file", "acc"),
        ("winogrande_file", "acc"),
    }
    own = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(dense), "dtype": "float32"},
        device="cpu",
        tasks=list(NAMES),
        task_manager=task_manager(tasks),
        bootstrap_iters=0,
    )["results"]
    for metrics in report.tasks:
        assert metrics.paired is not None and metrics.paired.flips == metrics.paired.delta == 0
        assert metrics.accuracy == metrics.paired.reference == own[metrics.task][f"{metrics.metric},none"]
    assert any(0 < metrics.accuracy < 1 for metrics in report.tasks)
    name = "perplexity,none"
    found, expected = report.task_results["lambada_file"][name], own["lambada_file"][name]
    assert found == pytest.approx(expected, rel=1e-4)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["lm_eval"] == lm_eval.__version__ and content["texts"] == {}


def test_the_noise_floor_is_what_the_reference_answers_in_another_dtype(lossless, questions):
    pytest.importorskip("lm_eval")
    dense, packed = lossless
    tasks = Tasks(NAMES, path=EXAMPLES / "tasks")
    options = EvalOptions(against=dense, tasks=tasks, noise_floor=True, device="cpu")
    floor = evaluate_many([packed], options)[0].noise_floor
    assert floor is not None and (floor.dtype, floor.texts) == ("bfloat16", {})
    (own,) = evaluate_many([dense], EvalOptions(tasks=tasks, dtype="bfloat16", device="cpu"))
    (exact,) = evaluate_many([dense], EvalOptions(tasks=tasks, device="cpu"))
    assert [replace(m, paired=None) for m in floor.tasks] == list(own.tasks)
    assert [m.paired.reference for m in floor.tasks] == [m.accuracy for m in exact.tasks]
    assert own.noise_floor is None


def test_answers_are_kept_until_the_evaluation_is_done(lossless, questions, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    packed = lossless[1]
    tasks = Tasks(NAMES[:2], limit=2, path=EXAMPLES / "tasks")
    options, partial = {"device": "cpu"}, Partial(tmp_path / "partial")
    seen = []
    first = evaluate_many(
        [packed],
        EvalOptions(tasks=tasks, **options),
        partial=partial,
        progress=lambda *step: seen.append(step),
    )[0]
    assert all(metrics.paired is None and metrics.items == 2 for metrics in first.tasks)
    assert seen[-1] == (2, 2, "int8 on lambada_file")
    compared = {"against": lossless[0], "noise_floor": True, **options}
    second = evaluate_many([packed], EvalOptions(tasks=tasks, **compared), partial=partial)[0]
    monkeypatch.setattr("quantkit.eval.harness.QuantkitLM", None)
    again = evaluate_many([packed], EvalOptions(tasks=tasks, **options), partial=partial)[0]
    assert again.tasks == first.tasks and again.task_results == first.task_results
    again = evaluate_many([packed], EvalOptions(tasks=tasks, **compared), partial=partial)[0]
    assert again.tasks == second.tasks and again.noise_floor == second.noise_floor
    with pytest.raises(TypeError):
        fewer = Tasks(NAMES[:2], limit=3, path=EXAMPLES / "tasks")
        evaluate_many([packed], EvalOptions(tasks=fewer, **options), partial=partial)


def test_missing_data_and_unknown_tasks_are_named(questions, lossless, monkeypatch):
    module = pytest.importorskip("lm_eval.tasks")
    real = module.TaskManager
    # Reading lm-eval's own index takes seconds.
    monkeypatch.setattr(
        module, "TaskManager", lambda include_path, include_defaults: real(None, include_path, False)
    )
    (questions / "arc_easy.jsonl").unlink()
    with pytest.raises(UsageError, match="task arc_easy_file: its data cannot be read"):
        evaluate_many(
            [lossless[1]], EvalOptions(tasks=Tasks(NAMES[:1], path=EXAMPLES / "tasks"), device="cpu")
        )
    with pytest.raises(UsageError, match="lm-eval has no task 'arc_sleazy'"):
        task_manager(Tasks(("arc_sleazy",), path=EXAMPLES / "tasks"))


def test_answers_of_the_hub_are_bounded_while_a_task_is_read():
    pytest.importorskip("lm_eval")

    class Manager:
        def load(self, names):
            return HfApi(endpoint="https://hub.test").dataset_info("org/name")

    long = json.dumps({"id": "org/name", "description": "x" * MAX_ANSWER_BYTES}).encode()
    with (
        answering({"/api/datasets/org/name": Answer(long)}),
        pytest.raises(QuantkitError, match=f"more than {MAX_ANSWER_BYTES} bytes"),
    ):
        _run_task(None, "arc_easy", Tasks(("arc_easy",)), Manager())


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (KeyError("choices"), r"task arc_easy: lm-eval ended with KeyError ('choices') in "),
        (ValueError("a\x1b[31m\nb" + "x" * 900), r"ValueError (a\x1b[31m b"),
        (ConnectionError("Couldn't reach 'ai2_arc' on the Hub"), "its data cannot be read (Couldn't reach"),
    ],
)
def test_what_lm_eval_raises_is_one_line(error, said):
    pytest.importorskip("lm_eval")

    class Manager:
        def load(self, names):
            raise error

    with pytest.raises(UsageError) as caught:
        _run_task(None, "arc_easy", Tasks(("arc_easy",)), Manager())
    text = str(caught.value)
    assert said in text and len(text) < 700 and text.isprintable()


def test_lm_eval_finds_the_model_class_by_name():
    pytest.importorskip("lm_eval")
    from lm_eval.api.registry import get_model

    from quantkit.eval.harness import QuantkitLM

    assert get_model("quantkit") is QuantkitLM


@pytest.mark.parametrize("place", ["model", "model/tasks", "."])
def test_no_task_is_read_from_a_model(tmp_path, place):
    (tmp_path / "model" / "tasks").mkdir(parents=True)
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"model is the directory of a model, and task files are code"):
        Tasks(("x",), path=tmp_path / place)
    with pytest.raises(UsageError, match="missing is no directory"):
        Tasks(("x",), path=tmp_path / "missing")


def test_items_that_differ_are_not_compared():
    run = TaskRun({}, {"piqa": {"acc": [True, False]}}, {"piqa": "1"})
    (found,) = task_metrics(run, run)
    assert (found.items, found.accuracy) == (2, 0.5)
    with pytest.raises(CheckpointError, match="not asked the same items"):
        task_metrics(run, TaskRun({}, {"piqa": {"acc": [True, False]}}, {"piqa": "2"}))


def test_tasks_without_lm_eval_name_the_extra(monkeypatch):
    real = builtins.__import__

    def without_lm_eval(name, *args, **kwargs):
        if name.split(".")[0] == "lm_eval":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_lm_eval)
    with pytest.raises(EnvironmentProblem, match=r"pip install 'lm-eval\[hf\]>="):
        task_manager(Tasks(("arc_easy",)))


def test_wrong_tasks_are_named():
    with pytest.raises(UsageError, match="no task"):
        Tasks(())
    with pytest.raises(UsageError, match="limit is 0"):
        Tasks(("arc_easy",), limit=0)
    with pytest.raises(UsageError, match="batch is 0"):
        Tasks(("arc_easy",), batch=0)


def test_results_become_json():
    found = jsonable(
        {"acc": np.float64(0.5), 1: [np.int64(3), float("nan")], "f": len, "a": np.array([1, 2])}
    )
    assert found == {"acc": 0.5, "1": [3, None], "f": str(len), "a": [1, 2]}
    json.dumps(found, allow_nan=False)


def test_answers_belong_to_the_task_files_as_they_are(tmp_path):
    assert Tasks(NAMES).stamps() == []
    (tmp_path / "sub").mkdir()
    file = tmp_path / "sub" / "a.yaml"
    file.write_text("task: a")
    tasks = Tasks(("a",), path=tmp_path)
    before = tasks.stamps()
    assert [(Path(path), size) for path, size, _ in before] == [(file.resolve(), 7)]
    assert tasks.stamps() == before
    file.write_text("task: a # changed")
    assert tasks.stamps() != before
