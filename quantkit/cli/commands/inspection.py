"""`quantkit inspect`: what is in a packed checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from quantkit.cli import options
from quantkit.cli.console import note, print_json, say
from quantkit.cli.layers import print_layers, print_readers, totals
from quantkit.cli.plots import check_png, draw_errors
from quantkit.errors import UsageError


def inspect(
    directory: options.PackedDirectory,
    every_layer: options.EveryLayer = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Also draw the error of every linear by its block."),
    ] = None,
    tensor_parallel: Annotated[
        bool,
        typer.Option("--tensor-parallel", help="Also show among how many GPUs transformers can divide it."),
    ] = False,
    json: options.Json = False,
) -> None:
    """Show how a packed checkpoint stores each linear.

    Reads the manifest, if there is one, and headers only. "bits" counts every stored bit per weight, "error"
    is the squared error of the weights over their squares. With --json, prints the manifest, or what headers
    tell of it. The plot has the errors of the outputs if the model was calibrated.
    """
    from quantkit.checkpoint.manifest import read_manifest
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.runtime.saved_model import NO_MANIFEST, is_saved, read_record
    from quantkit.verification.readers import readers_of

    if json and tensor_parallel:
        raise UsageError(
            "--json prints the manifest, which has no tensor parallel sizes; leave out --tensor-parallel or "
            "--json."
        )
    if plot is not None:
        check_png(plot)
    record = read_record(directory)
    checkpoint = Checkpoint.open(directory)
    if plot is not None:
        left_out = draw_errors(plot, directory.resolve().name, record.layers)
        if left_out:
            note(
                f"{len(left_out)} linears are not in the plot, such as {left_out[0]}: exact, or without data."
            )
    if json:
        print_json(record.to_dict() if is_saved(directory) else read_manifest(directory))
        return
    for warning in checkpoint.warnings:
        note(warning)
    if record.source is None:
        note(NO_MANIFEST)
    else:
        made_by = ", ".join(f"{name} {version}" for name, version in record.versions.items())
        commit = f" at commit {record.source_commit}" if record.source_commit else ""
        say(f"made from {record.source}{commit} with {made_by}")
    if record.calibration is not None:
        say(f"calibrated on {record.calibration}")
    if record.recipe.get("rotate"):
        say("rotated: the residual stream and the values of heads by Hadamard matrices")
    print_layers(record.layers, record.dense, every_layer=every_layer)
    say(totals(record.source_bytes, checkpoint.nbytes, record.bits_per_weight))
    print_readers(record.container, record.needs_quantkit, *readers_of(checkpoint, record.layers))
    if tensor_parallel:
        from quantkit.runtime.tensor_parallel import plan_of_checkpoint

        parallel = plan_of_checkpoint(checkpoint)
        say(f"tensor parallel sizes: {', '.join(map(str, parallel.sizes))}")
        say(f"not {parallel.first_refused}: {parallel.why_not(parallel.first_refused)}")
    if plot is not None:
        say(f"wrote {plot}")
