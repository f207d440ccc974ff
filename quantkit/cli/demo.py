"""`quantkit demo`: the main job on a bundled model, in one command."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import note, out, progress
from quantkit.errors import UsageError

#: Formats of the demo: from lossless to unusable, so that the table shows the whole range.
FORMATS = ("int8", "int4", "fp6", "binary")


def demo(
    source: Annotated[str, typer.Argument(help="The checkpoint; examples/stories260K is bundled.")],
    text: Annotated[list[Path], typer.Option("--text", help="UTF-8 text to score; repeatable.")],
    out_directory: Annotated[Path, typer.Option("--out", help="Where models and report go.")] = Path(
        "demo-output"
    ),
    formats: Annotated[str, typer.Option(help="Formats, comma-separated.")] = ",".join(FORMATS),
    group_size: options.GroupSizeText = None,
    window: Annotated[int, typer.Option(help="Tokens per window.", min=2)] = 512,
    max_windows: Annotated[int | None, typer.Option(help="Windows per text. [all]", min=1)] = None,
    device: options.Device = "auto",
) -> None:
    """Quantize SOURCE to several formats, evaluate each against it, print one table, write the report."""
    from quantkit.calibrate.recipe import parse_group_size
    from quantkit.cli.models import quiet_transformers
    from quantkit.eval.evaluate import evaluate_many
    from quantkit.eval.report import table, write_report
    from quantkit.model.quantize import quantize

    names = [name.strip() for name in formats.split(",") if name.strip()]
    if not names:
        raise UsageError("--formats is empty; name at least one format.")
    quiet_transformers()
    out_directory.mkdir(parents=True, exist_ok=True)
    packed = []
    for name in names:
        with progress(f"quantizing to {name}") as advance:
            result = quantize(
                source,
                out_directory / name,
                format=name,
                group_size=parse_group_size(group_size),
                device=device,
                overwrite=True,
                progress=advance,
            )
        packed.append(result.directory)
        if result.plan.not_portable:
            note(f"{name}: needs quantkit to load ({result.plan.not_portable[0]})")
    with progress("evaluating") as advance:
        reports = evaluate_many(
            packed,
            against=source,
            texts=text,
            window=window,
            max_windows=max_windows,
            device=device,
            progress=advance,
        )
    out.print(table(reports))
    for line in dict.fromkeys(line for report in reports for line in report.notes):
        note(line)
    write_report(out_directory / "report", reports)
    out.print(f"wrote {out_directory / 'report' / 'report.md'}")
