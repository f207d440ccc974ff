"""Adapters of PEFT in a model: whether graphs can hold them, and which are active now.

A LoRA adds scaling * B A x to a linear. These are torch operations, so a graph of the model has them too. A
graph reads A and B where they are, so their values may change. Other adapters may be switched on between
steps. So the active ones are part of the key of a graph.
"""

import copy
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from torch import nn

from quantkit.runtime.cuda_graphs import refusals
from quantkit.runtime.tensor_parallel import ranks_of

#: Sets of active adapters that a model is captured with. Each has a graph, and so a KV cache, of its own.
MOST_SETS = 4
#: Module of PEFT's classes of LoRA, and those on a dense linear and on a dense parameter, such as a router's.
_LORA, _ON_LINEAR, _ON_PARAMETER = "peft.tuners.lora.layer", "Linear", "ParamWrapper"


#: Reads the attributes of a layer that its forward depends on, beside its matrices: whether adapters are
#: disabled, which are active and which are merged, and their scalings.
_attributes = itemgetter("_disable_adapters", "_active_adapter", "merged_adapters", "scaling")


class _State(NamedTuple):
    """State of a LoRA layer: a copy of its `_attributes`, and its matrices by adapter.

    Another adapter of the same name may take the place of one. A set keeps the matrices alive until the next
    prompt.
    """

    attributes: tuple[Any, ...]
    a: dict[str, Any]
    b: dict[str, Any]


def lora_layers(modules: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the attributes of each LoRA layer of PEFT in `modules`."""
    attributes = [vars(module) for module in modules]
    return [of for of in attributes if "lora_variant" in of]


def why_unfit_adapters(model: Any, modules: Sequence[Any]) -> str | None:
    """Return why adapters of PEFT in `model` cannot be captured, and a remedy; None if they can.

    `modules` are all modules of `model`.
    """
    for module in modules:
        kind = _why_odd(module)
        if kind is not None:
            name = next(name for name, one in model.named_modules() if one is module)
            return refusals.ADAPTERS.because(module=name, kind=kind)
    layers = lora_layers(modules)
    if layers and ranks_of(modules) is not None:
        return refusals.ADAPTERS_OF_RANKS.because()
    dropouts = (one for of in layers for one in of["_modules"]["lora_dropout"].children())
    if any(one.training and not isinstance(one, nn.Identity) for one in dropouts):
        return refusals.TRAINING.because()
    return None


def _why_odd(module: Any) -> str | None:
    """Return what `module` of PEFT is instead of plain LoRA; None for plain LoRA and modules of others."""
    kind = type(module)
    if not any(one.__module__.partition(".")[0] == "peft" for one in kind.__mro__):
        return None
    is_ours, is_plain = kind.__module__.partition(".")[0] == "quantkit", False
    if kind.__module__ == _LORA:
        # Of dense experts PEFT computes all weights anew in each step.
        is_router = kind.__name__ == _ON_PARAMETER and module.num_experts == 1
        is_plain = kind.__name__ == _ON_LINEAR or is_router
    if not (is_ours or is_plain):
        return kind.__name__
    variants = [type(variant).__name__ for variant in vars(module).get("lora_variant", {}).values()]
    return variants[0] if variants else None


class ActiveAdapters:
    """Counts the sets of active adapters of a model, given all its `modules`.

    A set has the names that are active at each layer, their scalings and matrices.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._layers = lora_layers(modules)
        self._sets: list[list[_State]] = []
        self._last = 0

    @property
    def count(self) -> int:
        """Return the number of sets that were active so far, at most `MOST_SETS`."""
        return len(self._sets)

    def number(self) -> int:
        """Return the number of the set that is active now: 0 is the first one, `MOST_SETS` one too many."""
        if not self._layers:
            return 0
        # This runs at each step, and the set is mostly that of the step before.
        others = (number for number in range(len(self._sets)) if number != self._last)
        for number in (self._last, *others) if self._sets else ():
            if _are_now(self._sets[number], self._layers):
                self._last = number
                return number
        if len(self._sets) == MOST_SETS:
            return MOST_SETS
        self._sets.append([_state(of) for of in self._layers])
        self._last = len(self._sets) - 1
        return self._last

    def why_not(self, number: int) -> str | None:
        """Return why steps with the set of this number cannot be captured; None if they can."""
        if number >= MOST_SETS:
            return refusals.SWITCHED.because(most=MOST_SETS)
        states = self._sets[number] if self._layers else ()
        unmerges = (disabled and merged for (disabled, _, merged, _), *_ in states)
        return refusals.UNMERGES.because() if any(unmerges) else None


def _state(of: dict[str, Any]) -> _State:
    """Return the state of the LoRA layer with the attributes `of`."""
    modules = of["_modules"]
    attributes = tuple(map(copy.copy, _attributes(of)))
    return _State(attributes, {**modules["lora_A"]._modules}, {**modules["lora_B"]._modules})


def _are_now(states: Sequence[_State], layers: Sequence[dict[str, Any]]) -> bool:
    """Return True if the LoRA layers with the attributes `layers` are in these states.

    Runs at each step: 0.4 us a layer, where a step of a graph is launched in 200 us or less.
    """
    for (attributes, a, b), of in zip(states, layers, strict=True):
        modules = of["_modules"]
        if (
            _attributes(of) != attributes
            or modules["lora_A"]._modules != a
            or modules["lora_B"]._modules != b
        ):
            return False
    return True
