"""`quantkit plan`: what quantizing would write, from headers alone."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from quantkit.cli import options
from quantkit.cli.console import note, print_json, progress, say, size
from quantkit.cli.layers import print_layers, print_readers, totals
from quantkit.errors import UsageError

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
    bits_per_weight: options.BitsPerWeight = None,
    formats: options.AllocatedFormats = None,
    calibration: options.Calibration = None,
    calibration_samples: options.CalibrationSamples = None,
    calibration_length: options.CalibrationLength = None,
    seed: options.Seed = 0,
    device: options.Device = "auto",
    max_shard_size: options.ShardSize = "2GB",
    allow_auto_map: options.AllowAutoMap = False,
    every_layer: options.EveryLayer = False,
    json: options.Json = False,
) -> None:
    """Show what quantizing would write, without doing it.

    Bytes, bits per weight, peak memory and what becomes of every layer and why. Reads no weights, and of a
    model on the hub downloads only headers, unless --bits-per-weight has sensitivities measured.
    """
    from quantkit.model import quantize as quantizing
    from quantkit.model.calibration_data import CalibrationOptions

    budget = options.budget_of(bits_per_weight, formats)
    data = CalibrationOptions(calibration, calibration_samples, calibration_length, seed)
    if budget is None and (data, device) != (CalibrationOptions(), "auto"):
        raise UsageError(
            "plan has --calibration, --calibration-samples, --calibration-length, --seed and --device for "
            "--bits-per-weight alone. Leave them out, or give that."
        )
    chosen = options.recipe_of(
        format, method, group_size, zero_point, scale_dtype, packing, recipe, lm_head, rule, budget
    )
    shard_bytes = options.parse_size(max_shard_size)
    with progress("measuring") as report:
        checkpoint, planned = quantizing.plan(
            source,
            chosen,
            max_shard_bytes=shard_bytes,
            allow_auto_map=allow_auto_map,
            budget=budget,
            calibration=data,
            device=device,
            progress=report,
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
    if (found := planned.allocation) is not None:
        say(
            f"allocated: {8 * found.nbytes / found.weights:.3f} of {found.bits_per_weight:g} bits per "
            f"weight, expected KL divergence {found.divergence:.3g} nats per token"
        )
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
        **({} if planned.allocation is None else {"allocation": planned.allocation.to_dict()}),
    }
