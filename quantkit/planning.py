"""Plan a quantization from headers, as `quantkit plan` does; `quantizing.py` begins with the same steps.

What only some plans need, such as the measuring of a budget, is imported there: most of the
time of a plan is imports (`benchmarks/plan_time.py`).
"""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch

from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.open_source import open_source
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.memory import enough_memory
from quantkit.model.model_free import read_tensors, with_other_parts
from quantkit.model.prefixes import read_names
from quantkit.model.structure import Structure, read_structure
from quantkit.progress import Progress
from quantkit.progress_bar import reporting
from quantkit.quantization.blockwise.block_tasks import needs_data
from quantkit.quantization.keywords import QuantizeKeywords, options_of, with_keywords
from quantkit.quantization.plan import Plan, make_plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.rotated_checkpoint import rotated
from quantkit.quantization.side_files import check_side_files
from quantkit.recipes.recipe import Recipe
from quantkit.verification.plan_check import checked

if TYPE_CHECKING:
    from quantkit.calibrate.data.samples import Samples
    from quantkit.quantization.allocate.allocate import Allocated
    from quantkit.quantization.allocate.budget import Budget


@with_keywords
def plan(
    source: str | Path, *, progress: Progress | bool | None = None, **given: Unpack[QuantizeKeywords]
) -> Plan:
    """Return the plan of `quantize` with the same options: sizes, and the fate of every linear.

    Reads headers only, of a model on the hub too, unless `bits_per_weight` or a `budget` has sensitivities
    measured; `progress(done, all, at work)` is called meanwhile. Raises `QuantkitError` for every refusal.
    """
    with reporting(progress, "measuring") as report:
        return plan_checkpoint(source, options_of(given, "plan"), progress=report)[1]


def plan_checkpoint(
    source: str | Path, options: QuantizeOptions, *, progress: Progress | None = None
) -> tuple[Checkpoint, Plan]:
    """Open the source and plan its quantization, without writing.

    Reads headers only, also from the hub. A `budget` needs more: the formats of linears without a rule are
    then allocated by sensitivities. Those are measured on calibration data unless they are in the user's
    cache; `progress(done, all, at work)` is called meanwhile.
    """
    recipe = options.to_recipe()
    options = replace(options, recipe=recipe)
    directory = resolve(source, headers_only=options.budget is None)
    checkpoint, structure = open_structure(directory, recipe, options.allow_auto_map)
    if options.budget is None:
        planned = make_plan(checkpoint, structure, recipe, max_shard_bytes=options.max_shard_bytes)
    else:
        with enough_memory(str(source)):
            device = pick_device(options.device)
            found = allocated(checkpoint, structure, options, options.budget, device, progress)
        planned = plan_allocated(checkpoint, structure, found, options.max_shard_bytes)
    planned = checked(planned, checkpoint, structure, options, source)
    methods = (task.method for shard in planned.shards for task in shard.tasks)
    options.distillation.check_used(any(one is not None and one.distill is not None for one in methods))
    if needs_data(planned) or options.calibration.sources is not None:
        from quantkit.quantization.blockwise.calibration import blocks_with_data

        blocks_with_data(checkpoint, planned, options.calibration, torch.device("cpu"))
    return checkpoint, planned


def open_structure(directory: Path, recipe: Recipe, allow_auto_map: bool) -> tuple[Checkpoint, Structure]:
    """Open the source as the recipe asks, rotated or not, and read its structure.

    Raises `QuantkitError` if it cannot be quantized.
    """
    checkpoint = open_source(directory, allow_auto_map=allow_auto_map or recipe.model_free)
    if recipe.model_free:
        checkpoint, structure = read_tensors(checkpoint, recipe.default.group_of_rows())
    else:
        checkpoint, structure = with_other_parts(*read_names(checkpoint))
    checkpoint = check_side_files(checkpoint)
    if not recipe.rotate:
        return checkpoint, structure
    turned = rotated(checkpoint)
    return turned, read_structure(turned)


def allocated(
    checkpoint: Checkpoint,
    structure: Structure,
    options: QuantizeOptions,
    budget: "Budget",
    device: torch.device,
    progress: Progress | None,
) -> "Allocated":
    """Choose a format for every linear without a rule; sensitivities are measured unless they are cached."""
    from quantkit.checkpoint.engines import asked_engine
    from quantkit.quantization.allocate.allocate import allocate_formats
    from quantkit.quantization.blockwise.calibration_data import read_samples

    def read(rows: int) -> "Samples":
        return read_samples(checkpoint, options.calibration, rows)

    engine = None if options.engine is None else asked_engine(options.engine)[0]
    return allocate_formats(
        checkpoint, structure, options.to_recipe(), budget, device, read, progress, engine
    )


def plan_allocated(
    checkpoint: Checkpoint, structure: Structure, found: "Allocated", max_shard_bytes: int
) -> Plan:
    """Plan the quantization by the allocation `found`, with its recipe and notes."""
    planned = make_plan(checkpoint, structure, found.recipe, max_shard_bytes=max_shard_bytes)
    return replace(planned, notes=(*found.notes, *planned.notes), allocation=found.allocation)
