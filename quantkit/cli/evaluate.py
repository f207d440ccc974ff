"""`quantkit eval`: perplexity, divergence from the original, tasks, and honest bits."""

import json as json_module
from pathlib import Path
from typing import Annotated, Any

import typer

from quantkit.cli import options
from quantkit.cli.console import note, out, progress
from quantkit.errors import UsageError


def evaluate(
    directory: options.Source,
    against: Annotated[
        str | None, typer.Option("--against", help="The original: adds divergence and excess.")
    ] = None,
    text: Annotated[
        list[Path] | None, typer.Option("--text", help="UTF-8 text to score; repeatable.")
    ] = None,
    tasks: Annotated[
        str | None, typer.Option("--tasks", help="lm-eval tasks, comma-separated (extra 'eval').")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Documents per task.", min=1)] = None,
    window: Annotated[int, typer.Option(help="Tokens per window.", min=2)] = 1024,
    max_windows: Annotated[int | None, typer.Option(help="Windows per text. [all]", min=1)] = None,
    dtype: Annotated[str, typer.Option(help="Precision of the forward passes.")] = "float32",
    device: options.Device = "auto",
    batch: Annotated[int, typer.Option(help="Windows at a time.", min=1)] = 1,
    verbose: options.Verbose = False,
    json: Annotated[Path | None, typer.Option("--json", help="Write the figures to this file.")] = None,
    report: Annotated[Path | None, typer.Option("--report", help="Write a report with a plot here.")] = None,
) -> None:
    """Measure DIRECTORY on texts and tasks, against the model it was made from."""
    if not text and not tasks:
        raise UsageError("nothing to evaluate: give --text FILE (repeatable), --tasks NAMES, or both.")
    from quantkit.cli.models import open_model, quiet_transformers
    from quantkit.eval.evaluate import evaluate as measure
    from quantkit.eval.report import table, write_report

    figures: dict[str, Any] = {}
    quiet_transformers()
    if text:
        with progress("evaluating") as advance:
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
        out.print(table([result]))
        for line in result.notes:
            note(line)
        if report is not None:
            write_report(report, [result])
            out.print(f"wrote {report}")
    if tasks:
        from quantkit.eval.tasks import run_tasks

        model, tokenizer = open_model(directory, device, dtype, verbose=verbose)
        figures["tasks"] = run_tasks(model, tokenizer, tasks.split(","), limit=limit)
        for name, values in figures["tasks"].items():
            out.print(f"{name}: {values}")
    if json is not None:
        json.write_text(json_module.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")
        out.print(f"wrote {json}")
