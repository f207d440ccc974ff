"""Quantizing a checkpoint: plan, stream, write.

`model/plan.py` decides everything first, `model/stream.py` moves the tensors, `checkpoint/writer.py` writes.
With calibration data `model/blockwise.py` comes before: it quantizes the blocks into files that are then
streamed.
"""

import json
import os
import platform
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.methods import CHUNK_WEIGHTS
from quantkit.calibrate.parameters import SAMPLE_WEIGHTS
from quantkit.calibrate.recipe import Choice, Recipe, parse_rule, read_recipe
from quantkit.calibrate.samples import Samples
from quantkit.checkpoint.hub import resolve
from quantkit.checkpoint.journal import read_journal
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.source import Checkpoint, check_not_quantized
from quantkit.checkpoint.writer import Mode, OutputDirectory
from quantkit.errors import QuantkitError, UsageError
from quantkit.model.allocate import Allocated, Allocation, allocate_formats
from quantkit.model.block_tasks import BlockTasks, block_tasks, needs_data, work_bytes
from quantkit.model.blocks import Decoder
from quantkit.model.blockwise import compute_dtype, quantize_blocks
from quantkit.model.budget import Budget
from quantkit.model.calibration_data import CalibrationOptions, read_samples
from quantkit.model.devices import pick_device
from quantkit.model.memory import enough_memory
from quantkit.model.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from quantkit.model.ranks import Ranks, joined
from quantkit.model.record import Measured, ModelRecord
from quantkit.model.rotated import rotated
from quantkit.model.stream import CHUNK_BYTES, WORKERS, row_unit, write_shard
from quantkit.model.structure import Structure, read_structure
from quantkit.model.work_files import Followed, WorkFiles
from quantkit.model.workers import working
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import GroupSize, ZeroPoint
from quantkit.progress import Advance, Progress, counting

#: Workers with calibration data, by device: one per core, and one for a GPU, whose passes would share its
#: memory.
CALIBRATION_WORKERS = {"cpu": max(1, os.cpu_count() or 1), "cuda": 1}


@dataclass(frozen=True)
class QuantizeResult:
    """A finished packed checkpoint: its directory, plan, and what was measured of each packed linear."""

    directory: Path
    plan: Plan
    measured: Mapping[str, Measured]

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
    if budget is not None:
        given = {
            "format": format,
            "group-size": group_size,
            "zero-point": zero_point,
            "scale-dtype": scale_dtype,
            "packing": packing,
            "recipe": recipe,
        }
        for option, value in given.items():
            if value is not None:
                raise UsageError(
                    f"{budget.limit.option} chooses the formats, so it does not go with --{option}. Leave "
                    "one out; --formats says what to choose from, and --rule what certain linears get."
                )
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
        values = {
            "format": format,
            "group_size": group_size,
            "method": method,
            "zero_point": zero_point,
            "scale_dtype": scale_dtype,
            "packing": packing,
        }
        for key, value in values.items():
            found = getattr(from_file.default, key)
            if value is not None and found != value:
                option = key.replace("_", "-")
                raise UsageError(
                    f"--{option} {value} and [default] of recipe {recipe} "
                    f"({'its own' if found is None else found}) differ. Give the {option} in one place."
                )
    else:
        from_file = Recipe(default)
    first = [parse_rule(rule, from_file.default) for rule in rules]
    if lm_head is not None:
        first.append(parse_rule(f"*lm_head={lm_head}", Choice(method=from_file.default.method)))
    return Recipe(from_file.default, (*first, *from_file.rules), rotate or from_file.rotate)


def _open(directory: Path, recipe: Recipe, allow_auto_map: bool) -> Checkpoint:
    """The source as the recipe wants it, refused if it cannot be quantized."""
    checkpoint = Checkpoint.open(directory, allow_auto_map=allow_auto_map)
    check_not_quantized(checkpoint)
    return rotated(checkpoint) if recipe.rotate else checkpoint


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
    checkpoint = _open(resolve(source, headers_only=budget is None), chosen, allow_auto_map)
    structure = read_structure(checkpoint)
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


def _kept(out: Path, source: Path, mode: Mode) -> Allocated | None:
    """The allocation of the run that wrote to `out`, which a resumed run keeps; None if there is none.

    `OutputError`, before anything is measured, where a run may not write.
    """
    OutputDirectory.check(out, source, mode)
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
    progress: Progress | None = None,
    measuring: Progress | None = None,
    on_plan: Callable[[Checkpoint, Plan], None] | None = None,
    ranks: Ranks | None = None,
) -> QuantizeResult:
    """Quantize a checkpoint (a directory or a hub id) into the packed checkpoint directory `out`.

    `format` (default int4), `method` (mse), `group_size`, `zero_point` ("none", "integer" or "float"),
    `scale_dtype` (a name such as "bfloat16" or "e4m3") and `packing` ("bits" or "radix") apply to every
    linear of the decoder; `rules` ("PATTERN=FORMAT[:GROUP][:METHOD]" or "PATTERN=keep"), `lm_head` (a
    format) and a recipe file refine that. With `rotate` the weights are rotated first, and the
    model computes the same (`model/rotated.py`). `device` is where the arithmetic runs; "auto" takes a GPU
    if there is one.
    `allow_auto_map` accepts a config that names remote code, which is dropped and never run. `calibration`
    says what texts methods with data are calibrated on, the text that comes with quantkit if nothing else.
    With a `budget`, of bits per weight or milliseconds per token, linears without a rule get the formats that
    cost the least accuracy within it, by sensitivities measured on the same texts;
    `measuring(done, all, at work)` is called meanwhile, and a resumed run keeps the formats.
    `progress(done_bytes, all_bytes, tensor)` is called as source bytes are dealt with, `on_plan` once
    before any tensor is written.

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
        ranks = stack.enter_context(joined()) if ranks is None else ranks
        target = ranks.device(pick_device(device))
        checkpoint = _open(resolve(source), recipe, allow_auto_map)
        structure, options = read_structure(checkpoint), calibration or CalibrationOptions()
        allocation: dict[str, Any] = {}
        if budget is None:
            planned = make_plan(checkpoint, structure, recipe, max_shard_bytes=max_shard_bytes)
        else:
            # The first rank allocates, for all.
            allocate = partial(_allocated, checkpoint, structure, recipe, budget, options, target, measuring)
            place = Path(out), checkpoint.directory, mode
            known = ranks.from_first(lambda: Allocated.to_dict(_kept(*place) or allocate()))
            found = Allocated.from_dict(known)
            request = {"budget": budget.to_dict(), "asked": recipe.to_dict(), "calibration": vars(options)}
            allocation = {"allocation": {**request, "result": found.allocation.to_dict()}}
            recipe = found.recipe
            planned = _plan_of(checkpoint, structure, found, max_shard_bytes)
        if not planned.quantized_weights:
            raise UsageError(
                f"there is nothing to quantize in {source}: the recipe keeps every linear, or no layer is a "
                "linear that can be packed. `quantkit plan` shows why each is kept."
            )
        calibrated = _calibrated(checkpoint, planned, options, target)
        if calibrated is not None:
            planned = replace(planned, notes=(*planned.notes, *calibrated.samples.notes))
        run = {**_run_record(checkpoint, recipe, target, max_shard_bytes, calibrated), **allocation}
        _check_alike(ranks, run, calibrated)
        report = counting(_work(planned, calibrated), progress if ranks.first else None)
        output = None
        if ranks.first:
            expected = planned.output_bytes + (0 if calibrated is None else calibrated.work_bytes)
            opened = OutputDirectory.open(Path(out), checkpoint.directory, mode, run, expected)
            output = stack.enter_context(opened)
            if on_plan is not None:
                on_plan(checkpoint, planned)
        if calibrated is not None:
            _calibrate(checkpoint, planned, calibrated, output, Path(out), ranks, report)
        if output is not None:
            _write(checkpoint, planned, output, target, report, calibrated, str(source), recipe)
        # The others wait for the manifest.
        ranks.meet(None)
        measured = ModelRecord.from_manifest(read_manifest(Path(out))).measured
        return QuantizeResult(Path(out), planned, measured)


def _write(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    report: Advance,
    calibrated: "_Calibrated | None",
    source: str,
    recipe: Recipe,
) -> None:
    """Write all of the checkpoint that is not there."""
    if output.complete:
        report(_work(planned, calibrated), "")
        return
    measured = _stream(checkpoint, planned, output, device, report, calibrated)
    checkpoint.check_unchanged()
    _discard_work(output, calibrated)
    output.finish(
        planned.weight_map,
        planned.output_bytes,
        planned.model_config,
        checkpoint.side_files,
        _record(source, planned, recipe, measured, calibrated).to_dict(),
    )


def _check_alike(ranks: Ranks, run: Mapping[str, Any], calibrated: "_Calibrated | None") -> None:
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
    for rank, other in enumerate(ranks.meet(digests)):
        differing = sorted(key for key in digests.keys() | other.keys() if digests.get(key) != other.get(key))
        if differing:
            raise UsageError(
                f"ranks {ranks.number} and {rank} were not asked the same, or do not see the same files; "
                f"they differ in {', '.join(differing)}. Start all ranks with one command, on one host or on "
                "hosts that have the same files."
            )


@dataclass(frozen=True, eq=False)
class _Calibrated:
    """What a run with calibration data works with."""

    samples: Samples
    seed: int
    decoder: Decoder
    blocks: tuple[BlockTasks, ...]
    work_bytes: int

    def to_dict(self) -> dict[str, Any]:
        """What of it determines the bytes written."""
        return {"tokens_sha256": self.samples.digest, "shape": list(self.samples.tokens.shape)}


def _discard_work(output: OutputDirectory, calibrated: "_Calibrated | None") -> None:
    """Remove the work files of a run whose shards are whole."""
    for block in () if calibrated is None else calibrated.blocks:
        for name in (block.filename, block.hidden_filename):
            if output.is_done(name):
                output.discard(name)


def _calibrated(
    checkpoint: Checkpoint, planned: Plan, options: CalibrationOptions, device: torch.device
) -> _Calibrated | None:
    """Everything that can be refused about calibration, before any work; None if no method needs it."""
    if not needs_data(planned):
        if options.sources is not None and planned.allocation is None:
            raise UsageError(
                "calibration data was given, but no method of the recipe takes any. Leave it out, or choose "
                "one that does, such as --method gptq; `quantkit methods` lists them."
            )
        return None
    decoder = Decoder(checkpoint, device, compute_dtype(checkpoint, device))
    blocks = tuple(block_tasks(planned, decoder, str(checkpoint.config.get("model_type"))))
    samples = read_samples(checkpoint, options, decoder.embedding_rows)
    size = work_bytes(blocks, samples, decoder.hidden_size)
    return _Calibrated(samples, options.seed, decoder, blocks, size)


def peak_bytes(planned: Plan) -> int:
    """About how much memory quantizing on a CPU takes beyond the libraries: what the workers hold."""
    tasks = [task for shard in planned.shards for task in shard.tasks if task.source.shape]
    rows = [row_unit(task) * task.source.nbytes // max(1, task.source.shape[0]) for task in tasks]
    chunk = max([CHUNK_BYTES["cpu"], *rows])
    fitted = any(task.scheme is not None and task.scheme.is_fitted for task in tasks)
    # A chunk as read, its packed parts, and the float32 copies and histograms of the piece in work; with code
    # books the sample, its scales, codes and errors, and what the search makes of them.
    return WORKERS["cpu"] * (8 * chunk + 128 * CHUNK_WEIGHTS + fitted * 64 * SAMPLE_WEIGHTS)


def _work(planned: Plan, calibrated: _Calibrated | None) -> int:
    """Source bytes to deal with: those of what is calibrated, and then those of all tensors."""
    blocks = () if calibrated is None else calibrated.blocks
    shards = sum(task.source.nbytes for shard in planned.shards for task in shard.tasks)
    return shards + sum(task.source.nbytes for block in blocks for task in block.tasks.values())


def _calibrate(
    checkpoint: Checkpoint,
    planned: Plan,
    calibrated: _Calibrated,
    output: OutputDirectory | None,
    out: Path,
    ranks: Ranks,
    report: Advance,
) -> None:
    """Fill the work files, unless all shards are done; ranks beside the first have no `output`."""

    def done() -> list[str] | None:
        assert output is not None
        if output.complete or all(output.is_done(shard.filename) for shard in planned.shards):
            return None
        names = [name for block in calibrated.blocks for name in (block.filename, block.hidden_filename)]
        return [name for name in names if output.is_done(name)]

    known = ranks.from_first(done)
    if known is None:
        return
    files: WorkFiles = Followed(out, known) if output is None else output
    decoder = calibrated.decoder
    lanes = max(1, CALIBRATION_WORKERS[decoder.device.type] // ranks.on_host)
    with working(lanes, "quantize") as workers:
        blocks, samples = calibrated.blocks, calibrated.samples
        quantize_blocks(checkpoint, blocks, decoder, files, samples, workers, lanes, ranks, report)


def _stream(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    report: Advance,
    calibrated: _Calibrated | None,
) -> dict[str, Measured]:
    """Write every shard that is not done; what was measured of each packed linear."""
    details: dict[str, dict[str, Any]] = {}
    blocks = [block for block in (() if calibrated is None else calibrated.blocks) if block.tasks]
    with working(WORKERS[device.type], "quantize") as workers:
        prepared = None
        if blocks and not all(output.is_done(shard.filename) for shard in planned.shards):
            prepared = Checkpoint.of_files([output.path / block.filename for block in blocks])
        for shard in planned.shards:
            if output.is_done(shard.filename):
                report(sum(task.source.nbytes for task in shard.tasks), shard.filename)
            else:
                with output.shard(shard.filename, shard.specs, {"format": "pt"}) as file:
                    sums = write_shard(checkpoint, shard, file, device, workers, report, prepared)
                    modules = {task.module for task in shard.tasks}
                    file.detail["layers"] = {
                        **{module: {"squared": pair} for module, pair in sums.items()},
                        **{
                            module: detail
                            for block in blocks
                            for module, detail in output.details(block.filename)["layers"].items()
                            if module in modules
                        },
                    }
            for module, detail in output.details(shard.filename)["layers"].items():
                known = details.setdefault(module, {**detail, "squared": [0.0, 0.0]})
                for i, value in enumerate(detail["squared"]):
                    known["squared"][i] += value
    return {module: Measured.of(detail) for module, detail in details.items()}


def _run_record(
    checkpoint: Checkpoint,
    recipe: Recipe,
    device: torch.device,
    max_shard_bytes: int,
    calibrated: _Calibrated | None,
) -> dict[str, Any]:
    """All that determines the bytes written."""
    return {
        **({} if calibrated is None else {"calibration": calibrated.to_dict()}),
        "source": checkpoint.fingerprint(),
        "recipe": recipe.to_dict(),
        "device": device.type,
        "max_shard_bytes": max_shard_bytes,
        "versions": _versions(),
    }


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    from quantkit import __version__

    return {
        "quantkit": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "python": platform.python_version(),
    }


def _record(
    source: str,
    planned: Plan,
    recipe: Recipe,
    measured: Mapping[str, Measured],
    calibrated: _Calibrated | None,
) -> ModelRecord:
    return ModelRecord(
        source=source,
        source_bytes=planned.source_bytes,
        container=planned.config.container,
        needs_quantkit=planned.not_portable,
        bits_per_weight=planned.bits_per_weight,
        versions=_versions(),
        recipe=recipe.to_dict(),
        layers=planned.layer_records(measured),
        dense=_dense(planned, calibrated),
        seed=None if calibrated is None else calibrated.seed,
        calibration=None if calibrated is None else _calibration_text(calibrated.samples),
    )


def _dense(planned: Plan, calibrated: _Calibrated | None) -> dict[str, str]:
    """Why each dense tensor is, and which are not those of the source."""
    changed = {
        task.source.name
        for block in (() if calibrated is None else calibrated.blocks)
        for task in block.changed.values()
    }
    folded = ", changed: it has the scales of input features"
    return {name: reason + (folded if name in changed else "") for name, reason in planned.dense.items()}


def _calibration_text(samples: Samples) -> str:
    count, length = samples.tokens.shape
    return f"{count} samples of {length} tokens from {samples.origin}, sha256 {samples.digest}"
