"""One linear with calibration data: from weights and the Hessian of their inputs to codes and scales.

What linears with the same input share is prepared once, in `LinearStats`. Rows are independent given that,
and are worked on some at a time.
"""

from dataclasses import dataclass
from functools import partial

import torch

from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import Method, QuantizedRows, squared_norm
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.rounding import positive_scales, round_nearest
from quantkit.calibrate.scale_search import whole_importance
from quantkit.calibrate.steps import Rows, ScaleSearch
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
    stats: LinearStats,
    target: torch.Tensor | None = None,
) -> CalibratedRows:
    """Quantize rows ([n, K], any float dtype) of a weight whose inputs are known.

    `parameters` are what the rows of the tensor share, fitted to `method.target` of them, which are `target`
    if that is known. A row depends on itself, `parameters` and `stats` alone. Raises `FormatError` as
    `quantize_rows` does.
    """
    exact = rows.to(torch.float32).contiguous()
    norm = squared_norm(exact)
    bound = parameters.bind(scheme)
    weights = parameters.normalised(method.target(exact, stats) if target is None else target)
    scale, zero_point = _scale_zero(weights, stats.hessian.importance, bound, method.scale_search)
    gridded = Rows(weights, scale, zero_point, bound)
    done = positive_scales(gridded, method.rounding.apply(gridded, stats))
    errors = exact - done.values * gridded.wide(done.scale) / parameters.global_scale
    codes = quantize_units(done.values, None if zero_point is None else gridded.wide(zero_point), bound)[0]
    quantized = QuantizedRows(
        scheme.pack(codes),
        done.scale.to(scheme.scale_dtype),
        None if zero_point is None else zero_point.to(scheme.zero_point_dtype),
        float(errors.double().square_().sum()),
        norm,
    )
    energy = stats.hessian.output_energy
    return CalibratedRows(quantized, energy(errors), energy(exact))


def stored_nearest(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
) -> torch.Tensor:
    """Return what is stored for each of some weights [C, n, K], float32, to compare scalings by.

    They are rounded to nearest on the grid that their `importance` [C, K] asks for. `scheme` has the values
    of its codes.
    """
    shape = (weights.shape[1], weights.shape[2])
    parameters = [fit_parameters(partial(iter, [one]), shape, scheme, search.fit) for one in weights]
    pairs = zip(parameters, weights, strict=True)
    normalised = torch.cat([shared.normalised(one) for shared, one in pairs])
    rows = Rows(normalised, *_scale_zero_of(normalised, importance, scheme, search), scheme)
    done = round_nearest(rows)
    stored = (done.values * rows.wide(done.scale)).view(weights.shape)
    return torch.stack([one / shared.global_scale for shared, one in zip(parameters, stored, strict=True)])


def _scale_zero(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales and zero-points (or None) of rows [n, K], both float32 [n, G]; `importance` is [K]."""
    at_once = len(weights) if weights.device.type == "cpu" else max(1, GPU_GRID_WEIGHTS // weights.shape[1])
    found = [_scale_zero_of(rows, importance[None], scheme, search) for rows in torch.split(weights, at_once)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scale for scale, _ in found]), torch.cat(zeros) if zeros else None


def _scale_zero_of(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
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
        fitted = search.fit(groups, scheme, of_rows.reshape(-1, width))
        scales.append(fitted.scale.view(count, -1))
        if fitted.zero_point is not None:
            zeros.append(fitted.zero_point.view(count, -1))
    return torch.cat(scales, 1), torch.cat(zeros, 1) if zeros else None
