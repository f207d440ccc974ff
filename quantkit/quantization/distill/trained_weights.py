"""Weights of a student that are trained: parameters in the dtype of the model, and their gradients.

A linear or norm is a parameter. A matrix of fused experts is a place in a parameter that has all experts.

If an expert is a slice of an ordinary tensor, its gradient is as large as that of all experts, mostly zeros.
Here each slice is a leaf of its own, and its gradient a view of that of the parameter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from quantkit.model.names import ExpertPart


@dataclass(frozen=True)
class Place:
    """Place of a trained matrix or norm: a parameter of the model, or a matrix [N, K] of experts in it."""

    parameter: str
    part: ExpertPart | None = None

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the view of this place in `tensor`, the parameter or its gradient."""
        return tensor if self.part is None else self.part.of(tensor)


class ExpertStack(torch.Tensor):
    """Parameter of fused experts, [E, ...]. By the number of an expert it gives a leaf with its weights.

    In all other operations `whole` takes its place. Both add their gradients to the same memory.
    """

    whole: torch.Tensor
    slices: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, whole: torch.Tensor) -> "ExpertStack":
        """Return the stack with the memory of `whole`, a leaf [E, ...]."""
        stack: ExpertStack = torch.Tensor._make_subclass(cls, whole.detach())
        stack.whole = whole
        stack.slices = tuple(one.requires_grad_() for one in whole.detach().unbind())
        return stack

    def collect(self, gradient: torch.Tensor | None) -> None:
        """Let gradients be added to `gradient`, of the shape of the parameter; None lets go of it."""
        self.whole.grad = gradient
        for number, one in enumerate(self.slices):
            one.grad = None if gradient is None else gradient[number]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and isinstance(args[0], cls) and _is_number(args[1]):
            return args[0].slices[int(args[1])]
        args, kwargs = tree_map_only(cls, lambda one: one.whole, (args, kwargs or {}))
        return func(*args, **kwargs)


def _is_number(index: Any) -> bool:
    """Return True for what selects one expert: an integer, or a tensor [] of one."""
    if isinstance(index, torch.Tensor):
        return index.ndim == 0 and not index.dtype.is_floating_point and index.dtype != torch.bool
    return type(index) is int


class TrainedWeights:
    """Leaves that collect gradients, by parameter, and where each trained stack and norm is in them.

    A stack has several places, whose rows are joined in order.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], places: Mapping[str, tuple[Place, ...]]) -> None:
        self._places = places
        self.leaves = {name: one.detach().requires_grad_() for name, one in tensors.items()}
        self._stacks = {
            place.parameter: ExpertStack.of(self.leaves[place.parameter])
            for place in {one.parameter: one for one in chain.from_iterable(places.values())}.values()
            if place.part is not None
        }

    def put_into(self, model: nn.Module) -> None:
        """Replace parameters of `model` by the leaves themselves, by name.

        Those of fused experts are replaced by an `ExpertStack`. None is an `nn.Parameter`, which would be a
        leaf of its own.
        """
        for name, leaf in self.leaves.items():
            owner, _, last = name.rpartition(".")
            # `setattr` takes only an `nn.Parameter`, which would be a leaf of its own.
            parameters: dict[str, Any] = model.get_submodule(owner)._parameters
            parameters[last] = self._stacks.get(name, leaf)

    @torch.no_grad()
    def write(self, name: str, values: torch.Tensor) -> None:
        """Set the weights of the trained stack or norm `name`, rounded to the dtype of the model."""
        weights = [place.of(self.leaves[place.parameter]) for place in self._places[name]]
        for one, part in zip(weights, torch.split(values, [len(one) for one in weights]), strict=True):
            one.copy_(part)

    def collect(self) -> None:
        """Begin a step, whose gradients are added up; those of an expert that no token reaches are 0."""
        for name, stack in self._stacks.items():
            stack.collect(torch.zeros_like(self.leaves[name]))

    def unreached(self) -> list[str]:
        """Return the names of trained stacks and norms that no text has reached: they have no gradient."""
        return [
            name
            for name, places in self._places.items()
            if all(self.leaves[place.parameter].grad is None for place in places)
        ]

    def gradient(self, name: str) -> torch.Tensor:
        """Return the gradient of the trained stack or norm `name`; zeros if no text has reached it."""
        parts = []
        for place in self._places[name]:
            leaf = self.leaves[place.parameter]
            parts.append(place.of(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def checksum(self) -> int:
        """Return the sum of the bits of all weights, read as integers."""
        found = torch.zeros((), dtype=torch.int64)
        for leaf in self.leaves.values():
            bits = leaf.detach().view({2: torch.int16, 4: torch.int32}[leaf.itemsize])
            found = found.to(leaf.device) + bits.sum(dtype=torch.int64)
        return int(found)

    def let_go(self, parameter: str) -> None:
        """Free the gradient of a parameter."""
        if parameter in self._stacks:
            self._stacks[parameter].collect(None)
        self.leaves[parameter].grad = None
