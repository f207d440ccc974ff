"""`quantkit plan`: what quantizing would write, from headers alone."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantkit.cli import options
from quantkit.cli.console import note, print_json, say, size
from quantkit.cli.layers import print_layers, print_readers, totals

if TYPE_CHECKING:
    from quantkit.model.plan import Plan
    from quantkit.model.record import Measured


def plan(
    source: options.Source,
    format: options.Format = None,
    method: options.MethodName = None,
    group_size: options.GroupSizeText = None,
    zero_point: options.ZeroPointKind = None,
    scale_dtype: options.ScaleDtype = None,
    packing: options.PackingText = None,
    recipe: options.RecipeFile = None,
    lm_head: options.LmHead = None,
    rule: options.Rules = None,
    max_shard_size: options.ShardSize = "2GB",
    allow_auto_map: options.AllowAutoMap = False,
    every_layer: options.EveryLayer = False,
    json: options.Json = False,
) -> None:
    """Show what quantizing would write, without doing it.

    Bytes, bits per weight, peak memory and what becomes of every layer and why. Reads no weights, and of a
    model on the hub downloads only headers.
    """
    from quantkit.model import quantize as quantizing

    chosen = options.recipe_of(
        format, method, group_size, zero_point, scale_dtype, packing, recipe, lm_head, rule
    )
    checkpoint, planned = quantizing.plan(
        source,
        chosen,
        max_shard_bytes=options.parse_size(max_shard_size),
        allow_auto_map=allow_auto_map,
    )
    if json:
        print_json(plan_dict(planned))
        return
    for warning in checkpoint.warnings:
        note(warning)
    print_plan(planned, every_layer=every_layer)
    say(f"peak memory beyond the libraries: about {size(quantizing.peak_bytes(planned))}")


def print_plan(planned: "Plan", *, every_layer: bool) -> None:
    """The fate of every tensor, sizes, and whether other tools can read the result."""
    print_layers(planned.layer_records({}), planned.dense, every_layer=every_layer)
    say(totals(planned.source_bytes, planned.output_bytes, planned.bits_per_weight))
    print_readers(planned.config.container, planned.not_portable)
    for text in planned.notes:
        note(text)


def plan_dict(planned: "Plan", measured: "Mapping[str, Measured] | None" = None) -> dict[str, Any]:
    """The plan as JSON."""
    return {
        "source_bytes": planned.source_bytes,
        "output_bytes": planned.output_bytes,
        "bits_per_weight": planned.bits_per_weight,
        "container": planned.config.container,
        "needs_quantkit": list(planned.not_portable),
        "notes": list(planned.notes),
        "files": {shard.filename: sum(task.nbytes for task in shard.tasks) for shard in planned.shards},
        "layers": {name: asdict(layer) for name, layer in planned.layer_records(measured or {}).items()},
        "dense": dict(planned.dense),
    }
