"""Measure the largest inputs of linears, keys and values for static scales, with the original model.

Experts of a layer store a scale each, from the tokens that chose them, and round by the largest, as vLLM
does. An expert that no token chose stores the largest.
"""

import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from quantkit.calibrate.data.samples import Samples
from quantkit.errors import UsageError
from quantkit.model.blocks import Block, Decoder
from quantkit.model.distributed import Ranks
from quantkit.model.experts import DOWN, chosen_rows, spec_of
from quantkit.model.forward.model_pass import Call, ModelPass
from quantkit.model.hidden_states import choose_home
from quantkit.model.names import ExpertPart
from quantkit.packing.activations import activations_named
from quantkit.packing.names import KV_PARTS
from quantkit.progress import Advance
from quantkit.quantization.blockwise.moe_calibration import Routed
from quantkit.quantization.blockwise.pipeline import batch_size
from quantkit.quantization.blockwise.states import States
from quantkit.quantization.plan import Plan
from quantkit.quantization.task import Task

#: Features of the widest tensor of a block, in hidden sizes: of an MLP.
_WIDEST = 4


#: Names of the KV cache among the arguments of a decoder layer, by version of transformers.
_CACHES = ("past_key_values", "cache")

Key = TypeVar("Key")


#: Fused parameter of experts, such as `layers.0.mlp.experts.down_proj`, and the number of one of them.
Expert = tuple[str, int]


@dataclass(frozen=True)
class Wanted:
    """Names of `linears` whose inputs are measured, and of the k_proj and v_proj whose outputs are.

    `experts` are the matrices of fused experts whose inputs are measured, by stored name.
    """

    linears: frozenset[str]
    keys_and_values: frozenset[str]
    experts: Mapping[str, Expert]

    @classmethod
    def of(cls, planned: Plan, part_of: Callable[[str], ExpertPart | None]) -> "Wanted":
        """Return the modules of a plan with scales to measure; `part_of` finds a stored matrix in experts."""
        tasks = [task for shard in planned.shards for task in shard.tasks if task.module is not None]
        static = {task.source.name: task.module or "" for task in tasks if task.is_static}
        places = {stored: part for stored in static if (part := part_of(stored)) is not None}
        return cls(
            frozenset(module for stored, module in static.items() if stored not in places),
            frozenset(task.module or "" for task in tasks if task.kv_part is not None),
            {stored: (static[stored], part.expert) for stored, part in places.items()},
        )

    def within(self, block: str) -> "Wanted":
        """Return the modules in a block."""

        def inside(name: str) -> bool:
            return f"{name}.".startswith(f"{block}.")

        return Wanted(
            frozenset(filter(inside, self.linears)),
            frozenset(filter(inside, self.keys_and_values)),
            {stored: expert for stored, expert in self.experts.items() if inside(expert[0])},
        )

    def __bool__(self) -> bool:
        return bool(self.linears or self.keys_and_values or self.experts)


@dataclass(frozen=True)
class Ranges:
    """Largest magnitudes of the inputs of linears, and of the keys or values that linears make, by module.

    Of fused experts `inputs` has the largest of all, by parameter, and `experts` that of each matrix, by
    stored name. `unchosen` are the experts that no token chose, as numbers of each parameter.
    """

    inputs: Mapping[str, float]
    keys_and_values: Mapping[str, float]
    experts: Mapping[str, float]
    unchosen: Mapping[str, Sequence[int]]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return a warning if no token chose some experts."""
        # Gate and up, and down: the same experts.
        owners = {name.rpartition(".")[0]: len(numbers) for name, numbers in self.unchosen.items()}
        if not owners:
            return ()
        first, count = next(iter(owners.items()))
        others = f", {sum(owners.values())} in {len(owners)} layers" if len(owners) > 1 else ""
        return (
            f"no calibration token chose {count} experts of {first}{others}: the scales of their inputs are "
            "the largest of their layer. More calibration samples give them their own.",
        )


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
    inputs, states = Largest[str | Expert](), Largest[str]()
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
            with seeing(block, in_block, inputs), decoder.loaded(block):
                list(workers.map(partial(_run, block, cache), passes))
        if name is not None and name in wanted.linears:
            for one in passes:
                inputs.add(name, one.call.hidden)
    of_layers, of_experts, unchosen = _experts(wanted.experts, inputs.found)
    of_linears = {name: _checked(name, inputs.found.get(name), "inputs") for name in sorted(wanted.linears)}
    return Ranges(
        of_linears | of_layers,
        {
            name: _checked(name, states.found.get(name), "keys or values")
            for name in sorted(wanted.keys_and_values)
        },
        of_experts,
        unchosen,
    )


def _experts(
    wanted: Mapping[str, Expert], found: Mapping[str | Expert, float]
) -> tuple[dict[str, float], dict[str, float], dict[str, list[int]]]:
    """Compute the fields `inputs`, `experts` and `unchosen` of `Ranges` for the fused experts `wanted`.

    `found` maps (parameter, expert) to the largest magnitude of its inputs. An expert without tokens gets the
    largest of its parameter. Raises `UsageError` if that is zero or not finite.
    """
    layers: dict[str, float] = {}
    unchosen: dict[str, list[int]] = {}
    for parameter, numbers in _by_parameter(wanted).items():
        magnitudes = [found.get((parameter, number)) for number in numbers]
        seen = [one for one in magnitudes if one is not None]
        largest = next((one for one in seen if not math.isfinite(one)), max(seen, default=None))
        layers[parameter] = _checked(parameter, largest, "inputs", f"{parameter.rpartition('.')[0]}.*")
        if len(seen) < len(numbers):
            unchosen[parameter] = [
                number for number, one in zip(numbers, magnitudes, strict=True) if one is None
            ]
    # Inputs of zeros have no scale either.
    experts = {stored: found.get(expert) or layers[expert[0]] for stored, expert in wanted.items()}
    return layers, experts, unchosen


def _by_parameter(wanted: Mapping[str, Expert]) -> dict[str, list[int]]:
    """Return the sorted numbers of the experts in each fused parameter."""
    numbers: dict[str, set[int]] = {}
    for parameter, number in wanted.values():
        numbers.setdefault(parameter, set()).add(number)
    return {parameter: sorted(of_one) for parameter, of_one in sorted(numbers.items())}


class Largest(Generic[Key]):
    """Thread-safe collector of the largest magnitude of each module, or other key."""

    def __init__(self) -> None:
        self.found: dict[Key, float] = {}
        self._lock = threading.Lock()

    def add(self, module: Key, x: torch.Tensor) -> None:
        """Include the values `x` [..., K] of a module; NaN makes the magnitude NaN."""
        largest = float(x.abs().amax()) if x.numel() else 0.0
        with self._lock:
            before = self.found.get(module, 0.0)
            self.found[module] = before if math.isnan(before) or largest <= before else largest


def _cache(modules: frozenset[str], largest: Largest[str]) -> Any:
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
def seeing(block: Block, wanted: Wanted, largest: Largest[str | Expert]) -> Iterator[None]:
    """Context manager: record the inputs of the linears and experts `wanted` of `block` in `largest`."""

    def of_linear(_: nn.Module, inputs: tuple[torch.Tensor, ...], *, name: str) -> None:
        largest.add(name, inputs[0])

    def of_experts(experts: nn.Module, inputs: tuple[torch.Tensor, ...], *, name: str) -> None:
        spec, routed = spec_of(experts), Routed.of([chosen_rows(experts, inputs)[0]], [], name)
        for number in of_owners[name]:
            x = routed.inputs[routed.tokens(number).to(routed.inputs.device)]
            if len(x):
                largest.add((f"{name}.{spec.first}", number), x)
                largest.add((f"{name}.{DOWN}", number), spec.between(experts, number, x))

    def hook(see: Callable[..., None], name: str) -> torch.utils.hooks.RemovableHandle:
        own = name.removeprefix(block.name).removeprefix(".")
        return block.module.get_submodule(own).register_forward_pre_hook(partial(see, name=name))

    of_owners = {name.rpartition(".")[0]: of_one for name, of_one in _by_parameter(wanted.experts).items()}
    hooks = [
        *(hook(of_linear, name) for name in wanted.linears),
        *(hook(of_experts, name) for name in of_owners),
    ]
    try:
        yield
    finally:
        for one in hooks:
            one.remove()


def _checked(module: str, largest: float | None, what: str, pattern: str | None = None) -> float:
    """Return `largest`, the magnitude of `what` of a module; `UsageError` unless positive and finite.

    `pattern` of a rule matches all that stays dense together, by default the module.
    """
    if largest is not None and 0.0 < largest < math.inf:
        return largest
    found = "none were seen" if largest is None else f"the largest is {largest}"
    remedy = "choose scales per token (--scheme FP8_DYNAMIC)" if what == "inputs" else "leave out --kv-scales"
    raise UsageError(
        f"scales of the {what} of {module!r} are measured on the calibration data, and {found}. Give data on "
        f"which it runs with --calibration, {remedy}, or keep it dense with --rule "
        f"'{pattern or module}=keep'."
    )


def bind_task(task: Task, ranges: Ranges) -> Task:
    """Return a task with static scales computed from `ranges`: of inputs, and of keys or values."""
    if task.module is None:
        return task
    if task.is_static and task.scheme is not None and task.scheme.activations is not None:
        static, own = task.scheme.activations, ranges.experts.get(task.source.name)
        task = replace(
            task,
            scheme=replace(task.scheme, activations=static.fit(ranges.inputs[task.module])),
            own_inputs=None if own is None else static.fit(own).stored,
        )
    if task.kv_part is not None and task.module is not None:
        e4m3 = activations_named("fp8-static")
        assert e4m3 is not None
        task = replace(task, kv_scale=e4m3.fit(ranges.keys_and_values[task.module]).stored)
    return task
