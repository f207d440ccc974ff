"""Search the scale and zero-point of each group of weights.

A method gets groups, float32 [R, g], one group a row, and returns a `ScaleZero`. With calibration data, it
also gets the `importance` of every weight, float32 [R, g]: integers that weight its squared error. Scales are
computed in float32 and rounded to their stored dtype before they are measured. So the searched scale is the
stored one.

`mse` minimises the squared error of every group. It does not round the weights once per candidate. It counts
each group into a histogram of `bins` cells over [-absmax, absmax]. The error of all candidates is then one
matrix product with a table that depends only on the scheme:

    error[R, C] = counts[R, bins] @ table[bins, C],    table[b, c] = (v_b - nearest_c(v_b))^2

With importance, a weight counts that often.

The table holds small integers, multiples of a step, so every sum is exact. The best candidate of a group then
depends neither on other groups nor on the order of additions. The product is in float32 if that holds such
sums with a step well below the rounding error itself, else in float64.

The best candidate is refitted in closed form, s = <x, q> / <q, q> for its codes q. The refit is kept if its
exact error is smaller. Plain rounding is a candidate too, so `mse` is never worse than `rtn`. On Gaussian
groups of 128 at int4 the error is 0.2 % above an exhaustive search (docs/accuracy.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme

#: Scale candidates per sign. Unevenly spaced formats get twice as many, because their error has a minimum in
#: every octave of the scale; so do small formats, because their range is wide.
CANDIDATES = 32
#: Smallest candidate by number of values, as a fraction of the scale that covers the group. The fewer values
#: a format has, the more of a group its best scale clips.
LOWEST = ((4, 0.1), (8, 0.25), (256, 0.4))
#: Largest candidate, by True for evenly spaced formats: if the largest values are far apart, the second
#: largest may cover the group better.
HIGHEST = {True: 1.2, False: 1.6}
#: Best candidates that are rounded and measured again if scales have few digits.
COARSE_CHOICES = 6
#: Largest factor, with headroom in float32 for products; only weights below 1e-33 need a larger one.
LARGEST_FACTOR = 2.0**120
#: Most candidate zero-points per group width.
ZERO_CANDIDATES = 32
#: Histogram cells per code, and their limits: a cell must be well below a quantization step.
BINS_PER_CODE = 8
BINS_RANGE = (256, 1024)
#: Histogram cells at a time, by device; 1 MB on a CPU, which is a core's cache.
HISTOGRAM_CELLS = {"cpu": 1 << 18, "cuda": 1 << 27}
#: Bound on sums of integer table entries over a group that keeps them exact, by dtype.
EXACT_SUM = {torch.float32: 2**24, torch.float64: 2**53}
#: Largest step of a table, relative to the smallest mean error of a candidate.
STEP_OF_ERROR = 1 / 32
#: Importance of the most important weight of a group; others are in proportion, at least 1.
MOST_IMPORTANT = 1 << 12


@dataclass(frozen=True)
class ScaleZero:
    """Grid of each of R groups, to whose values its weights are rounded.

    scale       float32 [R, 1], exact in the scale dtype
    zero_point  float32 [R, 1], in codes; None without zero-points
    """

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


def whole_importance(importance: torch.Tensor) -> torch.Tensor:
    """Convert importance (float [R, g], not negative) to integers, float32 [R, g], at most `MOST_IMPORTANT`.

    Sums of integers are exact in any order.
    """
    most = importance.amax(-1, keepdim=True)
    scaled = importance * torch.where(most > 0, MOST_IMPORTANT / most, 0.0)
    return scaled.round_().clamp_(1, MOST_IMPORTANT).float()


def rtn(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> ScaleZero:
    """Return the scale and zero-point of plain rounding for groups, float32 [R, g].

    The scale maps the absmax of a group (or its range, or its mean magnitude) to that of the format. Ignores
    `importance`.
    """
    if scheme.has_zero_point:
        return _min_max(groups, scheme)
    magnitude = groups.abs()
    largest = scheme.format.absmax
    if scheme.format.rounding_statistic == "absmax":
        statistic = magnitude.amax(-1, keepdim=True)
    else:
        # Divide first: the sum of weights near the float32 limit would overflow.
        statistic = (magnitude / magnitude.shape[-1]).sum(-1, keepdim=True)
    if scheme.scale_type.digits == 1:
        # OCP MX v1.0, 6.3: both are rounded down to powers of two.
        statistic, largest = _power_below(statistic), 2.0 ** math.floor(math.log2(largest))
    return ScaleZero(storable(statistic / largest, scheme))


def _power_below(x: torch.Tensor) -> torch.Tensor:
    """Return the largest power of two not above each `x` (float32 [...], not negative); 0 for 0."""
    return x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def global_scale(absmax: float, scheme: Scheme) -> float:
    """Return the divisor of a tensor's scales, with which the largest scale becomes the type's `max`."""
    if not 0 < absmax < math.inf:
        return 1.0
    return min(scheme.scale_type.max * scheme.format.absmax / absmax, LARGEST_FACTOR)


def mse(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> ScaleZero:
    """Search the scale and zero-point of least squared error for each group, float32 [R, g].

    Squares are weighted by `importance`: whole numbers, float32 [R, g], from `whole_importance`.
    """
    if scheme.scale_type.digits == 1:
        return _search_exponent(groups, scheme, importance)
    most = 1 if importance is None else MOST_IMPORTANT
    table = _search_table(scheme, groups.shape[1] * most, groups.device)
    step = max(1, HISTOGRAM_CELLS[groups.device.type] // table.errors.shape[0])
    if len(groups) <= step:
        return _search(groups, table, scheme, importance)
    grids = [
        _search(
            groups[at : at + step],
            table,
            scheme,
            None if importance is None else importance[at : at + step],
        )
        for at in range(0, len(groups), step)
    ]
    zeros = [grid.zero_point for grid in grids if grid.zero_point is not None]
    return ScaleZero(torch.cat([grid.scale for grid in grids]), torch.cat(zeros) if zeros else None)


def _search_exponent(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None) -> ScaleZero:
    """Choose the scale of least squared error for each group, float32 [R, g], among powers of two.

    Only the plain one and its neighbours are candidates. `importance` [R, g] weights squares; None weights
    all equally.
    """
    plain = rtn(groups, scheme)
    rivals = [
        ScaleZero(rounded_scale(plain.scale * factor, scheme), plain.zero_point) for factor in (0.5, 2.0)
    ]
    unit = unit_of(groups)
    return _best(groups / unit, unit, plain, rivals, scheme, importance)


def _search(
    groups: torch.Tensor, table: "_SearchTable", scheme: Scheme, importance: torch.Tensor | None
) -> ScaleZero:
    unit = unit_of(groups)
    units = groups / unit
    errors = _histogram(units, table.errors, importance) @ table.errors
    # Rounding a scale of few digits may move it far from the best; another candidate may round better.
    few_digits = scheme.scale_type.digits < 8
    if few_digits:
        choices = errors.topk(COARSE_CHOICES, dim=-1, largest=False).indices
    else:
        choices = errors.argmin(-1, keepdim=True)
    rivals = []
    for rank in range(choices.shape[1]):
        choice = choices[:, rank, None]
        zero_point = None if table.zero_points is None else table.zero_points[choice]
        rivals.append(ScaleZero(rounded_scale(table.scales[choice] * unit, scheme), zero_point))
    refitted = rivals[0]
    for _ in range(scheme.zero_point_type.refits):
        refitted = _refit(units, refitted, unit, scheme, importance)
        rivals.append(refitted)
    return _best(units, unit, rtn(groups, scheme), rivals, scheme, importance)


def unit_of(groups: torch.Tensor) -> torch.Tensor:
    """Return the absmax of each group, float32 [R, 1] of [R, g]; 1 for a group of zeros.

    In this unit the squares of weights neither overflow nor underflow.
    """
    absmax = groups.abs().amax(-1, keepdim=True)
    return torch.where(absmax == 0, 1.0, absmax)


def _best(
    units: torch.Tensor,
    unit: torch.Tensor,
    best: ScaleZero,
    rivals: Sequence[ScaleZero],
    scheme: Scheme,
    importance: torch.Tensor | None,
) -> ScaleZero:
    """Choose for each group the grid of least squared error: `best` or, if better, one of `rivals`.

    The groups are `units` [R, g] times `unit` [R, 1], as of `unit_of`. Errors are measured exactly, weighted
    by `importance` [R, g] unless it is None.
    """
    best_error = squared_error(units, best, unit, scheme, importance)
    for rival in rivals:
        # NaN, from a rival's scale that overflows its dtype, compares as not better.
        error = squared_error(units, rival, unit, scheme, importance)
        better = error < best_error
        best = _select(better, rival, best)
        best_error = torch.where(better, error, best_error)
    return best


def _select(where: torch.Tensor, one: ScaleZero, other: ScaleZero) -> ScaleZero:
    scale = torch.where(where, one.scale, other.scale)
    if one.zero_point is None or other.zero_point is None:
        return ScaleZero(scale)
    return ScaleZero(scale, torch.where(where, one.zero_point, other.zero_point))


def storable(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Round scales (any float dtype and shape) to the scheme's scale dtype; return them in float32.

    A scale that is or becomes zero belongs to a group of zeros, or of weights too small for the dtype. It
    becomes 1 if the format stores zero, and else stays 0: the group is exactly zero. Raises `FormatError` if
    a scale overflows the dtype.
    """
    stored = rounded_scale(scale, scheme)
    if not torch.isfinite(stored).all():
        raise FormatError(
            f"a scale of {scale.abs().max().item():.6g} overflows {scheme.scale_dtype}; store the scales in "
            "a dtype with more range, such as bfloat16 or float32, or keep the layer dense."
        )
    return stored


def rounded_scale(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Round as `storable`, but a scale that overflows the dtype becomes infinite."""
    stored = scheme.scale_type.round(scale)
    return torch.where(stored == 0, 1.0 if scheme.format.has_zero else 0.0, stored)


def nearest(units: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """Round `units` [..., g] (weights / scale) to the nearest values, also in units of the scale.

    `zero_point`, in codes, shifts the values and broadcasts to `units`; None without zero-points.
    """
    return scheme.zero_point_type.nearest(scheme.format, units, zero_point)


def squared_error(
    units: torch.Tensor,
    grid: ScaleZero,
    unit: torch.Tensor,
    scheme: Scheme,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Measure the squared error of each group rounded to `grid`, float64 [R, 1], in units of `unit` squared.

    The groups are `units` [R, g] times `unit` [R, 1], as of `unit_of`. `importance` [R, g] weights the
    errors.
    """
    scale = grid.scale / unit
    rounded = nearest(units / torch.where(scale == 0, 1.0, scale), grid.zero_point, scheme)
    squares = rounded.mul_(scale).sub_(units).square_()
    if importance is not None:
        squares.mul_(importance)
    return squares.sum(-1, keepdim=True, dtype=torch.float64)


def _min_max(groups: torch.Tensor, scheme: Scheme) -> ScaleZero:
    levels = 2**scheme.format.bits - 1
    low = groups.amin(-1, keepdim=True).clamp_(max=0)
    high = groups.amax(-1, keepdim=True).clamp_(min=0)
    # Divide first: the range of weights near the float32 limit overflows, its steps do not.
    scale = storable(high / levels - low / levels, scheme)
    return ScaleZero(scale, scheme.zero_point_type.round(scheme.format, -low / scale, scheme.scale_dtype))


def _refit(
    units: torch.Tensor, grid: ScaleZero, unit: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None
) -> ScaleZero:
    """Fit the scale of least squared error to the codes that each group, float32 [R, g], has on `grid`.

    The groups are `units` [R, g] times `unit` [R, 1]. `importance` [R, g] weights squares; None weights all
    equally. A zero-point that lies between codes is fitted too.
    """
    scale = grid.scale / unit
    x = units.double()
    values = nearest(units / torch.where(scale == 0, 1.0, scale), grid.zero_point, scheme).double()
    free = scheme.zero_point_type.is_continuous
    mean_x, mean_v = (_mean(t, importance) if free else 0.0 for t in (x, values))
    centred = values - mean_v
    counted = centred if importance is None else centred * importance
    squares = (counted * centred).sum(-1, keepdim=True)
    fitted = (counted * (x - mean_x)).sum(-1, keepdim=True) / squares
    fitted = torch.where((squares > 0) & (fitted != 0), fitted, scale)
    zero_point = grid.zero_point
    if free:
        assert zero_point is not None
        shifted = zero_point + (mean_v - mean_x / fitted)
        zero_point = scheme.zero_point_type.round(scheme.format, shifted, scheme.scale_dtype)
    return ScaleZero(rounded_scale(fitted.float() * unit, scheme), zero_point)


def _mean(x: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    if importance is None:
        return x.mean(-1, keepdim=True)
    return (x * importance).sum(-1, keepdim=True) / importance.sum(-1, keepdim=True, dtype=torch.float64)


@dataclass(frozen=True)
class _SearchTable:
    """C candidates of the grid of a group, in units of its absmax.

    scales       [C]
    zero_points  [C], in codes; None without zero-points
    errors       [bins, C], squared error of each bin's middle in multiples of a step, float32 or float64
    """

    scales: torch.Tensor
    zero_points: torch.Tensor | None
    errors: torch.Tensor


@lru_cache(maxsize=32)
def _search_table(scheme: Scheme, count_of_group: int, device: torch.device) -> _SearchTable:
    number_format = scheme.format
    count, even = len(number_format.numbers), isinstance(number_format, IntFormat)
    low = next(low for limit, low in LOWEST if count <= limit)
    high = HIGHEST[even]
    ratios = torch.linspace(low, high, CANDIDATES if even and count > 8 else 2 * CANDIDATES)
    zero_points = None
    if scheme.has_zero_point:
        # The range of a group is between one and two absmax; every position of zero is a candidate.
        levels = 2**number_format.bits - 1
        widths = torch.linspace(low, 2 * high, CANDIDATES) / levels
        step = max(scheme.zero_point_type.step, (levels + 1) / ZERO_CANDIDATES)
        zeros = torch.arange(0, levels + step / 2, step, dtype=torch.float32)
        scales, zero_points = (t.reshape(-1, 1) for t in torch.meshgrid(widths, zeros, indexing="ij"))
    else:
        scales = (ratios / max(number_format.max, -number_format.min))[:, None]
        if not number_format.is_symmetric and scheme.scale_type.signed:
            # The longer side of a format may face either way: a negative scale turns it.
            scales = torch.cat([scales, -scales])
    low, high = BINS_RANGE
    bins = min(max(BINS_PER_CODE << number_format.bits, low), high)
    centres = (torch.arange(bins) + 0.5) * (2 / bins) - 1
    errors = (nearest(centres / scales, zero_points, scheme) * scales - centres).double().square_()
    return _SearchTable(
        scales[:, 0].to(device),
        None if zero_points is None else zero_points[:, 0].to(device),
        _integers(errors, count_of_group).T.contiguous().to(device),
    )


def _integers(errors: torch.Tensor, count_of_group: int) -> torch.Tensor:
    """Scale errors (float64 [candidates, bins]) to proportional integers.

    Their dtype is the fastest in which sums over a group of `count_of_group` weights stay exact.
    """
    worst, best = float(errors.max()), float(errors.mean(-1).min())
    # Powers of two, so that dividing by them rounds nothing.
    steps = {t: 2.0 ** math.ceil(math.log2(worst * count_of_group / limit)) for t, limit in EXACT_SUM.items()}
    fine = steps[torch.float32] <= best * STEP_OF_ERROR
    dtype = torch.float32 if fine else torch.float64
    return torch.round(errors / steps[dtype]).to(dtype)


def _histogram(units: torch.Tensor, errors: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Count the weights of each group in equal intervals of [-1, 1]: [R, bins], in the dtype of `errors`.

    `units` [R, g] are weights over the group's absmax. With `importance` a weight counts that often.
    """
    bins = errors.shape[0]
    # Slightly below bins / 2, which keeps 1.0 inside the last cell.
    cells = (units * (bins / 2 * (1 - 1e-6))).add_(bins / 2).to(torch.int64)
    counts = errors.new_zeros(units.shape[0], bins)
    if importance is None:
        return counts.scatter_add_(1, cells, counts.new_ones(1, 1).expand_as(cells))
    return counts.scatter_add_(1, cells, importance.to(errors.dtype))
