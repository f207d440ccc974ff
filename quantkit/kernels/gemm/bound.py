"""Products whose launches are ready but for x, the bias, and what they write.

What a launch depends on is looked up once; `Bound` is what is left to do per call. Fixed arguments are
integers, and tensors that stay where they are, such as a layout; each of the others is an `Operand`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from quantkit.kernels.jit.launcher import FixedLaunch, Launch


@dataclass(frozen=True)
class Operand:
    """An argument that is another tensor at every call: its number in `Bound.operands`."""

    number: int


#: x; the bias, or y where there is none; y; room for sums, or y where none is needed.
X, BIAS, Y, SUMS = map(Operand, range(4))


@dataclass(frozen=True, eq=False)
class Bound:
    """The product y of `size` for x [m, k] of one m, by launches of which all but operands is known.

    `prepare` makes of x what kernels take. `sums` is the shape of the float32 numbers that launches leave
    each other, () for none.
    """

    launches: Sequence[tuple[Launch, tuple[Any, ...]]]
    size: tuple[int, int]
    dtype: torch.dtype
    device: torch.device
    prepare: Callable[[torch.Tensor], torch.Tensor]
    sums: tuple[int, ...] = ()

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """y for contiguous x [m, k] and a contiguous bias, on the current device."""
        operands = self.operands(x, bias)
        for launch, arguments in self.launches:
            launch(*_filled(arguments, operands))
        return operands[Y.number]

    def operands(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        """Tensors for the operands of one call, by their numbers."""
        x, y = self.prepare(x), torch.empty(self.size, dtype=self.dtype, device=self.device)
        sums = torch.empty(self.sums, dtype=torch.float32, device=self.device) if self.sums else y
        return x, y if bias is None else bias, y, sums

    def fixed(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[FixedLaunch, ...] | None:
        """The launches of calls like this one, once it was made, with addresses for operands.

        None where kernels take another x than this, an operand is at no multiple of 16 bytes, or a launch has
        no fixed form.
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
    return [operands[one.number] if type(one) is Operand else one for one in arguments]
