"""Hessians of inputs and squares of gradients of linears, summed over the tokens of passes forward and back.

The gradients are those of the log probability of tokens that the model draws, so that their squares are the
Fisher information (`quantization/allocate/sensitivity.py`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from quantkit.calibrate.hessian import Hessian, check_finite, gram
from quantkit.errors import CheckpointError
from quantkit.model.experts import DOWN, spec_of
from quantkit.quantization.blockwise.moe_calibration import PRIOR, Routed


@dataclass(frozen=True, eq=False)
class Seen:
    """Sums over tokens for linears that share an input, float32.

    weighted  [K, K] sum of |g|^2 x x^T, g of all of them together
    weight    sum of |g|^2
    inputs    [K, K] sum of x x^T, None where the method asks for none
    squares   by linear, [N] sum of g_n^2
    """

    weighted: torch.Tensor
    weight: float
    inputs: torch.Tensor | None
    squares: Mapping[str, torch.Tensor]

    @classmethod
    def of(
        cls, name: str, inputs: torch.Tensor, slopes: Mapping[str, torch.Tensor], *, unweighted: bool
    ) -> Self:
        """Sum over inputs [..., K] and the gradients [..., N] at the outputs of each linear.

        With `unweighted` also `inputs`. Raises `FormatError` with the `name` of one of them if an input is
        not finite.
        """
        flat = inputs.reshape(-1, inputs.shape[-1])
        check_finite(flat, name)
        squares = {one: slope.reshape(len(flat), -1).square() for one, slope in slopes.items()}
        weights = torch.stack([square.sum(-1) for square in squares.values()]).sum(0)
        return cls(
            gram(flat * weights.sqrt()[:, None]),
            float(weights.double().sum()),
            gram(flat) if unweighted else None,
            {one: square.sum(0) for one, square in squares.items()},
        )

    def plus(self, other: Self) -> Self:
        """The sums over the tokens of both; takes the memory of this."""
        inputs = None
        if self.inputs is not None and other.inputs is not None:
            inputs = self.inputs.add_(other.inputs)
        squares = {name: one.add_(other.squares[name]) for name, one in self.squares.items()}
        return type(self)(self.weighted.add_(other.weighted), self.weight + other.weight, inputs, squares)

    def weighted_hessian(self) -> torch.Tensor:
        """H float32 [K, K], in which a token counts by its gradient; takes the memory of `weighted`."""
        return self.weighted.div_(self.weight) if self.weight else self.weighted


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """Arguments of a call of fused experts, and the gradients at its result, on the host.

    inputs   [T, K]
    chosen   int64 [T, k], the experts of each token
    weights  [T, k], those of their outputs in the sum
    slopes   [T, K]
    """

    inputs: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def of(cls, call: Sequence[torch.Tensor], slopes: torch.Tensor, name: str) -> Self:
        """`CheckpointError` where the module called `name` is called with something else."""
        shapes = [tuple(one.shape) for one in call]
        if len(call) < 3 or call[1].is_floating_point() or shapes[1:3] != [(len(call[0]), shapes[1][-1])] * 2:
            raise CheckpointError(
                f"{name} is called with {shapes}; quantkit measures experts that are called with hidden "
                "states, the numbers of the chosen ones and their weights. Decide on them with a rule, such "
                f"as --rule '{name}.*=int4'."
            )
        inputs, chosen, weights = (one.detach().cpu() for one in call[:3])
        return cls(inputs, chosen.to(torch.int64), weights.to(torch.float32), slopes.cpu())


@dataclass(frozen=True, eq=False)
class RoutedGradients:
    """All calls of fused experts, and what the tokens that chose an expert show of its matrices.

    An expert that no token chose is taken to be chosen by one token, the mean of all: no expert of which
    nothing is known counts for nothing.
    """

    experts: Any
    name: str
    routed: Routed
    weights: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def of(cls, experts: nn.Module, name: str, calls: Sequence[ExpertCall]) -> Self:
        """Collect the `calls` of the module called `name`, in their order."""
        inputs, chosen = (torch.cat([getattr(call, part) for call in calls]) for part in ("inputs", "chosen"))
        weights, slopes = (
            torch.cat([getattr(call, part) for call in calls]) for part in ("weights", "slopes")
        )
        return cls(experts, name, Routed(inputs, chosen, None), weights, slopes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of tokens that chose each expert."""
        return tuple(len(self.routed.tokens(expert)) for expert in range(len(self.experts.down_proj)))

    def seen(self, expert: int) -> dict[str, Seen]:
        """Return the sums of the two parameters of an expert, by their names; outputs as in `weight`."""
        tokens, slots = (self.routed.chosen == expert).nonzero(as_tuple=True)
        if len(tokens):
            weights = self.weights[tokens, slots]
        else:
            tokens = self.routed.everyone(self.routed.inputs.shape[1])
            weights = self.weights.mean() / len(tokens) ** 0.5
        spec, down = spec_of(self.experts), self.weight(expert, DOWN)
        slopes = (weights[..., None] * self.slopes[tokens]).to(down.device)
        inputs = self._inputs(tokens)
        products = spec.product(self.experts, spec.first, expert, inputs).requires_grad_()
        with torch.enable_grad():
            middle = spec.activated(self.experts, products)
        (back,) = torch.autograd.grad(middle, products, slopes @ down)
        name = f"{self.name}.{expert}"
        return {
            spec.first: Seen.of(name, inputs, {spec.first: back}, unweighted=False),
            DOWN: Seen.of(name, middle.detach(), {DOWN: slopes}, unweighted=False),
        }

    def weight(self, expert: int, leaf: str) -> torch.Tensor:
        """The rows [N', K] of all matrices of an expert in a parameter."""
        return spec_of(self.experts).rows(getattr(self.experts, leaf)[expert])

    def everyone(self) -> Hessian:
        """The Hessian of what all tokens bring to the first product, whichever expert they chose."""
        return _hessian(self._inputs(self.routed.everyone(self.routed.inputs.shape[1])))

    def hessian(self, expert: int, leaf: str, everyone: Hessian) -> Hessian:
        """The Hessian of the inputs of an expert's matrix (`quantization/blockwise/moe_calibration.py`)."""
        tokens = self.routed.tokens(expert)

        def read(some: torch.Tensor) -> torch.Tensor:
            inputs = self._inputs(some)
            return spec_of(self.experts).between(self.experts, expert, inputs) if leaf == DOWN else inputs

        features = self.weight(expert, DOWN).shape[1] if leaf == DOWN else len(everyone.matrix)
        every = _hessian(read(self.routed.everyone(features))) if leaf == DOWN else everyone
        return every.joined(_hessian(read(tokens)) if len(tokens) else None, PRIOR * features)

    def _inputs(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.routed.inputs[tokens].to(self.experts.down_proj.device)


def _hessian(inputs: torch.Tensor) -> Hessian:
    return Hessian(gram(inputs).div_(len(inputs)), len(inputs))
