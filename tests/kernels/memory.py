"""Memcheck for Triton's interpreter: each address that a kernel reads or writes is in a tensor of its launch.

Which one is not known, nor what lies between the elements of one: from the first to the last all is its own.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

#: What of the interpreter takes addresses: what it does there, and which arguments are addresses and mask.
ACCESSES = {
    "create_masked_load": ("reads", 0, 1),
    "create_masked_store": ("writes", 0, 2),
    "create_atomic_rmw": ("changes", 1, 3),
}


class OutOfBoundsError(AssertionError):
    """A kernel reads or writes what is in no tensor of its launch."""


class Bounds:
    """The memory of tensors: intervals of addresses, of which those that overlap are one."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        intervals: list[list[int]] = []
        for begin, end in sorted(interval(tensor) for tensor in tensors if tensor.numel()):
            if intervals and begin < intervals[-1][1]:
                intervals[-1][1] = max(intervals[-1][1], end)
            else:
                intervals.append([begin, end])
        self._begins, self._ends = np.array(intervals or [[0, 0]], dtype=np.uint64).T.copy()

    def check(self, does: str, addresses: np.ndarray, mask: np.ndarray, size: int) -> None:
        """Raise unless all that `mask` leaves of `addresses` begin something of so many bytes in a tensor."""
        if not mask.all():
            addresses = np.broadcast_to(addresses, mask.shape)[mask.astype(bool)]
        if not addresses.size:
            return
        # Nearly always all are in one.
        lowest, highest = addresses.min(), addresses.max()
        which = np.searchsorted(self._begins, lowest, "right") - 1
        if which >= 0 and highest + np.uint64(size) <= self._ends[which]:
            return
        which = np.searchsorted(self._begins, addresses, "right") - 1
        outside = (which < 0) | (addresses + np.uint64(size) > self._ends[which])
        if outside.any():
            first = int(addresses[outside].min())
            past = min((first - int(end) for end in self._ends if end <= first), default=None)
            where = "before all of them" if past is None else f"{past} bytes past the end of one"
            raise OutOfBoundsError(
                f"it {does} {outside.sum()} of {outside.size} addresses that are in no tensor, "
                f"the first {where}"
            )


def interval(tensor: torch.Tensor) -> tuple[int, int]:
    """The addresses of its first element, and after its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_of(argument: Any) -> Iterator[torch.Tensor]:
    """The tensors of an argument of a launch."""
    if isinstance(argument, torch.Tensor):
        yield argument
    elif isinstance(argument, tuple):
        for one in argument:
            yield from tensors_of(one)
    elif hasattr(argument, "base"):
        yield from tensors_of(argument.base)


def teach(monkeypatch: pytest.MonkeyPatch, by_address: Sequence[torch.Tensor]) -> None:
    """Have Triton's interpreter check every address; those of `by_address` a kernel may find in memory."""
    from triton.runtime import interpreter

    bounds = Bounds(())
    on_host, builder = interpreter.GridExecutor._init_args_hst, interpreter.interpreter_builder

    def begin(self: Any, arguments: Any, options: Any) -> Any:
        nonlocal bounds
        host, host_options = on_host(self, arguments, options)
        bounds = Bounds(tensors_of((*host, *host_options.values(), *by_address)))
        return host, host_options

    def checked(access: Callable[..., Any], does: str, pointers: int, mask: int) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            size = arguments[pointers].get_element_ty().primitive_bitwidth // 8
            bounds.check(does, arguments[pointers].data, arguments[mask].data, size)
            return access(*arguments)

        return call

    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", begin)
    for name, where in ACCESSES.items():
        monkeypatch.setattr(builder, name, checked(getattr(builder, name), *where))
