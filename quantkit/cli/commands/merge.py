"""`quantkit merge`: a LoRA adapter becomes part of a packed checkpoint."""

from collections import Counter
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import note, note_unchecked, print_json, progress, say
from quantkit.cli.records import with_fields
from quantkit.signals import advising


@dataclass(frozen=True)
class MergeArguments:
    """The command line of `merge`, an option per field."""

    source: Annotated[
        str | None,
        typer.Option(
            "--source",
            help="The original, to whose weights the adapter is added.",
            show_default="the one that the manifest names",
        ),
    ] = None
    from_packed: Annotated[
        bool,
        typer.Option(
            "--from-packed", help="Add it to the dequantized weights, which loses most of the adapter."
        ),
    ] = False
    calibration: options.CalibrationAgain = None
    text: Annotated[
        Path | None,
        typer.Option(
            "--text",
            metavar="FILE",
            help="UTF-8 text to measure KL on.",
            show_default="a part of the one that comes with quantkit, unless --no-check",
        ),
    ] = None
    device: options.Device = "auto"
    resume: options.Resume = False
    overwrite: options.Overwrite = False
    check: options.CheckOutput = True
    json: options.Json = False


@with_fields
def merge(
    packed: options.PackedDirectory,
    adapter: Annotated[
        Path, typer.Argument(metavar="ADAPTER", help="A LoRA directory, as PEFT's save_pretrained writes it.")
    ],
    out_directory: options.OutDirectory,
    given: MergeArguments,
) -> None:
    """Merge a LoRA adapter into a packed checkpoint.

    The adapter is added to the original weights of the linears that it changes. Each sum is rounded to the
    scheme of DIR by the method of DIR, calibrated on the same samples if it takes any. A note names linears
    for which that is not possible. All other tensors of DIR are copied bit for bit. KL from the original with
    the adapter is given before, with the adapter beside DIR, and after.
    """
    from quantkit import merging
    from quantkit.cli.files import resume_advice
    from quantkit.runtime.transformers.quiet import silence

    silence()
    advice = partial(resume_advice, out_directory, overwrite=given.overwrite)
    with advising(advice), progress("merging") as report:
        result = merging.merge(
            packed,
            adapter,
            out_directory,
            source=given.source,
            from_packed=given.from_packed,
            calibration=given.calibration,
            text=given.text,
            device=given.device,
            resume=given.resume,
            overwrite=given.overwrite,
            check=given.check,
            progress=report,
        )
    for line in result.notes:
        note(line)
    note_unchecked(result.unchecked)
    if given.json:
        print_json(
            {
                "directory": str(result.directory),
                "methods": dict(result.methods),
                "relative_errors": dict(result.relative_errors),
                "copied": result.copied,
                **{
                    name: None if one is None else one.to_dict()
                    for name, one in (
                        ("before", result.before),
                        ("after", result.after),
                        ("text", result.text),
                    )
                },
                "notes": list(result.notes),
            }
        )
        return
    for method, count in Counter(result.methods.values()).items():
        say(f"{count} linears merged, {'dense' if method is None else f'rounded by {method}'}")
    say(f"{result.copied} tensors copied")
    if result.before is not None and result.after is not None:
        say(
            f"KL from the original with the adapter, {result.after.tokens} tokens: mean "
            f"{result.before.kl_mean:.3g} nats before, with the adapter beside the packed model, and "
            f"{result.after.kl_mean:.3g} after"
        )
    if result.text is not None:
        one = result.text
        say(
            f"against the adapter beside the packed model, {one.tokens} tokens: KL mean {one.kl_mean:.3g} "
            f"nats, same top-1 {one.same_top1:.1%}, perplexity {one.perplexity:.6g} for "
            f"{one.reference_perplexity:.6g}"
        )
    say(f"wrote {result.directory}")
