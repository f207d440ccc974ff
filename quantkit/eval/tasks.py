"""Benchmark tasks through lm-evaluation-harness, the optional extra `eval`."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from quantkit.errors import EnvironmentProblem, UsageError


def run_tasks(
    model: Any, tokenizer: Any, tasks: Sequence[str], limit: int | None = None, *, batch: int = 1
) -> dict[str, Any]:
    """Run the lm-eval tasks of those names on a loaded model; JSON-able results by task.

    `limit` is the number of examples per task, by default all. Only tasks that come with lm-eval are
    known: a task file is code, and quantkit runs none found beside a model. Data sets are downloaded
    from the Hugging Face hub unless they are cached.

    `EnvironmentProblem` if lm-eval is not installed, `UsageError` for an unknown task or no task.
    """
    if not tasks:
        raise UsageError("no task was named. Name at least one, for example arc_easy.")
    if limit is not None and limit < 1:
        raise UsageError(f"limit is {limit}; use at least 1 example per task, or none for all.")
    try:
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise EnvironmentProblem(
            f"tasks need lm-eval, which cannot be imported ({error}). Install it with "
            "`pip install 'quantkit[eval]'`."
        ) from error
    manager = TaskManager()
    unknown = [task for task in tasks if not manager.match_tasks([task])]
    if unknown:
        raise UsageError(
            f"lm-eval has no task {', '.join(map(repr, unknown))}. `lm-eval ls tasks` lists those it has."
        )
    found = simple_evaluate(
        model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch),
        tasks=list(tasks),
        task_manager=manager,
        limit=limit,
        log_samples=False,
    )
    return {name: jsonable(result) for name, result in found["results"].items()}


def jsonable(value: Any) -> Any:
    """`value` with numpy numbers and arrays as Python's, non-finite numbers as null, the rest as text."""
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
