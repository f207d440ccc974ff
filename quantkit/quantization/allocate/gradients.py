"""Backpropagate through a model block by block: the output of a block is a leaf that collects its gradient.

The computations of the model between blocks have their own graph (`ModelPass` with `grad`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.model.blocks import Block
from quantkit.model.forward.model_pass import Call, ModelPass
from quantkit.model.forward.trees import hidden_in, mapped, mutable_in, tensors_in


@dataclass(frozen=True, eq=False)
class Step:
    """One forward pass of a block: call, output, and the arguments `written` to, as leaves of autograd."""

    call: Call
    output: Any
    written: tuple[torch.Tensor, ...]

    @classmethod
    def take(cls, block: Block, one: ModelPass) -> "Step":
        """Run `block` for a pass that waits before it, and advance the pass to the next block."""
        with torch.no_grad(), one.loaded() as call:
            of_call = {id(tensor) for tensor in tensors_in(call)}
            output = mapped(block.run(call), _leaf)
            written: list[torch.Tensor] = []
            for mapping in mutable_in(call.values):
                for key, value in list(mapping.items()):
                    if any(id(tensor) not in of_call for tensor in tensors_in(value)):
                        mapping[key] = mapped(value, _leaf)
                        written += tensors_in(mapping[key])
        one.advance(output)
        return cls(call, output, tuple(written))

    @property
    def hidden(self) -> torch.Tensor:
        """Return the hidden states after the block, a leaf."""
        found = hidden_in(self.output)
        assert found is not None
        return found

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the block returned, or modified in place."""
        return (*tensors_in(self.output), *self.written)

    def backward(
        self,
        block: Block,
        outputs: Mapping[str, torch.Tensor],
        earlier: Sequence[torch.Tensor],
        device: torch.device,
    ) -> dict[str, torch.Tensor]:
        """Run the block again to fill `outputs`; return their gradients, zero if there are none.

        The gradients at the leaves of this step are passed on to `earlier`, the leaves of the steps before.
        """
        moved: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if id(tensor) not in moved:
                found = tensor.detach().to(device)
                depends = tensor.requires_grad or tensor is self.call.hidden
                moved[id(tensor)] = tensor, found.requires_grad_(depends and tensor.is_floating_point())
            return moved[id(tensor)][1]

        call = mapped(self.call, move)
        with torch.enable_grad():
            output = block.run(call)
        replaced = {id(found) for _, found in moved.values()}
        arguments = (one for mapping in mutable_in(call.values) for one in tensors_in(dict(mapping)))
        again = (*tensors_in(output), *(one for one in arguments if id(one) not in replaced))
        both = zip(again, self.leaves, strict=True)
        # Tensors that depend on weights only need no gradient.
        pairs = [(one, leaf.grad) for one, leaf in both if leaf.grad is not None and one.requires_grad]
        inputs = [(tensor, found) for tensor, found in moved.values() if found.requires_grad]
        tensors = [*(found for _, found in inputs), *outputs.values()]
        if not pairs:
            return {name: torch.zeros_like(one) for name, one in outputs.items()}
        found = torch.autograd.grad(
            [one for one, _ in pairs], tensors, [grad.to(device) for _, grad in pairs], allow_unused=True
        )
        between = []
        for (tensor, _), gradient in zip(inputs, found, strict=False):
            if gradient is None or not tensor.requires_grad:
                continue
            if tensor.is_leaf:
                _add(tensor, gradient)
            else:
                between.append((tensor, gradient))
        _go_on(between, earlier, device)
        return {
            name: torch.zeros_like(one) if gradient is None else gradient
            for (name, one), gradient in zip(outputs.items(), found[len(inputs) :], strict=True)
        }


def _go_on(
    between: Sequence[tuple[torch.Tensor, torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    device: torch.device,
) -> None:
    """Backpropagate to `leaves`; `between` are tensors computed from `leaves`, with their gradients."""
    leaves = [leaf for leaf in leaves if leaf.requires_grad]
    if not between or not leaves:
        return
    stored = [leaf.data for leaf in leaves]
    for leaf in leaves:
        leaf.data = leaf.data.to(device)
    tensors, gradients = zip(*between, strict=True)
    # The graph is retained because one tensor may be the input of several blocks.
    found = torch.autograd.grad(tensors, leaves, gradients, retain_graph=True, allow_unused=True)
    for leaf, data in zip(leaves, stored, strict=True):
        leaf.data = data
    for leaf, gradient in zip(leaves, found, strict=True):
        if gradient is not None:
            _add(leaf, gradient)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _add(leaf: torch.Tensor, gradient: torch.Tensor) -> None:
    gradient = gradient.to(leaf.device)
    leaf.grad = gradient if leaf.grad is None else leaf.grad + gradient
