"""`quantkit convert`: a checkpoint that is packed already in, one with the same values out."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from quantkit.cli import options, parsing
from quantkit.cli.console import note, note_unchecked, print_json, progress, say
from quantkit.cli.records import with_fields
from quantkit.files import size_text
from quantkit.signals import advising

if TYPE_CHECKING:
    from quantkit.checkpoint.source import Checkpoint
    from quantkit.quantization.plan import Plan

WithoutActivations = Annotated[
    bool,
    typer.Option(
        "--without-activations",
        help="Leave out how linears round their inputs, and the static scales of inputs, keys and values.",
    ),
]


@dataclass(frozen=True)
class ConvertArguments:
    """The command line of `convert`, an option per field."""

    resume: options.Resume = False
    overwrite: options.Overwrite = False
    check: options.CheckOutput = True
    dense_embeddings: options.DenseEmbeddings = False
    packing: options.PackingText = None
    without_activations: WithoutActivations = False
    max_shard_size: options.ShardSize = options.SHARD_SIZE
    allow_auto_map: options.AllowAutoMap = False
    every_layer: options.EveryLayer = False
    json: options.Json = False


@with_fields
def convert(source: options.Source, out_directory: options.OutDirectory, given: ConvertArguments) -> None:
    """Convert a low-bit checkpoint and keep every value.

    Codes and scales of SOURCE become those of the scheme whose weights are the same, bit by bit, which is
    compared while OUT is written; 'verify OUT --against SOURCE' compares again. Prints which scheme each kind
    of weight became. A linear whose values no scheme has, such as one in K-quants, is refused by name:
    'quantize' reads the same SOURCE and rounds. The token embedding is packed too where a scheme has its
    values. What else is no linear is stored as numbers. Static scales of inputs, keys and values are kept.
    """
    from quantkit import converting
    from quantkit.cli.commands.plan import plan_dict, print_plan, print_warnings
    from quantkit.cli.files import resume_advice
    from quantkit.recipes.recipe import parse_packing

    begun = not given.overwrite

    def show(checkpoint: "Checkpoint", plan: "Plan") -> None:
        nonlocal begun
        begun = True
        for warning in checkpoint.warnings:
            note(warning)
        if not given.json:
            print_plan(plan, every_layer=given.every_layer)

    def advice() -> str | None:
        return resume_advice(out_directory, overwrite=given.overwrite) if begun else None

    asked = converting.ConvertOptions(
        max_shard_bytes=parsing.parse_size(given.max_shard_size),
        allow_auto_map=given.allow_auto_map,
        resume=given.resume,
        overwrite=given.overwrite,
        check=given.check,
        dense_embeddings=given.dense_embeddings,
        packing=parse_packing("bits" if given.packing is None else given.packing),
        without_activations=given.without_activations,
    )
    with advising(advice), progress("converting") as report:
        result = converting.convert(source, out_directory, asked, progress=report, on_plan=show)
    note_unchecked(result.unchecked)
    if given.json:
        print_json({"directory": str(result.directory), **plan_dict(result.plan, result.measured)})
        return
    kinds = [layer.linear.kind for layer in result.plan.layers if layer.scheme and layer.weights]
    table = " and the token embedding" if "embedding" in kinds else ""
    linears = len(kinds) - kinds.count("embedding")
    say(f"{linears} linears{table} have the values of {source}, bit by bit")
    say(f"wrote {result.directory} ({size_text(result.plan.output_bytes)})")
    print_warnings(result.plan)
