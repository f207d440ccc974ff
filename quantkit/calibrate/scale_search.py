"""Grids: the scale and the zero-point of a group of weights.

A method sees groups, float32 [R, g], one group a row, and answers with a `ScaleZero`. Where there is
calibration data, it also sees the `importance` of every weight, float32 [R, g]: whole numbers that its
squared error counts by. Scales are computed in float32 and rounded to the dtype they are stored in before
anything is measured with them. So what was searched is what is stored.

`mse` minimises the squared error of every group. It does not round the weights once per candidate. It counts
each group into a histogram of `bins` cells over [-absmax, absmax]. The error of all candidates is then one
matrix product with a table that only depends on the scheme:

    error[R, C] = counts[R, bins] @ table[bins, C],    table[b, c] = (v_b - nearest_c(v_b))^2

With importance, a weight counts that often.

The table holds small integers, multiples of a step, so that every sum is exact. A group's winner then depends
neither on the groups that share its matrix nor on the order of the additions. Where float32 holds such sums
at a step well below the rounding error itself, the product is in float32, else in float64.

The winner is then refitted in closed form, s = <x, q> / <q, q> for its codes q. That is kept only where it is
better, measured exactly. Plain rounding competes too, so `mse` is never worse than `rtn`. On Gaussian groups
of 128 at int4 this ends 0.2 % above an exhaustive search (docs/accuracy.md).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme

#: Scale candidates per sign. Formats that are not evenly spaced get twice as many, and so do small ones: the
#: error of the former has a minimum in every octave of the scale, and of the latter a wide range to search.
CANDIDATES = 32
#: Candidates are fractions of the scale that just covers the group. The fewer values a format has, the more
#: of a group its best scale clips: up to so many values, from here ...
LOWEST = ((4, 0.1), (8, 0.25), (256, 0.4))
#: ... up to here, evenly spaced or not: where the largest values are far apart, the second may cover better.
HIGHEST = {True: 1.2, False: 1.6}
#: How many of the best candidates are rounded and measured where scales have few digits.
COARSE_CHOICES = 6
#: A float32 that leaves room for what is multiplied by it; only weights below 1e-33 want a larger one.
LARGEST_FACTOR = 2.0**120
#: The most candidate zero-points per width of a group.
ZERO_CANDIDATES = 32
#: Histogram cells per code point, and their limits: a cell must be well below a quantization step.
BINS_PER_CODE = 8
BINS_RANGE = (256, 1024)
#: Cells of the histograms made at a time, by device: on a CPU 1 MB, which is a core's cache.
HISTOGRAM_CELLS = {"cpu": 1 << 18, "cuda": 1 << 27}
#: Table entries are integers below this over the weights that a group counts for, so that their sums are
#: exact, by dtype.
EXACT_SUM = {torch.float32: 2**24, torch.float64: 2**53}
#: A table is fine enough if its step is this small against the smallest mean error of a candidate.
STEP_OF_ERROR = 1 / 32
#: The importance of the most important weight of a group; that of the others in proportion, at least 1.
MOST_IMPORTANT = 1 << 12


@dataclass(frozen=True)
class ScaleZero:
    """Scales, float32 [R, 1], exact in the scale dtype; zero-point codes, float32 [R, 1], or None."""

    scale: torch.Tensor
    zero_point: torch.Tensor | None = None


def whole_importance(importance: torch.Tensor) -> torch.Tensor:
    """Importance of any unit (float [R, g], not negative) as the whole numbers that grids take, float32.

    Whole, so that sums of them are exact in any order.
    """
    most = importance.amax(-1, keepdim=True)
    scaled = importance * torch.where(most > 0, MOST_IMPORTANT / most, 0.0)
    return scaled.round_().clamp_(1, MOST_IMPORTANT).float()


def rtn(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> ScaleZero:
    """Plain rounding: the scale maps the group's absmax (or range, or mean magnitude) to the format's.

    It knows no `importance`.
    """
    if scheme.has_zero_point:
        return _min_max(groups, scheme)
    magnitude = groups.abs()
    largest = scheme.format.absmax
    if scheme.format.rounding_statistic == "absmax":
        statistic = magnitude.amax(-1, keepdim=True)
    else:
        # Divided first: the sum of weights near the float32 limit overflows, the mean does not.
        statistic = (magnitude / magnitude.shape[-1]).sum(-1, keepdim=True)
    if scheme.scale_type.digits == 1:
        # OCP MX v1.0, 6.3: both are rounded down to powers of two.
        statistic, largest = _power_below(statistic), 2.0 ** math.floor(math.log2(largest))
    return ScaleZero(storable(statistic / largest, scheme))


def _power_below(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two up to each of `x` (float32, not negative); 0 for 0."""
    return x.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)


def global_scale(absmax: float, scheme: Scheme) -> float:
    """Return the divisor of all scales of a tensor with this absmax: its largest plain one becomes `max`."""
    if not 0 < absmax < math.inf:
        return 1.0
    return min(scheme.scale_type.max * scheme.format.absmax / absmax, LARGEST_FACTOR)


def mse(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> ScaleZero:
    """The grid with the smallest squared error per group, each weight's times its `importance`."""
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
    """Powers of two leave no choice but the plain one and its neighbours."""
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
    # A scale of few digits may be rounded far from the best, and another candidate less far.
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
    """Each group's absmax, 1 for zeros. In its units squares neither overflow nor vanish."""
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
    """For each group the first grid with the smallest squared error, measured exactly."""
    best_error = squared_error(units, best, unit, scheme, importance)
    for rival in rivals:
        # NaN, where a rival's scale overflows its dtype, is not below anything.
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
    """`scale` rounded to the scheme's scale dtype, as float32.

    A scale that is or becomes zero belongs to a group of zeros, or of weights too small for the dtype. It
    becomes 1 where the format stores zero, and stays 0 where it does not: the group is exactly zero.
    Raises `FormatError` if a scale overflows the dtype.
    """
    stored = rounded_scale(scale, scheme)
    if not torch.isfinite(stored).all():
        raise FormatError(
            f"a scale of {scale.abs().max().item():.6g} overflows {scheme.scale_dtype}; store the scales in "
            "a dtype with more range, such as bfloat16 or float32, or keep the layer dense."
        )
    return stored


def rounded_scale(scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """As `storable`, but a scale that overflows the dtype becomes infinite."""
    stored = scheme.scale_type.round(scale)
    return torch.where(stored == 0, 1.0 if scheme.format.has_zero else 0.0, stored)


def nearest(units: torch.Tensor, zero_point: torch.Tensor | None, scheme: Scheme) -> torch.Tensor:
    """The nearest values of the grid to `units` (weights over scale), in the same units."""
    return scheme.zero_point_type.nearest(scheme.format, units, zero_point)


def squared_error(
    units: torch.Tensor,
    grid: ScaleZero,
    unit: torch.Tensor,
    scheme: Scheme,
    importance: torch.Tensor | None = None,
) -> torch.Tensor:
    """Squared error of groups `units * unit` on `grid`, in squared units: float64 [R, 1]."""
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
    # Divided apart: the range of weights near the float32 limit overflows, its levels do not.
    scale = storable(high / levels - low / levels, scheme)
    return ScaleZero(scale, scheme.zero_point_type.round(scheme.format, -low / scale, scheme.scale_dtype))


def _refit(
    units: torch.Tensor, grid: ScaleZero, unit: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None
) -> ScaleZero:
    """The least-squares grid for the codes that `grid` gives: its scale, and a continuous zero-point."""
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
    """Candidates in units of absmax: scales [C], zero-points [C] or None.

    `errors` [bins, C] are their squared errors in multiples of a step, float32 or float64.
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
            # The longer side of the range may face either way: the sign of the scale turns it.
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
    """Errors (float64) as proportional integers, in the fastest dtype that sums as many exactly enough."""
    worst, best = float(errors.max()), float(errors.mean(-1).min())
    # Powers of two, so that dividing by them rounds nothing.
    steps = {t: 2.0 ** math.ceil(math.log2(worst * count_of_group / limit)) for t, limit in EXACT_SUM.items()}
    fine = steps[torch.float32] <= best * STEP_OF_ERROR
    dtype = torch.float32 if fine else torch.float64
    return torch.round(errors / steps[dtype]).to(dtype)


def _histogram(units: torch.Tensor, errors: torch.Tensor, importance: torch.Tensor | None) -> torch.Tensor:
    """Return how much of each group, all in [-1, 1], is in which cell: [R, bins], dtype of `errors`."""
    bins = errors.shape[0]
    # A hair under bins / 2 keeps 1.0 inside the last cell.
    cells = (units * (bins / 2 * (1 - 1e-6))).add_(bins / 2).to(torch.int64)
    counts = errors.new_zeros(units.shape[0], bins)
    if importance is None:
        return counts.scatter_add_(1, cells, counts.new_ones(1, 1).expand_as(cells))
    return counts.scatter_add_(1, cells, importance.to(errors.dtype))
