"""`quantkit eval`: perplexity, divergence from the original, tasks, and honest bits."""

import json as json_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import options
from quantkit.cli.console import progress, say
from quantkit.errors import EnvironmentProblem, OutputError, UsageError


def evaluate(
    directory: options.Model,
    against: Annotated[
        str | None, typer.Option("--against", help="The original: adds what was lost to each text.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", metavar="FILE", help="UTF-8 text to score; repeatable.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option("--tasks", metavar="NAMES", help="lm-eval tasks, comma-separated (extra 'eval')."),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Examples per task.", min=1, show_default="all")] = None,
    window: Annotated[int, typer.Option(help="Tokens per window of a text.", min=2)] = 1024,
    max_windows: Annotated[
        int | None, typer.Option(help="Windows per text.", min=1, show_default="all")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of the activations: float32, bfloat16 or float16.")] = "float32",
    device: options.Device = "auto",
    batch: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 1,
    verbose: options.Verbose = False,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the figures to this file.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option("--report", metavar="DIR", help="Write a report with a plot here.")
    ] = None,
) -> None:
    """Measure a model on texts and tasks.

    With --against, each text is also scored by the original: the excess is the logarithm of perplexity over
    the original's, KL the divergence of the next-token distributions, both in nats per token.
    """
    names = [name.strip() for name in (tasks or "").split(",") if name.strip()]
    _check(text, names, against=against, tasks=tasks, report=report)
    from quantkit.cli.figures import print_reports
    from quantkit.cli.models import log_kernels, open_model, using_transformers
    from quantkit.eval.evaluate import evaluate as measure
    from quantkit.eval.report import write_report

    if verbose:
        log_kernels()
    # Before hours of work, not after.
    if json is not None:
        _write(json, "", "a")
    figures: dict[str, Any] = {}
    if text:
        with progress("evaluating") as advance, using_transformers(directory):
            result = measure(
                directory,
                against=against,
                texts=text,
                window=window,
                max_windows=max_windows,
                dtype=dtype,
                device=device,
                batch=batch,
                progress=advance,
            )
        figures = result.to_dict()
        print_reports([result])
        if json is not None:
            _write_figures(json, figures)
        if report is not None:
            write_report(report, [result])
            say(f"wrote {report / 'report.md'}")
    if names:
        from quantkit.eval.tasks import run_tasks

        model, tokenizer = open_model(directory, device, dtype)
        figures["tasks"] = run_tasks(model, tokenizer, names, limit=limit)
        for name, values in figures["tasks"].items():
            for metric, value in values.items():
                say(f"{name} {metric}: {value}")
    if json is not None:
        _write_figures(json, figures)
        say(f"wrote {json}")


def _check(
    text: list[Path] | None,
    names: list[str],
    *,
    against: str | None,
    tasks: str | None,
    report: Path | None,
) -> None:
    """Refuse at once what would fail, or be ignored, after the work."""
    if tasks is not None and not names:
        raise UsageError("--tasks names no task; name at least one, for example arc_easy.")
    if not text and not names:
        raise UsageError("nothing to evaluate: give --text FILE (repeatable), --tasks NAMES, or both.")
    if not text and (against or report):
        raise UsageError("--against and --report are about texts: give --text FILE as well.")
    if names and find_spec("lm_eval") is None:
        raise EnvironmentProblem("--tasks needs lm-eval. Install it with `pip install 'quantkit[eval]'`.")
    if report is not None:
        options.make_directory(report)


def _write_figures(path: Path, figures: dict[str, Any]) -> None:
    _write(path, json_module.dumps(figures, indent=2, allow_nan=False) + "\n", "w")


def _write(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}. Choose a file in a writable directory."
        ) from error
