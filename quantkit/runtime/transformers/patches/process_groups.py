"""Drop CUDA graphs that contain an all-reduce before their process group is destroyed.

NCCL waits for such graphs forever. Without this patch, `destroy_process_group` hangs while the model lives,
and so may the end of a process that does not call it.
"""

import atexit
import weakref
from collections.abc import Callable
from functools import wraps
from typing import Any, Protocol

import torch.distributed

#: Function that is wrapped, in the modules from which programs call it.
NAME = "destroy_process_group"
#: Attribute of the wrapper only.
_MARK = "drops_graphs"


class HasGraphs(Protocol):
    """Interface of an object that holds CUDA graphs."""

    def drop(self) -> None:
        """Drop all graphs."""


_OWNERS: "weakref.WeakSet[HasGraphs]" = weakref.WeakSet()


def drop_before_destroying(owner: HasGraphs) -> None:
    """Make `owner` drop its graphs before process groups are destroyed, and at the end of the process."""
    _OWNERS.add(owner)
    apply()


def apply() -> None:
    """Make `torch.distributed.destroy_process_group` drop graphs first; does nothing if applied already."""
    if not is_applied():
        for module in _modules():
            setattr(module, NAME, _wrapped(getattr(module, NAME)))
        atexit.register(_drop)


def undo() -> None:
    """Restore the original `torch.distributed.destroy_process_group`."""
    for module in _modules():
        function = getattr(module, NAME)
        if hasattr(function, _MARK):
            setattr(module, NAME, function.__wrapped__)
    atexit.unregister(_drop)


def is_applied() -> bool:
    """Return True if `torch.distributed.destroy_process_group` is wrapped."""
    return any(hasattr(getattr(module, NAME), _MARK) for module in _modules())


def _modules() -> tuple[Any, ...]:
    if not torch.distributed.is_available():
        return ()
    return torch.distributed, torch.distributed.distributed_c10d


def _wrapped(destroy: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(destroy)
    def destroy_process_group(*arguments: Any, **named: Any) -> Any:
        _drop()
        return destroy(*arguments, **named)

    setattr(destroy_process_group, _MARK, True)
    return destroy_process_group


def _drop() -> None:
    for owner in list(_OWNERS):
        owner.drop()
