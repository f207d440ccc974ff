"""Measure inputs of linears with static scales: their largest magnitudes in passes of the original model."""

import math
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from quantkit.calibrate.data.samples import Samples
from quantkit.errors import UsageError
from quantkit.model.blocks import Block, Decoder
from quantkit.model.distributed import Ranks
from quantkit.model.forward.model_pass import ModelPass
from quantkit.model.hidden_states import choose_home
from quantkit.progress import Advance
from quantkit.quantization.blockwise.input_groups import Forwards
from quantkit.quantization.blockwise.pipeline import batch_size
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task

#: Features of the widest tensor of a block, in hidden sizes: of an MLP.
_WIDEST = 4


def static_modules(planned: Plan) -> frozenset[str]:
    """Return the linears of a plan whose inputs have static scales."""
    tasks = (task for shard in planned.shards for task in shard.tasks)
    return frozenset(task.module for task in tasks if task.is_static and task.module is not None)


def measure_inputs(
    decoder: Decoder,
    samples: Samples,
    modules: Collection[str],
    workers: ThreadPoolExecutor,
    ranks: Ranks,
    path: Path,
    report: Advance,
) -> dict[str, float]:
    """Return the largest magnitude of the inputs of linears, by module, over all samples.

    Runs the original model block by block; `path` is where hidden states go that do not fit in memory. Raises
    `UsageError` for a linear that does not run on the samples, or whose inputs are not finite or all zero.
    """
    ranges = _Ranges()
    widest = _WIDEST * decoder.hidden_size
    rows = batch_size(samples.tokens.shape, False, widest, decoder.device.type)
    batches = torch.split(samples.tokens, 1 if samples.beside else rows)
    needed = samples.tokens.numel() * decoder.hidden_size * decoder.dtype.itemsize
    home = choose_home(needed, widest, decoder.device, ranks, path)
    with decoder.passes() as start:
        beside = samples.beside or [None] * len(batches)
        passes = list(
            workers.map(lambda one: start(one[0], home, beside=one[1]), zip(batches, beside, strict=True))
        )
        while (name := passes[0].block) is not None and name != decoder.head_name:
            block = decoder.block(name)
            mine = {module for module in modules if f"{module}.".startswith(f"{name}.")}
            report(0, f"{name}, its inputs")
            with ranges.of(block, mine), decoder.loaded(block), _forwards(block, passes) as forwards:
                list(workers.map(forwards.finish, range(len(passes))))
        if name is not None and name in modules:
            for one in passes:
                ranges.add(name, one.call.hidden)
    return {module: _checked(module, ranges.largest.get(module)) for module in sorted(modules)}


def _forwards(block: Block, passes: Sequence[ModelPass]) -> Forwards:
    return Forwards(block, passes, (), suspend=False)


class _Ranges:
    """Largest magnitudes by module, while several workers run a block."""

    def __init__(self) -> None:
        self.largest: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, module: str, x: torch.Tensor) -> None:
        """Add inputs `x` [..., K] of a module; NaN stays NaN."""
        largest = float(x.abs().amax()) if x.numel() else 0.0
        with self._lock:
            known = self.largest.get(module, 0.0)
            self.largest[module] = known if math.isnan(known) or largest <= known else largest

    @contextmanager
    def of(self, block: Block, modules: Collection[str]) -> Iterator[None]:
        """Add the inputs of `modules` of `block` in every pass within."""

        def hook(module: str) -> torch.utils.hooks.RemovableHandle:
            def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
                self.add(module, inputs[0])

            own = module.removeprefix(block.name).removeprefix(".")
            return block.module.get_submodule(own).register_forward_pre_hook(before)

        hooks = [hook(module) for module in modules]
        try:
            yield
        finally:
            for one in hooks:
                one.remove()


def _checked(module: str, largest: float | None) -> float:
    """Return the magnitude of the inputs of a module, or raise `UsageError` if it gives no scale."""
    found = None if largest is None else f"the largest of its inputs is {largest}"
    if largest is not None and 0.0 < largest < float("inf"):
        return largest
    raise UsageError(
        f"{module!r} has static input scales, and {found or 'it does not run'} on the calibration data. Give "
        "data on which it runs with --calibration, choose scales that are found per token (--scheme "
        f"FP8_DYNAMIC), or keep it dense with --rule '{module}=keep'."
    )


def bind_task(task: Task, largest: Mapping[str, float]) -> Task:
    """Return a task with the number of its static scales, from the magnitude of the inputs of its module."""
    if not task.is_static or task.scheme is None or task.scheme.activations is None:
        return task
    assert task.module is not None
    activations = task.scheme.activations.fit(largest[task.module])
    return replace(task, scheme=replace(task.scheme, activations=activations))
