"""Stream the tensors of each output file through memory, in chunks of rows.

Each worker reads a chunk, quantizes it and writes the result at the offset in the plan. So reading,
arithmetic and writing overlap, and memory does not grow with the model. Chunk boundaries follow from shapes
alone, so the bytes do not depend on the number of workers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch

from quantkit.calibrate.methods import (
    CHUNK_WEIGHTS,
    GPU_CHUNK_WEIGHTS,
    QuantizedRows,
    parts_of,
    quantize_rows,
)
from quantkit.calibrate.parameters import SAMPLE_WEIGHTS, TensorParameters, fit_parameters
from quantkit.checkpoint.model_record import Measured
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TransposedTensor
from quantkit.errors import naming
from quantkit.memory import STREAM_IDLE_BYTES, in_pieces, trim_cache
from quantkit.packing.bitpack import BLOCK
from quantkit.progress import Advance
from quantkit.quantization.nesting import kept_rows
from quantkit.quantization.plan import Plan, Shard
from quantkit.quantization.task import Task
from quantkit.workers import cpu_workers, working

#: Bytes of a source tensor that a worker holds at a time, by device.
CHUNK_BYTES = {"cpu": 8 << 20, "cuda": 64 << 20}
#: Fewest workers, so that one reads while another computes, and most, to limit memory. Each has one thread:
#: the pieces are too small for more, and sums then have a fixed order.
FEWEST_WORKERS, MOST_WORKERS = 2, 8


def worker_count(device: str) -> int:
    """Return the number of workers that quantize on a device of this type."""
    workers = cpu_workers() if device == "cpu" else FEWEST_WORKERS
    return min(MOST_WORKERS, max(FEWEST_WORKERS, workers))


def peak_bytes(planned: Plan) -> int:
    """Estimate the bytes that all workers together hold if they quantize on a CPU, without libraries."""
    tasks = [task for shard in planned.shards for task in shard.tasks if task.source.shape]
    rows = [_row_unit(task) * task.source.nbytes // max(1, task.source.shape[0]) for task in tasks]
    chunk = max([CHUNK_BYTES["cpu"], *rows])
    fitted = any(task.scheme is not None and task.scheme.is_fitted for task in tasks)
    # A chunk as read, its packed parts, and the float32 copies and histograms of the current piece; with code
    # books also the sample, its scales, codes, errors and temporaries.
    return worker_count("cpu") * (8 * chunk + 128 * CHUNK_WEIGHTS + fitted * 64 * SAMPLE_WEIGHTS)


def write_shards(
    checkpoint: Checkpoint,
    planned: Plan,
    output: OutputDirectory,
    device: torch.device,
    report: Advance,
    quantized: Sequence[str],
    beside: Mapping[str, Any] = MappingProxyType({}),
) -> dict[str, Measured]:
    """Quantize and write every unfinished shard of `output`; return the measured errors by packed linear.

    report     called with bytes of source tensors that are done, and the name of the tensor or shard
    quantized  files of `output` with tensors that are quantized already; these are copied
    beside     values that the details of each written shard get too
    """
    details: dict[str, dict[str, Any]] = {}
    with working(worker_count(device.type), "quantize") as workers:
        prepared = None
        if quantized and not all(output.is_done(shard.filename) for shard in planned.shards):
            prepared = Checkpoint.of_files([output.path / filename for filename in quantized])
        for shard in planned.shards:
            if output.is_done(shard.filename):
                report(sum(task.source.nbytes for task in shard.tasks), shard.filename)
            else:
                with output.shard(shard.filename, shard.specs, {"format": "pt"}) as file:
                    sums = write_shard(checkpoint, shard, file, device, workers, report, prepared)
                    modules = {task.module for task in shard.tasks}
                    file.detail.update(beside)
                    file.detail["layers"] = {
                        **{module: {"squared": pair} for module, pair in sums.items()},
                        **{
                            module: detail
                            for filename in quantized
                            for module, detail in output.details(filename)["layers"].items()
                            if module in modules
                        },
                    }
            for module, detail in output.details(shard.filename)["layers"].items():
                total = details.setdefault(module, {**detail, "squared": [0.0, 0.0]})
                for i, value in enumerate(detail["squared"]):
                    total["squared"][i] += value
    return {module: Measured.of(detail) for module, detail in details.items()}


def write_shard(
    checkpoint: Checkpoint,
    shard: Shard,
    file: ShardFile,
    device: torch.device,
    workers: ThreadPoolExecutor,
    report: Advance,
    prepared: Checkpoint | None = None,
) -> dict[str, list[float]]:
    """Quantize and write the tensors of one shard to `file`; return two sums of squares by module.

    The sums are those of (weight - stored)^2 and of weight^2 over packed rows. Tensors in `prepared` are
    copied from there, and add nothing.
    """
    futures: dict[Future[tuple[float, float] | None], tuple[Task, int, int]] = {}
    # Submitted before the chunks, so that a waiting chunk never blocks the fit it waits for.
    fits = [
        None
        if task.method is None or _is_in(prepared, task)
        else workers.submit(_fit_parameters, checkpoint, task, device)
        for task in shard.tasks
    ]
    for task, parameters in zip(shard.tasks, fits, strict=True):
        if prepared is not None and _is_in(prepared, task):
            rows = task.source.shape[0]
            futures[workers.submit(_copy_prepared, prepared, task, file)] = (task, 0, rows)
            continue
        for start, stop in _chunks(task, device):
            future = workers.submit(_write_rows, checkpoint, task, file, start, stop, parameters, device)
            futures[future] = (task, start, stop)
    results: dict[tuple[str, int], tuple[float, float]] = {}
    try:
        for future in as_completed(futures):
            task, start, stop = futures[future]
            squares = future.result()
            if squares is not None:
                results[task.source.name, start] = squares
            rows = task.source.shape[0] if task.source.shape else 1
            report(task.source.nbytes * (stop - start) // max(rows, 1), task.source.name)
    except BaseException:
        for fit in fits:
            if fit is not None:
                fit.cancel()
        for future in futures:
            future.cancel()
        # The file is closed next, and its descriptor may then be reused for another file.
        wait(futures)
        raise
    sums: dict[str, list[float]] = {}
    # In the order of the plan, so that float additions always give the same sums.
    for task, start, _ in futures.values():
        if (task.source.name, start) in results and task.module is not None:
            entry = sums.setdefault(task.module, [0.0, 0.0])
            for i, value in enumerate(results[task.source.name, start]):
                entry[i] += value
    return sums


def _fit_parameters(checkpoint: Checkpoint, task: Task, device: torch.device) -> TensorParameters:
    """Fit the parameters that the rows of a tensor share; reads the tensor only if there are any.

    One worker sees all its rows.
    """
    assert task.scheme is not None and task.method is not None
    source = task.source

    def chunks(source: StoredTensor) -> Iterator[torch.Tensor]:
        for start, stop in _chunks(replace(task, source=source), device):
            weights = checkpoint.read(source.name, start, stop).to(device)
            yield from torch.split(weights, _piece_rows(weights.shape[1], device))

    rows, columns = source.shape
    with naming(repr(source.name)):
        return fit_parameters(
            lambda: chunks(source),
            (rows, columns),
            task.scheme,
            task.method.scale_search.fit,
            task.method.scale_search.fit_tensor,
            lambda: chain.from_iterable(map(chunks, task.beside)),
        )


def _is_in(prepared: Checkpoint | None, task: Task) -> bool:
    return prepared is not None and task.outputs[0].name in prepared.tensors


def _copy_prepared(prepared: Checkpoint, task: Task, file: ShardFile) -> None:
    for spec in task.outputs:
        for data, offset in prepared.pieces(spec.name, CHUNK_BYTES["cpu"]):
            file.write(spec.name, data, offset=offset)


def _piece_rows(columns: int, device: torch.device) -> int:
    """Return how many rows of `columns` weights are quantized at a time on `device`, as memory allows."""
    return max(1, (CHUNK_WEIGHTS if device.type == "cpu" else GPU_CHUNK_WEIGHTS) // columns)


def _chunks(task: Task, device: torch.device) -> list[tuple[int, int]]:
    """Split a tensor into row ranges of bounded bytes."""
    rows = task.source.shape[0] if task.source.shape else 1
    row_bytes = max(1, task.source.nbytes // max(rows, 1))
    unit = _row_unit(task)
    step = max(1, CHUNK_BYTES[device.type] // row_bytes // unit) * unit
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _row_unit(task: Task) -> int:
    """Return the number of rows that chunks are multiples of, for whole words of zero-points and blocks.

    A copied tensor may have large rows: all the weights of an expert.
    """
    if task.source.whole:
        return task.source.shape[0]
    return 1 if task.scheme is None else math.lcm(BLOCK, *task.scheme.row_units().values())


def _write_rows(
    checkpoint: Checkpoint,
    task: Task,
    file: ShardFile,
    start: int,
    stop: int,
    fit: Future[TensorParameters] | None,
    device: torch.device,
) -> tuple[float, float] | None:
    """Copy, convert or quantize rows `[start, stop)` of a tensor, and write them to `file`.

    Returns the sums of (weight - stored)^2 and weight^2; None for copied rows. `fit` has the parameters that
    all rows share; None keeps the codes of the source.
    """
    if task.scheme is None:
        _copy_rows(checkpoint, task, file, start, stop)
        return None
    if fit is None:
        return _keep_rows(checkpoint, task, file, start, stop)
    return _quantize_rows(checkpoint, task, file, start, stop, fit.result(), device)


def _copy_rows(checkpoint: Checkpoint, task: Task, file: ShardFile, start: int, stop: int) -> None:
    (spec,) = task.outputs
    whole = not task.source.shape
    data = checkpoint.read(task.source.name) if whole else checkpoint.read(task.source.name, start, stop)
    # A rotated source has more digits than the stored dtype.
    data = data.to(spec.torch_dtype)
    if isinstance(task.source, TransposedTensor):
        data = data.T.contiguous()
    file.write(spec.name, data, offset=start * (spec.elements // max(spec.shape[0], 1) if spec.shape else 1))


def _quantize_rows(
    checkpoint: Checkpoint,
    task: Task,
    file: ShardFile,
    start: int,
    stop: int,
    parameters: TensorParameters,
    device: torch.device,
) -> tuple[float, float]:
    assert task.scheme is not None and task.method is not None
    scheme, method = task.scheme, task.method
    weights = checkpoint.read(task.source.name, start, stop)
    trim_cache(device, STREAM_IDLE_BYTES)

    def quantized(rows: torch.Tensor) -> QuantizedRows:
        return quantize_rows(rows.to(device), scheme, method, parameters)

    with naming(f"{task.source.name!r}, rows {start} to {stop - 1}"):
        pieces = [
            piece
            for rows in torch.split(weights, scheme.whole_blocks(_piece_rows(weights.shape[1], device)))
            for piece in in_pieces(quantized, [rows], repr(task.source.name), scheme.group_rows)
        ]
    _write_parts(file, task, start, parts_of(pieces, scheme), parameters.parts(scheme))
    return sum(p.squared_error for p in pieces), sum(p.squared_norm for p in pieces)


def _keep_rows(
    checkpoint: Checkpoint, task: Task, file: ShardFile, start: int, stop: int
) -> tuple[float, float]:
    """Write rows `start` to `stop` of the source's codes and scales, after comparing their values with it.

    Returns the squared error, 0, and the sum of squared weights.
    """
    assert task.scheme is not None
    with naming(f"{task.source.name!r}, rows {start} to {stop - 1}"):
        packed, norm = kept_rows(checkpoint, task.source, task.scheme, start, stop)
    parts = dict(packed.parts())
    # These parts exist once for all rows.
    once = {part: parts.pop(part) for part in ("global_scale",) if part in parts}
    if task.scheme.per_tensor:
        once["scale"] = parts.pop("scale")
    _write_parts(file, task, start, parts, once)
    return 0.0, norm


def _write_parts(
    file: ShardFile,
    task: Task,
    start: int,
    parts: Mapping[str, torch.Tensor],
    once: Mapping[str, torch.Tensor],
) -> None:
    """Write `parts` of rows from `start` on; with the first rows also the parts `once` for all rows."""
    assert task.scheme is not None
    before = task.scheme.storage_shapes((start, task.source.shape[1]))
    for part, tensor in parts.items():
        spec = dict(task.parts)[part]
        # The stored rows before these follow from the matrix rows before `start`.
        first = before[part][1][0]
        file.write(spec.name, tensor.cpu().view(spec.torch_dtype), offset=first * spec.shape[1])
    if start == 0:
        whole = {**task.known, **once}
        for part, spec in task.parts:
            if part in whole:
                file.write(spec.name, whole[part])
