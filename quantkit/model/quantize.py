"""Quantizing a checkpoint: plan, stream, write.

`model/plan.py` decides everything first, `model/stream.py` moves the tensors, `checkpoint/writer.py` writes.
"""

import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.calibrate.methods import CHUNK_WEIGHTS
from quantkit.calibrate.parameters import SAMPLE_WEIGHTS
from quantkit.calibrate.recipe import Choice, Recipe, parse_rule, read_recipe
from quantkit.checkpoint.hub import resolve
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Checkpoint, check_not_quantized
from quantkit.checkpoint.writer import Mode, OutputDirectory
from quantkit.errors import UsageError
from quantkit.model.plan import DEFAULT_SHARD_BYTES, Plan, make_plan
from quantkit.model.record import ModelRecord
from quantkit.model.stream import CHUNK_BYTES, WORKERS, row_unit, write_shard
from quantkit.model.structure import read_structure
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import GroupSize, ZeroPoint

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class QuantizeResult:
    """A finished packed checkpoint: its directory, plan, and the relative error of each packed linear.

    The error is sum((w - stored)^2) / sum(w^2) over the linear's weights.
    """

    directory: Path
    plan: Plan
    relative_errors: Mapping[str, float]


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
) -> Recipe:
    """The recipe of these options: `rules` first, then `lm_head`, then the recipe file's, then the default.

    Raises `UsageError` or `FormatError` naming the option.
    """
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
        given = {
            "format": format,
            "group_size": group_size,
            "method": method,
            "zero_point": zero_point,
            "scale_dtype": scale_dtype,
            "packing": packing,
        }
        for key, value in given.items():
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
    return Recipe(from_file.default, (*first, *from_file.rules))


def plan(
    source: str | Path,
    recipe: Recipe | None = None,
    *,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_auto_map: bool = False,
) -> tuple[Checkpoint, Plan]:
    """The source, opened, and what quantizing it would write. Reads headers only, also from the hub."""
    checkpoint = Checkpoint.open(resolve(source, headers_only=True), allow_auto_map=allow_auto_map)
    check_not_quantized(checkpoint)
    structure = read_structure(checkpoint)
    return checkpoint, make_plan(checkpoint, structure, recipe or Recipe(), max_shard_bytes=max_shard_bytes)


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
    device: str = "auto",
    resume: bool = False,
    overwrite: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
    allow_auto_map: bool = False,
    progress: Progress | None = None,
    on_plan: Callable[[Checkpoint, Plan], None] | None = None,
) -> QuantizeResult:
    """Quantize a checkpoint (a directory or a hub id) into the packed checkpoint directory `out`.

    `format` (default int4), `method` (mse), `group_size`, `zero_point` ("none", "integer" or "float"),
    `scale_dtype` (a name such as "bfloat16" or "e4m3") and `packing` ("bits" or "radix") apply to every
    linear of the decoder; `rules` ("PATTERN=FORMAT[:GROUP][:METHOD]" or "PATTERN=keep"), `lm_head` (a
    format) and a recipe file refine that. `device` is where the arithmetic runs; "auto" takes a GPU if there
    is one.
    `allow_auto_map` accepts a config that names remote code, which is dropped and never run.
    `progress(done_bytes, all_bytes, tensor)` is called as source bytes are dealt with, `on_plan` once
    before any tensor is written.

    Raises `QuantkitError` for every refusal; nothing was written then, or `resume=True` continues.
    """
    if resume and overwrite:
        raise UsageError("resume and overwrite exclude each other: continue the run, or start it anew.")
    if isinstance(recipe, Recipe):
        if any((format, method, group_size, zero_point, scale_dtype, packing, lm_head, rules)):
            raise UsageError(
                "a Recipe says all about format and rules; leave out format, method, group_size, zero_point, "
                "scale_dtype, packing, lm_head and rules, or make the recipe with them."
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
        )
    target = pick_device(device)
    checkpoint = Checkpoint.open(resolve(source), allow_auto_map=allow_auto_map)
    check_not_quantized(checkpoint)
    planned = make_plan(checkpoint, read_structure(checkpoint), recipe, max_shard_bytes=max_shard_bytes)
    if not planned.quantized_weights:
        raise UsageError(
            f"there is nothing to quantize in {source}: the recipe keeps every linear, or no layer is a "
            "linear that can be packed. `quantkit plan` shows why each is kept."
        )
    mode = Mode.RESUME if resume else Mode.OVERWRITE if overwrite else Mode.NEW
    run = _run_record(checkpoint, recipe, target, max_shard_bytes)
    with OutputDirectory.open(Path(out), checkpoint.directory, mode, run, planned.output_bytes) as output:
        if on_plan is not None:
            on_plan(checkpoint, planned)
        errors = _stream(checkpoint, planned, output, target, progress)
        checkpoint.check_unchanged()
        if not output.complete:
            output.finish(
                planned.weight_map,
                planned.output_bytes,
                planned.model_config,
                checkpoint.side_files,
                _record(str(source), planned, recipe, errors).to_dict(),
            )
    return QuantizeResult(Path(out), planned, errors)


def peak_bytes(planned: Plan) -> int:
    """About how much memory quantizing on a CPU takes beyond the libraries: what the workers hold."""
    tasks = [task for shard in planned.shards for task in shard.tasks if task.source.shape]
    rows = [row_unit(task) * task.source.nbytes // max(1, task.source.shape[0]) for task in tasks]
    chunk = max([CHUNK_BYTES["cpu"], *rows])
    fitted = any(task.scheme is not None and task.scheme.is_fitted for task in tasks)
    # A chunk as read, its packed parts, and the float32 copies and histograms of the piece in work; with code
    # books the sample, its scales, codes and errors, and what the search makes of them.
    return WORKERS["cpu"] * (8 * chunk + 128 * CHUNK_WEIGHTS + fitted * 64 * SAMPLE_WEIGHTS)


def pick_device(device: str) -> torch.device:
    """The torch device of "auto", "cpu" or "cuda"; `UsageError` if CUDA is asked for and not there."""
    available = torch.cuda.is_available()
    if device == "auto":
        return torch.device("cuda" if available else "cpu")
    if device == "cuda" and not available:
        raise UsageError(
            "device 'cuda' is not available: this torch sees no GPU. Install a CUDA build of torch, or use "
            "--device cpu."
        )
    if device not in ("cpu", "cuda"):
        raise UsageError(f"device {device!r} is unknown; use auto, cpu or cuda.")
    return torch.device(device)


def _stream(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    progress: Progress | None,
) -> dict[str, float]:
    """Write every shard that is not done; the relative error of each packed linear."""
    sums: dict[str, list[float]] = {}
    total = sum(task.source.nbytes for shard in planned.shards for task in shard.tasks)
    done = 0

    def report(nbytes: int, name: str) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(done, total, name)

    if output.complete:
        report(total, "")
        layers = ModelRecord.from_manifest(read_manifest(output.path)).layers
        return {n: layer.relative_error for n, layer in layers.items() if layer.relative_error is not None}
    threads = torch.get_num_threads()
    workers = ThreadPoolExecutor(
        WORKERS[device.type], "quantize", initializer=torch.set_num_threads, initargs=(1,)
    )
    try:
        for shard in planned.shards:
            if output.is_done(shard.filename):
                detail = output.details(shard.filename)["squared"]
                report(sum(task.source.nbytes for task in shard.tasks), shard.filename)
            else:
                with output.shard(shard.filename, shard.specs, {"format": "pt"}) as file:
                    detail = write_shard(checkpoint, shard, file, device, workers, report)
                    file.detail["squared"] = detail
            for module, pair in detail.items():
                entry = sums.setdefault(module, [0.0, 0.0])
                entry[0] += pair[0]
                entry[1] += pair[1]
    finally:
        workers.shutdown(cancel_futures=True)
        # A worker sets its own number and the one that threads to come start with.
        torch.set_num_threads(threads)
    return {module: error / norm if norm else 0.0 for module, (error, norm) in sums.items()}


def _run_record(
    checkpoint: Checkpoint, recipe: Recipe, device: torch.device, max_shard_bytes: int
) -> dict[str, Any]:
    """All that determines the bytes written."""
    return {
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


def _record(source: str, planned: Plan, recipe: Recipe, errors: Mapping[str, float]) -> ModelRecord:
    return ModelRecord(
        source=source,
        source_bytes=planned.source_bytes,
        container=planned.config.container,
        needs_quantkit=planned.not_portable,
        bits_per_weight=planned.bits_per_weight,
        versions=_versions(),
        recipe=recipe.to_dict(),
        layers=planned.layer_records(errors),
        dense=planned.dense,
    )
