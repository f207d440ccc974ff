"""Find and map tensors in nested arguments and results: tuples, lists, mappings and records."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in `value`, in order."""
    if isinstance(value, torch.Tensor):
        yield value
        return
    for one in _items(value):
        yield from tensors_in(one)


def hidden_in(value: Any) -> torch.Tensor | None:
    """Return the first tensor in `value`, which all blocks use for hidden states; None without tensors."""
    return next(tensors_in(value), None)


def with_hidden(value: Any, hidden: torch.Tensor) -> Any:
    """Return `value` with `hidden` in place of its first tensor."""
    first = hidden_in(value)
    return mapped(value, lambda tensor: hidden if tensor is first else tensor)


def mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `value` with `function` applied to each tensor; parts without tensors are not copied."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if hidden_in(value) is None:
        return value
    if isinstance(value, list | tuple):
        items = [mapped(one, function) for one in value]
        # Named tuples take their items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    changed = copy.copy(value)
    if isinstance(value, MutableMapping):
        for key, one in value.items():
            changed[key] = mapped(one, function)
    else:
        for field in fields(value):
            object.__setattr__(changed, field.name, mapped(getattr(value, field.name), function))
    return changed


def mutable_in(value: Any) -> Iterator[MutableMapping[Any, Any]]:
    """Yield the mutable mappings in `value`, except nested ones."""
    if isinstance(value, MutableMapping):
        yield value
    else:
        for one in _items(value):
            yield from mutable_in(one)


def _items(value: Any) -> Iterator[Any]:
    if isinstance(value, list | tuple):
        yield from value
    elif isinstance(value, Mapping):
        yield from value.values()
    elif is_dataclass(value) and not isinstance(value, type):
        yield from (getattr(value, field.name) for field in fields(value))
