"""`quantkit inspect`: what is in a checkpoint, packed by quantkit or by another tool, or not at all."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import options
from quantkit.cli.collector import collector_paused
from quantkit.cli.console import note, print_json, print_table, say
from quantkit.cli.layers import print_layers, print_readers, totals
from quantkit.cli.plots import check_png, draw_errors
from quantkit.errors import UsageError
from quantkit.files import size_text

if TYPE_CHECKING:
    from quantkit.verification.description import Description


@collector_paused()
def inspect(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="DIR",
            exists=True,
            readable=False,
            help="A checkpoint directory of any tool, packed or not, or a GGUF file.",
        ),
    ],
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
    """Show what a checkpoint is and how it stores its weights.

    Reads the manifest, if there is one, and headers only. Of a checkpoint that quantkit did not pack, says
    how it is stored, what reads it and what quantkit can do with it. "bits" counts every stored bit per
    weight, "error" is the squared error of the weights over their squares. With --json, prints the manifest,
    or what headers tell of it. The plot has the errors of the outputs if the model was calibrated.
    """
    from quantkit.runtime.saved_model import is_foreign

    if not is_foreign(directory):
        _show_packed(directory, every_layer, plot, tensor_parallel, json)
        return
    for option, given in (("--plot", plot), ("--tensor-parallel", tensor_parallel)):
        if given:
            raise UsageError(
                f"{option} is for what quantkit packed, and {directory} was not. Leave it out, or pack it."
            )
    _show(directory, json)


def _show_packed(
    directory: Path, every_layer: bool, plot: Path | None, tensor_parallel: bool, json: bool
) -> None:
    """Print how a checkpoint that quantkit packed stores each linear."""
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


def _show(path: Path, json: bool) -> None:
    """Print what a checkpoint of another tool is, and what to do with it."""
    from quantkit.verification.description import describe

    found = describe(path)
    actions = _actions(found, path)
    if json:
        print_json({**asdict(found), "commands": [command for command, _ in actions]})
        return
    kind = found.method or "not quantized"
    say(f"{found.architecture or 'unknown architecture'}, {kind}, {size_text(found.nbytes)}")
    rows = [
        (kind.stored_as, str(kind.tensors), str(kind.weights), f"{kind.bits_per_weight:.3f}")
        for kind in found.kinds
        if found.not_read is None
    ]
    if rows:
        print_table(
            ("stored as", "tensors", "weights", "bits"),
            rows,
            words=("stored as",),
            folded=("stored as",),
            narrow=True,
        )
    if found.settings:
        say(f"its settings say {found.settings}")
    bits = {name: "unknown" if of is None else f"{of:.3f}" for name, of in found.bits_per_weight.items()}
    packed = f"low-bit tensors {bits['linears']}, " if found.method else ""
    say(f"bits per weight: {packed}whole model {bits['model']}")
    if found.inputs:
        say(found.inputs)
    if found.made_for:
        say(f"for, by their documentation: {', '.join(found.made_for)}")
    for command, what in actions:
        say(f"`quantkit {command}` {what}")
    if found.not_read is not None:
        note(f"quantkit does not read these weights: {found.not_read}")
    elif found.not_converted is not None:
        note(f"`quantkit convert` cannot keep the values: {found.not_converted}")


def _actions(found: "Description", path: Path) -> list[tuple[str, str]]:
    """Commands that take such a checkpoint, and what each does."""
    actions = []
    low_bit = any(kind.low_bit for kind in found.kinds)
    if found.not_read is None and low_bit and found.not_converted is None:
        actions.append((f"convert {path} OUT", "packs it with the same values"))
    if found.not_read is None:
        actions.append((f"quantize {path} OUT", "rounds it again" if low_bit else "packs it"))
    commands, runs = f"eval {path} --text FILE`, `bench` and `generate", "run it"
    if found.not_read is None and low_bit:
        actions.append((f"eval {path} --text FILE", "measures it, on dequantized weights"))
        commands = f"bench {path}` and `generate"
    through = next((tool for tool in found.made_for if tool.startswith("transformers")), None)
    if through is not None:
        actions.append((commands, f"{runs} by {through}" if low_bit or found.not_read else runs))
    return actions
