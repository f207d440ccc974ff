"""Scale input features, so that important ones are rounded more finely.

A linear computes the same if the columns of its weight are multiplied by s and its inputs divided by s. The
division folds into the operation before it. Rounding W s then has smaller errors for features with a large s.
An `InputScaling` lists candidates s; the one with the smallest output error is used.

AWQ (arXiv 2306.00978) tries s = a^r and s = a^r / w^(1 - r), and runs the layer for each. Here a is the
magnitude of the features, w that of their weights relative to their group. With the Hessian H of the inputs,
no layer has to run: the error of the outputs is tr(E H E^T), E = Q(W s) / s - W.

SmoothQuant (arXiv 2211.10438) has the single candidate s = max|x|^a / max|w|^(1 - a).
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass

import torch

from quantkit.calibrate.hessian import Hessian
from quantkit.calibrate.linear_stats import Need
from quantkit.calibrate.steps import Transform
from quantkit.packing.schemes import Scheme

#: Candidate exponents.
EXPONENTS = tuple(i / 10 for i in range(11))
#: Candidate exponents of the weights' magnitudes in the divisor; AWQ has 0 or 1.
WEIGHT_PARTS = (0.0, 0.5, 1.0)
#: Rows of a weight on which candidates are measured, evenly spaced.
SAMPLE_ROWS = 256
#: Weights on which a GPU measures candidates at a time: one candidate alone is bound by launches. Scales are
#: searched for the same number at a time.
GPU_WEIGHTS = 1 << 24
#: Exponent a of SmoothQuant.
SMOOTHING = 0.5
#: Largest ratio of a scale to the geometric mean of all, either way.
LARGEST = 1e4

#: (weights float32 [C, n, K], mean squares of their inputs [C, K], scheme) -> stored values of each of C
#: candidates, rounded to nearest.
Stored = Callable[[torch.Tensor, torch.Tensor, Scheme], torch.Tensor]


@dataclass(frozen=True, eq=False)
class Consumer:
    """Weight float32 [N, K] that reads the scaled inputs, and the scheme in which it is stored."""

    weight: torch.Tensor
    scheme: Scheme

    @property
    def sample(self) -> torch.Tensor:
        return self.weight[:: -(-len(self.weight) // SAMPLE_ROWS)]


#: (consumers, Hessian of their inputs, shared) -> candidate scales, float32 [S] each. `shared` (int64 [K])
#: maps input features to the S scales: with grouped-query attention several features share one.
Candidates = Callable[[Sequence[Consumer], Hessian, torch.Tensor], list[torch.Tensor]]


@dataclass(frozen=True)
class InputScaling(Transform):
    """Scaling of input features; `quantization/blockwise/awq.py` takes the best candidate of a block.

    `statistics` names the statistics that `candidates` needs besides H.
    """

    name: str
    candidates: Candidates
    statistics: Set[Need] = frozenset()

    @property
    def needs(self) -> Set[Need]:
        return frozenset[Need]({"hessian"}) | self.statistics


def searched(consumers: Sequence[Consumer], hessian: Hessian, shared: torch.Tensor) -> list[torch.Tensor]:
    """Compute AWQ's candidates of scales, float32 [S] each, for all exponents; the first is all ones.

    `shared` (int64 [K]) is the index, below S, of the scale that each input feature takes.
    """
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
    """Compute SmoothQuant's scales, a list of one tensor float32 [S], for inputs that `consumers` share.

    `shared` (int64 [K]) is the index, below S, of the scale that each input feature takes. `hessian` has the
    largest magnitude of each. The geometric mean of the scales is 1 before they are clamped, as a common
    factor changes nothing.
    """
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
    """Return the number of candidates per call of `output_errors`."""
    return 1 if device.type == "cpu" else max(1, GPU_WEIGHTS // (SAMPLE_ROWS * columns))


def output_errors(
    consumers: Sequence[Consumer], hessian: Hessian, scales: torch.Tensor, stored: Stored
) -> list[float]:
    """Measure the output error of each of C candidate `scales` (float32 [C, K]) on a sample of rows.

    Columns are multiplied by the scales, rounded by `stored` and divided again. The C results are squared
    errors, mean over tokens, summed over the sampled rows of all `consumers`.
    """
    importance, factors = hessian.importance / scales.square(), scales[:, None]
    totals = [0.0] * len(scales)
    for one in consumers:
        scaled = one.sample * factors
        errors = (stored(scaled, importance, one.scheme) - scaled) / factors
        totals = [total + found for total, found in zip(totals, hessian.output_energies(errors), strict=True)]
    return totals


def _relative_magnitude(one: Consumer) -> torch.Tensor:
    """Return the mean over rows of |weight| / (largest of its group), by input feature: float32 [K]."""
    magnitude = one.weight.abs()
    groups = torch.split(magnitude, one.scheme.group_columns(magnitude.shape[1]), dim=1)
    return torch.cat([group / group.amax(1, keepdim=True).clamp_min(1e-30) for group in groups], 1).mean(0)


def _mean_of(values: torch.Tensor, shared: torch.Tensor, count: int) -> torch.Tensor:
    sums = torch.zeros(count, dtype=torch.float64, device=values.device)
    sums.index_add_(0, shared, values.double())
    return (sums / torch.bincount(shared, minlength=count)).float()
