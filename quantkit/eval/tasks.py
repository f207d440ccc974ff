"""Run benchmark tasks through lm-evaluation-harness, the optional extra `eval`, item by item.

lm-eval reads the tasks, queries the model and judges each item. `quantkit.eval.paired` then compares models
on the same items.
"""

import hashlib
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial as bind
from pathlib import Path
from traceback import extract_tb
from typing import Any

import numpy as np

from quantkit.about import pip_install
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError
from quantkit.escaping import one_line
from quantkit.eval.paired import Paired, accuracy_error, compare
from quantkit.eval.result_cache import Partial
from quantkit.memory import is_lack_of_memory
from quantkit.model.hf_files import PACKAGE
from quantkit.progress import Progress

#: A directory with this file is a model's, and no task is read from it.
_MODEL_FILE = "config.json"

#: lm-eval's own seed, so that few-shot examples equal those of its command line.
_FEWSHOT_SEED = 1234
#: Characters shown of an error of lm-eval, which may contain a whole document.
_SHOWN_CHARS = 300


@dataclass(frozen=True)
class Tasks:
    """Tasks to run: their names, and at most `limit` items of each; `path` is a folder of task files.

    `batch` is the number of requests at a time. A task file is code: its templates and functions run with the
    rights of the user. Only task files in `path` and of lm-eval are read, never those of a model.
    """

    names: tuple[str, ...]
    limit: int | None = None
    path: Path | None = None
    batch: int = 1

    def __post_init__(self) -> None:
        if not self.names:
            raise UsageError("no task was named. Name at least one, for example arc_easy.")
        if self.limit is not None and self.limit < 1:
            raise UsageError(f"limit is {self.limit}; use at least 1 example per task, or none for all.")
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}; use at least 1 request.")
        if self.path is not None:
            check_task_path(self.path)

    def stamps(self) -> list[tuple[str, int, int]]:
        """Return path, size and mtime of each file of `path`, on which answers depend."""
        if self.path is None:
            return []
        files = sorted(path for path in self.path.resolve().rglob("*") if path.is_file())
        return [(str(path), stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]


@dataclass(frozen=True)
class TaskRun:
    """Results of one model: lm-eval's figures by task, and the correct items by task and metric.

    `documents` is a hash of the items of each task, as the model saw them.
    """

    results: Mapping[str, Any]
    correct: Mapping[str, Mapping[str, Sequence[bool]]]
    documents: Mapping[str, str]


@dataclass(frozen=True)
class TaskMetrics:
    """Metric of a task that is right or wrong per item; `paired` is None without a reference."""

    task: str
    metric: str
    items: int
    accuracy: float
    accuracy_se: float | None
    paired: Paired | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        return asdict(self)


def check_task_path(path: Path) -> None:
    """Raise `UsageError` if `path` is no directory, or overlaps a model's directory."""
    if not path.is_dir():
        raise UsageError(f"task path {path} is no directory. Name a folder of task files in lm-eval's YAML.")
    place = path.resolve()
    models = [folder for folder in (place, *place.parents) if (folder / _MODEL_FILE).is_file()]
    models += [Path(folder) for folder, _, files in os.walk(place) if _MODEL_FILE in files]
    if models:
        raise UsageError(
            f"task path {path}: {models[0]} is the directory of a model, and task files are code. Look at "
            "the task files that you want and copy them to a folder of their own."
        )


def task_manager(tasks: Tasks) -> Any:
    """Return lm-eval's index of its own tasks and of those in `tasks.path`.

    Raises `EnvironmentProblem` if lm-eval is not installed, `UsageError` for an unknown task.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentProblem(
            f"tasks need lm-eval, which cannot be imported ({error}). Install it with {pip_install('eval')}."
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    # lm-eval's own index takes seconds to read; skip it if the folder has all tasks.
    for defaults in (False, True) if tasks.path is not None else (True,):
        with _explained(f"tasks {', '.join(tasks.names)}"):
            manager = TaskManager(
                include_path=None if tasks.path is None else str(tasks.path), include_defaults=defaults
            )
            unknown = [task for task in tasks.names if not manager.match_tasks([task])]
        if not unknown:
            return manager
    raise UsageError(
        f"lm-eval has no task {', '.join(map(repr, unknown))}. `lm-eval ls tasks` lists those it has; "
        "--task-path names a folder with others."
    )


def run_tasks(
    model: Path | str,
    tasks: Tasks,
    manager: Any,
    *,
    dtype: str = "float32",
    device: str = "auto",
    partial: Partial | None = None,
    key: str = "",
    progress: Progress | None = None,
) -> TaskRun:
    """Run `tasks` on the checkpoint `model`, task by task; `manager` is from `task_manager`.

    Tasks stored in `partial` under `key` are not run again. Data sets are downloaded from the Hugging Face
    hub unless they are cached or files. With `HF_HUB_OFFLINE` nothing is downloaded, and a missing one is a
    `UsageError`.
    """
    lm: Any = None
    run = TaskRun({}, {}, {})
    for name in tasks.names:
        found = None if partial is None else partial.json(key, f"task-{_slug(name)}")
        if found is None:
            if lm is None:
                from quantkit.eval.harness import QuantkitLM

                lm = QuantkitLM(str(model), device=device, dtype=dtype, batch_size=tasks.batch)
            if progress is not None:
                lm.report = bind(_labeled, progress, f"{Path(model).name} on {name}")
            found = _run_task(lm, name, tasks, manager)
            if partial is not None:
                partial.store_json(key, f"task-{_slug(name)}", found)
        run = TaskRun(*({**had, **found[part]} for part, had in vars(run).items()))
    return run


def _labeled(progress: Progress, label: str, done: int, total: int) -> None:
    progress(done, total, label)


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Context manager: turn errors of lm-eval and its libraries about a task into one line.

    Errors of quantkit pass.
    """
    try:
        yield
    except QuantkitError:
        raise
    # Errors of huggingface_hub and datasets are of this class too.
    except OSError as error:
        raise UsageError(
            f"{what}: its data cannot be read ({one_line(str(error))}). Files are looked for from the "
            "directory that the command runs in; data sets of the hub need a network, or the cache and "
            "HF_HUB_OFFLINE=1."
        ) from error
    except Exception as error:
        *_, at = extract_tb(error.__traceback__)
        if is_lack_of_memory(error) or Path(at.filename).is_relative_to(PACKAGE):
            raise
        text = one_line(str(error))[:_SHOWN_CHARS]
        raise UsageError(
            f"{what}: lm-eval ended with {type(error).__name__} ({text}) in {Path(at.filename).name}, line "
            f"{at.lineno}. Check the task's files and data, or choose another task."
        ) from error


def _run_task(lm: Any, name: str, tasks: Tasks, manager: Any) -> dict[str, Any]:
    from lm_eval import evaluate

    from quantkit.checkpoint.hub.answers import FILE_SECONDS
    from quantkit.checkpoint.hub.client import guarded

    # As lm_eval.simple_evaluate, without the seconds it takes to inspect the machine and git. Metrics may
    # come from the hub too.
    with _explained(f"task {name}"), guarded(FILE_SECONDS):
        loaded = manager.load([name])
        for task in loaded["tasks"].values():
            if task.get_config("num_fewshot") is None:
                task.set_config(key="num_fewshot", value=0)
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        found = evaluate(lm, loaded, limit=tasks.limit, bootstrap_iters=0)
    correct: dict[str, dict[str, list[bool]]] = {}
    documents = {}
    for task, samples in found["samples"].items():
        digest = hashlib.sha256()
        values: dict[str, list[Any]] = {}
        for sample in sorted(samples, key=lambda sample: (str(sample["filter"]), sample["doc_id"])):
            digest.update("".join(sample[f"{what}_hash"] for what in ("doc", "prompt", "target")).encode())
            suffix = "" if sample["filter"] == "none" else f",{sample['filter']}"
            for metric in sample["metrics"]:
                values.setdefault(f"{metric}{suffix}", []).append(jsonable(sample[metric]))
        correct[task] = {
            metric: list(map(bool, items))
            for metric, items in values.items()
            if all(isinstance(item, (bool, int, float)) and item in (0, 1) for item in items)
        }
        documents[task] = digest.hexdigest()
    results = {task: jsonable(result) for task, result in found["results"].items()}
    return {"results": results, "correct": correct, "documents": documents}


def task_metrics(run: TaskRun, reference: TaskRun | None) -> tuple[TaskMetrics, ...]:
    """Return the metrics of `run`, compared with `reference` item by item.

    Raises `CheckpointError` if the two did not see the same items.
    """
    metrics = []
    for task, by_metric in run.correct.items():
        if reference is not None and reference.documents.get(task) != run.documents[task]:
            raise CheckpointError(
                f"task {task}: the model and its reference were not asked the same items. Its files changed "
                "in between; delete the partial results and start again."
            )
        for metric, correct in by_metric.items():
            theirs = None if reference is None else reference.correct[task].get(metric)
            metrics.append(
                TaskMetrics(
                    task=task,
                    metric=metric,
                    items=len(correct),
                    accuracy=sum(correct) / len(correct),
                    accuracy_se=accuracy_error(correct),
                    paired=None if theirs is None else compare(correct, theirs),
                )
            )
    return tuple(metrics)


def _slug(name: str) -> str:
    """Return a valid file name for any task name."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def jsonable(value: Any) -> Any:
    """Convert `value` to JSON values: numpy to Python numbers, non-finite to null, others to text."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(item) for item in value]
    if isinstance(value, (np.generic, np.ndarray)):
        return jsonable(value.tolist())
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return str(value)
