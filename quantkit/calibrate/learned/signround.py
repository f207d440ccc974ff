"""SignRound: learn codes by signed gradient descent.

SignRound (arXiv 2309.05516) gives every weight an offset V in [-0.5, 0.5], in quantization steps, and rounds
weight / scale + V. Signed gradient descent changes all offsets of a block at once, by equal steps that shrink
to zero (`quantization/blockwise/refine_block.py`). Rounding passes its gradient straight through. So the sign
of an offset's gradient is the sign of its weight's gradient times that of its scale. No autograd graph goes
through the rounding.

This version starts from codes that are already good for each linear. V is measured from halfway between the
value of the code and the weight, limited to the code's cell. So V = 0 gives the initial codes, and a code
changes only if many steps agree. SignRound starts from the nearest codes and measures V from the weight
itself. There, some codes change in every step, so a few steps lose more than they gain. Scales and
zero-points stay as they are.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch

from quantkit.calibrate.linear_stats import Need
from quantkit.calibrate.scale_search import nearest
from quantkit.calibrate.steps import Refined, Refinement
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor, quantize_units, spread

#: Largest offset, in quantization steps.
REACH = 0.5


class Offsets:
    """Offsets V of one linear, its weight float32 [N, K], and its initial packed form."""

    def __init__(self, weight: torch.Tensor, packed: PackedTensor) -> None:
        self.start, scheme = packed, packed.scheme
        step = scheme.format.even_step
        assert step is not None and scheme.planes == 1
        columns, zero_point = packed.shape[1], packed.zero_points()
        self._step = step
        self._scale = spread(packed.group_scale(), columns, scheme)
        self._zero = None if zero_point is None else spread(zero_point.float(), columns, scheme)
        stored = packed.dequantize()
        divisor = torch.where(self._scale == 0, 1.0, self._scale)
        units, codes = weight.float() / divisor, stored / divisor
        # Slightly inside the cell, so that the edge belongs to the current code.
        edge = step * REACH * (1 - 1e-3)
        self._anchor = codes + ((units - codes) / 2).clamp_(-edge, edge)
        self._offset = torch.zeros_like(self._anchor)

    def values(self) -> torch.Tensor:
        """Return the stored weights for the current offsets, float32 [N, K]."""
        return nearest(self._units(), self._zero, self.start.scheme).mul_(self._scale)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """Move the offsets by `rate` against the sign of `gradient`, float32 [N, K], of the weights."""
        against = gradient.sign().mul_(self._scale.sign())
        self._offset.sub_(against, alpha=rate).clamp_(-REACH, REACH)

    def packed(self) -> PackedTensor:
        """Return the packed linear for the current offsets."""
        scheme = self.start.scheme
        codes, _ = quantize_units(self._units(), self._zero, scheme)
        return PackedTensor.from_parts(
            {**dict(self.start.parts()), "packed": scheme.pack(codes)}, scheme, self.start.shape
        )

    def _units(self) -> torch.Tensor:
        return torch.add(self._anchor, self._offset, alpha=self._step)


@dataclass(frozen=True)
class SignRound(Refinement):
    """Learn offsets by block; only for formats with evenly spaced values."""

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"hessian", "block_output"})

    def lacks(self, scheme: Scheme) -> Iterator[str]:
        yield from super().lacks(scheme)
        if scheme.format.even_step is None:
            yield "between steps of unequal size"

    def start(self, weight: torch.Tensor, packed: PackedTensor) -> Refined:
        return Offsets(weight, packed)

    def __str__(self) -> str:
        return "learned by block"
