"""Describe fused experts: how their parameters store matrices, and what they compute.

`find_spec` runs a module on tiny numbers and compares the result with each known formula that fits its
shapes. So a new architecture with a known formula needs no change.
"""

import copy
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

GATE_UP = "gate_up_proj"
UP = "up_proj"
DOWN = "down_proj"

#: Matrices of an expert, stacked from the top, by the parameter that holds them for all experts.
MATRICES: Mapping[str, tuple[str, ...]] = {GATE_UP: ("gate", "up"), UP: ("up",), DOWN: ("down",)}

#: Sizes of a probe: experts E, features H of x, features I between the products, tokens.
_EXPERTS, _HIDDEN, _BETWEEN, _TOKENS = 3, 8, 6, 6
#: Attributes of modules that hold sizes.
_SIZES = {
    **{"num_experts": _EXPERTS, "hidden_dim": _HIDDEN, "hidden_size": _HIDDEN},
    **{"intermediate_dim": _BETWEEN, "intermediate_size": _BETWEEN, "expert_dim": _BETWEEN},
}


@dataclass(frozen=True)
class Activation:
    """Activation between the products of an expert: a row of `ACTIVATIONS`, by formula, and its constants.

    `limit` bounds what it takes, `alpha` is a factor in it, for formulas that have them.
    """

    formula: str = "act(gate) * up"
    limit: float = math.inf
    alpha: float = 1.0
    #: Row of `FUNCTIONS` used as act in modules without `act_fn`.
    act: str | None = None

    def __call__(self, act_fn: Any, *products: torch.Tensor) -> torch.Tensor:
        """Return [..., I] from gate and up, [..., I] each, or from up alone."""
        act = act_fn if self.act is None else FUNCTIONS[self.act]
        return ACTIVATIONS[self.formula].compute(self, act, *products)


FUNCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True)
class Formula:
    """Row of `ACTIVATIONS`: the function `compute`, its number of inputs, `products`, and its parameters.

    `act`, `limit` and `alpha` are True if it takes an activation, a bound, and a factor.
    """

    compute: Callable[..., torch.Tensor]
    products: int = 2
    act: bool = True
    limit: bool = False
    alpha: bool = False
    #: Kind in `kernels/moe/expert_activation.py`; "act" for the kind of act, None without a kernel.
    kernel: str | None = None


def _clamped(of: Activation, up: torch.Tensor) -> torch.Tensor:
    return up.clamp(-of.limit, of.limit)


def _swiglu(of: Activation, act: Any, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    gate = gate.clamp(max=of.limit)
    return (_clamped(of, up) + 1) * (gate * torch.sigmoid(gate * of.alpha))


#: Activations by formula, in the order in which they are tried.
ACTIVATIONS: Mapping[str, Formula] = {
    "act(gate) * up": Formula(lambda of, act, gate, up: act(gate) * up, kernel="act"),
    "act(min(gate, limit)) * clamp(up, limit)": Formula(
        lambda of, act, gate, up: act(gate.clamp(max=of.limit)) * _clamped(of, up), limit=True, kernel="act"
    ),
    "min(act(gate), limit) * clamp(up, limit)": Formula(
        lambda of, act, gate, up: act(gate).clamp(max=of.limit) * _clamped(of, up), limit=True
    ),
    "(clamp(up, limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)": Formula(
        _swiglu, act=False, limit=True, alpha=True, kernel="swiglu"
    ),
    "act(gate, up)": Formula(lambda of, act, gate, up: act(gate, up)),
    "act(up)": Formula(lambda of, act, up: act(up), products=1),
}


@dataclass(frozen=True)
class ExpertsSpec:
    """Fused experts: y = sum over the chosen experts of weight * down(activation(first(x))).

    first         parameter of the first product: gate_up_proj [E, 2I, H], or up_proj [E, I, H] without gate;
                  down_proj is [E, H, I]
    transposed    parameters are [E, H, 2I] and [E, I, H]
    interleaved   rows of gate and up alternate
    biased        there are `gate_up_proj_bias` [E, 2I] and `down_proj_bias` [E, H]
    routed        called with x [T, H], and the experts and weights of each token, [T, k]; other modules are
                  called with the rows of all experts, [E * T, H], scaled by the router, 0 if not chosen
    """

    first: str = GATE_UP
    transposed: bool = False
    interleaved: bool = False
    biased: bool = False
    activation: Activation = Activation()
    routed: bool = True

    @property
    def parameters(self) -> tuple[str, str]:
        """Return the parameters that hold matrices, in the order of the products."""
        return self.first, DOWN

    def sizes(self, down: Sequence[int]) -> tuple[int, int, int]:
        """Return (experts, H, I) from the shape of down_proj."""
        count, *sizes = down
        hidden, between = reversed(sizes) if self.transposed else sizes
        return count, hidden, between

    def rows(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a view [N', K] of all rows of one expert; `weight` is its slice of a parameter."""
        return weight.T if self.transposed else weight

    def matrix(self, weight: torch.Tensor, parameter: str, index: int) -> torch.Tensor:
        """Return a view of matrix `index`, [N, K], in `weight`, the slice of `parameter` for one expert."""
        return self.split(self.rows(weight), parameter, 0)[index]

    def split(self, rows: torch.Tensor, parameter: str, dim: int = -1) -> Sequence[torch.Tensor]:
        """Split `rows`, [..., N'] or [N', ...], along `dim`, -1 or 0: a view per matrix of `parameter`."""
        count = len(MATRICES[parameter])
        if not self.interleaved:
            return rows.chunk(count, dim)
        return [rows[..., index::count] if dim < 0 else rows[index::count] for index in range(count)]

    def joined(self, matrices: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the matrices of an expert, [N, K] each, into its slice of a parameter of the module."""
        whole = (
            torch.stack(list(matrices), 1).flatten(0, 1) if self.interleaved else torch.cat(list(matrices))
        )
        return self.rows(whole)

    def product(self, experts: Any, parameter: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Multiply x [..., K] by all matrices of an expert of a dense module; return [..., N'], with bias."""
        y = F.linear(x, self.rows(getattr(experts, parameter)[expert]))
        return y + getattr(experts, f"{parameter}_bias")[expert] if self.biased else y

    def activated(self, experts: Any, products: torch.Tensor) -> torch.Tensor:
        """Return the input of down_proj, [..., I], from `products` of the first: [..., 2 I] or [..., I].

        The latter is without a gate. `experts` is the module.
        """
        return self.activation(getattr(experts, "act_fn", None), *self.split(products, self.first))

    def between(self, experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        """Return the input of down_proj, [..., I], from x [..., H], for an expert of a dense module."""
        return self.activated(experts, self.product(experts, self.first, expert, x))

    def as_routed(self, call: Sequence[torch.Tensor], experts: int) -> tuple[torch.Tensor, ...]:
        """Convert a call to rows [n, H], their experts [n, k] and their weights [n, k].

        In a module that is not `routed`, each row has one expert of weight 1; number `experts` means none.
        """
        if self.routed:
            return tuple(call)
        rows = call[0].reshape(-1, call[0].shape[-1])
        index = torch.arange(experts, device=rows.device).repeat_interleave(len(rows) // experts)
        return rows, torch.where(rows.any(-1), index, experts)[:, None], rows.new_ones(len(rows), 1)


def chosen_rows(experts: Any, call: Sequence[torch.Tensor]) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return the rows of a call that have an expert, as `ExpertsSpec.as_routed` does, and their index.

    `call` are the arguments of the module `experts`. The index selects the same rows of other tensors. A call
    of routed experts is returned whole.
    """
    spec, count = spec_of(experts), len(experts.down_proj)
    if spec.routed:
        return tuple(call), slice(None)
    routed = spec.as_routed(call, count)
    rows = (routed[1][:, 0] < count).nonzero().flatten()
    return tuple(one[rows] for one in routed), rows


def is_fused_experts(module: nn.Module) -> bool:
    """Return True if `module` holds all its experts in two parameters, the second called `down_proj`."""
    parameters = module._parameters
    return parameters.get(DOWN) is not None and any(parameters.get(one) is not None for one in (GATE_UP, UP))


def spec_of(experts: nn.Module) -> ExpertsSpec:
    """Return the `ExpertsSpec` of fused experts; asserts that `find_spec` returns one."""
    found = find_spec(experts)
    assert isinstance(found, ExpertsSpec), found
    return found


def find_spec(experts: nn.Module) -> ExpertsSpec | str:
    """Return the spec of fused experts, or the reason if quantkit does not know their layout or function.

    `is_fused_experts(experts)` must be True. Works for modules on the meta device.
    """
    kind, parameters = type(experts).__name__, experts._parameters
    first = GATE_UP if parameters.get(GATE_UP) is not None else UP
    biased = {f"{first}_bias", f"{DOWN}_bias"} <= set(parameters)
    names = {first, DOWN, *([f"{first}_bias", f"{DOWN}_bias"] if biased else [])}
    children = [name for name, one in experts.named_children() if any(True for _ in one.parameters())]
    more = sorted({*parameters, *experts._buffers, *children} - names)
    if more:
        return f"{kind} has more than {first} and {DOWN}: {', '.join(more)}"
    shapes = [tuple(parameters[name].shape) for name in (first, DOWN)]  # type: ignore[union-attr]
    for transposed in (False, True):
        spec = ExpertsSpec(first, transposed, biased=biased)
        if len(shapes[1]) == 3 and shapes[0] == _shapes(spec, *spec.sizes(shapes[1]))[first]:
            return _probed(experts, spec, spec.sizes(shapes[1]))
    rows = f"{len(MATRICES[first])}I".removeprefix("1")
    return f"{first} {shapes[0]} and {DOWN} {shapes[1]} of {kind} are not [E, {rows}, H] and [E, H, I]"


def _shapes(spec: ExpertsSpec, experts: int, hidden: int, between: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of `experts` experts with sizes `hidden` and `between`."""
    rows = between * len(MATRICES[spec.first])
    sizes = {spec.first: (rows, hidden), DOWN: (hidden, between)}
    shapes = {name: (experts, *(size[::-1] if spec.transposed else size)) for name, size in sizes.items()}
    biases = {f"{name}_bias": (experts, size[0]) for name, size in sizes.items()} if spec.biased else {}
    return {**shapes, **biases}


_probe_results: dict[tuple[Any, ...], ExpertsSpec | str] = {}


def _probed(experts: nn.Module, spec: ExpertsSpec, sizes: tuple[int, int, int]) -> ExpertsSpec | str:
    """Complete `spec` by probing: run the module and compare with each known formula and its constants.

    `sizes` are (experts, H, I). Returns text that says why if none computes the same.
    """
    numbers = tuple(sorted({float(one) for one in vars(experts).values() if _is_number(one, sizes)}))
    key = (type(experts), type(getattr(experts, "act_fn", None)), numbers, spec)
    if key not in _probe_results:
        # Loading runs under `torch.device("meta")`, but the probe needs numbers, from its own generator.
        with torch.device("cpu"), torch.no_grad():
            _probe_results[key] = _Probe(experts, spec, sizes, numbers).run()
    return _probe_results[key]


def _is_number(value: Any, sizes: Sequence[int]) -> bool:
    """Return True if an attribute is a number that may be a constant of a formula, not a size."""
    return type(value) in (int, float) and 0 < value < math.inf and value not in sizes


class _Probe:
    """Calls of a module with tiny random parameters, to compare with known formulas."""

    def __init__(
        self, experts: nn.Module, spec: ExpertsSpec, sizes: tuple[int, int, int], numbers: Sequence[float]
    ) -> None:
        self._experts, self._spec, self._numbers = experts, spec, numbers
        numbers_of = partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
        shapes = _shapes(spec, _EXPERTS, _HIDDEN, _BETWEEN)
        parameters = {name: nn.Parameter(numbers_of(*shape)) for name, shape in shapes.items()}
        # Scales of the tokens: from far below all limits to far above one.
        scales = torch.tensor([0.25, 1, 4, 16, 4 * max(numbers, default=1), 1])
        x = numbers_of(_TOKENS, _HIDDEN) * scales[:, None]
        index = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0], [2, 1]])
        #: Arguments of a call, by True for routed modules and False for others.
        self._calls: dict[bool, tuple[torch.Tensor, ...]] = {
            True: (x, index, numbers_of(_TOKENS, 2)),
            False: (x,),
        }
        by_size = dict(zip(sizes, (_EXPERTS, _HIDDEN, _BETWEEN), strict=True))
        own = vars(experts)
        if len(by_size) == len(sizes):
            own = {name: by_size.get(one, one) if type(one) is int else one for name, one in own.items()}
        self._tiny = copy.copy(experts)
        self._tiny.__dict__ = {**own, **_SIZES, "_parameters": parameters}

    def run(self) -> ExpertsSpec | str:
        reason = (
            f"{type(self._experts).__name__} computes something else than the experts that quantkit knows"
        )
        # Take the eager function that transformers wraps to dispatch to grouped GEMMs.
        forward = inspect.unwrap(type(self._experts).forward)
        actual, errors = {}, []
        for routed, call in self._calls.items():
            try:
                actual[routed] = forward(self._tiny, *call)
            except Exception as error:  # Another model's code, called with guesses, may fail in any way.
                errors.append(f"{type(error).__name__}: {error}")
        for spec in self._candidates():
            if spec.routed in actual and self._computes(spec, actual[spec.routed]):
                return spec
        return reason if actual else f"{reason} ({errors[0]})"

    def _candidates(self) -> Iterator[ExpertsSpec]:
        has_act = isinstance(getattr(self._experts, "act_fn", None), nn.Module)
        products = len(MATRICES[self._spec.first])
        for formula, row in ACTIVATIONS.items():
            if row.products != products:
                continue
            choices = itertools.product(
                (*self._numbers, math.inf) if row.limit else (math.inf,),
                (*self._numbers, 1.0) if row.alpha else (1.0,),
                FUNCTIONS if row.act and not has_act else (None,),
                (False, True)[:products],
                self._calls,
            )
            for limit, alpha, act, interleaved, routed in choices:
                activation = Activation(formula, limit, alpha, act)
                yield replace(self._spec, interleaved=interleaved, activation=activation, routed=routed)

    def _computes(self, spec: ExpertsSpec, actual: Any) -> bool:
        x, index, weights = spec.as_routed(self._calls[spec.routed], _EXPERTS)
        expected = torch.zeros_like(x)
        try:
            for token, experts in enumerate(index.tolist()):
                for slot, expert in enumerate(experts):
                    between = spec.between(self._tiny, expert, x[token])
                    expected[token] += weights[token, slot] * spec.product(self._tiny, DOWN, expert, between)
        except Exception:  # An act_fn that takes other arguments.
            return False
        if not isinstance(actual, torch.Tensor) or actual.shape != expected.shape:
            return False
        errors = (actual - expected).abs().amax(-1)
        return bool((errors <= 1e-4 * expected.abs().amax(-1)).all())
