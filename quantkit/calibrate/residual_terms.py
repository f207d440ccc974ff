"""Search scales of additive planes: a weight is the sum of one value per plane, each with its own scale.

The levels of a group are all sums that P scales give: one per combination of plane values, 256 at most. The
best codes for given scales are those of the nearest level. The best scales for given codes solve

    G s = b,    G[p, q] = sum_i v_p(i) v_q(i),    b[p] = sum_i v_p(i) x_i,

with v_p(i) the value of weight i in plane p. `search` alternates both steps from several starts. One start is
greedy (`plain`): it fits each plane to the residual of the planes before. With two planes of `binary` this is
residual binarization, W ~ a1*B1 + a2*B2 (ARB, arXiv 2410.03129).

No step touches the weights. A group is sorted once, and each level then has an interval of it. G, b and the
error depend only on the count and sum of each interval: differences of two prefix sums. Scales are rounded to
their dtype before levels are formed, so the measured error is the stored one.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.calibrate.scale_search import rounded_scale, rtn, unit_of
from quantkit.packing.formats import NumberFormat
from quantkit.packing.schemes import Scheme

#: Starts besides the greedy one: the ratio of the scales of successive planes, and the part of the group's
#: absmax that the levels cover. Heavy tails need planes of similar scale.
RATIOS = (1 / 3, 2 / 3, 1.0)
COVERS = (1.0, 0.5)
ITERATIONS = 10
#: Relative ridge on the diagonal of G, so that planes with equal codes still have a solution.
RIDGE = 1e-9


def plain(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Return greedy scales, float32 [R, planes], of groups float32 [R, g].

    Each plane gets the scale by plain rounding of what the planes before left. Ignores `importance`.
    """
    rest, scales = groups, []
    for _ in range(scheme.planes):
        scale = rtn(rest, scheme).scale
        scales.append(scale)
        rest = rest - scheme.format.round(rest / torch.where(scale == 0, 1.0, scale)) * scale
    return torch.cat(scales, 1)


def search(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> torch.Tensor:
    """Return the scales, float32 [R, planes], of least squared error found for groups float32 [R, g].

    Never worse than `plain`. `importance` [R, g] weights squared errors; None weights all equally.
    """
    unit = unit_of(groups)
    ordered = _Sorted.of(groups.double() / unit, importance)
    greedy = plain(groups, scheme)
    best, least = greedy, _measure(ordered, greedy, unit, scheme)[0]
    for start in (greedy, *_starts(unit, scheme)):
        scales = _stored(start.double(), scheme)
        for _ in range(ITERATIONS):
            error, fitted = _measure(ordered, scales, unit, scheme)
            # NaN, from a scale that overflows its dtype, compares as not better.
            better = error < least
            best, least = torch.where(better, scales, best), torch.where(better, error, least)
            scales = _stored(fitted, scheme)
    return best


def _starts(unit: torch.Tensor, scheme: Scheme) -> Iterator[torch.Tensor]:
    """Yield scales, float32 [R, planes], whose largest level is a part, of `COVERS`, of a group's absmax.

    `unit` [R, 1] is the absmax of each group. Scales of successive planes have a ratio of `RATIOS`.
    """
    for ratio, cover in itertools.product(RATIOS, COVERS):
        shape = torch.tensor([ratio**plane for plane in range(scheme.planes)], device=unit.device)
        yield unit * (cover / scheme.format.absmax / shape.sum() * shape)


def encode(groups: torch.Tensor, scales: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes (uint8 [R, g]) and values (float32) of the levels nearest to `groups` ([R, g]).

    `scales` are [R, planes]. Midpoints go down.
    """
    codes, values = _combinations(scheme.format, scheme.planes, groups.device)
    unit = unit_of(groups)
    levels, order = _levels(scales, unit, values)
    nearest = torch.searchsorted(_midpoints(levels), groups.double() / unit)
    chosen = order.gather(1, nearest)
    return codes[chosen], (levels.gather(1, nearest) * unit).float()


@lru_cache(maxsize=32)
def _combinations(
    number_format: NumberFormat, planes: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """List the L combinations of plane values: their codes (uint8 [L]), and the values (float64 [planes, L]).

    Codes without a value in some plane are left out.
    """
    bits = number_format.bits
    codes = torch.arange(2 ** (planes * bits))
    table = torch.tensor(number_format.values, dtype=torch.float64)
    values = torch.stack([table[codes >> (plane * bits) & (2**bits - 1)] for plane in range(planes)])
    numbers = ~values.isnan().any(0)
    return codes[numbers].to(torch.uint8).to(device), values[:, numbers].contiguous().to(device)


def _levels(
    scales: torch.Tensor, unit: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the ascending levels of each group, float64 [R, L], and the combination of each, int64 [R, L].

    Levels are multiples of `unit` (float32 [R, 1]). `scales` are [R, planes]. Combinations are columns of
    `values`, float64 [planes, L] of `_combinations`.
    """
    in_units = scales.double() / unit
    total = torch.zeros(len(scales), values.shape[1], dtype=torch.float64, device=scales.device)
    for plane, of_plane in enumerate(values):
        total += in_units[:, plane, None] * of_plane
    # A stable sort: of equal levels, the same code is always first.
    ordered = total.sort(dim=1, stable=True)
    return ordered.values, ordered.indices


def _midpoints(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:, 1:] + levels[:, :-1]) / 2


@dataclass(frozen=True)
class _Sorted:
    """Groups in ascending order, float64 [R, g], with weighted sums, float64.

    `counts` and `sums` are prefix sums, [R, g + 1], starting with 0, of the importance and of importance
    times weight; `squares` is [R, 1].
    """

    weights: torch.Tensor
    counts: torch.Tensor
    sums: torch.Tensor
    squares: torch.Tensor

    @classmethod
    def of(cls, groups: torch.Tensor, importance: torch.Tensor | None) -> "_Sorted":
        weights, order = groups.sort(dim=1, stable=True)
        counts = torch.ones_like(weights) if importance is None else importance.double().gather(1, order)
        sums = counts * weights
        squares = (sums * weights).sum(1, keepdim=True)
        return cls(weights, F.pad(counts.cumsum(1), (1, 0)), F.pad(sums.cumsum(1), (1, 0)), squares)


def _measure(
    groups: _Sorted, scales: torch.Tensor, unit: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor]:
    """Measure the squared error of each group with its best codes for `scales`; also return the next scales.

    The error is float64 [R, 1], in units of `unit` squared. The next scales, float64 [R, planes], are those
    of least squared error for these codes.
    """
    _, values = _combinations(scheme.format, scheme.planes, scales.device)
    levels, order = _levels(scales, unit, values)
    cuts = torch.searchsorted(groups.weights, _midpoints(levels), right=True)
    ends = F.pad(F.pad(cuts, (1, 0)), (0, 1), value=groups.weights.shape[1])
    counts, sums = (prefix.gather(1, ends).diff(dim=1) for prefix in (groups.counts, groups.sums))
    error = groups.squares + (levels * (levels * counts - 2 * sums)).sum(1, keepdim=True)
    used = [plane[order] for plane in values]
    gram = [[(one * other * counts).sum(1) for other in used] for one in used]
    moments = [(plane * sums).sum(1) for plane in used]
    return error, _solve(gram, moments) * unit


def _solve(gram: list[list[torch.Tensor]], moments: list[torch.Tensor]) -> torch.Tensor:
    """Solve gram x = moments for x float64 [R, P], by Gauss-Jordan.

    `gram` is many small positive semidefinite matrices.
    """
    planes = range(len(moments))
    rows = [[*gram[p], moments[p]] for p in planes]
    for p in planes:
        rows[p][p] = rows[p][p] * (1 + RIDGE) + 1e-300
    for p in planes:
        rows[p] = [entry / rows[p][p] for entry in rows[p]]
        for q in planes:
            if q != p:
                factor = rows[q][p]
                rows[q] = [entry - factor * pivot for entry, pivot in zip(rows[q], rows[p], strict=True)]
    return torch.stack([row[-1] for row in rows], 1)


def _stored(scales: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return `scales`, float32 [R, planes], in stored form, largest first.

    Scales are made positive if their signs add no level.
    """
    if scheme.format.is_symmetric or not scheme.scale_type.signed:
        scales = scales.abs()
    order = scales.abs().argsort(dim=1, descending=True, stable=True)
    return rounded_scale(scales.gather(1, order).float(), scheme)
