"""Read figures of `eval` and `bench` for a model from their files, with the plots of their reports."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from quantkit.bench.figures import Serving, Speed, read_benchmark
from quantkit.errors import UsageError
from quantkit.eval.results import EvalReport
from quantkit.eval.tasks import TaskMetrics
from quantkit.files import from_json, os_error_text
from quantkit.report import eval_plots

#: Image of a report: its caption and a file name without folders.
_IMAGE = re.compile(r"!\[((?:[^\]\\]|\\.)*)\]\(([\w\-]+)\.png\)")
_Measured = TypeVar("_Measured", bound=Speed | Serving)


@dataclass(frozen=True)
class Accuracy:
    """Figures of `eval` on one text; comparing fields are None without a reference."""

    text: str
    tokens: int
    perplexity: float | None
    reference_perplexity: float | None
    kl_mean: float | None
    kl_mean_se: float | None
    same_top1: float | None


@dataclass(frozen=True)
class Measurements:
    """Figures of a model, and how they were measured; any may be missing.

    `tasks` are metrics by model label. With a noise floor they include the original in another dtype, by its
    label. The first of `speed` and of `serving` is the model, the others the original.
    """

    accuracy: tuple[Accuracy, ...] = ()
    tasks: tuple[tuple[str, tuple[TaskMetrics, ...]], ...] = ()
    accuracy_how: str = ""
    speed: tuple[Speed, ...] = ()
    serving: tuple[Serving, ...] = ()


@dataclass(frozen=True)
class Plot:
    """Plot of `part`, `eval` or `bench`: its name without suffix, caption and PNG."""

    part: str
    name: str
    caption: str
    png: bytes


def read_measurements(
    directory: Path, evaluation: Path | None, benchmarks: Sequence[Path] = ()
) -> Measurements:
    """Read the figures of the model in `directory` from a file of `eval` and files of `bench`.

    Raises `UsageError` for other files, for files about other models only, and for two files of `bench` with
    the same kind of figures.
    """
    found = Measurements() if evaluation is None else _evaluated(directory, evaluation)
    files = [(path, read_benchmark(path)) for path in benchmarks]
    return replace(
        found,
        speed=_with_original(directory, [(path, one.speed) for path, one in files]),
        serving=_with_original(directory, [(path, one.serving) for path, one in files]),
    )


def _with_original(
    directory: Path, files: Sequence[tuple[Path, tuple[_Measured, ...] | None]]
) -> tuple[_Measured, ...]:
    """Return the figures of the model in `directory` and of the original, from the only file that has any."""
    having = [(path, figures) for path, figures in files if figures is not None]
    if not having:
        return ()
    path, figures = having[0]
    if len(having) > 1:
        raise UsageError(f"{path} and {having[1][0]} have figures of the same kind. Give one of the two.")
    own = next((one for one in figures if _is_model(directory, one.model)), None)
    if own is None:
        raise _other_model(directory, path, [one.model for one in figures])
    # The original has no packed format.
    return (own, *(one for one in figures if one.format == "dense" and one is not own))


def plots_of(
    directory: Path, evaluation: Path | None, benchmarks: Sequence[Path] = ()
) -> tuple[tuple[Plot, ...], str | None]:
    """Return plots of the model in `directory`, and a note if there can be none of its evaluation.

    An evaluation of several models has all of them in its plots; those of one are drawn anew.
    """
    if evaluation is None:
        return plots_beside(None, benchmarks), None
    data = json.loads(evaluation.read_bytes())
    if len(data.get("reports", [data])) == 1:
        return plots_beside(evaluation, benchmarks), None
    own = next(one for one in data["reports"] if _is_model(directory, one["model"]))
    try:
        drawn, why = eval_plots.figures([EvalReport.from_dict(own)])
    except (ValueError, TypeError, KeyError) as error:
        # Of an older version: the tables need less.
        drawn, why = [], f"{evaluation} has no figures to draw ({type(error).__name__}: {error})"
    plots = tuple(Plot("eval", f"eval-{one.name}", one.caption, one.png) for one in drawn)
    note = None if plots else f"the card has no plots of the evaluation: {why}"
    return (*plots, *plots_beside(None, benchmarks)), note


def plots_beside(evaluation: Path | None, benchmarks: Sequence[Path] = ()) -> tuple[Plot, ...]:
    """Return the plots of the reports that `eval` and `bench` wrote beside their figures."""
    found = []
    parts = [("bench", path) for path in benchmarks]
    for part, path in parts if evaluation is None else [("eval", evaluation), *parts]:
        text = path.with_suffix(".md")
        if not text.is_file():
            continue
        for caption, name in _IMAGE.findall(text.read_text(encoding="utf-8", errors="replace")):
            image = text.parent / f"{name}.png"
            if image.is_file():
                # Undo the escaping of Markdown.
                plain = html.unescape(re.sub(r"\\([^A-Za-z0-9\s])", r"\1", caption))
                found.append(Plot(part, f"{part}-{name}", plain, image.read_bytes()))
    return tuple(found)


def _is_model(directory: Path, model: str) -> bool:
    return Path(model).resolve() == directory.resolve() or Path(model).name == directory.resolve().name


def _other_model(directory: Path, path: Path, models: Sequence[str]) -> UsageError:
    return UsageError(
        f"{path} is about {', '.join(models) or 'no model'}, not {directory}. Give the file that was "
        "measured of it."
    )


def _evaluated(directory: Path, path: Path) -> Measurements:
    """Read report.json or eval.json: the figures of the model in `directory`, and how they were measured."""
    try:
        data = json.loads(path.read_bytes())
        reports = data.get("reports", [data])
        models = [report["model"] for report in reports]
        own = next((one for one in reports if _is_model(directory, one["model"])), None)
        if own is None:
            raise _other_model(directory, path, models)
        rows = tuple(from_json(Accuracy, {**metrics, "text": text}) for text, metrics in own["texts"].items())
        tasks = [(Path(own["model"]).name, own["tasks"])]
        floor = own.get("noise_floor")
        if floor is not None:
            # Older files have a noise floor for texts only.
            tasks.append((eval_plots.floor_label(own["against"], floor["dtype"]), floor.get("tasks", ())))
        answers = tuple(
            (label, tuple(from_json(TaskMetrics, one) for one in metrics))
            for label, metrics in tasks
            if metrics
        )
        how = (
            f"Windows of {own['window']} tokens, activations in {own['dtype']} on {own['device']}; quantkit "
            f"{own['quantkit_version']}, torch {own['torch']}, transformers {own['transformers']}."
        )
    except OSError as error:
        raise UsageError(f"cannot read {path}: {os_error_text(error)}. Check the path.") from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"{path} is not what `quantkit eval` writes ({type(error).__name__}: {error}). Give its "
            "report.json or the file of --json."
        ) from error
    return Measurements(rows, answers, how)
