"""Round the inputs of linears in the passes of calibration, as the packed model will.

Methods then see the rounded inputs X' in place of X: H = X'^T X' / T. Methods that correct the input error
target the outputs of the original X. So the codes also compensate the rounding of inputs.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from quantkit.model.blocks import Block
from quantkit.model.experts import DOWN
from quantkit.packing.activations import ActivationScheme
from quantkit.quantization.blockwise.block_tasks import BlockTasks


def _activations(todo: BlockTasks) -> dict[str, ActivationScheme]:
    """Return the activation scheme of each module of a block that rounds its inputs, by name.

    Fused experts are one module, with the scheme of gate and up; down reads intermediate results.
    """
    found = dict(todo.rounded)
    for name, task in todo.tasks.items():
        part = todo.parts.get(name)
        module, _, leaf = (name, "", "") if part is None else part.parameter.rpartition(".")
        if task.scheme is not None and task.scheme.activations is not None and leaf != DOWN:
            found[module] = task.scheme.activations
    return found


@contextmanager
def rounded_inputs(block: Block, todo: BlockTasks) -> Iterator[None]:
    """Context manager: round the inputs of the modules of `block` by the activation schemes in `todo`.

    Modules with one input tensor and scheme get one rounded tensor, because linears with an identical tensor
    share a Hessian. In experts, only the inputs of gate and up are rounded.
    """
    rounder = _Rounder()
    hooks = [
        block.module.get_submodule(name).register_forward_pre_hook(rounder.hook(scheme))
        for name, scheme in _activations(todo).items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _Rounder:
    """Forward pre-hooks that cache the last rounded tensor of each thread."""

    def __init__(self) -> None:
        self._last = threading.local()

    def hook(self, scheme: ActivationScheme) -> Any:
        def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return self._rounded(scheme, inputs[0]), *inputs[1:]

        return before

    def _rounded(self, scheme: ActivationScheme, x: torch.Tensor) -> torch.Tensor:
        kept = getattr(self._last, "kept", None)
        if kept is not None and kept[0] == scheme and kept[1]() is x:
            cached: torch.Tensor | None = kept[2]()
            if cached is not None:
                return cached
        y = scheme.round(x)
        self._last.kept = (scheme, weakref.ref(x), weakref.ref(y))
        return y
