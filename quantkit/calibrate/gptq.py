"""GPTQ and coordinate descent: choose codes for a small error of a linear's outputs, not its weights.

Let W [N, K] be weights, Q stored values and H the Hessian of the inputs (`calibrate/hessian.py`). The squared
error of the outputs is a quadratic form in the error E = W - Q, row by row:

    tr(E H E^T) = sum over rows of e H e^T.

With H = L D L^T, L unit lower triangular, that is sum_j D_j (e_j + sum_{k>j} e_k L_kj)^2. So once the columns
after j are rounded, the best target of column j is not w_j but w_j + sum_{k>j} e_k L_kj. This is GPTQ (arXiv
2210.17323) in the form LDLQ (QuIP, arXiv 2307.13304, theorem 6: both are equal). It takes one factorization
and no inverse. Every target is computed from the original weights and the errors so far. So rounding errors
do not accumulate, as they do in repeated updates of the weights.

Columns are rounded by falling mean square of their feature (GPTQ's activation order): all later columns can
compensate the first ones. Scales are chosen before, in the original order, so groups stay whole.

`coordinate_descent` continues on the same quadratic form. Given the errors of all other columns, the best
target is

    w_j + sum_{k != j} e_k H_kj / H_jj,

and the best scale of a group for its codes v is s + (v H_g e) / (v H_gg v). Neither step can raise the error.
"""

from collections.abc import Callable, Set
from dataclasses import dataclass
from typing import NamedTuple

import torch

from quantkit.calibrate.hessian import CholeskyFactor, DampedHessian
from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.scale_search import nearest, rounded_scale
from quantkit.calibrate.steps import SINGULAR, Rounded, Rounding, Rows
from quantkit.packing.schemes import Scheme

#: Columns whose targets are computed by one matrix product from the errors before them.
BLOCK = 128
#: Columns of H per product when outputs are computed.
PRODUCT_COLUMNS = 4096
#: Columns, in whole groups, whose outputs are computed together before their scales are refitted, by device:
#: a single group leaves most of a GPU idle.
REFIT_COLUMNS = {"cpu": 1, "cuda": 1024}


def round_nearest(rows: Rows) -> Rounded:
    """Round every weight to its nearest value."""
    scale = rows.wide(rows.scale)
    zero = None if rows.zero_point is None else rows.wide(rows.zero_point)
    values = nearest(rows.weights / torch.where(scale == 0, 1.0, scale), zero, rows.scheme)
    return Rounded(values, rows.scale, rows.weights - values * scale)


def round_refitted(rows: Rows, hessian: DampedHessian) -> Rounded:
    """Round every weight to nearest and refit scales to the outputs; a second time for rows it improves."""
    first = refit_scales(rows, round_nearest(rows), hessian)
    moved = Rows(rows.weights, first.scale, rows.zero_point, rows.scheme)
    again = refit_scales(rows, round_nearest(moved), hessian)
    better = _output_error(again, hessian) < _output_error(first, hessian)
    return Rounded(
        torch.where(better, again.values, first.values),
        torch.where(better, again.scale, first.scale),
        torch.where(better, again.errors, first.errors),
    )


def _output_error(rounded: Rounded, hessian: DampedHessian) -> torch.Tensor:
    """Return the squared output error of each row, float64 [n, 1]."""
    columns = rounded.errors.shape[1]
    spans = (slice(at, min(at + PRODUCT_COLUMNS, columns)) for at in range(0, columns, PRODUCT_COLUMNS))
    products = torch.cat([rounded.errors @ hessian.columns(span) for span in spans], 1)
    return products.double().mul_(rounded.errors).sum(1, keepdim=True)


def gptq_round(rows: Rows, factor: CholeskyFactor) -> Rounded:
    """Round `rows` by GPTQ: each column at its weight plus the coupled errors of the columns before it.

    `factor` is that of the Hessian of the inputs.
    """
    start = Rounded(torch.zeros_like(rows.weights), rows.scale, torch.zeros_like(rows.weights))
    _sweep(rows, start, lambda span: factor.coupling[:, span].T, factor.order)
    return start


def coordinate_descent(
    rows: Rows, start: Rounded, hessian: DampedHessian, order: torch.Tensor, sweeps: int
) -> Rounded:
    """Improve `start` by `sweeps` rounds of coordinate descent on scales and codes; reuses its memory.

    Columns are taken in `order` (int64 [K]). Scales stay exact in the scale dtype.
    """

    def coupling(span: slice) -> torch.Tensor:
        found = hessian.ordered(order, span)
        own = found[:, span].diagonal()
        found.div_(own.clone()[:, None])
        own.zero_()
        return found

    for _ in range(sweeps):
        start = refit_scales(rows, start, hessian)
        _sweep(rows, start, coupling, order)
    return refit_scales(rows, start, hessian) if sweeps else start


def refit_scales(rows: Rows, start: Rounded, hessian: DampedHessian) -> Rounded:
    """Refit the scale of each group to the codes of `start`, one group after the other.

    Reuses the memory of its values and errors. A scale changes only if that lowers the output error of stored
    values, and never to zero.
    """
    scale, errors, values = start.scale.clone(), start.errors, start.values
    columns = values.shape[1]
    size = rows.scheme.group_columns(columns)
    together = size * max(1, REFIT_COLUMNS[values.device.type] // size)
    for first in range(0, columns, together):
        block = slice(first, min(first + together, columns))
        h_columns = hessian.columns(block)
        outputs = errors @ h_columns
        for at in range(first, block.stop, size):
            span, group = slice(at, min(at + size, columns)), at // size
            inside = slice(at - first, span.stop - first)
            v, old = values[:, span], scale[:, group, None]
            pull = (outputs[:, inside] * v).sum(1, keepdim=True)
            weight = (v @ h_columns[span, inside] * v).sum(1, keepdim=True)
            fitted = rounded_scale(torch.where(weight > 0, old + pull / weight, old), rows.scheme)
            step = fitted - old
            # Change of the squared error if the scale changes by `step`.
            better = (step * (step * weight - 2 * pull) < 0) & (fitted != 0) & fitted.isfinite()
            scale[:, group, None] = torch.where(better, fitted, old)
            moved = rows.weights[:, span] - v * scale[:, group, None]
            moved = torch.where(better, moved, errors[:, span])
            if span.stop < block.stop:
                outputs[:, inside.stop :].addmm_(moved - errors[:, span], h_columns[span, inside.stop :])
            errors[:, span] = moved
    return Rounded(values, scale, errors)


def positive_scales(rows: Rows, rounded: Rounded) -> Rounded:
    """Make negative scales positive by negating values, if the format has both signs.

    Refitting may turn a scale negative, and scales of NVFP4 have no sign.
    """
    turned = rounded.scale < 0
    if not rows.scheme.format.is_symmetric or rows.zero_point is not None or not bool(turned.any()):
        return rounded
    sign = torch.where(turned, -1.0, 1.0)
    return Rounded(rounded.values * rows.wide(sign), rounded.scale * sign, rounded.errors)


def _sweep(
    rows: Rows, rounded: Rounded, coupling: Callable[[slice], torch.Tensor], order: torch.Tensor
) -> None:
    """Round each column once, in `order`, at its weight plus the coupled errors of others: GPTQ's loop.

    GPTQ couples each column to the errors of earlier ones, coordinate descent to those of all others.
    `coupling` returns rows [c, K] for some columns in that order, with a zero diagonal. Updates values and
    errors of `rounded` in place.
    """
    size = rows.scheme.group_columns(len(order))
    # Transposed, so that each column is contiguous.
    weights, errors = (t.index_select(1, order).T.contiguous() for t in (rows.weights, rounded.errors))
    values = torch.empty_like(weights)
    round_columns: Callable[[Columns, Scheme], torch.Tensor] = _gptq_block
    for at in range(0, len(order), BLOCK):
        block = slice(at, min(at + BLOCK, len(order)))
        groups, coupled = order[block] // size, coupling(block)
        scale = rounded.scale.index_select(1, groups).T.contiguous()
        columns = Columns(
            torch.addmm(weights[block], coupled, errors),
            weights[block],
            scale,
            None if rows.zero_point is None else rows.zero_point.index_select(1, groups).T.contiguous(),
            errors[block],
            coupled[:, block].T,
        )
        if at == 0 and weights.is_cuda:
            round_columns = _GptqGraph(columns, rows.scheme)
        values[block] = round_columns(columns, rows.scheme)
        errors[block] = weights[block] - values[block] * scale
    back = torch.argsort(order)
    rounded.values.copy_(values.index_select(0, back).T)
    rounded.errors.copy_(errors.index_select(0, back).T)


class Columns(NamedTuple):
    """Columns to round one after the other, as rows [c, n], float32.

    `targets` include the coupled errors of all other columns, `weights` W do not. `scale` and `zero_point`
    are those of each weight. `errors` are W - Q of these columns before they are rounded. `coupling` is
    [c, c].
    """

    targets: torch.Tensor
    weights: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    errors: torch.Tensor
    coupling: torch.Tensor

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Columns":
        """Apply `change` to all fields."""
        parts = {name: change(part) for name, part in self._asdict().items() if part is not None}
        return self._replace(**parts)


def _gptq_block(columns: Columns, scheme: Scheme) -> torch.Tensor:
    """Round a block of c columns in order, as GPTQ does; return their values [c, n] in units of the scale.

    Since `targets` were computed, errors of the columns before have changed. Each column's target gains these
    changes, coupled.
    """
    targets, weights, scale, zero, errors, coupling = columns
    divisor = torch.where(scale == 0, 1.0, scale)
    values = torch.empty_like(targets)
    # Change of the errors since the targets were computed.
    change = torch.zeros_like(targets)
    for j in range(len(targets)):
        target = targets[j]
        if j:
            target = target + coupling[:j, j] @ change[:j]
        values[j] = nearest(target / divisor[j], None if zero is None else zero[j], scheme)
        change[j] = weights[j] - values[j] * scale[j] - errors[j]
    return values


class _GptqGraph:
    """`_gptq_block` as a CUDA graph, for shapes as in `like`: a thousand small launches take longer."""

    def __init__(self, like: Columns, scheme: Scheme) -> None:
        self._columns = like.each(torch.clone)
        # Run once first: libraries and tables are set up on first use, which cannot be captured.
        _gptq_block(like.each(lambda part: part[:2]), scheme)
        # A graph belongs to the current GPU, which may differ from that of the columns.
        with torch.cuda.device(like.targets.device):
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._values = _gptq_block(self._columns, scheme)

    def __call__(self, columns: Columns, scheme: Scheme) -> torch.Tensor:
        """Return the rounded values [c, n] of `columns`; they are valid until the next call."""
        if len(columns.targets) != len(self._values):
            return _gptq_block(columns, scheme)
        for target, source in zip(self._columns, columns, strict=True):
            if target is not None and source is not None:
                target.copy_(source)
        with torch.cuda.device(columns.targets.device):
            self._graph.replay()
        return self._values


@dataclass(frozen=True)
class Nearest(Rounding):
    """Round every weight to its nearest value; the only rounding without data."""

    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        return round_nearest(rows)

    def __str__(self) -> str:
        return "nearest"


NEAREST = Nearest()


@dataclass(frozen=True)
class NearestRefitted(Rounding):
    """Round every weight to its nearest value, with scales refitted to the outputs."""

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"hessian", "damped_hessian"})

    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        return round_refitted(rows, stats.damped)

    def __str__(self) -> str:
        return "nearest, scales refitted"


@dataclass(frozen=True)
class Gptq(Rounding):
    """Round by GPTQ, then `sweeps` rounds of coordinate descent; to nearest if H is singular."""

    sweeps: int = 0

    @property
    def quick(self) -> Rounding:
        return NEAREST

    @property
    def needs(self) -> Set[Need]:
        factored = frozenset[Need]({"hessian", "cholesky"})
        return factored | frozenset[Need]({"damped_hessian"}) if self.sweeps else factored

    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        if stats.factor is None:
            return round_nearest(rows)
        rounded = gptq_round(rows, stats.factor)
        if not self.sweeps:
            return rounded
        return coordinate_descent(rows, rounded, stats.damped, stats.factor.order, self.sweeps)

    def note(self, stats: LinearStats) -> str | None:
        return None if stats.factor is not None else SINGULAR + "its weights were rounded to nearest"

    def __str__(self) -> str:
        return "gptq" + (f", {self.sweeps} sweeps of coordinate descent" if self.sweeps else "")
