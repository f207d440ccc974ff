"""Measure the largest inputs of linears, keys and values for static scales, with the original model."""

import math
import threading
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quantkit.calibrate.data.samples import Samples
from quantkit.errors import UsageError
from quantkit.model.blocks import Block, Decoder
from quantkit.model.distributed import Ranks
from quantkit.model.forward.model_pass import Call, ModelPass
from quantkit.model.hidden_states import choose_home
from quantkit.packing.activations import activations_named
from quantkit.packing.names import KV_PARTS
from quantkit.progress import Advance
from quantkit.quantization.blockwise.pipeline import batch_size
from quantkit.quantization.blockwise.states import States
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task

#: Features of the widest tensor of a block, in hidden sizes: of an MLP.
_WIDEST = 4


#: Names of the KV cache among the arguments of a decoder layer, by version of transformers.
_CACHES = ("past_key_values", "cache")


@dataclass(frozen=True)
class Wanted:
    """Names of linears whose inputs are measured, and of k_proj and v_proj whose outputs are."""

    linears: frozenset[str]
    keys_and_values: frozenset[str]

    @classmethod
    def of(cls, planned: Plan) -> "Wanted":
        """Return the modules of a plan with scales to measure."""
        tasks = [task for shard in planned.shards for task in shard.tasks]
        return cls(
            frozenset(task.module for task in tasks if task.is_static and task.module is not None),
            frozenset(task.module for task in tasks if task.kv_part is not None and task.module is not None),
        )

    def within(self, block: str) -> "Wanted":
        """Return the modules in a block."""

        def inside(names: frozenset[str]) -> frozenset[str]:
            return frozenset(name for name in names if f"{name}.".startswith(f"{block}."))

        return Wanted(inside(self.linears), inside(self.keys_and_values))

    def __bool__(self) -> bool:
        return bool(self.linears or self.keys_and_values)


@dataclass(frozen=True)
class Ranges:
    """Largest magnitudes of the inputs of linears, and of the keys or values that linears make, by module."""

    inputs: Mapping[str, float]
    keys_and_values: Mapping[str, float]


def measure(
    decoder: Decoder,
    samples: Samples,
    wanted: Wanted,
    workers: ThreadPoolExecutor,
    path: Path,
    report: Advance,
) -> Ranges:
    """Return the largest magnitudes of inputs, keys and values of `wanted` modules, over all samples.

    Runs the original model block by block; `path` is where hidden states go that do not fit in memory. Keys
    are measured after the rotary embedding, as a cache stores them. Raises `UsageError` for a module that
    does not run on the samples, and for magnitudes that are zero or not finite.
    """
    inputs, states = _Largest(), _Largest()
    widest = _WIDEST * decoder.hidden_size
    rows = batch_size(samples.tokens.shape, False, widest, decoder.device.type)
    batches = torch.split(samples.tokens, 1 if samples.beside else rows)
    needed = samples.tokens.numel() * decoder.hidden_size * decoder.dtype.itemsize
    home = choose_home(needed, widest, decoder.device, Ranks(), path)
    with decoder.passes() as start:
        beside = samples.beside or [None] * len(batches)
        passes = list(
            workers.map(lambda one: start(one[0], home, beside=one[1]), zip(batches, beside, strict=True))
        )
        waiting = States(tuple(range(len(passes))), home, passes, None)
        while (name := waiting.block) is not None and name != decoder.head_name:
            block, in_block = decoder.block(name), wanted.within(name)
            report(0, f"{name}, its inputs")
            cache = _cache(in_block.keys_and_values, states)
            with _seeing(block, in_block.linears, inputs), decoder.loaded(block):
                list(workers.map(partial(_run, block, cache), passes))
        if name is not None and name in wanted.linears:
            for one in passes:
                inputs.add(name, one.call.hidden)
    return Ranges(
        {name: _checked(name, inputs.found.get(name), "inputs") for name in sorted(wanted.linears)},
        {
            name: _checked(name, states.found.get(name), "keys or values")
            for name in sorted(wanted.keys_and_values)
        },
    )


class _Largest:
    """Thread-safe collector of the largest magnitude of each module."""

    def __init__(self) -> None:
        self.found: dict[str, float] = {}
        self._lock = threading.Lock()

    def add(self, module: str, x: torch.Tensor) -> None:
        """Include the values `x` [..., K] of a module; NaN makes the magnitude NaN."""
        largest = float(x.abs().amax()) if x.numel() else 0.0
        with self._lock:
            before = self.found.get(module, 0.0)
            self.found[module] = before if math.isnan(before) or largest <= before else largest


def _cache(modules: frozenset[str], largest: _Largest) -> Any:
    """Return a KV cache that records the magnitudes of keys and values and stores nothing.

    Returns None without `modules`.
    """
    from transformers import DynamicCache

    class Seeing(DynamicCache):  # type: ignore[misc]
        def update(
            self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
        ) -> tuple[torch.Tensor, torch.Tensor]:
            states = dict(zip(KV_PARTS, (key_states, value_states), strict=True))
            for module in modules:
                largest.add(module, states[module.rpartition(".")[2]])
            return key_states, value_states

    return Seeing() if modules else None


def _with_cache(call: Call, cache: Any) -> Call:
    """Return the call of a layer with `cache` as argument, if the layer takes a cache."""
    names = [name for name in _CACHES if name in call.kwargs and call.kwargs[name] is None]
    return call if cache is None or not names else Call(call.args, {**call.kwargs, names[0]: cache})


def _run(block: Block, cache: Any, one: ModelPass) -> None:
    """Run a block for a pass, and advance the pass to the next block."""
    with torch.no_grad():
        with one.loaded() as call:
            output = block.run(_with_cache(call, cache))
        one.advance(output)


@contextmanager
def _seeing(block: Block, modules: Collection[str], largest: _Largest) -> Iterator[None]:
    """Context manager: record the inputs of `modules` of `block` in `largest`."""

    def hook(module: str) -> torch.utils.hooks.RemovableHandle:
        def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            largest.add(module, inputs[0])

        own = module.removeprefix(block.name).removeprefix(".")
        return block.module.get_submodule(own).register_forward_pre_hook(before)

    hooks = [hook(module) for module in modules]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _checked(module: str, largest: float | None, what: str) -> float:
    """Return `largest`, the magnitude of `what` of a module; `UsageError` unless positive and finite."""
    if largest is not None and 0.0 < largest < math.inf:
        return largest
    found = "none were seen" if largest is None else f"the largest is {largest}"
    remedy = "choose scales per token (--scheme FP8_DYNAMIC)" if what == "inputs" else "leave out --kv-scales"
    raise UsageError(
        f"scales of the {what} of {module!r} are measured on the calibration data, and {found}. Give data on "
        f"which it runs with --calibration, {remedy}, or keep it dense with --rule '{module}=keep'."
    )


def bind_task(task: Task, ranges: Ranges) -> Task:
    """Return a task with static scales computed from `ranges`: of inputs, and of keys or values."""
    if task.module is None:
        return task
    if task.is_static and task.scheme is not None and task.scheme.activations is not None:
        activations = task.scheme.activations.fit(ranges.inputs[task.module])
        task = replace(task, scheme=replace(task.scheme, activations=activations))
    if task.kv_part is not None and task.module is not None:
        e4m3 = activations_named("fp8-static")
        assert e4m3 is not None
        task = replace(task, kv_scale=e4m3.fit(ranges.keys_and_values[task.module]).stored)
    return task
