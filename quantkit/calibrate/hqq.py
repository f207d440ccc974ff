"""HQQ, half-quadratic quantization: minimize an l_p error with p < 1, which tolerates outliers.

Badri & Shaji, "Half-Quadratic Quantization of Large Machine Learning Models" (2023),
https://mobiusml.github.io/hqq_blog/. For weights W and their stored values Q(W), it minimises

    sum |W - Q(W)|^p    by alternating    E = shrink(W - Q(W)),    grid = least squares for W - E,

where `shrink` is the generalized soft threshold |e| - |e|^(p-1) / beta, and beta grows by kappa a step. A
zero-point is updated while the scale stays that of plain rounding: with z the code of zero and x in steps, z
= mean(q - (x - E)). Without zero-point the scale is updated: s = <W - E, q> / <q, q>.

Errors are measured in units of the plain scale. The publication measures them in weights. At beta 10 that
sets every error below 0.17 to zero, which language models hardly ever exceed, and leaves the least-squares
fit.
"""

from collections.abc import Callable

import torch

from quantkit.calibrate.scale_search import ScaleZero, rtn, storable
from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, IntFormat
from quantkit.packing.schemes import Scheme

#: Exponent of the norm, first weight of the quadratic term, its growth, and number of steps.
P = 0.7
BETA = 10.0
KAPPA = 1.01
ITERATIONS = 20

#: (groups [R, g], plain scale [R, 1], updated scale or zero-point [R, 1]) -> values [R, g] in codes without
#: zero-point, and errors [R, g] in units of the plain scale, float64.
_Residual = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
#: (scale or zero-point, plain scale, values, errors minus shrunk errors) -> updated scale or zero-point.
_Update = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def hqq(groups: torch.Tensor, scheme: Scheme, importance: torch.Tensor | None = None) -> ScaleZero:
    """Refine plain rounding of each group (float32 [R, g]) by half-quadratic splitting.

    The l_p error is never above that of plain rounding. A group stops as soon as its own error does not fall,
    so it depends on no other group. Zero-points are rounded to storable ones after the last step. Ignores
    `importance`. Raises `FormatError` for a format that is not an int, and for a plain scale that overflows
    its dtype.
    """
    number_format = scheme.format
    if not isinstance(number_format, IntFormat):
        int_formats = ", ".join(name for name, row in FORMATS.items() if isinstance(row, IntFormat))
        raise FormatError(
            f"method 'hqq' moves the zero-point or the scale of evenly spaced codes, which {scheme} has not; "
            f"use it with {int_formats}, with any zero-point, or take method 'mse'."
        )
    plain = rtn(groups, scheme)
    if plain.zero_point is None:
        residual, update = _symmetric(number_format, scheme)
        return ScaleZero(_alternate(groups, plain.scale, plain.scale, residual, update))
    residual, update = _with_zero_point(number_format)
    zero_point = _alternate(groups, plain.scale, plain.zero_point, residual, update)
    zero_point = scheme.zero_point_type.round(number_format, zero_point, scheme.scale_dtype)
    # Rounding the zero-point may cost more than the steps gained.
    errors = (_lp(residual(groups, plain.scale, zero)[1]) for zero in (zero_point, plain.zero_point))
    return ScaleZero(plain.scale, torch.where(next(errors) < next(errors), zero_point, plain.zero_point))


def _lp(errors: torch.Tensor) -> torch.Tensor:
    return errors.abs().pow(P).sum(-1, keepdim=True)


def _alternate(
    groups: torch.Tensor, unit: torch.Tensor, start: torch.Tensor, residual: _Residual, update: _Update
) -> torch.Tensor:
    """Return the scale or zero-point of least l_p error found for each group, float32 [R, 1].

    The search begins at `start` [R, 1] and moves by `update`. Errors of the groups [R, g] are those of
    `residual`, in units of the plain scale `unit` [R, 1].
    """
    best, least = start.clone(), torch.full_like(start, torch.inf, dtype=torch.float64)
    # Only groups that still change: their indices, and their current values.
    rows, moving, beta = torch.arange(len(groups), device=groups.device), start, BETA
    for _ in range(ITERATIONS + 1):
        values, errors = residual(groups, unit, moving)
        magnitude = errors.abs()
        power = magnitude.pow(P)
        total = power.sum(-1, keepdim=True)
        falls = (total < least[rows])[:, 0]
        if not falls.all():
            rows, groups, unit, moving, total = (t[falls] for t in (rows, groups, unit, moving, total))
            values, errors, magnitude, power = (t[falls] for t in (values, errors, magnitude, power))
        if not len(rows):
            break
        best[rows], least[rows] = moving, total
        # |e|^(p-1) is infinite at 0, where nothing is left to shrink.
        threshold = power.div_(magnitude.clamp(min=1e-30)).div_(beta)
        shrunk = magnitude.sub_(threshold).clamp_(min=0).copysign_(errors)
        moving = update(moving, unit, values, errors.sub_(shrunk))
        beta *= KAPPA
    return best


def _with_zero_point(number_format: IntFormat) -> tuple[_Residual, _Update]:
    def residual(
        groups: torch.Tensor, unit: torch.Tensor, zero_point: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = number_format.round_offset(groups / unit, zero_point)
        return values, groups.double() / unit - values

    def update(
        zero_point: torch.Tensor, unit: torch.Tensor, values: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        # mean(q - (x - E)), as q = value + z and x = value + e.
        return (zero_point - rest.mean(-1, keepdim=True)).float()

    return residual, update


def _symmetric(number_format: IntFormat, scheme: Scheme) -> tuple[_Residual, _Update]:
    def residual(
        groups: torch.Tensor, unit: torch.Tensor, scale: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        values = number_format.round(groups / scale)
        # Divide first: value times scale may overflow, the error in steps does not.
        return values, groups.double() / unit - values * (scale.double() / unit)

    def update(
        scale: torch.Tensor, unit: torch.Tensor, values: torch.Tensor, rest: torch.Tensor
    ) -> torch.Tensor:
        # <x - E, q> / <q, q> as an update of the scale: x - E is scale * q + (e - E).
        exact = values.double()
        squares = exact.square().sum(-1, keepdim=True)
        change = (rest * exact).sum(-1, keepdim=True) / squares.clamp(min=1)
        fitted = scale.double() + change * unit
        return storable(fitted.clamp(max=scheme.scale_type.max).float(), scheme)

    return residual, update
