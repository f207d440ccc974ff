"""Sum Hessians of inputs and squared gradients of linears over tokens, by forward and backward passes.

The gradients are of the log probability of tokens drawn from the model, so their squares are the Fisher
information (`quantization/allocate/sensitivity.py`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from quantkit.calibrate.hessian import Hessian, check_finite, gram
from quantkit.errors import CheckpointError
from quantkit.model.experts import DOWN, spec_of
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.schemes import Scheme
from quantkit.quantization.blockwise.moe_calibration import PRIOR, Routed


def roundings(schemes: Iterable[Scheme], largest: float) -> dict[ActivationScheme, ActivationScheme]:
    """Return the activation schemes of `schemes`, by themselves; static ones fit inputs up to `largest`."""
    named = (scheme.activations for scheme in schemes)
    # Zeros are rounded to zeros by any scale.
    return {one: one.fit(largest or 1.0) if one.static else one for one in named if one is not None}


def _rounding_losses(
    x: torch.Tensor,
    slope: torch.Tensor,
    weight: torch.Tensor,
    rounds: Mapping[ActivationScheme, ActivationScheme],
) -> dict[ActivationScheme, float]:
    """Return by scheme the sum over tokens of (g W d)^2 for inputs [T, K], gradients [T, N], W [N, K].

    d is the error of the rounded inputs x - d.
    """
    back = slope @ weight if rounds else x
    return {
        scheme: float((back * (x - fitted.round(x))).double().sum(-1).square().sum())
        for scheme, fitted in rounds.items()
    }


@dataclass(frozen=True, eq=False)
class Seen:
    """Sums over tokens of inputs x and output gradients g, for linears that share x; float32.

    weighted  [K, K] sum of |g|^2 x x^T, with g the gradients of all these linears together
    weight    sum of |g|^2
    inputs    [K, K] sum of x x^T, None unless the method needs it
    squares   by linear, [N] sum of g_n^2
    rounded   by linear and activation scheme, the sum of (g W d)^2 with x - d the rounded inputs
    """

    weighted: torch.Tensor
    weight: float
    inputs: torch.Tensor | None
    squares: Mapping[str, torch.Tensor]
    rounded: Mapping[str, Mapping[ActivationScheme, float]]

    @classmethod
    def of(
        cls,
        name: str,
        inputs: torch.Tensor,
        slopes: Mapping[str, torch.Tensor],
        weights: Mapping[str, torch.Tensor],
        rounds: Mapping[ActivationScheme, ActivationScheme],
        *,
        unweighted: bool,
    ) -> Self:
        """Sum over inputs [..., K] and over the gradients `slopes` [..., N] at the output of each linear.

        `weights` [N, K] are those of the linears, by name. `rounds` maps the activation schemes to measure to
        themselves with the number of a static scale (`roundings`). With `unweighted`, the field
        `inputs` is computed too. Raises `FormatError` with the `name` of a linear whose input is not finite.
        """
        flat = inputs.reshape(-1, inputs.shape[-1])
        check_finite(flat, name)
        squares = {one: slope.reshape(len(flat), -1).square() for one, slope in slopes.items()}
        sizes = torch.stack([square.sum(-1) for square in squares.values()]).sum(0)
        return cls(
            gram(flat * sizes.sqrt()[:, None]),
            float(sizes.double().sum()),
            gram(flat) if unweighted else None,
            {one: square.sum(0) for one, square in squares.items()},
            {
                one: _rounding_losses(flat, slope.reshape(len(flat), -1), weights[one], rounds)
                for one, slope in slopes.items()
            },
        )

    def plus(self, other: Self) -> Self:
        """Add the sums of `other` in place, and return the result."""
        inputs = None
        if self.inputs is not None and other.inputs is not None:
            inputs = self.inputs.add_(other.inputs)
        squares = {name: one.add_(other.squares[name]) for name, one in self.squares.items()}
        rounded = {
            name: {scheme: value + other.rounded[name][scheme] for scheme, value in of_one.items()}
            for name, of_one in self.rounded.items()
        }
        weight = self.weight + other.weight
        return type(self)(self.weighted.add_(other.weighted), weight, inputs, squares, rounded)

    def weighted_hessian(self) -> torch.Tensor:
        """Return the Hessian float32 [K, K] of tokens weighted by |g|^2; reuses `weighted`'s memory."""
        return self.weighted.div_(self.weight) if self.weight else self.weighted


@dataclass(frozen=True, eq=False)
class ExpertCall:
    """Arguments of one call of fused experts, and the gradients at the output of the call, in CPU memory.

    inputs   [T, K]
    chosen   int64 [T, k], the experts of each token
    weights  [T, k], the weights of their outputs in the sum
    slopes   [T, K], the gradients
    """

    inputs: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def of(cls, call: Sequence[torch.Tensor], slopes: torch.Tensor, name: str) -> Self:
        """Copy a call of experts, and the gradients `slopes` at their outputs, to the host.

        `call` is (hidden states, numbers of the chosen experts, their weights). Raises `CheckpointError` if
        module `name` takes other arguments.
        """
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
    """All calls of the fused `experts`, module `name`, and the gradients of each expert's tokens.

    `routed` are the inputs and the experts chosen, `weights` those of the choices, float32 [T, k], and
    `slopes` the gradients at the outputs.
    An expert that no token chose counts as chosen by one token, the mean of all tokens. Otherwise its error
    would cost nothing.
    """

    experts: Any
    name: str
    routed: Routed
    weights: torch.Tensor
    slopes: torch.Tensor

    @classmethod
    def of(cls, experts: nn.Module, name: str, calls: Sequence[ExpertCall]) -> Self:
        """Collect the `calls` of module `name`, in their order."""
        inputs, chosen = (torch.cat([getattr(call, part) for call in calls]) for part in ("inputs", "chosen"))
        weights, slopes = (
            torch.cat([getattr(call, part) for call in calls]) for part in ("weights", "slopes")
        )
        return cls(experts, name, Routed(inputs, chosen, None), weights, slopes)

    @property
    def counts(self) -> tuple[int, ...]:
        """Return the number of tokens that chose each expert."""
        return tuple(len(self.routed.tokens(expert)) for expert in range(len(self.experts.down_proj)))

    def seen(
        self, expert: int, rounds: Mapping[str, Mapping[ActivationScheme, ActivationScheme]]
    ) -> dict[str, Seen]:
        """Return the sums for both fused parameters of an expert, by parameter name; rows as in `weight`.

        `rounds` are the `roundings` of each parameter.
        """
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
        given = {spec.first: (inputs, back), DOWN: (middle.detach(), slopes)}
        return {
            leaf: Seen.of(
                name,
                x,
                {leaf: slope},
                {leaf: self.weight(expert, leaf)},
                rounds.get(leaf, {}),
                unweighted=False,
            )
            for leaf, (x, slope) in given.items()
        }

    def weight(self, expert: int, leaf: str) -> torch.Tensor:
        """Return the rows [N', K] of all matrices of an expert in a parameter."""
        return spec_of(self.experts).rows(getattr(self.experts, leaf)[expert])

    def everyone(self) -> Hessian:
        """Return the Hessian of the inputs of all tokens, independent of the chosen experts."""
        return _hessian(self._inputs(self.routed.everyone(self.routed.inputs.shape[1])))

    def hessian(self, expert: int, leaf: str, everyone: Hessian) -> Hessian:
        """Return the Hessian of the inputs of number `expert`, of its fused parameter `leaf`.

        That of all tokens counts for more the fewer chose the expert. `everyone` is it, but for down_proj,
        whose inputs differ by expert.
        """
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
