"""Fit one scale for a whole tensor, from the count of each distinct value.

A tensor is too large to be searched as one group. Its values are counted instead, as float32 with 12 digits,
which is at least as many as 16-bit weights have. There are at most 2^20 values. Counts of chunks add up to
the same integers in any order, and a fit to them is a fit to every weight. Weights with more digits are
rounded to 12, a relative error of 2^-13; the largest magnitude is kept exactly.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quantkit.calibrate.scale_search import nearest, rounded_scale, storable
from quantkit.packing.schemes import Scheme

#: Low bits of a float32 that are rounded off; it has 24 digits.
DROPPED = 24 - 12
#: Candidate scales per octave, and then between the best and each of its neighbours.
PER_OCTAVE = 32
#: Largest candidate: it covers this multiple of the largest weight.
HIGHEST = 2.0
#: Most refits of the best candidate.
REFITS = 8


@dataclass(frozen=True)
class ValueCounts:
    """Histogram of the U distinct values of a tensor.

    values  float32 [U]
    counts  float64 [U], number of weights that have each value
    absmax  largest magnitude
    """

    values: torch.Tensor
    counts: torch.Tensor
    absmax: float

    @property
    def absmean(self) -> float:
        """Return the mean magnitude."""
        return float((self.values.double().abs() * self.counts).sum() / self.counts.sum())


def count_values(chunks: Iterable[torch.Tensor]) -> ValueCounts | None:
    """Count the values of a tensor read in `chunks` (any float dtype and shape); None if not finite."""
    absmax, cells = 0.0, 1 << (32 - DROPPED)
    total: torch.Tensor | None = None
    for chunk in chunks:
        weights = chunk.to(torch.float32).contiguous().view(-1)
        largest = float(weights.abs().max())
        if not largest < math.inf:
            return None
        absmax = max(absmax, largest)
        rounded = (weights.view(torch.int32) + (1 << (DROPPED - 1))) >> DROPPED
        counted = torch.bincount(rounded & (cells - 1), minlength=cells)
        total = counted if total is None else total.add_(counted)
    assert total is not None
    total = total.cpu()
    found = total.nonzero().view(-1)
    # Sign of 32 bits, in int64.
    signed = (found ^ (cells >> 1)) - (cells >> 1)
    values = (signed << DROPPED).to(torch.int32).view(torch.float32)
    return ValueCounts(values.clamp(-absmax, absmax), total[found].double(), absmax)


def plain(tensor: ValueCounts, scheme: Scheme) -> float:
    """Return the scale of plain rounding, which maps absmax, or the mean magnitude, to the format's largest.

    Raises `FormatError` if it overflows the scale dtype.
    """
    statistic = tensor.absmax if scheme.format.rounding_statistic == "absmax" else tensor.absmean
    return float(storable(torch.tensor(statistic) / scheme.format.absmax, scheme))


def search(tensor: ValueCounts, scheme: Scheme) -> float:
    """Return the scale of least squared error found; never worse than `plain` on the counted values.

    A scale s that is optimal for its codes q is the mean of |x| / |q| weighted by q^2. Larger weights have no
    smaller codes. So the largest code times s is at least the mean of |x| (Chebyshev's sum inequality). All
    octaves from there up are searched, then the interval around the best. The best is refitted in closed
    form, s = <x, q> / <q, q>, while that helps.
    """
    best = plain(tensor, scheme)
    if tensor.absmax == 0:
        return best
    least, fitted = _measure(tensor, best, scheme)
    cover = max(scheme.format.max, -scheme.format.min)
    steps = math.ceil(PER_OCTAVE * math.log2(HIGHEST * tensor.absmax / tensor.absmean))
    octaves = torch.arange(steps + 1, dtype=torch.float64) / PER_OCTAVE
    candidates = tensor.absmean / cover * torch.exp2(octaves)
    if not scheme.format.is_symmetric:
        # The longer side of a format may face either way: a negative scale turns it.
        candidates = torch.cat([candidates, -candidates])
    for _ in range(2):
        for scale in _stored(candidates, scheme):
            error, refitted = _measure(tensor, scale, scheme)
            if error < least:
                best, least, fitted = scale, error, refitted
        between = torch.linspace(-1, 1, 2 * PER_OCTAVE + 1, dtype=torch.float64) / PER_OCTAVE
        candidates = best * torch.exp2(between)
    for _ in range(REFITS):
        for scale in _stored(torch.tensor([fitted], dtype=torch.float64), scheme):
            error, refitted = _measure(tensor, scale, scheme)
            if error < least:
                best, least, fitted = scale, error, refitted
    return best


def _stored(scales: torch.Tensor, scheme: Scheme) -> list[float]:
    """Return the distinct stored values of scales (float64 [n]), without those that overflow."""
    rounded = rounded_scale(scales.float(), scheme)
    return list(dict.fromkeys(rounded[rounded.isfinite()].tolist()))


def _measure(tensor: ValueCounts, scale: float, scheme: Scheme) -> tuple[float, float]:
    """Measure the sum of squared errors with `scale`; also return the least-squares scale for its codes."""
    codes = nearest(tensor.values / (scale or 1.0), None, scheme).double()
    exact = tensor.values.double()
    weighted = tensor.counts * codes
    error = float((tensor.counts * (exact - codes * scale).square_()).sum())
    squares = float((weighted * codes).sum())
    fitted = float((weighted * exact).sum()) / squares if squares > 0 else scale
    return error, fitted or scale
