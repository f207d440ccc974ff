"""Weights of modules on the meta device that are read when the module first runs."""

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn


class LazyWeights:
    """A context in which `modules`, by name, read their own parameters when they first run.

    `read` gives a parameter by its name. `release` gives memory back.
    """

    def __init__(self, modules: Mapping[str, nn.Module], read: Callable[[str], torch.Tensor]) -> None:
        self._modules, self._read = modules, read
        self._meta: dict[nn.Module, dict[str, nn.Parameter]] = {}
        self._running: Counter[nn.Module] = Counter()
        self._mutex = threading.RLock()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            if any(parameter is not None for parameter in module._parameters.values()):
                self._stack.callback(module.register_forward_pre_hook(self._begin(name)).remove)
                self._stack.callback(module.register_forward_hook(self._end, always_call=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        self._running.clear()
        self.release()

    def release(self) -> None:
        """Drop the weights of modules that are not running."""
        with self._mutex:
            for module in [one for one in self._meta if not self._running[one]]:
                module._parameters.update(self._meta.pop(module))

    def _begin(self, name: str) -> Callable[[nn.Module, Any], None]:
        def begin(module: nn.Module, _: Any) -> None:
            with self._mutex:
                self._running[module] += 1
                if module in self._meta:
                    return
                dense = {leaf: one for leaf, one in module._parameters.items() if one is not None}
                self._meta[module] = dense
                for leaf in dense:
                    weight = self._read(f"{name}.{leaf}" if name else leaf)
                    module._parameters[leaf] = nn.Parameter(weight, requires_grad=False)

        return begin

    def _end(self, module: nn.Module, *_: Any) -> None:
        with self._mutex:
            self._running[module] -= 1
