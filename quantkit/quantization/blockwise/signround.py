"""Learned rounding: the codes of all linears of a block, chosen by what comes out of the block.

Rounding that looks at one linear at a time cannot know how its errors meet those of the others behind an
activation or a softmax. SignRound (arXiv 2309.05516) gives every weight an offset V in [-0.5, 0.5], in steps
of its grid, and rounds weight / scale + V. Signed gradient descent moves all offsets of a block at once, by
equal steps that shrink to nothing, so that the block's outputs come close to the original's. Rounding passes
its gradient straight through, so that the sign of an offset's gradient is that of its weight's times that of
its scale: no graph goes through the rounding itself.

Here it goes on from codes that are good already, each for its linear. V counts from halfway between the value
of the code and the weight, or from the edge of the code's cell where the weight is that far away. So V = 0
gives the codes there were, and a code changes only where many steps agree. SignRound starts from the nearest
codes and counts from the weight itself: some codes then change in every step, by which a few steps lose more
than they win. Scales and zero-points stay as they are.

The block runs on inputs that the quantized blocks before it make, and its outputs are compared with those of
the original block on the original's inputs: what the blocks before it lost is made good as far as it can be.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from quantkit.calibrate.scale_search import nearest
from quantkit.model.blocks import Block
from quantkit.model.distributed import Record
from quantkit.packing.tensor import PackedTensor, quantize_units, spread
from quantkit.quantization.blockwise.layer_quantizer import Solver

#: Steps of descent. The first is 1 / STEPS long and the last almost nothing, so that an offset that always
#: goes one way comes to the end of its range.
STEPS = 50
#: Micro-batches that a step sees, as many as a small machine has cores.
AT_ONCE = 2
#: After so many steps, and before the first, the error of all samples is measured; the best is kept.
CHECK_EVERY = 25
#: How far an offset goes at most, in steps of the grid.
REACH = 0.5


@dataclass(frozen=True, eq=False)
class Learned:
    """What learning found: the linears by name, and the errors of the block's outputs before and after it.

    An error is the sum of (original - output)^2 over that of original^2, on all samples.
    """

    packed: Mapping[str, PackedTensor]
    error_before: float
    error: float


class Offsets:
    """The offsets V of one linear: its weight [N, K], and as it is packed before they move."""

    def __init__(self, weight: torch.Tensor, packed: PackedTensor) -> None:
        self._packed, scheme = packed, packed.scheme
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
        return nearest(self._units(), self._zero, self._packed.scheme).mul_(self._scale)

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """Move by `rate` against the gradient [N, K] of the weights."""
        against = gradient.sign().mul_(self._scale.sign())
        self._offset.sub_(against, alpha=rate).clamp_(-REACH, REACH)

    def packed(self) -> PackedTensor:
        """The linear as it is now."""
        scheme = self._packed.scheme
        codes, _ = quantize_units(self._units(), self._zero, scheme)
        return PackedTensor.from_parts(
            {**dict(self._packed.parts()), "packed": scheme.pack(codes)}, scheme, self._packed.shape
        )

    def _units(self) -> torch.Tensor:
        return torch.add(self._anchor, self._offset, alpha=self._step)


def learn_rounding(
    block: Block,
    linears: Mapping[str, tuple[torch.Tensor, PackedTensor]],
    inputs: Sequence[torch.Tensor],
    targets: Sequence[torch.Tensor],
    solver: Solver,
    seed: str,
    report: Callable[[str], None],
) -> Learned:
    """Learn the rounding of the `linears` of a block, by name inside it: each [N, K] and as it is packed.

    `block` has all its weights, which are the learned ones afterwards. `inputs` and `targets` are the hidden
    states [B, T, d] before and after it of this rank's micro-batches. `seed` decides the order in which
    micro-batches are seen; `report` is called with the number of every step.
    """
    offsets = {name: Offsets(weight, packed) for name, (weight, packed) in linears.items()}
    passes = _Passes(block, inputs, targets, solver, tuple(linears))
    best = {name: packed for name, (_, packed) in linears.items()}
    passes.set({name: packed.dequantize() for name, packed in best.items()})
    before = least = passes.error()
    for step, drawn in enumerate(_draws(seed, passes.count)):
        for name, gradient in passes.gradients(drawn).items():
            offsets[name].descend(gradient, (STEPS - step) / STEPS**2)
        passes.set({name: one.values() for name, one in offsets.items()})
        if (step + 1) % CHECK_EVERY == 0:
            error = passes.error()
            if error < least:
                least, best = error, {name: one.packed() for name, one in offsets.items()}
        report(f"step {step + 1} of {STEPS} of learned rounding")
    passes.set({name: packed.dequantize() for name, packed in best.items()})
    return Learned(best, before, least)


def _draws(seed: str, count: int) -> Iterator[list[int]]:
    """Which of `count` micro-batches each step sees, ascending: all in turn, in a new order each time."""
    generator, waiting = random.Random(seed), list[int]()
    for _ in range(STEPS):
        if len(waiting) < min(AT_ONCE, count):
            waiting = generator.sample(range(count), count)
        drawn, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        yield sorted(drawn)


class _Passes:
    """The passes of all micro-batches through a block, of which each rank runs its own.

    What they find is added up in the order of micro-batches, whoever ran them.
    """

    def __init__(
        self,
        block: Block,
        inputs: Sequence[torch.Tensor],
        targets: Sequence[torch.Tensor],
        solver: Solver,
        names: Sequence[str],
    ) -> None:
        self._block, self._inputs, self._targets, self._solver = block, inputs, targets, solver
        self._weights = {name: block.module.get_parameter(f"{name}.weight") for name in names}
        for weight in self._weights.values():
            weight.requires_grad_()
        counts = solver.ranks.all_gather(len(inputs))
        self.count = sum(counts)
        self._first = sum(counts[: solver.ranks.number])

    def set(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give linears these weights."""
        for name, weight in weights.items():
            self._weights[name].data.copy_(weight)

    def gradients(self, drawn: Sequence[int]) -> dict[str, torch.Tensor]:
        """Those of the squared error of some micro-batches by the weights of linears, float32 [N, K]."""
        mine = [at - self._first for at in drawn if 0 <= at - self._first < len(self._inputs)]
        found = list(self._solver.in_order(self._gradient, mine))
        total: dict[str, torch.Tensor] = {}
        for record in self._solver.ranks.gather_records(found, self._solver.device):
            for name, gradient in record.tensors.items():
                total[name] = total[name].add_(gradient) if name in total else gradient.float()
        return total

    def error(self) -> float:
        """The squared error of the outputs of all micro-batches over the sum of their squares."""
        mine = list(self._solver.in_order(self._squares, range(len(self._inputs))))
        pairs = list(chain.from_iterable(self._solver.ranks.all_gather(mine)))
        error, energy = (sum(column) for column in zip(*pairs, strict=True))
        return float(error / energy) if energy else 0.0

    def _gradient(self, lane: int) -> Record:
        error = self._residual(lane).square().sum()
        gradients = torch.autograd.grad(error, list(self._weights.values()))
        return Record(dict(zip(self._weights, gradients, strict=True)))

    @torch.no_grad()
    def _squares(self, lane: int) -> tuple[float, float]:
        return _sum_of_squares(self._residual(lane)), _sum_of_squares(self._targets[lane])

    def _residual(self, lane: int) -> torch.Tensor:
        device = self._solver.device
        output = self._block.run(self._inputs[lane].to(device))
        return output.float() - self._targets[lane].to(device).float()


def _sum_of_squares(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
