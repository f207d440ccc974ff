"""Estimate the duration of a run on this machine, from a measured sample and counted operations.

Without data, a few rows of random weights are quantized by each method and scheme, and the seconds per weight
count for all. With data, a matrix product is measured, and the operations of a calibration are counted:

    passes       2 x weights x tokens, twice: for the inputs of a block, and for its outputs once rounded;
                 twice that for methods that also run the original
    Hessians     2 x K^2 x tokens for every input of K features
    factors      3 x K^3 for every such input
    rounding     2 x K for every weight, and the scale search that was sampled

A training takes the time that it is given, or that its size decides. Attention, reading, writing and the
check of the result are not counted.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.calibrate.linear_stats import OF_ORIGINAL
from quantkit.calibrate.methods import quantize_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import synchronize
from quantkit.packing.schemes import Scheme
from quantkit.quantization.blockwise.calibration_data import sample_shape
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task, needs_of

#: Weights that are quantized as a sample, and the sides of the product that is measured.
SAMPLE_WEIGHTS = 1 << 18
_PRODUCT = 768
#: Method without data that stands for the scale search of methods with data.
_SEARCH = "mse"
#: Kinds of weights that are sampled; the rest counts as the first, which has the most weights.
_SAMPLED = 3
#: Linears by the last part of their names that share the input of the one before them.
_SHARED = frozenset({"k_proj", "v_proj", "up_proj"})


@dataclass(frozen=True)
class Duration:
    """Estimated seconds of a run; the true time lies between seconds / `factor` and seconds * `factor`."""

    seconds: float
    factor: float


def estimate(
    checkpoint: Checkpoint,
    planned: Plan,
    options: CalibrationOptions,
    device: torch.device,
    training: DistillOptions,
) -> Duration | None:
    """Estimate the seconds of a run of `planned`: time a sample of its work on `device`, and count the rest.

    Sensitivities of an allocation are not counted: who has its plan has measured them, and they are kept.
    Returns None if no estimate is reliable: for experts with data, methods that learn in blocks, and a number
    of steps of `training`. `options` give the number of calibration tokens.
    """
    tasks = [task for shard in planned.shards for task in shard.tasks if task.scheme is not None]
    with_data = [task for task in tasks if task.needs]
    learned = any(task.method is not None and task.method.refine is not None for task in tasks)
    experts = any(layer.linear.kind == "experts" for layer in planned.layers)
    trained = sum(
        task.source.elements for task in tasks if task.method is not None and task.method.distill is not None
    )
    if learned or (with_data and experts):
        return None
    if trained and training.steps is not None:
        return None
    rows = _seconds_of_rows(tasks, device)
    measured = any(task.is_measured for task in tasks)
    if not with_data and not measured:
        return Duration(rows, 2.0)
    operations = _operations(with_data, checkpoint, options)
    if measured:
        # A pass of the original.
        tokens = math.prod(sample_shape(checkpoint, options))
        operations += 2.0 * tokens * sum(task.source.elements for task in tasks)
    seconds = rows + operations / _speed(device)
    return Duration(seconds + (training.seconds_of(trained) if trained else 0.0), 3.0)


def _seconds_of_rows(tasks: Iterable[Task], device: torch.device) -> float:
    """Time a sample of random weights; return the seconds to search scales and round all weights of `tasks`.

    The `_SAMPLED` pairs of scheme and method with the most weights are timed. Others count as the first of
    them.
    """
    weights: dict[tuple[Scheme, str], int] = {}
    columns: dict[tuple[Scheme, str], int] = {}
    for task in tasks:
        assert task.scheme is not None and task.method is not None
        kind = (task.scheme, _SEARCH if task.needs else task.method.name)
        weights[kind] = weights.get(kind, 0) + task.source.elements
        columns[kind] = max(columns.get(kind, 0), task.source.shape[-1])
    kinds = sorted(weights, key=lambda kind: -weights[kind])
    if not kinds:
        return 0.0
    rates = {}
    for scheme, method in kinds[:_SAMPLED]:
        width = columns[scheme, method]
        sample = torch.randn(max(scheme.group_rows, SAMPLE_WEIGHTS // width), width, device=device)

        def quantize(sample: torch.Tensor = sample, scheme: Scheme = scheme, method: str = method) -> object:
            return quantize_tensor(sample, scheme, method=method)

        rates[scheme, method] = _seconds(quantize, device) / sample.numel()
    first = rates[kinds[0]]
    return sum(weights[kind] * rates.get(kind, first) for kind in kinds)


def _operations(tasks: Iterable[Task], checkpoint: Checkpoint, options: CalibrationOptions) -> float:
    """Count the floating-point operations to calibrate `tasks`; a multiplication and an addition are two.

    Counts passes, Hessians, factors and rounding, as the module's docstring says.
    """
    every = list(tasks)
    samples, length = sample_shape(checkpoint, options)
    tokens = samples * length
    passes = 2 * (1 + bool(OF_ORIGINAL & needs_of(every)))
    total = 0.0
    for task in every:
        width = task.source.shape[-1]
        total += 2.0 * task.source.elements * (tokens * passes + width)
        if (task.module or "").rpartition(".")[2] not in _SHARED:
            total += 2.0 * width**2 * tokens + 3.0 * width**3
    return total


def _speed(device: torch.device) -> float:
    """Time a float32 product on `device`; return floating-point operations per second.

    A multiplication and an addition are two operations.
    """
    x = torch.randn(_PRODUCT, _PRODUCT, device=device)
    return 2.0 * _PRODUCT**3 / _seconds(lambda: x @ x, device)


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Run `work` twice; return the seconds of the second run, from and to an idle device."""
    work()
    synchronize(device)
    begin = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - begin
