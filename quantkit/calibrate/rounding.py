"""Rounding with compensation: codes that make the error of a linear's outputs small, not that of its weights.

For weights W [N, K], stored values Q and the second moments H of the inputs (`calibrate/moments.py`), the
squared error of the outputs is a quadratic of the error E = W - Q, row by row:

    tr(E H E^T) = sum over rows of e H e^T.

With H = L D L^T, L unit lower triangular, that is sum_j D_j (e_j + sum_{k>j} e_k L_kj)^2. So a column is best
rounded not at w_j but at w_j + sum_{k>j} e_k L_kj, once the columns after it have their errors. This is GPTQ
(arXiv 2210.17323), written as LDLQ (QuIP, arXiv 2307.13304, theorem 6: the two are equal). It takes one
factorization and no inverse, and every target is computed from the original weights and the errors so far, so
that rounding errors do not add up as they do in repeated updates of the weights.

Columns come in the order of falling mean square of their feature (GPTQ's activation order): what is rounded
first has all others to make good for it. Scales were chosen before, in the original order, so groups stay
whole.

`polish` goes on by coordinate descent on the same quadratic. Given the errors of all other columns the best
target is

    w_j + sum_{k != j} e_k H_kj / H_jj,

and the best scale of a group for its codes v is s + (v H_g e) / (v H_gg v). Neither step can raise the error.
"""

from dataclasses import dataclass

import torch

from quantkit.calibrate.grids import nearest, rounded_scale
from quantkit.calibrate.moments import Factor
from quantkit.packing.schemes import Scheme

#: Columns whose targets are computed together from the errors before them, by one matrix product.
BLOCK = 128


@dataclass(frozen=True, eq=False)
class Rounded:
    """Values [n, K] in units of their scale, scales [n, G], and errors W - Q [n, K], all float32."""

    values: torch.Tensor
    scale: torch.Tensor
    errors: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Weights float32 [n, K] with the grid of each: scales and zero-points (or None) [n, G]."""

    weights: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme

    def wide(self, per_group: torch.Tensor) -> torch.Tensor:
        """One value per group as one per weight: [n, G] -> [n, K]."""
        columns = self.weights.shape[1]
        size = self.scheme.group_columns(columns)
        return per_group.repeat_interleave(size, dim=1)[:, :columns]


def round_nearest(rows: Rows) -> Rounded:
    """Every weight to its nearest value."""
    scale = rows.wide(rows.scale)
    zero = None if rows.zero_point is None else rows.wide(rows.zero_point)
    values = nearest(rows.weights / torch.where(scale == 0, 1.0, scale), zero, rows.scheme)
    return Rounded(values, rows.scale, rows.weights - values * scale)


def round_refitted(rows: Rows, second: torch.Tensor) -> Rounded:
    """Every weight to its nearest value, and scales refitted to the outputs; twice, where that is better for
    a row.

    `second` is H, damped.
    """
    first = refit_scales(rows, round_nearest(rows), second)
    moved = Rows(rows.weights, first.scale, rows.zero_point, rows.scheme)
    again = refit_scales(rows, round_nearest(moved), second)
    better = _output_error(again, second) < _output_error(first, second)
    return Rounded(
        torch.where(better, again.values, first.values),
        torch.where(better, again.scale, first.scale),
        torch.where(better, again.errors, first.errors),
    )


def _output_error(rounded: Rounded, second: torch.Tensor) -> torch.Tensor:
    """float64 [n, 1]."""
    return (rounded.errors @ second).double().mul_(rounded.errors).sum(1, keepdim=True)


def compensate(rows: Rows, factor: Factor) -> Rounded:
    """GPTQ: each column rounded at its weight plus what the errors of the columns before it ask for."""
    start = Rounded(torch.zeros_like(rows.weights), rows.scale, torch.zeros_like(rows.weights))
    return _sweep(rows, start, factor.coupling, factor.order)


def polish(rows: Rows, start: Rounded, second: torch.Tensor, order: torch.Tensor, sweeps: int) -> Rounded:
    """`start` after so many rounds of scales and codes by coordinate descent on `second`, H damped.

    Columns are taken in `order` (int64 [K]). Scales stay exact in the scale dtype.
    """
    ordered = second.index_select(0, order).index_select(1, order)
    coupling = ordered / ordered.diagonal()
    coupling.fill_diagonal_(0.0)
    for _ in range(sweeps):
        start = _sweep(rows, refit_scales(rows, start, second), coupling, order)
    return refit_scales(rows, start, second) if sweeps else start


def refit_scales(rows: Rows, start: Rounded, second: torch.Tensor) -> Rounded:
    """The codes of `start` with the scale of each group refitted, one group after the other.

    A scale moves only where that lowers the error of the outputs as it is stored, and never to zero.
    """
    scale, errors, values = start.scale.clone(), start.errors.clone(), start.values
    columns = values.shape[1]
    size = rows.scheme.group_columns(columns)
    for group, at in enumerate(range(0, columns, size)):
        span = slice(at, min(at + size, columns))
        v, old = values[:, span], scale[:, group, None]
        own = second[span, span]
        pull = (errors @ second[:, span] * v).sum(1, keepdim=True)
        weight = (v @ own * v).sum(1, keepdim=True)
        fitted = rounded_scale(torch.where(weight > 0, old + pull / weight, old), rows.scheme)
        step = fitted - old
        # What the error changes by when the scale moves by `step`.
        better = (step * (step * weight - 2 * pull) < 0) & (fitted != 0) & fitted.isfinite()
        scale[:, group, None] = torch.where(better, fitted, old)
        moved = rows.weights[:, span] - v * scale[:, group, None]
        errors[:, span] = torch.where(better, moved, errors[:, span])
    return Rounded(values, scale, errors)


def _sweep(rows: Rows, start: Rounded, coupling: torch.Tensor, order: torch.Tensor) -> Rounded:
    """Round each column once, in `order`, at its weight plus the errors of the others times its `coupling`.

    `coupling` [K, K] has both dimensions in that order and a zero diagonal.
    """
    scheme = rows.scheme
    # Columns become rows, so that each is contiguous.
    weights, scale = (t.index_select(1, order).T.contiguous() for t in (rows.weights, rows.wide(start.scale)))
    zero = None
    if rows.zero_point is not None:
        zero = rows.wide(rows.zero_point).index_select(1, order).T.contiguous()
    divisor = torch.where(scale == 0, 1.0, scale)
    errors = start.errors.index_select(1, order).T.contiguous()
    values = torch.empty_like(weights)
    for at in range(0, len(order), BLOCK):
        stop = min(at + BLOCK, len(order))
        targets = torch.addmm(weights[at:stop], coupling[:, at:stop].T, errors)
        # What the errors of this block have changed by since the product.
        change = torch.zeros_like(targets)
        for i in range(stop - at):
            j = at + i
            target = targets[i]
            if i:
                target = target + coupling[at:j, j] @ change[:i]
            rounded = nearest(target / divisor[j], None if zero is None else zero[j], scheme)
            values[j] = rounded
            change[i] = weights[j] - rounded * scale[j] - errors[j]
        errors[at:stop] = weights[at:stop] - values[at:stop] * scale[at:stop]
    back = torch.argsort(order)
    return Rounded(values.T[:, back].contiguous(), start.scale, errors.T[:, back].contiguous())
