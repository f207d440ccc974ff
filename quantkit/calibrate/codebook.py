"""Fitted code books: the values of a format, chosen for one tensor.

Lloyd and Max's alternation, with a scale per group. Given a book, the method finds each group's scale and
with it the code of every weight. Given scales and codes, the squared error is a sum over the values v of

    sum_i s_i^2 (w_i / s_i - v)^2,    least at    v = sum_i s_i w_i / sum_i s_i^2,

over the weights i that have the value. It starts from quantiles of the normal distribution. For most of the
way it moves further than the least squares say: as the scales follow, that is too short a step. The book that
is kept is the one under which the method had the smallest error, so no round can make it worse.

The book is free to be longer on one side, and groups are free to turn it: their scale may be negative.
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

#: How far each round moves the book, in parts of the way to the least squares. Twice saves half of them.
STEPS = (2.0,) * 6 + (1.0,) * 2


class Fit(Protocol):
    """Choice of grids by a method: groups float32 [R, g], and what their squared errors count by, or None."""

    def __call__(
        self, groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None
    ) -> ScaleZero: ...


def fit_codebook(rows: torch.Tensor, scheme: Scheme, absmax: float, fit: Fit) -> tuple[float, ...]:
    """The book, ascending and of largest magnitude 1, for a tensor with rows such as `rows`, float32 [n, K].

    `absmax` is the largest magnitude of the whole tensor, and `fit` how the method chooses scales.
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
    """`book` moved towards `fitted`, largest magnitude 1; None where that is no book."""
    start = torch.tensor(book, dtype=torch.float64)
    moved = start + step * (torch.tensor(fitted, dtype=torch.float64) - start)
    moved = (moved / moved.abs().max()).float()
    ascending = bool(moved.isfinite().all()) and bool((moved.diff() > 0).all())
    return tuple(moved.tolist()) if ascending else None


def bind(scheme: Scheme, book: Sequence[float]) -> Scheme:
    """`scheme` with the values of its codes."""
    assert isinstance(scheme.format, FittedFormat)
    return replace(scheme, format=scheme.format.bind(book))


def normal_book(count: int) -> tuple[float, ...]:
    """Return the first book: evenly spaced quantiles of the normal distribution, one side with one more, and
    zero.

    For 16 values this is nf4, whose offset it generalises (QLoRA, arXiv 2305.14314, appendix E).
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
    """The squared error under `book`, and the values with the smallest error for its scales and codes."""
    bound = bind(scheme, book)
    factor = global_scale(absmax, bound) if scheme.global_scale else 1.0
    sums = torch.zeros(2, len(book), dtype=torch.float64)
    error = 0.0
    for groups in _groups(rows * factor, scheme):
        grid = fit(groups, bound)
        scale = torch.where(grid.scale == 0, 1.0, grid.scale)
        codes, values = quantize_units(groups / scale, None, bound)
        residual = torch.linalg.vector_norm(groups - values * grid.scale, dim=-1).double().cpu()
        # Added up in Python and by bincount, one after the other: no number of threads changes the order.
        error += sum(residual.square().tolist())
        flat = codes.flatten().cpu().to(torch.int64)
        exact = grid.scale.double()
        for at, terms in enumerate((exact * groups, (exact * exact).expand_as(groups))):
            sums[at] += torch.bincount(flat, terms.flatten().cpu(), minlength=len(book))
    # A value that no weight has stays where it is.
    fitted = torch.where(sums[1] > 0, sums[0] / sums[1], torch.tensor(book, dtype=torch.float64))
    return error / factor**2, fitted.tolist()


def _groups(rows: torch.Tensor, scheme: Scheme) -> Iterator[torch.Tensor]:
    """The groups of `rows`, [R, g]: the whole ones, then the ragged last ones."""
    for span, width in scheme.group_spans(rows.shape[1]):
        yield rows[:, span].reshape(-1, width)
