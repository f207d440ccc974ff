"""Launches of a product that are prepared for one weight and M; only x, bias and outputs are still missing.

Eager mode keeps them as launch plans. All that a launch depends on is looked up once; a `Bound` does the rest
per call. Its arguments are integers, tensors at a fixed address such as a layout, and an `Operand` for each
tensor that changes per call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kernels.jit.launcher import FixedLaunch, Launch


@dataclass(frozen=True)
class Operand:
    """Placeholder, among the arguments of a launch, for a tensor that changes with every call.

    `number` says which tensor it is: 0 x, 1 bias, 2 y, 3 partial sums.
    """

    number: int


#: x; bias, or y without one; y; partial sums, or y if there are none.
X, BIAS, Y, SUMS = map(Operand, range(4))


@dataclass(frozen=True, eq=False)
class Bound:
    """Prepared product y [m, n] = x [m, k] W^T + bias for one weight and m: call it with x and bias.

    launches          launches in order, each with its arguments, of which some are an `Operand`
    size, dtype       [m, n] and dtype of y, which each call allocates on `device`
    prepare           pads or copies x as the kernels need it
    sums              shape of float32 partial sums, () for none
    """

    launches: Sequence[tuple[Launch, tuple[Any, ...]]]
    size: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    prepare: Callable[[torch.Tensor], torch.Tensor]
    sums: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return y [m, n] for contiguous x [m, k] and contiguous bias [n] or None, on the current device."""
        operands = self.operands(x, bias)
        for launch, arguments in self.launches:
            launch(*_filled(arguments, operands))
        return operands[Y.number]

    def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Return (x, bias, y, partial sums) for one call: x after `prepare`, new memory for y and the sums.

        x is [m, k], bias [n], y [m, n]. If there is no bias, or there are no partial sums, y stands in its
        place; kernels do not read it there.
        """
        x, y = self.prepare(x), torch.empty(self.size, dtype=self.dtype, device=self.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=self.device) if self.sums else y
        return x, y if bias is None else bias, y, sums

    def fixed(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[FixedLaunch, ...] | None:
        """Return each launch as a `FixedLaunch`, to which a call passes only the addresses of operands.

        x [m, k] and bias [n] are operands of an earlier call. Returns None if kernels need a copy of x, an
        operand is not aligned to 16 bytes, or a launch has no such form.
        """
        operands = self.operands(x, bias)
        if operands[X.number] is not x or any(one.data_ptr() % 16 for one in operands):
            return None
        found = []
        for launch, arguments in self.launches:
            indices = [(index, one.number) for index, one in enumerate(arguments) if type(one) is Operand]
            fixed = launch.fixed(_filled(arguments, operands), indices)
            if fixed is None:
                return None
            found.append(fixed)
        return tuple(found)


def _filled(arguments: tuple[Any, ...], operands: tuple[torch.Tensor, ...]) -> list[Any]:
    """Return `arguments` of a launch with each `Operand` replaced by the tensor that it stands for.

    `operands` is the result of `Bound.operands`: x [m, k], bias [n], y [m, n] and float32 sums.
    """
    return [operands[one.number] if type(one) is Operand else one for one in arguments]
