"""Quantizing a checkpoint: plan, calibrate, stream, write.

`quantization/plan.py` decides everything first, `quantization/stream.py` moves the tensors,
`checkpoint/output/directory.py` writes. With calibration data `quantization/blockwise/calibration.py` comes
before: it fills files with quantized blocks, which are then streamed. `verification/check_output.py` runs the
result before it is finished, and `quantization/run_record.py` says what a run records of itself. Here are the
recipe of the options and the order of these steps.
"""

import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.data.samples import Samples
from quantkit.checkpoint.hub.repository import locate, resolve
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.journal import read_journal
from quantkit.checkpoint.source import CONFIG_NAME, INDEX_NAME, Checkpoint, check_not_quantized
from quantkit.devices import pick_device
from quantkit.errors import QuantkitError, UsageError
from quantkit.memory import enough_memory, free_memory, say_if_short
from quantkit.model.distributed import Ranks, join_ranks
from quantkit.model.prefixes import read_names
from quantkit.model.structure import Structure, read_structure
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import GroupSize
from quantkit.packing.zero_points import ZeroPoint
from quantkit.progress import Advance, Progress, counting
from quantkit.quantization.allocate.allocate import Allocated, allocate_formats
from quantkit.quantization.allocate.allocation import Allocation
from quantkit.quantization.allocate.budget import Budget
from quantkit.quantization.blockwise.block_tasks import needs_data
from quantkit.quantization.blockwise.calibration import Calibration, calibrate, discard_work
from quantkit.quantization.blockwise.calibration_data import CalibrationOptions, read_samples
from quantkit.quantization.gpu_memory import gpu_memory
from quantkit.quantization.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from quantkit.quantization.rotated_checkpoint import rotated
from quantkit.quantization.run_record import model_record, run_record
from quantkit.quantization.side_files import check_side_files
from quantkit.quantization.stream import write_shards
from quantkit.recipes.recipe import Choice, Recipe, parse_rule, read_recipe
from quantkit.verification.check_output import check_finished, check_unfinished

#: About what header, index, journal and manifest together say of a tensor of the output.
RECORD_BYTES = 1 << 10


@dataclass(frozen=True)
class QuantizeResult:
    """A finished packed checkpoint: its directory, plan, and what was measured of each packed linear.

    `unchecked` says why it was not run on a prompt where that was asked for.
    """

    directory: Path
    plan: Plan
    measured: Mapping[str, Measured]
    unchecked: str | None = None

    @property
    def relative_errors(self) -> dict[str, float]:
        """sum((w - stored)^2) / sum(w^2) over the weights of each packed linear."""
        return {name: measured.relative_error for name, measured in self.measured.items()}


def make_recipe(
    *,
    format: str | None = None,
    method: str | None = None,
    group_size: GroupSize = None,
    zero_point: ZeroPoint | None = None,
    scale_dtype: str | None = None,
    packing: PackingName | None = None,
    recipe: str | Path | None = None,
    lm_head: str | None = None,
    rules: tuple[str, ...] = (),
    rotate: bool = False,
    budget: Budget | None = None,
) -> Recipe:
    """The recipe of these options: `rules` first, then `lm_head`, then the recipe file's, then the default.
    It rotates the model if `rotate` or the file says so.

    With a `budget` formats are allocated later, to linears without a rule, and none may be given for them
    here.

    Raises `UsageError` or `FormatError` naming the option.
    """
    given = {
        "format": format,
        "group-size": group_size,
        "method": method,
        "zero-point": zero_point,
        "scale-dtype": scale_dtype,
        "packing": packing,
    }
    if budget is not None:
        # A method goes with a budget.
        _check_left_out({**given, "method": None, "recipe": recipe}, budget)
    default = Choice(
        format or "int4",
        group_size,
        zero_point or "none",
        scale_dtype,
        method or "mse",
        packing=packing or "bits",
    )
    if recipe is not None:
        from_file = read_recipe(Path(recipe), default)
        _check_agreeing(given, from_file.default, recipe)
    else:
        from_file = Recipe(default)
    first = [parse_rule(rule, from_file.default) for rule in rules]
    if lm_head is not None:
        first.append(parse_rule(f"*lm_head={lm_head}", Choice(method=from_file.default.method)))
    return Recipe(from_file.default, (*first, *from_file.rules), rotate or from_file.rotate)


def _check_left_out(given: Mapping[str, object], budget: Budget) -> None:
    """`UsageError` for the first option that has a value: the budget decides on it."""
    for option, value in given.items():
        if value is not None:
            raise UsageError(
                f"{budget.limit.option} chooses the formats, so it does not go with --{option}. Leave "
                "one out; --formats says what to choose from, and --rule what certain linears get."
            )


def _check_agreeing(given: Mapping[str, object], default: Choice, recipe: str | Path) -> None:
    """`UsageError` for the first option whose value is not that of the `default` of a recipe file."""
    for option, value in given.items():
        found = getattr(default, option.replace("-", "_"))
        if value is not None and found != value:
            raise UsageError(
                f"--{option} {value} and [default] of recipe {recipe} "
                f"({'its own' if found is None else found}) differ. Give the {option} in one place."
            )


def _open(directory: Path, recipe: Recipe, allow_auto_map: bool) -> tuple[Checkpoint, Structure]:
    """The source as the recipe wants it, refused if it cannot be quantized, and its structure."""
    checkpoint = Checkpoint.open(directory, allow_auto_map=allow_auto_map)
    check_not_quantized(checkpoint)
    checkpoint, structure = read_names(checkpoint)
    checkpoint = check_side_files(checkpoint)
    if not recipe.rotate:
        return checkpoint, structure
    turned = rotated(checkpoint)
    return turned, read_structure(turned)


def plan(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_auto_map: bool = False,
    budget: Budget | None = None,
    calibration: CalibrationOptions | None = None,
    device: str = "auto",
    progress: Progress | None = None,
) -> tuple[Checkpoint, Plan]:
    """The source, opened, and what quantizing it would write.

    Reads headers only, also from the hub, unless there is a `budget`: the formats of linears without a rule
    are then allocated, by sensitivities measured on `calibration` data where they are not in the user's
    cache; `progress(done, all, at work)` is called meanwhile.
    """
    chosen = recipe or Recipe()
    checkpoint, structure = _open(resolve(source, headers_only=budget is None), chosen, allow_auto_map)
    if budget is None:
        return checkpoint, make_plan(checkpoint, structure, chosen, max_shard_bytes=max_shard_bytes)
    options = calibration or CalibrationOptions()
    with enough_memory(str(source)):
        found = _allocated(checkpoint, structure, chosen, budget, options, pick_device(device), progress)
    return checkpoint, _plan_of(checkpoint, structure, found, max_shard_bytes)


def _allocated(
    checkpoint: Checkpoint,
    structure: Structure,
    recipe: Recipe,
    budget: Budget,
    calibration: CalibrationOptions,
    device: torch.device,
    progress: Progress | None,
) -> Allocated:
    def read(rows: int) -> Samples:
        return read_samples(checkpoint, calibration, rows)

    return allocate_formats(checkpoint, structure, recipe, budget, device, read, progress)


def _plan_of(checkpoint: Checkpoint, structure: Structure, found: Allocated, max_shard_bytes: int) -> Plan:
    planned = make_plan(checkpoint, structure, found.recipe, max_shard_bytes=max_shard_bytes)
    return replace(planned, notes=(*found.notes, *planned.notes), allocation=found.allocation)


def _kept(out: Path, checkpoint: Checkpoint, mode: Mode) -> Allocated | None:
    """The allocation of the run that wrote to `out`, which a resumed run keeps; None if there is none.

    `OutputError`, before anything is measured, where a run may not write.
    """
    OutputDirectory.check(out, checkpoint.directory, mode, _late_names(checkpoint))
    if mode is not Mode.RESUME:
        return None
    journal = read_journal(out)
    if journal is not None:
        run: Any = journal.run
    elif (out / MANIFEST_NAME).is_file():
        run = read_manifest(out).get("run")
    else:
        return None
    try:
        allocation = Allocation.from_dict(run["allocation"]["result"])
        return Allocated(Recipe.from_dict(run["recipe"]), allocation, ())
    except (KeyError, TypeError, QuantkitError):
        # What another version or another kind of run left; the run records are compared and tell.
        return None


def quantize(
    source: str | Path,
    out: str | Path,
    *,
    format: str | None = None,
    method: str | None = None,
    group_size: GroupSize = None,
    zero_point: ZeroPoint | None = None,
    scale_dtype: str | None = None,
    packing: PackingName | None = None,
    recipe: Recipe | str | Path | None = None,
    lm_head: str | None = None,
    rules: tuple[str, ...] = (),
    rotate: bool = False,
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_auto_map: bool = False,
    calibration: CalibrationOptions | None = None,
    budget: Budget | None = None,
    check: bool = False,
    progress: Progress | None = None,
    measuring: Progress | None = None,
    on_plan: Callable[[Checkpoint, Plan], None] | None = None,
    ranks: Ranks | None = None,
) -> QuantizeResult:
    """Quantize a checkpoint (a directory or a hub id) into the packed checkpoint directory `out`.

    `format` (default int4), `method` (mse), `group_size`, `zero_point` ("none", "integer" or "float"),
    `scale_dtype` (a name such as "bfloat16" or "e4m3") and `packing` ("bits" or "radix") apply to every
    linear of the decoder; `rules` ("PATTERN=FORMAT[:GROUP][:METHOD]" or "PATTERN=keep"), `lm_head` (a format)
    and a recipe file refine that. With `rotate` the weights are rotated first, and the model computes the
    same (`quantization/rotated_checkpoint.py`). `device` is where the arithmetic runs; "auto" takes a GPU if
    there is one. `allow_auto_map` accepts a config that names remote code, which is dropped and never run.
    `calibration` says what texts methods with data are calibrated on, the text that comes with quantkit if
    nothing else. With a `budget`, of bits per weight or milliseconds per token, linears without a rule get
    the formats that cost the least accuracy within it, by sensitivities measured on the same texts;
    `measuring(done, all, at work)` is called meanwhile, and a resumed run keeps the formats. With `check` the
    result is run on a fixed prompt before it is finished, and its logits are stored in the manifest, with
    which `verify` compares; where memory is too small, the result's `unchecked` says so.
    `progress(done_bytes, all_bytes, tensor)` is called as source bytes are dealt with, `on_plan` once before
    any tensor is written.

    `ranks` are the processes that share the calibration, by default those that torchrun started with this
    one. All of them call this alike and get the result; the first one writes `out` and makes the calls.

    Raises `QuantkitError` for every refusal; nothing was written then, or `resume=True` continues.
    """
    if resume and overwrite:
        raise UsageError("resume and overwrite exclude each other: continue the run, or start it anew.")
    if isinstance(recipe, Recipe):
        if any((format, method, group_size, zero_point, scale_dtype, packing, lm_head, rules, rotate)):
            raise UsageError(
                "a Recipe says all about format and rules; leave out format, method, group_size, zero_point, "
                "scale_dtype, packing, lm_head, rules and rotate, or make the recipe with them."
            )
    else:
        recipe = make_recipe(
            format=format,
            method=method,
            group_size=group_size,
            zero_point=zero_point,
            scale_dtype=scale_dtype,
            packing=packing,
            recipe=recipe,
            lm_head=lm_head,
            rules=rules,
            rotate=rotate,
            budget=budget,
        )
    mode = Mode.RESUME if resume else Mode.OVERWRITE if overwrite else Mode.NEW
    with enough_memory(str(source)), ExitStack() as stack:
        ranks = stack.enter_context(join_ranks()) if ranks is None else ranks
        target = ranks.device(pick_device(device))
        located = locate(source)
        checkpoint, structure = _open(located.directory, recipe, allow_auto_map)
        options = calibration or CalibrationOptions()
        allocation: dict[str, Any] = {}
        if budget is None:
            planned = make_plan(checkpoint, structure, recipe, max_shard_bytes=max_shard_bytes)
        else:
            # The first rank allocates, for all.
            allocate = partial(_allocated, checkpoint, structure, recipe, budget, options, target, measuring)
            kept = partial(_kept, Path(out), checkpoint, mode)
            found = Allocated.from_dict(ranks.broadcast(lambda: Allocated.to_dict(kept() or allocate())))
            request = {"budget": budget.to_dict(), "asked": recipe.to_dict(), "calibration": vars(options)}
            allocation = {"allocation": {**request, "result": found.allocation.to_dict()}}
            recipe = found.recipe
            planned = _plan_of(checkpoint, structure, found, max_shard_bytes)
        if not planned.quantized_weights:
            raise UsageError(
                f"there is nothing to quantize in {source}: the recipe keeps every linear, or no layer is a "
                "linear that can be packed. `quantkit plan` shows why each is kept."
            )
        calibrated = Calibration.of(checkpoint, planned, options, target)
        if calibrated is not None:
            planned = replace(planned, notes=(*planned.notes, *calibrated.samples.notes))
        run = {**run_record(checkpoint, recipe, target, max_shard_bytes, calibrated), **allocation}
        _say_if_short(checkpoint, planned, options, target)
        _check_alike(ranks, {**run, "source": checkpoint.fingerprint(of_copies=True)}, calibrated)
        report = counting(_work(planned, calibrated), progress if ranks.first else None)
        output = None
        if ranks.first:
            names, expected = _to_write(checkpoint, planned, calibrated)
            opened = OutputDirectory.open(Path(out), checkpoint.directory, mode, run, expected, names=names)
            output = stack.enter_context(opened)
            if on_plan is not None:
                on_plan(checkpoint, planned)
        if calibrated is not None:
            calibrate(checkpoint, planned, calibrated, output, Path(out), ranks, report)
        unchecked = None
        if output is not None:
            record = partial(model_record, located, planned, recipe, calibrated=calibrated)
            unchecked = _write(checkpoint, planned, output, target, report, calibrated, record, check)
        # Read by the first rank while it has the lock: another writer's manifest is not this run's.
        manifest = ranks.broadcast(lambda: read_manifest(Path(out) if output is None else output.path))
        measured = ModelRecord.from_manifest(manifest).measured
        return QuantizeResult(Path(out), planned, measured, unchecked)


def _write(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    report: Advance,
    calibrated: Calibration | None,
    record: Callable[[Mapping[str, Measured]], ModelRecord],
    check: bool,
) -> str | None:
    """Write all of the checkpoint that is not there, and `check` it; why it was not run, None if it was.

    `record` makes what the manifest says of what was measured.
    """
    if output.complete:
        report(_work(planned, calibrated), "")
        return check_finished(output, device) if check else None
    quantized = () if calibrated is None else calibrated.quantized_files
    measured = record(write_shards(checkpoint, planned, output, device, report, quantized))
    if calibrated is not None:
        discard_work(output, calibrated)
    unchecked = None

    def found() -> dict[str, Any]:
        """What the manifest gets of the files as they are now, which are all but itself and the config."""
        nonlocal unchecked
        checkpoint.check_unchanged()
        if not check:
            return {}
        logits, unchecked = check_unfinished(output, planned, measured.layers, device)
        return logits

    output.finish(
        planned.weight_map,
        planned.output_bytes,
        planned.model_config,
        checkpoint.side_files,
        measured.to_dict(),
        found,
    )
    return unchecked


def _say_if_short(
    checkpoint: Checkpoint, planned: Plan, calibration: CalibrationOptions, device: torch.device
) -> None:
    """Warn where the run takes more memory of a GPU than is free there."""
    if device.type == "cuda":
        needed = gpu_memory(checkpoint, planned, calibration, free_memory(device)).quantizing
        say_if_short(needed, device, calibrated=needs_data(planned))


def _check_alike(ranks: Ranks, run: Mapping[str, Any], calibrated: Calibration | None) -> None:
    """`UsageError` where ranks have nothing to share, or would write different bytes."""
    if ranks.size > 1 and calibrated is None:
        raise UsageError(
            f"torchrun started {ranks.size} processes, which share a calibration, but no method of the "
            "recipe takes any data. Start quantkit without torchrun, or choose a method that does, such as "
            "--method gptq."
        )
    digests = {
        key: sha256(json.dumps(value, sort_keys=True).encode()).hexdigest() for key, value in run.items()
    }
    for rank, other in enumerate(ranks.all_gather(digests)):
        differing = sorted(key for key in digests.keys() | other.keys() if digests.get(key) != other.get(key))
        if differing:
            raise UsageError(
                f"ranks {ranks.number} and {rank} were not asked the same, or do not see the same files; "
                f"they differ in {', '.join(differing)}. Start all ranks with one command, on one host or on "
                "hosts that have the same files."
            )


def _to_write(checkpoint: Checkpoint, planned: Plan, calibrated: Calibration | None) -> tuple[list[str], int]:
    """The names and about the bytes of all files that a run writes, its work files among them."""
    work_names, work = ((), 0) if calibrated is None else (calibrated.work_files, calibrated.work_bytes)
    side = sum(checkpoint.stamps[path].size for path in checkpoint.side_files)
    names = [*work_names, *(shard.filename for shard in planned.shards), *_late_names(checkpoint)]
    return names, planned.output_bytes + work + side + RECORD_BYTES * len(planned.weight_map)


def _late_names(checkpoint: Checkpoint) -> list[str]:
    """The files that come after the shards, where there may be an index."""
    side = [path.name for path in checkpoint.side_files]
    return [*side, INDEX_NAME, MANIFEST_NAME, CONFIG_NAME]


def _work(planned: Plan, calibrated: Calibration | None) -> int:
    """Source bytes to deal with: those of what is calibrated, and then those of all tensors."""
    shards = sum(task.source.nbytes for shard in planned.shards for task in shard.tasks)
    return shards + (0 if calibrated is None else calibrated.source_bytes)
