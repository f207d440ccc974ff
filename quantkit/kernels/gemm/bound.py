"""Launches with all arguments fixed but x, bias and outputs.

What a launch depends on is looked up once; `Bound` is what is left to do per call. Fixed arguments are
integers, and tensors that stay in place, such as a layout. Each other argument is an `Operand`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kernels.jit.launcher import FixedLaunch, Launch


@dataclass(frozen=True)
class Operand:
    """A tensor argument that changes with every call: its index in `Bound.operands`."""

    number: int


#: x; bias, or y where there is none; y; the float32 workspace, or y where none is needed.
X, BIAS, Y, SUMS = map(Operand, range(4))


@dataclass(frozen=True, eq=False)
class Bound:
    """Launches of y [m, n] = `size` for contiguous x [m, k], fixed but for their operands.

    `prepare` makes of x what kernels take. `sums` is the shape of the float32 workspace, () for none.
    """

    launches: Sequence[tuple[Launch, tuple[Any, ...]]]
    size: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    prepare: Callable[[torch.Tensor], torch.Tensor]
    sums: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y for contiguous x [m, k] and bias [n], on the current device."""
        operands = self.operands(x, bias)
        for launch, arguments in self.launches:
            launch(*_filled(arguments, operands))
        return operands[Y.number]

    def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the tensors of one call, by their `Operand` index: x, bias, y, sums."""
        x, y = self.prepare(x), torch.empty(self.size, dtype=self.dtype, device=self.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=self.device) if self.sums else y
        return x, y if bias is None else bias, y, sums

    def fixed(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[FixedLaunch, ...] | None:
        """Return the launches of calls like this one with addresses for operands, once it was made.

        None where `prepare` copies x, an operand is not 16-byte aligned, or a launch has no fixed form.
        """
        operands = self.operands(x, bias)
        if operands[X.number] is not x or any(one.data_ptr() % 16 for one in operands):
            return None
        found = []
        for launch, arguments in self.launches:
            places = [(place, one.number) for place, one in enumerate(arguments) if type(one) is Operand]
            fixed = launch.fixed(_filled(arguments, operands), places)
            if fixed is None:
                return None
            found.append(fixed)
        return tuple(found)


def _filled(arguments: tuple[Any, ...], operands: tuple[torch.Tensor, ...]) -> list[Any]:
    """Return `arguments` with the tensors of a call in place of each `Operand`."""
    return [operands[one.number] if type(one) is Operand else one for one in arguments]
