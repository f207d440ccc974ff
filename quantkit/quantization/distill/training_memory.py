"""Memory of a training: its size from shapes alone, and the way to train that fits what is free.

On the device are always the original, the student's weights, their gradients, and a micro-batch with its
logits. For the rest there are ways:

    numbers      latent numbers and Adam's means on the device, or in host memory, which costs transfers
    activations  those of all blocks, or the inputs of blocks, which costs a second pass forward
    micro-batch  more tokens, or fewer, which costs launches

Sums over tokens depend on the micro-batch, so a resumed run keeps that. The bits depend on nothing else here.
"""

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from quantkit.calibrate.learned.latent_linear import row_key
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import EnvironmentProblem
from quantkit.files import size_text
from quantkit.memory import IDLE_BYTES, RUN_AGAIN, WORKSPACE_BYTES
from quantkit.model.architectures import experts_per_token
from quantkit.quantization.blockwise.block_sizes import block_of, hidden_size
from quantkit.quantization.blockwise.pipeline import compute_dtype
from quantkit.quantization.distill import loss, stacking
from quantkit.quantization.distill.stacking import Stacking
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task

#: Sequences of a step, by device.
BATCH = {"cpu": 8, "cuda": 64}
#: Latent numbers that a step moves at a time, unless one matrix has more.
CHUNK_WEIGHTS = 1 << 26
#: Bytes of each of these meanwhile, more if they come from host memory, and more of those of one matrix.
MOVED_BYTES, FETCHED_BYTES, WORK_BYTES = 16, 10, 12
#: Values per token that a block keeps for gradients: in hidden sizes and in widths of the widest linear.
KEPT = (13, 3)
#: Values per token that each expert of it keeps: in hidden sizes and in widths between its products.
KEPT_BY_EXPERT = (4, 4)
#: Tensors of all logits of a micro-batch, and bytes of those whose divergence is computed at a time.
LOGIT_TENSORS, LOGIT_BYTES = 4, 24
#: Tokens times weights of a matrix whose product takes as long as the launches that come with it, by device:
#: 20 us at 200 T multiply-adds per second, or 80 us at 50 G.
LAUNCHES = {"cpu": 1 << 22, "cuda": 1 << 32}
#: Multiply-adds of a GPU while a byte comes from host memory, at 40 GB per second.
TRANSFER = 5000
#: Part of the time of a step that is given for less memory.
WORTH = 0.05
#: Part of the free memory that a training takes: what is cached between steps has gaps.
FILLED = 0.9


@dataclass(frozen=True)
class Sizes:
    """Sizes that the memory of a training follows from.

    kind        type of the device
    model       bytes of the original
    student     bytes of the student's own weights
    gradients   bytes of the gradients of those that are trained
    numbers     bytes of latent numbers, scales and zero-points with Adam's means
    pinned      their bytes in pinned host memory, which torch gives in powers of two
    weights     number of weights that are trained
    matrix      mean number of those of a matrix
    moved       latent numbers that a step moves at a time
    largest     most latent numbers of a matrix or stack
    blocks      number of blocks
    per_block   bytes per token that a block keeps for gradients
    per_input   bytes per token of its input
    per_logits  bytes per token of logits
    length      tokens of a sequence
    """

    kind: str
    model: int
    student: int
    gradients: int
    numbers: int
    pinned: int
    weights: int
    matrix: int
    moved: int
    largest: int
    blocks: int
    per_block: int
    per_input: int
    per_logits: int
    length: int

    @classmethod
    def of(cls, checkpoint: Checkpoint, planned: Plan, length: int, device: torch.device) -> "Sizes | None":
        """Return the sizes for sequences of `length` tokens; None if no method of the plan trains."""
        tasks = [task for shard in planned.shards for task in shard.tasks]
        packed = [task for task in tasks if task.scheme is not None]
        trained = [task for task in packed if task.method is not None and task.method.distill]
        if not trained:
            return None
        itemsize = compute_dtype(checkpoint, device).itemsize
        weights = sum(task.source.elements for task in trained)
        latents = [task.source.elements * task.scheme.planes for task in trained if task.scheme is not None]
        modules = {layer.linear.module for layer in planned.layers if layer.linear.kind == "experts"}
        experts = [task for task in packed if task.module in modules]
        # Dense linears of blocks keep activations too; the token embedding and the head are in no block.
        linears: list[tuple[int, ...]] = [
            task.source.shape
            for task in tasks
            if len(task.source.shape) == 2 and block_of(task.source.name) and task.module not in modules
        ] or [task.source.shape for task in packed]
        widest = max(map(max, linears))
        hidden = hidden_size(checkpoint, widest)
        values = KEPT[0] * hidden + KEPT[1] * widest
        if experts:
            between = max(sum(task.source.shape) for task in experts) - hidden
            of_expert = KEPT_BY_EXPERT[0] * hidden + KEPT_BY_EXPERT[1] * between
            # A module of gate and up has two matrices of an expert, that of down has one.
            count = min(Counter(task.module for task in experts).values())
            values += (experts_per_token(checkpoint.config) or count) * of_expert
        # The token embedding has most rows.
        vocabulary = max(task.source.shape[0] for task in tasks if len(task.source.shape) == 2)
        return cls(
            kind=device.type,
            model=itemsize * sum(tensor.elements for tensor in checkpoint.tensors.values()),
            student=itemsize * sum(task.source.elements for task in packed),
            gradients=itemsize * weights,
            numbers=sum(sum(_number_bytes(task)) for task in trained),
            pinned=sum(
                1 << (sum(parts) - 1).bit_length()
                for stack in _stacks(trained)
                for parts in zip(*map(_number_bytes, stack), strict=True)
                if sum(parts)
            ),
            weights=weights,
            matrix=weights // len(trained),
            moved=min(sum(latents), max(CHUNK_WEIGHTS, *latents)),
            largest=max(*latents, min(sum(latents), stacking.STACK_WEIGHTS)),
            blocks=max(1, len({block_of(task.source.name) for task in trained} - {""})),
            per_block=itemsize * values,
            per_input=itemsize * hidden,
            per_logits=itemsize * LOGIT_TENSORS * vocabulary,
            length=length,
        )


@dataclass(frozen=True)
class Way:
    """Way to train, for less memory on the device or less time.
    micro          sequences of a micro-batch
    on_host        numbers are in host memory between steps
    compute_again  activations of blocks are computed a second time for their gradients
    """

    micro: int
    on_host: bool = False
    compute_again: bool = False

    def nbytes(self, sizes: Sizes) -> int:
        """Return the bytes on the device."""
        tokens = self.micro * sizes.length
        kept = sizes.per_block + sizes.blocks * sizes.per_input
        passing = kept if self.compute_again else sizes.blocks * sizes.per_block
        held = sizes.model + sizes.student + sizes.gradients + (0 if self.on_host else sizes.numbers)
        micro_batch = tokens * (passing + sizes.per_logits) + LOGIT_BYTES * loss.CHUNK_LOGITS
        moving = sizes.moved * (MOVED_BYTES + self.on_host * FETCHED_BYTES) + sizes.largest * WORK_BYTES
        return held + max(micro_batch, moving)

    def time(self, sizes: Sizes, batch: int) -> float:
        """Return about how long a step with `batch` sequences takes, in units of a pass forward."""
        # One of the original and one of the student, and a pass back takes as long as two.
        passes = 4 + self.compute_again
        products = self.micro * sizes.length * sizes.matrix
        transfers = 2 * self.on_host * sizes.numbers * TRANSFER
        return passes * (1 + LAUNCHES[sizes.kind] / products) + transfers / (
            batch * sizes.length * sizes.weights
        )

    def text(self, sizes: Sizes, free: int, device: torch.device) -> str:
        """Return a sentence: the memory that this way to train takes of `free` bytes, and what costs time."""
        needed = size_text(self.nbytes(sizes))
        found = [f"training takes up to {needed} of the {size_text(free)} free on {device}"]
        if self.on_host:
            found.append(
                f"latent numbers and Adam's means, {size_text(sizes.numbers)}, stay in host memory, as there "
                "is no room for them, which makes steps longer"
            )
        if self.compute_again:
            found.append("activations are computed twice, as there is no room for all")
        return "; ".join([*found, f"{self.micro} sequences of {sizes.length} tokens run at a time"])


def ways(sizes: Sizes, batch: int, micro: int | None = None) -> list[Way]:
    """Return all ways to train with batches of `batch` sequences.

    Micro-batches have `micro` sequences; None tries `batch`, half of it and so on, down to one.
    """
    sequences = [batch] if micro is None else [micro]
    while micro is None and sequences[-1] > 1:
        sequences.append(-(-sequences[-1] // 2))
    # On a CPU the memory of the device is that of the host.
    residences = (False,) if sizes.kind == "cpu" else (False, True)
    return [Way(*one) for one in itertools.product(sequences, residences, (False, True))]


def choose(sizes: Sizes, batch: int, free: float, micro: int | None = None) -> Way:
    """Return the fastest way to train in `free` bytes, with smaller micro-batches if that costs little time.

    If none fits it is the one with least memory of all. `batch` is the sequences of a batch, `micro` those of
    a micro-batch, which a resumed run keeps; None for any.
    """
    room = FILLED * free - IDLE_BYTES - WORKSPACE_BYTES
    every = sorted(ways(sizes, batch, micro), key=lambda way: way.nbytes(sizes))
    fitting = [way for way in every if way.nbytes(sizes) <= room] or every[:1]
    best = min(fitting, key=lambda way: way.time(sizes, batch))
    # Numbers leave the device, and activations are computed twice, only where that is the faster way.
    alike = [way for way in fitting if replace(way, micro=best.micro) == best]
    most = (1 + WORTH) * best.time(sizes, batch)
    return next(way for way in alike if way.time(sizes, batch) <= most)


def least(sizes: Sizes, batch: int) -> Way:
    """Return the way to train with least memory whose micro-batches are not too small for the device.

    `batch` is the sequences of a batch.
    """
    every = [way for way in ways(sizes, batch) if way.compute_again]
    some = [way for way in every if way.on_host or sizes.kind == "cpu"]
    best = min(way.time(sizes, batch) for way in some)
    return min((way for way in some if way.time(sizes, batch) < 1.1 * best), key=lambda one: one.micro)


def check_host(
    way: Way, sizes: Sizes, free: int, processes: int, device: torch.device, on_device: int
) -> None:
    """Raise `EnvironmentProblem` if numbers go to host memory, and each of its `processes` has less, `free`.

    `on_device` bytes are free on the device.
    """
    kept = sizes.pinned if sizes.kind == "cuda" else sizes.numbers
    if way.on_host and kept > free:
        needed = replace(way, on_host=False).nbytes(sizes)
        each = f" for each of {processes} processes" if processes > 1 else ""
        raise EnvironmentProblem(
            f"training would keep {size_text(kept)} of latent numbers and Adam's means in host "
            f"memory, where {size_text(free)} are free{each}; {device} has {size_text(on_device)} free, and "
            f"would need {size_text(needed)} with them. {RUN_AGAIN}"
        )


def _stacks(tasks: Sequence[Task]) -> Iterator[list[Task]]:
    """Yield the tasks whose linears will be rows of one stack (`distill.stacks`)."""
    open_stacks = Stacking[Task]()
    for task in tasks:
        assert task.scheme is not None
        key = row_key(task.scheme, task.source.shape[-1])
        yield from open_stacks.add(task, key, task.source.elements * task.scheme.planes)
    yield from open_stacks.close()


def _number_bytes(task: Task) -> tuple[int, ...]:
    """Return the bytes of each tensor of the numbers of a matrix: float32, with two means of 2 bytes."""
    assert task.scheme is not None
    rows, columns = task.source.shape
    stored = task.scheme.storage_shapes((rows, columns))
    codes, scales = task.scheme.planes * rows * columns, torch.Size(stored["scale"][1]).numel()
    zeros = rows * task.scheme.groups(columns) if task.scheme.has_zero_point else 0
    of_each = [size for count in (codes, scales, zeros) for size in (4 * count, 2 * count, 2 * count)]
    # The first values of scales are beside their ratios.
    return *of_each, 4 * scales
