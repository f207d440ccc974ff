"""`quantkit demo`: the main job on a bundled model, in one command."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import completion, options, parsing
from quantkit.cli.console import note, progress, say
from quantkit.cli.files import REPORT_FILES, make_directory
from quantkit.cli.plots import note_without_plots
from quantkit.packing.presets import PRESETS
from quantkit.quantization.quantize_options import QuantizeOptions

#: From lossless to unusable, so that the table shows the whole range.
FORMATS = ("int8", "int4", "fp6", "binary")


def demo(
    source: options.Source,
    text: Annotated[
        list[Path], typer.Option("--text", metavar="FILE", help="UTF-8 text to score; repeatable.")
    ],
    out_directory: Annotated[
        Path, typer.Option("--out", metavar="DIR", readable=False, help="Where models and report go.")
    ] = Path("demo-output"),
    formats: Annotated[
        str,
        typer.Option(help="Formats, comma-separated.", autocompletion=completion.lists(*PRESETS)),
    ] = ",".join(FORMATS),
    group_size: options.GroupSizeText = None,
    window: Annotated[int, typer.Option(help="Tokens per window.", min=2)] = 512,
    max_windows: Annotated[
        int | None, typer.Option(help="Windows per text.", min=1, show_default="all")
    ] = None,
    device: options.Device = QuantizeOptions.device,
) -> None:
    """Quantize to several formats and compare them.

    Each is evaluated against SOURCE, which may be the bundled examples/stories260K. Prints one table and
    writes the packed models and a report below --out, over those of an earlier demo.
    """
    from quantkit.calibrate.data.documents import read_text
    from quantkit.cli.figures import print_reports
    from quantkit.cli.models import using_transformers
    from quantkit.eval.eval_options import EvalOptions
    from quantkit.eval.evaluate import evaluate_many
    from quantkit.quantizing import quantize
    from quantkit.recipes.recipe import parse_group_size
    from quantkit.recipes.recipe_options import RecipeOptions
    from quantkit.report.eval_report import write_report

    names = parsing.parse_list(formats, "--formats")
    size = parse_group_size(group_size)
    # What can be refused is refused before the first model is quantized.
    recipes = {name: RecipeOptions(format=name, group_size=size).to_recipe() for name in names}
    for path in text:
        read_text(path)
    make_directory(out_directory)
    make_directory(out_directory / "report", REPORT_FILES)
    note_without_plots()
    packed = []
    for name, recipe in recipes.items():
        with progress(f"quantizing to {name}") as advance:
            result = quantize(
                source, out_directory / name, recipe=recipe, device=device, overwrite=True, progress=advance
            )
        packed.append(result.directory)
        for reason in result.plan.not_portable[:1]:
            note(f"{name}: only quantkit can load this: {reason}")
    with progress("evaluating") as advance, using_transformers(source):
        asked = EvalOptions(
            texts=tuple(text), against=source, window=window, max_windows=max_windows, device=device
        )
        reports = evaluate_many(packed, asked, progress=advance)
    print_reports(reports)
    write_report(out_directory / "report", reports)
    say(f"wrote {out_directory / 'report' / 'report.html'}")
