"""Record in-place changes of weights in a forward on the meta device, and apply them to real weights."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

#: In-place operation on its first argument, and its other arguments.
Change = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]


class WeightChanges(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager that records in-place operations on `parameters`, by name, in `found`.

    The operations run too. One counts if its first argument is the parameter itself, not a view of it.
    """

    def __init__(self, parameters: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[Change]] = {}
        # Keep the tensors, so that their ids are not reused.
        self._parameters = {id(tensor): (name, tensor) for name, tensor in parameters.items()}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        known = self._parameters.get(id(args[0])) if args else None
        if known is not None and func._schema.is_mutable:
            self.found.setdefault(known[0], []).append((func, args[1:], kwargs or {}))
        return func(*args, **(kwargs or {}))


def apply_changes(weight: torch.Tensor, changes: Sequence[Change]) -> torch.Tensor:
    """Return a copy of `weight`, any shape, after the operations `changes` in order.

    `WeightChanges.found` has the changes of each parameter.
    """
    weight = weight.clone()
    for function, args, kwargs in changes:
        function(weight, *args, **kwargs)
    return weight
