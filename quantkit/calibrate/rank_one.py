"""Column scales: one factor per input feature, fitted to the magnitudes of a whole tensor.

The factors c and row factors r make the sum of (|w_ij| - r_i c_j)^2 least: the best rank-one magnitude, as in
SVID (OneBit, arXiv 2402.11295) and ARB-RC (arXiv 2410.03129). Alternating least squares,

    r_i = sum_j |w_ij| c_j / sum_j c_j^2        c_j = sum_i |w_ij| r_i / sum_i r_i^2,

is power iteration. Magnitudes are positive, so that it starts close and a few rounds do. Sums are in float64
and in the order of the rows: what is stored does not depend on who computed it.
"""

from collections.abc import Callable, Iterable

import torch

from quantkit.packing.schemes import SCALE_TYPES, Scheme

#: The rows of a tensor, [n, K] of any float dtype at a time, in order, as often as asked.
Chunks = Callable[[], Iterable[torch.Tensor]]

ROUNDS = 20
#: Rounds end where no factor moves by more, which is less than the digits that are stored.
TOLERANCE = 1e-4


def fit_column_scale(chunks: Chunks, scheme: Scheme) -> torch.Tensor:
    """The factor of each input feature, [K] in the dtype it is stored in; their mean is 1 before rounding.

    A factor that is zero or not finite becomes 1.
    """
    factors: torch.Tensor | None = None
    for _ in range(ROUNDS):
        fitted = _round(chunks, factors)
        done = factors is not None and bool(((fitted - factors).abs() <= TOLERANCE * factors).all())
        factors = fitted
        if done:
            break
    assert factors is not None
    stored = SCALE_TYPES[scheme.column_scale_dtype].round(factors)
    usable = stored.isfinite() & (stored > 0)
    return torch.where(usable, stored, 1.0).to(scheme.column_scale_dtype)


def _round(chunks: Chunks, factors: torch.Tensor | None) -> torch.Tensor:
    """One round of both steps: the next factors, float64 [K], of mean 1."""
    total: torch.Tensor | None = None
    for chunk in chunks():
        magnitude = chunk.double().abs_()
        # A common factor of all r does not matter, as the mean of c is 1.
        rows = magnitude.sum(1) if factors is None else magnitude @ factors
        columns = rows @ magnitude
        total = columns if total is None else total + columns
    assert total is not None
    return torch.where(total > 0, total, 0.0) / total.mean() if bool(total.mean() > 0) else total


def refit(
    groups: torch.Tensor, values: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """The scale [R, 1] with the least weighted error for the codes of a group: float32, not yet rounded.

    `values` are those of the codes that `scale` gives, `importance` the weight of each squared error (both
    [R, g], as `groups`). For `binary` and importance c^2 it is the r_i of the module docstring.
    """
    weighted = importance.double() * values
    squares = (weighted * values).sum(-1, keepdim=True)
    fitted = (weighted * groups).sum(-1, keepdim=True) / squares
    return torch.where(fitted.isfinite() & (fitted != 0), fitted, scale).float()


def weighted_error(
    groups: torch.Tensor, values: torch.Tensor, importance: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    """Sum of importance * (groups - values * scale)^2 of each group, float64 [R, 1]."""
    residual = groups.double() - values.double() * scale.double()
    return residual.square_().mul_(importance).sum(-1, keepdim=True)
