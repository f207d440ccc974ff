"""Launches bound to a weight, ready except for x, bias and outputs: the launch plans of eager mode.

Everything that a launch depends on is looked up once; a `Bound` does the rest per call. Fixed arguments are
integers, and tensors at a fixed address, such as a layout. Each other argument is an `Operand`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kernels.jit.launcher import FixedLaunch, Launch


@dataclass(frozen=True)
class Operand:
    """Argument that changes with every call: `number`, its index in `Bound.operands`."""

    number: int


#: x; bias, or y without one; y; partial sums, or y if there are none.
X, BIAS, Y, SUMS = map(Operand, range(4))


@dataclass(frozen=True, eq=False)
class Bound:
    """Product y of shape `size` for x [m, k] with a fixed m, by launches that are ready except for operands.

    `prepare` pads or copies x as kernels need it. `sums` is the shape of float32 partial sums, () for none.
    """

    launches: Sequence[tuple[Launch, tuple[Any, ...]]]
    size: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    prepare: Callable[[torch.Tensor], torch.Tensor]
    sums: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y for contiguous x [m, k] and a contiguous bias [n], on the current device."""
        operands = self.operands(x, bias)
        for launch, arguments in self.launches:
            launch(*_filled(arguments, operands))
        return operands[Y.number]

    def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return the tensors of one call, x [m, k], bias [n], y and sums, by `Operand.number`."""
        x, y = self.prepare(x), torch.empty(self.size, dtype=self.dtype, device=self.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=self.device) if self.sums else y
        return x, y if bias is None else bias, y, sums

    def fixed(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[FixedLaunch, ...] | None:
        """Return the launches of calls with x [m, k] and bias [n], with addresses instead of operands.

        Returns None if kernels need a copy of x, an operand is not aligned to 16 bytes, or a launch has no
        fixed form. This call must have been made before.
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
    """Return the arguments of a launch, with a tensor of `operands` in place of each `Operand`.

    `operands` are those of `Bound.operands`: x [m, k], bias [n], y [m, n] and float32 sums.
    """
    return [operands[one.number] if type(one) is Operand else one for one in arguments]
