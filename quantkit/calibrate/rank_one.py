"""Fit column scales: one factor per input feature, from the magnitudes of a whole tensor.

Factors c of columns and r of rows minimize the sum of (|w_ij| - r_i c_j)^2: the best rank-one approximation
of magnitudes, as in SVID (OneBit, arXiv 2402.11295) and ARB-RC (arXiv 2410.03129). Alternating least squares,

    r_i = sum_j |w_ij| c_j / sum_j c_j^2        c_j = sum_i |w_ij| r_i / sum_i r_i^2,

is power iteration. As magnitudes are positive, it starts close and needs few rounds. Sums are in float64 and
in the order of the rows, so the result does not depend on the number of workers.
"""

from collections.abc import Callable, Iterable

import torch

from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.packing.schemes import Scheme

#: Yields the rows of a tensor, [n, K] of any float dtype at a time, in order; may be called repeatedly.
Chunks = Callable[[], Iterable[torch.Tensor]]

ROUNDS = 20
#: Convergence: largest change of a factor, below the digits that are stored.
TOLERANCE = 1e-4


def fit_column_scale(chunks: Chunks, scheme: Scheme) -> torch.Tensor:
    """Fit the factor of each input feature, [K] in its stored dtype, with mean 1 before rounding.

    A factor that is zero or not finite becomes 1.
    """
    factors: torch.Tensor | None = None
    for _ in range(ROUNDS):
        fitted = _round(chunks, factors)
        converged = factors is not None and bool(((fitted - factors).abs() <= TOLERANCE * factors).all())
        factors = fitted
        if converged:
            break
    assert factors is not None
    stored = SCALE_TYPES[scheme.column_scale_dtype].round(factors)
    usable = stored.isfinite() & (stored > 0)
    return torch.where(usable, stored, 1.0).to(scheme.column_scale_dtype)


def _round(chunks: Chunks, factors: torch.Tensor | None) -> torch.Tensor:
    """Run one round of both steps; return the next factors, float64 [K], of mean 1."""
    total: torch.Tensor | None = None
    for chunk in chunks():
        magnitude = chunk.double().abs_()
        # A common factor of all r cancels, as the mean of c is 1.
        rows = magnitude.sum(1) if factors is None else magnitude @ factors
        columns = rows @ magnitude
        total = columns if total is None else total + columns
    assert total is not None
    return torch.where(total > 0, total, 0.0) / total.mean() if bool(total.mean() > 0) else total


def refit(
    groups: torch.Tensor, values: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the scale [R, 1] of least weighted error for the codes of a group: float32, not rounded.

    `values` are the decoded codes and `importance` the weights of squared errors, [R, g] as `groups`. For
    `binary` and importance c^2 it is the r_i of the module docstring.
    """
    weighted = importance.double() * values
    squares = (weighted * values).sum(-1, keepdim=True)
    fitted = (weighted * groups).sum(-1, keepdim=True) / squares
    return torch.where(fitted.isfinite() & (fitted != 0), fitted, scale).float()


def weighted_error(
    groups: torch.Tensor, values: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Return the sum of importance * (groups - values * scale)^2 of each group, float64 [R, 1]."""
    residual = groups.double() - values.double() * scale.double()
    return residual.square_().mul_(importance).sum(-1, keepdim=True)
