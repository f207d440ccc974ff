"""SignRound: codes that signed gradient descent moves.

SignRound (arXiv 2309.05516) gives every weight an offset V in [-0.5, 0.5], in steps of its grid, and rounds
weight / scale + V. Signed gradient descent moves all offsets of a block at once, by equal steps that shrink
to nothing (`quantization/blockwise/refine_block.py`). Rounding passes its gradient straight through. So the
sign of an offset's gradient is that of its weight's times that of its scale: no graph goes through the
rounding.

Here it goes on from codes that are good already, each for its linear. V counts from halfway between the value
of the code and the weight. If that is beyond the code's cell, V counts from the cell's edge. So V = 0 gives
the codes there were, and a code changes only where many steps agree. SignRound starts from the nearest codes
and counts from the weight itself. Some codes then change in every step, so that a few steps lose more than
they win. Scales and zero-points stay as they are.
"""

from collections.abc import Iterator, Set
from dataclasses import dataclass

import torch

from quantkit.calibrate.linear_stats import Need
from quantkit.calibrate.scale_search import nearest
from quantkit.calibrate.steps import Refined, Refinement
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor, quantize_units, spread

#: How far an offset goes at most, in steps of the grid.
REACH = 0.5


class Offsets:
    """The offsets V of one linear: its weight [N, K], and as it is packed before they move."""

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
        # A hair inside of the cell, so that the edge belongs to the code there is.
        edge = step * REACH * (1 - 1e-3)
        self._anchor = codes + ((units - codes) / 2).clamp_(-edge, edge)
        self._offset = torch.zeros_like(self._anchor)

    def values(self) -> torch.Tensor:
        """The weights as they would be stored now, float32 [N, K]."""
        return nearest(self._units(), self._zero, self.start.scheme).mul_(self._scale)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """Move by `rate` against the gradient [N, K] of the weights."""
        against = gradient.sign().mul_(self._scale.sign())
        self._offset.sub_(against, alpha=rate).clamp_(-REACH, REACH)

    def packed(self) -> PackedTensor:
        """The linear as it is now."""
        scheme = self.start.scheme
        codes, _ = quantize_units(self._units(), self._zero, scheme)
        return PackedTensor.from_parts(
            {**dict(self.start.parts()), "packed": scheme.pack(codes)}, scheme, self.start.shape
        )

    def _units(self) -> torch.Tensor:
        return torch.add(self._anchor, self._offset, alpha=self._step)


@dataclass(frozen=True)
class SignRound(Refinement):
    """Offsets learned by block; only for formats whose values are evenly spaced."""

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
