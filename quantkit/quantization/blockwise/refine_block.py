"""Refine a block: learn the rounding of all its linears by gradients of the block's output error.

Rounding one linear at a time cannot see how its errors combine with others behind an activation or a softmax.
So the codes of all linears of a block are optimized together, by sign descent whose steps shrink to zero. The
block's outputs approach the original's. `calibrate/learned/signround.py` defines the step of a code.

The block runs on outputs of the quantized blocks before it; the targets are outputs of the original block on
the original's inputs. So it also compensates errors of the blocks before it.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from quantkit.calibrate.steps import Refined
from quantkit.model.blocks import Block
from quantkit.model.distributed import Record
from quantkit.model.forward.model_pass import ModelPass
from quantkit.packing.tensor import PackedTensor
from quantkit.quantization.blockwise.block_tasks import weight_of
from quantkit.quantization.blockwise.layer_quantizer import Solver

#: Steps of descent. The first has length 1 / STEPS, the last almost 0: an offset that always moves one way
#: reaches the end of its range.
STEPS = 50
#: Micro-batches per step, as many as a small machine has cores.
AT_ONCE = 2
#: The error of all samples is measured before the first step and every this many steps; the best is kept.
CHECK_EVERY = 25


@dataclass(frozen=True, eq=False)
class Learned:
    """Learned linears by name, and the errors of the block's outputs before and after learning.

    An error is the sum of (original - output)^2 over the sum of original^2, on all samples.
    """

    packed: Mapping[str, PackedTensor]
    error_before: float
    error: float


def learn_rounding(
    block: Block,
    linears: Mapping[str, Refined],
    inputs: Sequence[ModelPass],
    targets: Sequence[torch.Tensor],
    solver: Solver,
    seed: str,
    report: Callable[[str], None],
) -> Learned:
    """Learn the rounding of the `linears` of a block, by name inside it.

    `block` has all weights on entry, and the learned weights on return. `inputs` are passes of this rank's
    micro-batches that wait before the block, `targets` the hidden states [B, T, d] after it. `seed` sets the
    order of micro-batches; `report` is called with the number of every step.
    """
    passes = _Passes(block, inputs, targets, solver, tuple(linears))
    best = {name: one.start for name, one in linears.items()}
    passes.set({name: packed.dequantize() for name, packed in best.items()})
    before = least = passes.error()
    for step, drawn in enumerate(_draws(seed, passes.count)):
        for name, gradient in passes.gradients(drawn).items():
            linears[name].descend(gradient, (STEPS - step) / STEPS**2)
        passes.set({name: one.values() for name, one in linears.items()})
        if (step + 1) % CHECK_EVERY == 0:
            error = passes.error()
            if error < least:
                least, best = error, {name: one.packed() for name, one in linears.items()}
        report(f"step {step + 1} of {STEPS} of learned rounding")
    passes.set({name: packed.dequantize() for name, packed in best.items()})
    return Learned(best, before, least)


def _draws(seed: str, count: int) -> Iterator[list[int]]:
    """Yield the micro-batches of each step, sorted, out of `count`; each round has a new random order.

    Every micro-batch is drawn once before any is drawn again.
    """
    generator, waiting = random.Random(seed), list[int]()
    for _ in range(STEPS):
        if len(waiting) < min(AT_ONCE, count):
            waiting = generator.sample(range(count), count)
        drawn, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
        yield sorted(drawn)


class _Passes:
    """Computes the squared error of a block's outputs, and its gradients by the weights of `names`.

    `inputs` are this rank's micro-batches, waiting before the block; `targets` [B, T, d] the outputs wanted
    of each. Errors and gradients are summed over all ranks, in the order of micro-batches. `count` is the
    number of micro-batches of all ranks.
    """

    def __init__(
        self,
        block: Block,
        inputs: Sequence[ModelPass],
        targets: Sequence[torch.Tensor],
        solver: Solver,
        names: Sequence[str],
    ) -> None:
        self._block, self._inputs, self._targets, self._solver = block, inputs, targets, solver
        self._weights = {name: block.module.get_parameter(weight_of(name)) for name in names}
        for weight in self._weights.values():
            weight.requires_grad_()
        counts = solver.ranks.all_gather(len(inputs))
        self.count = sum(counts)
        self._first = sum(counts[: solver.ranks.number])

    def set(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Set the weights of linears."""
        for name, weight in weights.items():
            self._weights[name].data.copy_(weight)

    def gradients(self, drawn: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the gradients of the squared error of some micro-batches, float32 [N, K] by linear."""
        own_batches = [at - self._first for at in drawn if 0 <= at - self._first < len(self._inputs)]
        found = list(self._solver.in_order(self._gradient, own_batches))
        total: dict[str, torch.Tensor] = {}
        for record in self._solver.ranks.gather_records(found, self._solver.device):
            for name, gradient in record.tensors.items():
                total[name] = total[name].add_(gradient) if name in total else gradient.float()
        return total

    def error(self) -> float:
        """Return the squared error of the outputs of all micro-batches over the sum of their squares."""
        own_errors = list(self._solver.in_order(self._squares, range(len(self._inputs))))
        pairs = list(chain.from_iterable(self._solver.ranks.all_gather(own_errors)))
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
        with self._inputs[lane].loaded() as call:
            output = self._block.hidden(call)
        return output.float() - self._targets[lane].to(device).float()


def _sum_of_squares(x: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2
