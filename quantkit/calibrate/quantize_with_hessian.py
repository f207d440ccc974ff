"""One linear with calibration data: from weights and the moments of their inputs to codes and scales.

What linears with the same input share is prepared once, in `Inputs`. Rows are independent given that, and are
worked on some at a time.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch

from quantkit.calibrate.hessian import DAMPINGS, Damped, Factor, Moments, correction_, factorize
from quantkit.calibrate.methods import Method, QuantizedRows, squared_norm
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.rounding import (
    Rounded,
    Rows,
    compensate,
    polish,
    positive_scales,
    round_nearest,
    round_refitted,
)
from quantkit.calibrate.scale_search import whole_importance
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import quantize_units

#: Rows worked on at a time on a CPU: what the columns of a chunk of them need stays in its cache.
CHUNK_ROWS = 512
#: Weights that are rounded at a time on a GPU, which takes some 28 bytes of memory for each, and that scales
#: are searched for at a time, which takes more.
GPU_CHUNK_WEIGHTS = 1 << 26
GPU_GRID_WEIGHTS = 1 << 24
#: Importance of a feature that is hardly ever there, in parts of the group's mean: its weights still count.
LEAST_IMPORTANCE = 1e-3


def chunk_rows(columns: int, device: torch.device) -> int:
    """Rows of a weight that are worked on at a time."""
    return CHUNK_ROWS if device.type == "cpu" else max(1, GPU_CHUNK_WEIGHTS // columns)


@dataclass(eq=False)
class Inputs:
    """The moments of some linears' input, and what their methods make of it.

    A GPU has no memory for all of it at once. So `corrected` comes first, and once the targets of all weights
    are known the correction is let go for the factor, by `factorize`.

    factors     whether a method asks for the factor
    drifts      whether their drift was known; it is not kept
    corrects    whether weights are corrected for it
    correction  P of `moments.correction_`, for methods that correct for drift
    factor      H factored, None where no method asks for it or H is singular whatever is added to its
                diagonal
    """

    moments: Moments
    factors: bool = False
    drifts: bool = False
    corrects: bool = False
    correction: torch.Tensor | None = None
    factor: Factor | None = None

    @classmethod
    def prepare(cls, moments: Moments, methods: Iterable[Method]) -> "Inputs":
        """All that `methods` need of `moments`, whose drift is used up."""
        found = cls.corrected(moments, methods)
        if found.factors:
            found.factor = factorize(moments.second)
        return found

    @classmethod
    def corrected(cls, moments: Moments, methods: Iterable[Method]) -> "Inputs":
        """What `methods` need of `moments`, whose drift is used up, before targets are known."""
        methods = tuple(methods)
        found = correction_(moments) if any(m.corrects for m in methods) else None
        return cls(
            replace(moments, drift=None),
            any(m.compensates for m in methods),
            moments.drift is not None,
            found is not None,
            found,
        )

    def factorize(self) -> None:
        """Let the correction go, and find what rounding needs."""
        self.correction = None
        if self.factors:
            self.factor = factorize(self.moments.second)

    @property
    def damped(self) -> Damped:
        """H as it was factored, for methods that refit scales or polish."""
        return Damped.of(self.moments.second, DAMPINGS[0] if self.factor is None else self.factor.damping)

    def target(self, rows: torch.Tensor, method: Method) -> torch.Tensor:
        """What rows (float32 [n, K]) are quantized as: corrected for the drift of the inputs if the method
        does.
        """
        if not (self.corrects and method.corrects):
            return rows
        assert self.correction is not None, "targets come before the factor"
        return torch.addmm(rows, rows, self.correction)

    def note(self, method: Method) -> str | None:
        """What was not done as the method says, and why; None if all was."""
        if method.compensates and self.factor is None:
            return "the second moments of the inputs are singular, so its weights were rounded to nearest"
        if method.corrects and self.drifts and not self.corrects:
            return "the second moments of the inputs are singular, so it is not corrected for drift"
        return None


@dataclass(frozen=True)
class CalibratedRows:
    """Quantized rows, and their outputs: sums over rows of the mean squared error and of the mean square."""

    rows: QuantizedRows
    output_error: float
    output_energy: float


def quantize_calibrated_rows(
    rows: torch.Tensor,
    scheme: Scheme,
    method: Method,
    parameters: TensorParameters,
    inputs: Inputs,
    target: torch.Tensor | None = None,
) -> CalibratedRows:
    """Quantize rows ([n, K], any float dtype) of a weight whose inputs are known.

    `parameters` are what the rows of the tensor share, fitted to `inputs.target` of them, which are `target`
    if that is known. A row depends on itself, `parameters` and `inputs` alone. Raises `FormatError` as
    `quantize_rows` does.
    """
    exact = rows.to(torch.float32).contiguous()
    norm = squared_norm(exact)
    bound = parameters.bind(scheme)
    weights = parameters.normalised(inputs.target(exact, method) if target is None else target)
    scale, zero_point = _grid(weights, inputs.moments.importance, bound, method)
    gridded = Rows(weights, scale, zero_point, bound)
    done = positive_scales(gridded, _round(gridded, method, inputs))
    errors = exact - done.values * gridded.wide(done.scale) / parameters.global_scale
    codes = quantize_units(done.values, None if zero_point is None else gridded.wide(zero_point), bound)[0]
    quantized = QuantizedRows(
        scheme.pack(codes),
        done.scale.to(scheme.scale_dtype),
        None if zero_point is None else zero_point.to(scheme.zero_point_dtype),
        float(errors.double().square_().sum()),
        norm,
    )
    energy = inputs.moments.output_energy
    return CalibratedRows(quantized, energy(errors), energy(exact))


def stored_nearest(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, method: Method
) -> torch.Tensor:
    """What is stored for each of some weights [C, n, K] rounded to nearest on the grid that their
    `importance` [C, K] asks for, float32: to compare scalings by.

    `scheme` has the values of its codes.
    """
    shape = (weights.shape[1], weights.shape[2])
    parameters = [fit_parameters(partial(iter, [one]), shape, scheme, method.fit) for one in weights]
    pairs = zip(parameters, weights, strict=True)
    normalised = torch.cat([shared.normalised(one) for shared, one in pairs])
    rows = Rows(normalised, *_grid_of(normalised, importance, scheme, method), scheme)
    done = round_nearest(rows)
    stored = (done.values * rows.wide(done.scale)).view(weights.shape)
    return torch.stack([one / shared.global_scale for shared, one in zip(parameters, stored, strict=True)])


def _round(rows: Rows, method: Method, inputs: Inputs) -> Rounded:
    if not method.compensates or inputs.factor is None:
        if method.refits:
            return round_refitted(rows, inputs.damped)
        return round_nearest(rows)
    done = compensate(rows, inputs.factor)
    if method.sweeps:
        done = polish(rows, done, inputs.damped, inputs.factor.order, method.sweeps)
    return done


def _grid(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, method: Method
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero-points (or None) of rows [n, K], both float32 [n, G]; `importance` is [K]."""
    at_once = len(weights) if weights.device.type == "cpu" else max(1, GPU_GRID_WEIGHTS // weights.shape[1])
    found = [_grid_of(rows, importance[None], scheme, method) for rows in torch.split(weights, at_once)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scale for scale, _ in found]), torch.cat(zeros) if zeros else None


def _grid_of(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, method: Method
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`importance` [C, K] is that of C equal parts of the rows."""
    count, columns = weights.shape
    parts = len(importance)
    scales, zeros = [], []
    # The ragged last group of every row is fitted on its own: padding would shift its statistics.
    for span, width in scheme.group_spans(columns):
        counted = importance[:, span].view(parts, 1, -1, width)
        counted = whole_importance(counted + LEAST_IMPORTANCE * counted.mean(-1, keepdim=True))
        groups = weights[:, span].reshape(-1, width)
        of_rows = counted.expand(-1, count // parts, -1, -1)
        grid = method.fit(groups, scheme, of_rows.reshape(-1, width))
        scales.append(grid.scale.view(count, -1))
        if grid.zero_point is not None:
            zeros.append(grid.zero_point.view(count, -1))
    return torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None
