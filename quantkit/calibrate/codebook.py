"""Fit code books: the values of a format, chosen for one tensor.

Lloyd-Max iteration with a scale per group. For a given book, the method finds each group's scale, and thereby
the code of every weight. For given scales and codes, the squared error is a sum over the values v of

    sum_i s_i^2 (w_i / s_i - v)^2,    least at    v = sum_i s_i w_i / sum_i s_i^2,

over the weights i with that value. The iteration starts from quantiles of the normal distribution. Most
rounds take twice the least-squares step, because the scales follow and make the plain step too short. The
book with the smallest error is kept, so no round can make it worse.

A book may have more values on one side of zero; a negative scale mirrors it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist
from typing import Protocol

import torch

from quantkit.calibrate.scale_search import ScaleZero, global_scale
from quantkit.packing.formats import FittedFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import quantize_units

#: Step of each round, relative to the least-squares step. Steps of 2 save half of the rounds.
STEPS = (2.0,) * 6 + (1.0,) * 2


class Fit(Protocol):
    """Function of a method that chooses scale and zero-point of each group, float32 [R, g].

    `importance` [R, g] weights squared errors; None weights all equally.
    """

    def __call__(
        self, groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None
    ) -> ScaleZero: ...


def fit_codebook(rows: torch.Tensor, scheme: Scheme, absmax: float, fit: Fit) -> tuple[float, ...]:
    """Fit a code book, ascending and of largest magnitude 1, to a sample of rows, float32 [n, K].

    `absmax` is the largest magnitude of the whole tensor, and `fit` the method's choice of scales.
    """
    assert isinstance(scheme.format, FittedFormat)
    book = normal_book(2**scheme.format.bits)
    best, least = book, float("inf")
    for step in (*STEPS, 0.0):
        error, fitted = _round(rows, scheme, book, absmax, fit)
        if error < least:
            best, least = book, error
        moved = _moved(book, fitted, step) or _moved(book, fitted, 1.0)
        if moved is None:
            break
        book = moved
    return best


def _moved(book: Sequence[float], fitted: Sequence[float], step: float) -> tuple[float, ...] | None:
    """Move `book` towards `fitted` and rescale it to largest magnitude 1; None if the result is no book."""
    start = torch.tensor(book, dtype=torch.float64)
    moved = start + step * (torch.tensor(fitted, dtype=torch.float64) - start)
    moved = (moved / moved.abs().max()).float()
    ascending = bool(moved.isfinite().all()) and bool((moved.diff() > 0).all())
    return tuple(moved.tolist()) if ascending else None


def bind(scheme: Scheme, book: Sequence[float]) -> Scheme:
    """Return `scheme` with the values `book` for its codes."""
    assert isinstance(scheme.format, FittedFormat)
    return replace(scheme, format=scheme.format.bind(book))


def normal_book(count: int) -> tuple[float, ...]:
    """Return the initial book: zero, and evenly spaced quantiles of the normal distribution on both sides.

    One side has one value more. For 16 values this is nf4, whose offset it generalises (QLoRA, arXiv
    2305.14314, appendix E).
    """
    if count < 4:
        return (-1.0, 1.0)
    normal, outermost = NormalDist(), 1 - (1 / (count - 1) + 1 / count) / 4
    sides = []
    for values in (count // 2 - 1, count // 2):
        step = (outermost - 0.5) / values
        sides.append([normal.inv_cdf(outermost - i * step) for i in range(values)])
    book = torch.tensor([*(-value for value in sides[0]), 0.0, *reversed(sides[1])], dtype=torch.float64)
    return tuple((book / book.abs().max()).float().tolist())


def _round(
    rows: torch.Tensor, scheme: Scheme, book: tuple[float, ...], absmax: float, fit: Fit
) -> tuple[float, list[float]]:
    """Round rows (float32 [n, K]) to the values `book`; return the sum of squared errors and better values.

    The latter are those of least squared error if scales and codes stay. `absmax` is that of the whole
    tensor.
    """
    bound = bind(scheme, book)
    factor = global_scale(absmax, bound) if scheme.global_scale else 1.0
    sums = torch.zeros(2, len(book), dtype=torch.float64)
    error = 0.0
    for groups in _groups(rows * factor, scheme):
        grid = fit(groups, bound)
        scale = torch.where(grid.scale == 0, 1.0, grid.scale)
        codes, values = quantize_units(groups / scale, None, bound)
        residual = torch.linalg.vector_norm(groups - values * grid.scale, dim=-1).double().cpu()
        # Summed in a fixed order, in Python and by bincount, so that the number of threads does not matter.
        error += sum(residual.square().tolist())
        flat = codes.flatten().cpu().to(torch.int64)
        exact = grid.scale.double()
        for at, terms in enumerate((exact * groups, (exact * exact).expand_as(groups))):
            sums[at] += torch.bincount(flat, terms.flatten().cpu(), minlength=len(book))
    # A value that no weight has is kept.
    fitted = torch.where(sums[1] > 0, sums[0] / sums[1], torch.tensor(book, dtype=torch.float64))
    return error / factor**2, fitted.tolist()


def _groups(rows: torch.Tensor, scheme: Scheme) -> Iterator[torch.Tensor]:
    """Yield the groups of `rows`, float32 [R, g]: whole groups first, then the shorter last ones."""
    for span, width in scheme.group_spans(rows.shape[1]):
        yield rows[:, span].reshape(-1, width)
