"""Scaling: input features that matter more are rounded finer.

A linear computes the same if the columns of its weights are multiplied by s and its inputs divided by it. The
operation before it can do that for free. Rounding W s moves error away from features with a large s. An
`InputScaling` says which s are tried; of several the one with the smallest error of the outputs is taken.

AWQ (arXiv 2306.00978) tries s = a^r and s = a^r / w^(1 - r), and runs the layer for each. Here a is the
magnitude of the features, w that of their weights relative to their group. With the Hessian H of the inputs
no layer is run: the error of the outputs is tr(E H E^T), E = Q(W s) / s - W.

SmoothQuant (arXiv 2211.10438) has s = max|x|^a / max|w|^(1 - a) and tries no other.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import Need
from quantkit.calibrate.steps import Transform
from quantkit.packing.schemes import Scheme

#: Exponents that are tried.
EXPONENTS = tuple(i / 10 for i in range(11))
#: How much of the magnitudes of the weights is divided by: AWQ has none or all.
WEIGHT_PARTS = (0.0, 0.5, 1.0)
#: Rows of a weight that a candidate is measured on, evenly spaced.
SAMPLE_ROWS = 256
#: Weights that a GPU measures candidates on at a time: starting operations for each takes longer than running
#: them. It is what scales are searched for at a time.
GPU_WEIGHTS = 1 << 24
#: a of SmoothQuant.
SMOOTHING = 0.5
#: Scales are at most this far from their geometric mean, either way.
LARGEST = 1e4

#: (weights float32 [C, n, K], mean squares of their inputs [C, K], scheme) -> what is stored for each of C
#: candidates, rounded to nearest.
Stored = Callable[[torch.Tensor, torch.Tensor, Scheme], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Consumer:
    """Weights float32 [N, K] that see scaled inputs, and the scheme they are stored in."""

    weight: torch.Tensor
    scheme: Scheme

    @property
    def sample(self) -> torch.Tensor:
        return self.weight[:: -(-len(self.weight) // SAMPLE_ROWS)]


#: (consumers, Hessian of their inputs, shared) -> scales to try, float32 [S] each. `shared` (int64 [K]) maps
#: input features to the S scales: under grouped-query attention some features have one.
Candidates = Callable[[Sequence[Consumer], Hessian, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class InputScaling(Transform):
    """Scales the input features; `quantization/blockwise/awq.py` takes the best candidate for a block's
    linears.

    `statistics` are what `candidates` needs beside H.
    """

    name: str
    candidates: Candidates
    statistics: Set[Need] = frozenset()

    @property
    def needs(self) -> Set[Need]:
        return frozenset[Need]({"hessian"}) | self.statistics


def searched(consumers: Sequence[Consumer], hessian: Hessian, shared: torch.Tensor) -> list[torch.Tensor]:
    """AWQ's scales for all exponents; the first is 1."""
    count = int(shared.max()) + 1
    activations = _mean_of(hessian.importance, shared, count).sqrt().clamp_min(1e-6)
    magnitudes = torch.stack([_relative_magnitude(one) for one in consumers]).mean(0)
    weights = _mean_of(magnitudes, shared, count).clamp_min(1e-4)
    found = [torch.ones(count, device=shared.device)]
    for exponent in EXPONENTS:
        for part in WEIGHT_PARTS:
            found.append(_centred(activations**exponent / weights ** (part * (1 - exponent))))
    return found


def smoothed(consumers: Sequence[Consumer], hessian: Hessian, shared: torch.Tensor) -> list[torch.Tensor]:
    """SmoothQuant's scales. A factor that all have in common changes nothing and is left out."""
    assert hessian.largest is not None
    count = int(shared.max()) + 1
    weights = torch.stack([one.weight.abs().amax(0) for one in consumers]).amax(0)
    activations, weights = (
        torch.zeros(count, device=shared.device).scatter_reduce_(0, shared, of, "amax").clamp_min(1e-5)
        for of in (hessian.largest, weights)
    )
    return [_centred(activations**SMOOTHING / weights ** (1 - SMOOTHING))]


def _centred(scales: torch.Tensor) -> torch.Tensor:
    return (scales / scales.log().mean().exp()).clamp(1 / LARGEST, LARGEST)


AWQ = InputScaling("scaling", searched)
SMOOTHQUANT = InputScaling("smoothing", smoothed, frozenset({"largest_input"}))


def measured_at_once(columns: int, device: torch.device) -> int:
    """Candidates that `output_errors` is called with at a time."""
    return 1 if device.type == "cpu" else max(1, GPU_WEIGHTS // (SAMPLE_ROWS * columns))


def output_errors(
    consumers: Sequence[Consumer], hessian: Hessian, scales: torch.Tensor, stored: Stored
) -> list[float]:
    """The squared errors of the outputs of sampled rows if columns are multiplied by each of `scales`
    ([C, K]) and rounded.
    """
    importance, factors = hessian.importance / scales.square(), scales[:, None]
    totals = [0.0] * len(scales)
    for one in consumers:
        scaled = one.sample * factors
        errors = (stored(scaled, importance, one.scheme) - scaled) / factors
        totals = [total + found for total, found in zip(totals, hessian.output_energies(errors), strict=True)]
    return totals


def _relative_magnitude(one: Consumer) -> torch.Tensor:
    """Return the size of each input feature's weights relative to the largest in their group: mean over rows,
    [K].
    """
    magnitude = one.weight.abs()
    groups = torch.split(magnitude, one.scheme.group_columns(magnitude.shape[1]), dim=1)
    return torch.cat([group / group.amax(1, keepdim=True).clamp_min(1e-30) for group in groups], 1).mean(0)


def _mean_of(values: torch.Tensor, shared: torch.Tensor, count: int) -> torch.Tensor:
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    sums.index_add_(0, shared, values.double())
    return (sums / torch.bincount(shared, minlength=count)).float()
