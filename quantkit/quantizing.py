"""Quantize a checkpoint: plan, calibrate, stream, write.

This module holds the order of the steps; the steps themselves are elsewhere:

    quantization/plan.py                    decides everything first
    quantization/blockwise/calibration.py   with calibration data: fills files with quantized blocks
    quantization/stream.py                  reads, quantizes and passes on the tensors
    checkpoint/output/directory.py          writes them
    verification/check_output.py            runs the result before the run is finished
    quantization/run_record.py              says what a run records of itself
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.data.samples import described_names
from quantkit.checkpoint.hub.repository import locate
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.model_record import Measured, ModelRecord
from quantkit.checkpoint.output.directory import Mode, OutputDirectory, late_names
from quantkit.checkpoint.output.journal import read_journal
from quantkit.checkpoint.relative_paths import with_relative_paths
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import QuantkitError
from quantkit.memory import enough_memory, free_memory, say_if_short
from quantkit.model.distributed import Ranks, join_ranks
from quantkit.planning import allocated, open_structure, plan_allocated
from quantkit.progress import Advance, Progress, counting
from quantkit.progress_bar import reporting
from quantkit.quantization.allocate.allocate import Allocated
from quantkit.quantization.allocate.allocation import Allocation
from quantkit.quantization.blockwise.block_tasks import needs_data
from quantkit.quantization.blockwise.calibration import (
    Calibration,
    calibrate,
    discard_work,
    measure_scales,
)
from quantkit.quantization.distill.distill import distill
from quantkit.quantization.distill.distillation import Distillation
from quantkit.quantization.gpu_memory import gpu_memory
from quantkit.quantization.keywords import QuantizeKeywords, options_of, with_keywords
from quantkit.quantization.plan import Plan, make_plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.run_record import check_alike, model_record, run_record
from quantkit.quantization.stream import write_shards
from quantkit.recipes.recipe import Recipe
from quantkit.verification.check_output import check_finished, check_headers_of, finish_checked
from quantkit.verification.plan_check import checked

#: Estimated bytes per output tensor in header, index, journal and manifest together.
RECORD_BYTES = 1 << 10

#: Called with the source and the plan, before any tensor is written.
OnPlan = Callable[[Checkpoint, Plan], None]


@dataclass(frozen=True)
class QuantizeResult:
    """Finished packed checkpoint: its directory, its plan, and the measured error of each packed linear.

    `unchecked` is the reason if a requested check on a prompt did not run, else None.
    """

    directory: Path
    plan: Plan
    measured: Mapping[str, Measured]
    unchecked: str | None = None

    def __repr__(self) -> str:
        return f"QuantizeResult({str(self.directory)!r}, {self.plan})"

    @property
    def relative_errors(self) -> dict[str, float]:
        """Return sum((w - stored)^2) / sum(w^2) for each packed linear, by name."""
        return {name: measured.relative_error for name, measured in self.measured.items()}


def _kept(out: Path, checkpoint: Checkpoint, mode: Mode) -> Allocated | None:
    """Return the allocation of the run that wrote to `out`, which a resumed run keeps; None without one.

    Raises `OutputError`, before any measurement, if a run may not write to `out`.
    """
    OutputDirectory.check(out, checkpoint.directory, mode, late_names(checkpoint.side_files))
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
        # Written by another version or another kind of run. Comparing the run records later gives the error.
        return None


@with_keywords
def quantize(
    source: str | Path,
    out: str | Path,
    *,
    resume: bool = QuantizeOptions.resume,
    overwrite: bool = QuantizeOptions.overwrite,
    check: bool = QuantizeOptions.check,
    progress: Progress | bool | None = None,
    measuring: Progress | None = None,
    on_plan: OnPlan | None = None,
    ranks: Ranks | None = None,
    **given: Unpack[QuantizeKeywords],
) -> QuantizeResult:
    """Quantize a checkpoint (a directory or a hub id) into the packed checkpoint directory `out`.

    `format` (default int4), `method` (mse), `group_size`, `zero_point` ("none", "integer" or "float"),
    `scale_dtype` (a name such as "bfloat16" or "e4m3") and `packing` ("bits", "radix" or "stream") apply to
    every linear of the decoder; `rules`, `lm_head` and a recipe (a `Recipe` or a file) refine that, as
    `RecipeOptions` says. `activations` ("fp8" or "int8", …) rounds the inputs of these linears. `scheme` is a
    `Scheme` or a name of llm-compressor for all of that, such as "W8A8". `bits_per_weight`, or another
    `budget`, chooses the format of each linear, among `formats` if given.

    `calibration` is a path, files and data sets as `NAME[:SAMPLES],...`, a list of texts, or a
    `datasets.Dataset`; `calibration_samples`, `calibration_length` and `seed` say what is drawn from it.
    `embeddings` packs the token embedding, with a head that is tied to it as one table. `kv_scales`, "fp8",
    stores scales of keys and values for the KV cache of an engine. With `rotate` the weights are rotated
    first, and the model computes the same (`quantization/rotated_checkpoint.py`). With `model_free` names and
    shapes decide what is a linear (`model/model_free.py`). `QuantizeOptions` explains the options from
    `device` on.

    `progress(done_bytes, all_bytes, tensor)` is called as source bytes are dealt with; by default a bar is
    shown in a terminal or notebook, and with False none. `measuring(done, all, at work)` is called while
    sensitivities are measured for a budget, `on_plan` once before any tensor is written. `ranks` are the
    processes that share the calibration, by default those of torchrun. All of them call this alike and get
    the result; the first one writes `out` and makes the calls.

    Raises `QuantkitError` for every refusal; nothing was written then, or `resume=True` continues.
    """
    run = {"resume": resume, "overwrite": overwrite, "check": check}
    options = options_of({**given, **run}, "quantize")
    with reporting(progress, "quantizing") as report:
        return quantize_checkpoint(
            source, out, options, progress=report, measuring=measuring, on_plan=on_plan, ranks=ranks
        )


def quantize_checkpoint(
    source: str | Path,
    out: str | Path,
    options: QuantizeOptions,
    *,
    progress: Progress | None = None,
    measuring: Progress | None = None,
    on_plan: OnPlan | None = None,
    ranks: Ranks | None = None,
) -> QuantizeResult:
    """Quantize a checkpoint like `quantize`, with the options as one record."""
    recipe = options.to_recipe()
    options = replace(options, recipe=recipe)
    with enough_memory(str(source)), ExitStack() as stack:
        ranks = stack.enter_context(join_ranks()) if ranks is None else ranks
        target = ranks.device(pick_device(options.device))
        located = locate(source)
        checkpoint, structure = open_structure(located.directory, recipe, options.allow_auto_map)
        allocation: dict[str, Any] = {}
        if (budget := options.budget) is None:
            planned = make_plan(checkpoint, structure, recipe, max_shard_bytes=options.max_shard_bytes)
        else:
            # Only the first rank allocates; it sends the result to all.
            allocate = partial(allocated, checkpoint, structure, options, budget, target, measuring)
            kept = partial(_kept, Path(out), checkpoint, options.mode)
            found = Allocated.from_dict(ranks.broadcast(lambda: Allocated.to_dict(kept() or allocate())))
            request: dict[str, Any] = {"budget": budget.to_dict(), "asked": recipe.to_dict()}
            request["calibration"] = options.calibration.to_dict()
            if options.engine is not None:
                request["engine"] = options.engine
            allocation = {"allocation": {**request, "result": found.allocation.to_dict()}}
            recipe = found.recipe
            planned = plan_allocated(checkpoint, structure, found, options.max_shard_bytes)
        planned = checked(planned, checkpoint, structure, options, source)
        calibrated = Calibration.of(checkpoint, planned, options.calibration, target)
        distilled = Distillation.of(checkpoint, planned, calibrated, options, ranks)
        if calibrated is not None:
            # Sensitivities may have been measured on the same text.
            notes = dict.fromkeys((*planned.notes, *calibrated.samples.notes))
            planned = replace(planned, notes=tuple(notes))
        run = {
            **run_record(checkpoint, recipe, target, options.max_shard_bytes, calibrated, distilled),
            **allocation,
        }
        _say_if_short(checkpoint, planned, options.calibration, target)
        check_alike(ranks, {**run, "source": checkpoint.fingerprint(of_copies=True)}, calibrated)
        report = counting(source_bytes(planned, calibrated), progress if ranks.first else None)
        output = None
        if ranks.first:
            names, expected = files_to_write(checkpoint, planned, calibrated, distilled)
            opened = OutputDirectory.open(
                Path(out), checkpoint.directory, options.mode, run, expected, names=names
            )
            output = stack.enter_context(opened)
            if on_plan is not None:
                on_plan(checkpoint, planned)
        if calibrated is not None:
            calibrated, planned = measure_scales(calibrated, planned, output, Path(out), ranks, report)
            distilled = None if distilled is None else distilled.bound(calibrated, planned)
            calibrate([one.filename for one in planned.shards], calibrated, output, Path(out), ranks, report)
        distill(distilled, output, Path(out), progress, decoding_by_graphs)
        unchecked = None
        if output is not None:
            record = partial(model_record, located, planned, recipe, calibrated=calibrated)
            unchecked = write_output(
                checkpoint, planned, output, target, report, calibrated, record, options.check, distilled
            )
        # The first rank reads it while it holds the lock, as another writer's manifest would not be of this
        # run.
        manifest = ranks.broadcast(lambda: read_manifest(Path(out) if output is None else output.path))
        measured = ModelRecord.from_manifest(manifest).measured
        return QuantizeResult(Path(out), planned, measured, unchecked)


def write_output(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    report: Advance,
    calibrated: Calibration | None,
    record: Callable[[Mapping[str, Measured]], ModelRecord],
    check: bool,
    distilled: Distillation | None = None,
) -> str | None:
    """Write all missing tensors of the checkpoint and `check` it.

    Returns the reason if the check did not run, else None. `record` makes the entry of the manifest from the
    measured errors.
    """
    if output.complete:
        report(source_bytes(planned, calibrated), "")
        return check_finished(output, device) if check else None
    quantized = () if calibrated is None else calibrated.quantized_files
    beside: dict[str, Any] = {}
    if distilled is not None:
        quantized, beside = distilled.result(output)
    errors = write_shards(checkpoint, planned, output, device, report, quantized, beside)
    measured = record(errors)
    measured = with_relative_paths(measured, described_names(measured.calibration), output.path)
    if distilled is not None:
        facts = distilled.facts(output)
        measured = replace(measured, distillation=facts, dense=distilled.reasons(measured.dense))
    if calibrated is not None:
        discard_work(output, [*calibrated.work_files, *(() if distilled is None else distilled.work_files)])

    def before() -> None:
        checkpoint.check_unchanged()
        check_headers_of(output, planned, checkpoint)

    return finish_checked(
        output,
        planned.weight_map,
        planned.output_bytes,
        planned.model_config,
        checkpoint.side_files,
        measured,
        device if check else None,
        before,
    )


def _say_if_short(
    checkpoint: Checkpoint, planned: Plan, calibration: CalibrationOptions, device: torch.device
) -> None:
    """Warn if the run needs more GPU memory than is free."""
    if device.type == "cuda":
        needed = gpu_memory(checkpoint, planned, calibration, free_memory(device)).quantizing
        say_if_short(needed, device, calibrated=needs_data(planned))


def files_to_write(
    checkpoint: Checkpoint,
    planned: Plan,
    calibrated: Calibration | None,
    distilled: Distillation | None = None,
) -> tuple[list[str], int]:
    """Return the names of all files of a run, work files included, and their approximate bytes."""
    works = [one for one in (calibrated, distilled) if one is not None]
    work_names, work = (
        [name for one in works for name in one.work_files],
        sum(one.work_bytes for one in works),
    )
    shards = [shard.filename for shard in planned.shards]
    expected = planned.output_bytes + work + checkpoint.side_bytes + RECORD_BYTES * len(planned.weight_map)
    return [*work_names, *shards, *late_names(checkpoint.side_files)], expected


def source_bytes(planned: Plan, calibrated: Calibration | None) -> int:
    """Return the source bytes to process: of all tensors, and again of calibrated tensors."""
    shards = sum(task.source.nbytes for shard in planned.shards for task in shard.tasks)
    return shards + (0 if calibrated is None else calibrated.source_bytes)


def decoding_by_graphs(model: Any) -> AbstractContextManager[None]:
    """Return a context in which `model`, dense, decodes with CUDA graphs, if it is on a GPU."""
    # Imported here, as few runs write texts.
    from quantkit.runtime.transformers.patches.generation import applied

    return applied(model)
