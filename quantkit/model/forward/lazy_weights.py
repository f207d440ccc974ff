"""Read weights of modules on the meta device when the model's code first uses them."""

import threading
from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from torch import nn


class LazyWeights:
    """Context manager: parameters of `modules`, by name, are read when an attribute asks for one.

    `read` gives a parameter by its name. Iterating over parameters gives placeholders on `device`, of
    `dtype`: NaN without memory. So a model that asks for its device does not get "meta". `release` frees the
    memory.
    """

    def __init__(
        self,
        modules: Mapping[str, nn.Module],
        read: Callable[[str], torch.Tensor],
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self._modules, self._read = modules, read
        self._nan = torch.full((), torch.nan, dtype=dtype, device=device)
        self._before: dict[nn.Module, dict[str, nn.Parameter | None]] = {}
        self._loaded: dict[str, nn.Parameter] = {}
        self._mutex = threading.RLock()

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            if any(one is not None for one in module._parameters.values()):
                self._before[module] = module._parameters
                module._parameters = _Parameters(self, name, self._placeholders(module))
        return self

    def __exit__(self, *_: object) -> None:
        for module, parameters in self._before.items():
            module._parameters = parameters
        self._before.clear()
        self.release()

    def release(self) -> None:
        """Free the weights that were read; a weight in use is freed when its use ends."""
        with self._mutex:
            self._loaded.clear()

    def weight(self, parameter: str) -> nn.Parameter:
        """Return a parameter by its name; reads it on first use."""
        with self._mutex:
            if parameter not in self._loaded:
                self._loaded[parameter] = nn.Parameter(self._read(parameter), requires_grad=False)
            return self._loaded[parameter]

    def _placeholders(self, module: nn.Module) -> dict[str, nn.Parameter | None]:
        return {
            leaf: None if one is None else nn.Parameter(self._nan.expand(one.shape), requires_grad=False)
            for leaf, one in module._parameters.items()
        }


class _Parameters(dict[str, Any]):
    """Parameters of the module called `name`: indexing reads the weight, iterating gives `placeholders`."""

    def __init__(self, weights: LazyWeights, name: str, placeholders: Mapping[str, Any]) -> None:
        super().__init__(placeholders)
        self._weights, self._name = weights, name

    def __getitem__(self, leaf: str) -> Any:
        placeholder = super().__getitem__(leaf)
        if placeholder is None:
            return None
        return self._weights.weight(f"{self._name}.{leaf}" if self._name else leaf)
