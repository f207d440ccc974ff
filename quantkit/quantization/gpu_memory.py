"""Bound the GPU memory of a run from shapes alone, as the driver counts it; `plan` prints it.

Each phase has an upper bound on its live tensors. The constants per weight and per token were counted on a
CPU; a test compares the bound with the bytes that the same code holds there.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.hessian import INPUT_ERROR_ROWS, TILE, strip_entries
from quantkit.calibrate.linear_stats import OF_ORIGINAL
from quantkit.calibrate.methods import GPU_CHUNK_WEIGHTS
from quantkit.calibrate.quantize_with_hessian import GPU_GRID_WEIGHTS, chunk_rows
from quantkit.calibrate.scale_search import (
    BINS_PER_CODE,
    BINS_RANGE,
    CANDIDATES,
    HISTOGRAM_CELLS,
    ZERO_CANDIDATES,
)
from quantkit.calibrate.scaling import GPU_WEIGHTS
from quantkit.checkpoint.model_record import float32_bytes
from quantkit.checkpoint.source import Checkpoint
from quantkit.memory import CONTEXT_BYTES, IDLE_BYTES, STREAM_IDLE_BYTES, WORKSPACE_BYTES
from quantkit.model.hidden_states import HIDDEN_BYTES, HIDDEN_MEMORY
from quantkit.packing.formats import IntFormat
from quantkit.quantization.allocate.sensitivity import BATCH, LOGITS, TOKENS
from quantkit.quantization.blockwise.block_sizes import block_of, hidden_size, stored_bytes
from quantkit.quantization.blockwise.block_tasks import needs_data
from quantkit.quantization.blockwise.calibration_data import sample_shape
from quantkit.quantization.blockwise.moe_calibration import WORK_BYTES
from quantkit.quantization.blockwise.pipeline import batch_size, compute_dtype
from quantkit.quantization.distill import training_memory
from quantkit.quantization.distill.training_memory import Sizes, choose, least
from quantkit.quantization.plan import Plan
from quantkit.quantization.stream import CHUNK_BYTES, peak_bytes, worker_count
from quantkit.quantization.task import Task, needs_of
from quantkit.workers import cpu_workers

#: Bytes per weight while rounding, by True for evenly spaced values and False for others, which use tables.
ROUND_BYTES = {True: 35, False: 52}
#: Bytes per weight while scales are searched, without histograms, by name of the search.
SEARCH_BYTES = {"rtn": 0, "mse": 48, "hqq": 88}
#: K x K float32 matrices in memory while H is factored, and while input errors are corrected
#: (docs/methods.md).
FACTOR, CORRECTION = 2.7, 3.2
#: Values per token in a pass through a block: in hidden sizes and in widths of the widest linear. `BACK` is
#: for a pass with gradients.
PASS, BACK = (10, 3), (20, 5)
#: Bytes per weight while its rounding is learned.
LEARNED_BYTES = 30


@dataclass(frozen=True)
class GpuMemory:
    """Largest GPU memory of a run in bytes, as nvidia-smi shows it.

    quantizing   bytes to quantize
    checking     bytes to run the result on a prompt, which is skipped if too little is free
    fastest      bytes of a training on a GPU with unlimited memory; None without a training
    """

    quantizing: int
    checking: int
    fastest: int | None = None


@dataclass(frozen=True)
class _Pass:
    """Sizes of a pass of calibration samples through the blocks.

    itemsize   bytes of an activation
    hidden     hidden size of the model
    widest     larger side of the largest linear
    tokens     tokens that pass at a time
    states     bytes of the hidden states of all samples
    """

    itemsize: int
    hidden: int
    widest: int
    tokens: int
    states: int

    @classmethod
    def of(
        cls,
        checkpoint: Checkpoint,
        tasks: Sequence[Task],
        shape: tuple[int, int],
        device: torch.device,
        refines: bool = False,
    ) -> "_Pass":
        """Return the sizes for samples of `shape` [count, tokens]; `refines` if rounding is learned."""
        itemsize = compute_dtype(checkpoint, device).itemsize
        widest = max(max(task.source.shape) for task in tasks)
        hidden = hidden_size(checkpoint, widest)
        tokens = batch_size(shape, refines, widest, device.type) * shape[1]
        return cls(itemsize, hidden, widest, tokens, shape[0] * shape[1] * hidden * itemsize)

    def nbytes(self, values: tuple[int, int]) -> int:
        """Return the bytes of a pass with `values` per token, such as `PASS` or `BACK`."""
        return self.tokens * self.itemsize * (values[0] * self.hidden + values[1] * self.widest)


def gpu_memory(
    checkpoint: Checkpoint, planned: Plan, options: CalibrationOptions, free: int | None = None
) -> GpuMemory:
    """Bound the GPU memory of a run of `planned` on a GPU with `free` bytes; reads no weights.

    Without `free`, memory is unlimited for hidden states, and a training is run in the way that takes the
    least.
    """
    device = torch.device("cuda")
    takes_data = planned.allocation is not None or needs_data(planned)
    shape = sample_shape(checkpoint, options) if takes_data else (0, 0)
    peaks = [
        streamed_bytes(planned, device) + STREAM_IDLE_BYTES,
        calibrated_bytes(checkpoint, planned, shape, device, free) + IDLE_BYTES,
    ]
    peaks.append(measured_bytes(checkpoint, planned, shape, device, free) + IDLE_BYTES)
    sizes, batch = Sizes.of(checkpoint, planned, shape[1], device), training_memory.BATCH[device.type]
    if sizes is not None:
        way = least(sizes, batch) if free is None else choose(sizes, batch, free)
        peaks.append(way.nbytes(sizes) + IDLE_BYTES)
    if planned.allocation is not None:
        peaks.append(_sensitivity_bytes(checkpoint, planned, shape[1]) + IDLE_BYTES)
    beside = CONTEXT_BYTES + WORKSPACE_BYTES
    checking = float32_bytes(planned.output_bytes, planned.layer_records({}))
    fastest = None
    if sizes is not None:
        fastest = beside + IDLE_BYTES + choose(sizes, batch, math.inf).nbytes(sizes)
    return GpuMemory(beside + max(peaks), beside + IDLE_BYTES + checking, fastest)


def host_bytes(checkpoint: Checkpoint, planned: Plan, options: CalibrationOptions) -> int | None:
    """Estimate the least bytes of a calibration on a CPU, beside libraries and activations that it keeps.

    These are the hidden states before and after a block, and its work. What is freed may stay in the heap:
    with 128 samples of 512 tokens on two threads `gptq` of SmolLM2-135M held 0.83 GB (estimated: 0.79 GB), of
    books-28m 1.0 GB (estimated: 0.58 GB). None if no block is calibrated, or if the result is trained too.
    """
    tasks, device = _packing(planned), torch.device("cpu")
    shape = sample_shape(checkpoint, options) if needs_of(tasks) else (0, 0)
    if not needs_of(tasks) or Sizes.of(checkpoint, planned, shape[1], device) is not None:
        return None
    one = _Pass.of(checkpoint, tasks, shape, device, any(map(_refines, tasks)))
    states = (1 + bool(OF_ORIGINAL & needs_of(tasks))) * one.states
    first = calibrated_bytes(checkpoint, planned, shape, device, None)
    return max(peak_bytes(planned), int(first + 2 * states + (cpu_workers() - 1) * one.nbytes(PASS)))


def streamed_bytes(planned: Plan, device: torch.device) -> int:
    """Bound the bytes of all workers that quantize without data.

    Each worker has a chunk of a tensor as read, and the rows that it quantizes.
    """
    tasks = [task for task in _packing(planned) if not task.needs]
    most = max((_rows_bytes(t, min(GPU_CHUNK_WEIGHTS, t.source.elements), device) for t in tasks), default=0)
    return worker_count(device.type) * (most + CHUNK_BYTES[device.type])


def measured_bytes(
    checkpoint: Checkpoint, planned: Plan, shape: tuple[int, int], device: torch.device, free: int | None
) -> int:
    """Bound the bytes of passes that measure scales of inputs, keys or values; 0 if none are measured.

    `shape` is that of the samples, [count, tokens]. `free` are the free bytes of the GPU; None is unlimited.
    """
    tasks = _packing(planned)
    if not any(task.is_measured for task in tasks):
        return 0
    one = _Pass.of(checkpoint, tasks, shape, device)
    at_home = one.states <= (HIDDEN_BYTES if free is None else min(HIDDEN_BYTES, HIDDEN_MEMORY * free))
    held = one.states if at_home else 2 * one.tokens * one.hidden * one.itemsize
    return int(max(stored_bytes(checkpoint, one.itemsize).values()) + one.nbytes(PASS) + held)


def calibrated_bytes(
    checkpoint: Checkpoint, planned: Plan, shape: tuple[int, int], device: torch.device, free: int | None
) -> int:
    """Bound the bytes to quantize blocks with calibration data; 0 if no method needs data.

    `shape` is that of the samples, [count, tokens]. `free` are the free bytes of the GPU; None is unlimited.
    """
    tasks = _packing(planned)
    if not needs_of(tasks):
        return 0
    one = _Pass.of(checkpoint, tasks, shape, device, any(map(_refines, tasks)))
    tokens, itemsize, through, back = one.tokens, one.itemsize, one.nbytes(PASS), one.nbytes(BACK)
    twice = 1 + bool(OF_ORIGINAL & needs_of(tasks))
    experts = {layer.linear.module for layer in planned.layers if layer.linear.kind == "experts"}
    states = twice * one.states
    most_states = HIDDEN_BYTES - 4 * max(task.source.shape[1] for task in tasks) ** 2
    at_home = device.type == "cpu" or states <= (
        most_states if free is None else min(most_states, HIDDEN_MEMORY * free)
    )
    held = states if at_home else 2 * tokens * one.hidden * itemsize
    # Calls of experts are stored with the hidden states, twice while they are concatenated.
    called = states if at_home else 0
    stored = stored_bytes(checkpoint, itemsize)
    peaks = [stored.get("", 0) + through]
    for prefix, of_block in _blocks(tasks).items():
        work = [through, _scaled_bytes(of_block, tokens * itemsize, through, device)]
        for stage in _stages(of_block):
            if stage[0].module in experts:
                # Two experts at least; without input error each has half as many matrices.
                matrices = max(twice * WORK_BYTES * t.source.shape[1] ** 2 for t in stage)
                rows = max(_rows_bytes(t, t.source.elements, device) for t in stage)
                work.append(called + max(called, matrices + rows))
            else:
                work.append(_stage_bytes(stage, tokens, tokens * itemsize, through, device))
        learned = sum(t.source.elements for t in of_block if _refines(t))
        work.append(learned and LEARNED_BYTES * learned + back)
        peaks.append(twice * stored.get(prefix, 0) + max(work))
    return held + max(peaks)


def _stage_bytes(stage: Sequence[Task], tokens: int, feature: int, through: int, device: torch.device) -> int:
    """Bound the bytes of linears of one input: to sum Hessians, factor them or round rows, whichever is most.

    `tokens` pass at a time, each with `feature` bytes per input feature; `through` are the bytes of the pass.
    """
    columns = stage[0].source.shape[1]
    matrix, strips = 4 * columns**2, 4 * strip_entries(columns, device)
    tile = 4 * columns * min(columns, TILE[device.type])
    needs = needs_of(stage)
    corrects, factors = "input_error" in needs, "cholesky" in needs
    inputs = (
        (1 + corrects) * columns * feature + tile + corrects * 4 * tokens * min(columns, INPUT_ERROR_ROWS)
    )
    wide = sum(4 * t.source.elements for t in stage if t.method is not None and t.method.transforms)
    rows = max(
        _rows_bytes(t, min(t.source.shape[0], chunk_rows(columns, device)) * columns, device) for t in stage
    )
    return max(
        2 * strips + corrects * 2 * matrix + max(through, inputs),
        strips + (1 + corrects) * matrix + tile,
        int(corrects * CORRECTION * matrix),
        int(factors * FACTOR * matrix) + wide,
        # Scales are refitted with a slice of the columns of H at a time.
        (1 + factors) * matrix + wide + rows + ("damped_hessian" in needs) * 2 * tile,
    )


def _scaled_bytes(tasks: Sequence[Task], feature: int, through: int, device: torch.device) -> int:
    """Bound the bytes to choose scales of input features: all their Hessians, and the candidates."""
    stages = _stages(task for task in tasks if task.method is not None and task.method.input_scaling)
    widths = [stage[0].source.shape[1] for stage in stages]
    strips, whole = (
        4 * sum(size) for size in ([strip_entries(w, device) for w in widths], [w**2 for w in widths])
    )
    # Magnitudes are measured on a whole weight, 12 bytes per element, candidates on some rows.
    wide = [
        4 * sum(t.source.elements for t in stage)
        + max(_rows_bytes(stage[0], GPU_WEIGHTS, device), 12 * max(t.source.elements for t in stage))
        for stage in stages
    ]
    return max(2 * strips + through + feature * sum(widths), strips + whole, whole + max(wide, default=0))


def _rows_bytes(task: Task, weights: int, device: torch.device) -> int:
    """Return the bytes for quantizing `weights` weights together.

    With data, scales are searched for a part of the weights at a time.
    """
    assert task.scheme is not None and task.method is not None
    scheme, data, name = task.scheme, bool(task.needs), task.method.scale_search.name
    group, bits, offset = (
        scheme.group_columns(task.source.shape[1]),
        scheme.format.bits,
        scheme.has_zero_point,
    )
    bins = min(max(BINS_PER_CODE << bits, BINS_RANGE[0]), BINS_RANGE[1])
    zeros = min(ZERO_CANDIDATES, int(2**bits / scheme.zero_point_type.step))
    candidates = CANDIDATES * (zeros if offset else 4)
    histograms = (8 if data else 4) * (bins + candidates) // group if name == "mse" else 0
    some = min(weights, GPU_GRID_WEIGHTS if data else weights, HISTOGRAM_CELLS[device.type] // bins * group)
    search = (SEARCH_BYTES[name] + histograms) * some + 8 * data * weights
    return max(search, (ROUND_BYTES[isinstance(scheme.format, IntFormat)] + 4 * offset) * weights)


def _sensitivity_bytes(checkpoint: Checkpoint, planned: Plan, length: int) -> int:
    """Bound the bytes to measure sensitivities on samples of `length` tokens.

    Counts a block or head in float32, two sums for each input, and a backward pass.
    """
    tasks, stored = _packing(planned), stored_bytes(checkpoint, 4)
    widest = max(max(task.source.shape) for task in tasks)
    back = 4 * min(BATCH * length, TOKENS) * (BACK[0] * hidden_size(checkpoint, widest) + BACK[1] * widest)
    peaks = [2 * stored.get("", 0) + 24 * LOGITS]
    for prefix, of_block in _blocks(tasks).items():
        each = 4 if needs_of(of_block) else 2
        inputs = {(t.module or "").rpartition(".")[0]: t.source.shape[1] for t in of_block}
        peaks.append(stored.get(prefix, 0) + each * 4 * sum(width**2 for width in inputs.values()) + back)
    return max(peaks)


def _packing(planned: Plan) -> list[Task]:
    return [task for shard in planned.shards for task in shard.tasks if task.scheme is not None]


def _refines(task: Task) -> bool:
    return task.method is not None and task.method.refine is not None


def _blocks(tasks: Iterable[Task]) -> dict[str, list[Task]]:
    """Return the tasks of each distinct kind of block; a head is a block called ""."""
    found: dict[str, list[Task]] = {}
    for task in tasks:
        found.setdefault(block_of(task.source.name), []).append(task)
    alike = {tuple((t.source.shape, t.scheme, t.method) for t in some): name for name, some in found.items()}
    return {name: found[name] for name in alike.values()}


def _stages(tasks: Iterable[Task]) -> list[list[Task]]:
    """Group linears that may share an input: in one module, with equal columns, and with data."""
    found: dict[tuple[str, int], list[Task]] = {}
    for task in tasks:
        if task.needs:
            found.setdefault(((task.module or "").rpartition(".")[0], task.source.shape[1]), []).append(task)
    return list(found.values())
