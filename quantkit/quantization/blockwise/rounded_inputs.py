"""Round the inputs of linears in the passes of calibration, as the packed model will.

Methods then see the rounded inputs X' in place of X: H = X'^T X' / T. Those that correct the input error aim
at the outputs of the original X. So the codes make good for the rounding of inputs too.
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
    """Return how the inputs of the modules of a block are rounded, by name; others take them as they are.

    Fused experts are one module, and this is of gate and up: the inputs of down arise inside.
    """
    found = {}
    for name, task in todo.tasks.items():
        part = todo.parts.get(name)
        module, _, leaf = (name, "", "") if part is None else part.parameter.rpartition(".")
        if task.scheme is not None and task.scheme.activations is not None and leaf != DOWN:
            found[module] = task.scheme.activations
    return found


@contextmanager
def rounded_inputs(block: Block, todo: BlockTasks) -> Iterator[None]:
    """Round the inputs of the modules of `block` as their schemes in `todo` say, in every pass within.

    Modules that get one tensor and round it alike get one rounded tensor, as their inputs tell that they
    share a Hessian. Within experts, only the inputs of gate and up are rounded.
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
    """Pre-hooks that keep the last tensor that was rounded, in each thread."""

    def __init__(self) -> None:
        self._last = threading.local()

    def hook(self, scheme: ActivationScheme) -> Any:
        def before(_: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            return self._rounded(scheme, inputs[0]), *inputs[1:]

        return before

    def _rounded(self, scheme: ActivationScheme, x: torch.Tensor) -> torch.Tensor:
        kept = getattr(self._last, "kept", None)
        if kept is not None and kept[0] == scheme and kept[1]() is x:
            known: torch.Tensor | None = kept[2]()
            if known is not None:
                return known
        y = scheme.round(x)
        self._last.kept = (scheme, weakref.ref(x), weakref.ref(y))
        return y
