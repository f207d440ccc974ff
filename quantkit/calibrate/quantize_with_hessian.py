"""Quantize one linear with the Hessian of its inputs.

Linears with the same input share their `LinearStats`. Given these statistics, rows are independent, and are
quantized some at a time.
"""

from dataclasses import dataclass
from functools import partial

import torch

from quantkit.calibrate.gptq import positive_scales, round_nearest
from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import Method, QuantizedRows
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.calibrate.scale_search import whole_importance
from quantkit.calibrate.squares import squared_norm
from quantkit.calibrate.steps import Rows, ScaleSearch
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import quantize_units

#: Rows quantized at a time on a CPU, so that a block of their columns stays in its cache.
CHUNK_ROWS = 512
#: Weights rounded at a time on a GPU, which takes about 28 bytes each; and weights whose scales are searched
#: at a time, which takes more.
GPU_CHUNK_WEIGHTS = 1 << 26
GPU_GRID_WEIGHTS = 1 << 24
#: Least importance of a feature, relative to the group's mean, so that rare features still count.
LEAST_IMPORTANCE = 1e-3


def chunk_rows(columns: int, device: torch.device) -> int:
    """Return how many rows of a weight [N, `columns`] are quantized at a time.

    `CHUNK_ROWS` on a CPU, for its cache; on a GPU as many as have `GPU_CHUNK_WEIGHTS` weights, at least one.
    """
    return CHUNK_ROWS if device.type == "cpu" else max(1, GPU_CHUNK_WEIGHTS // columns)


@dataclass(frozen=True)
class CalibratedRows:
    """Quantized rows of a weight, and their outputs on the calibration data.

    output_error   squared error of the outputs, mean over tokens, summed over rows
    output_energy  squared outputs of the unquantized rows, mean over tokens, summed over rows
    """

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
    """Quantize rows ([n, K], any float dtype) of a weight by `method`, with statistics `stats` of its inputs.

    `target` (float32 [n, K]) is rounded in place of `rows`; None computes it by `method.target`. Errors are
    measured against `rows`. `parameters` are shared by all rows of the tensor and were fitted to its target.
    A row depends on itself, `parameters` and `stats` only. Raises `FormatError` if a weight is NaN or
    infinite, or a scale overflows its dtype.
    """
    exact = rows.to(torch.float32).contiguous()
    norm = squared_norm(exact)
    bound = parameters.bind(scheme)
    weights = parameters.normalised(method.target(exact, stats) if target is None else target)
    scale, zero_point = _scale_zero(weights, stats.hessian.importance, bound, method.scale_search)
    gridded = Rows(weights, scale, zero_point, bound)
    rounded = positive_scales(gridded, method.rounding.apply(gridded, stats))
    errors = exact - rounded.values * gridded.wide(rounded.scale) / parameters.global_scale
    codes = quantize_units(rounded.values, None if zero_point is None else gridded.wide(zero_point), bound)[0]
    quantized = QuantizedRows(
        scheme.pack(codes),
        rounded.scale.to(scheme.scale_dtype),
        None if zero_point is None else zero_point.to(scheme.zero_point_dtype),
        float(errors.double().square_().sum()),
        norm,
    )
    energy = stats.hessian.output_energy
    return CalibratedRows(quantized, energy(errors), energy(exact))


def stored_nearest(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
) -> torch.Tensor:
    """Round C scaled versions of a weight, float32 [C, n, K], to nearest; return the stored values, float32.

    Scales are searched with `importance` [C, K] of the input features. The values of a fitted `scheme` are
    bound.
    """
    shape = (weights.shape[1], weights.shape[2])
    parameters = [fit_parameters(partial(iter, [one]), shape, scheme, search.fit) for one in weights]
    pairs = zip(parameters, weights, strict=True)
    normalised = torch.cat([shared.normalised(one) for shared, one in pairs])
    rows = Rows(normalised, *_scale_zero_of(normalised, importance, scheme, search), scheme)
    rounded = round_nearest(rows)
    stored = (rounded.values * rows.wide(rounded.scale)).view(weights.shape)
    return torch.stack([one / shared.global_scale for shared, one in zip(parameters, stored, strict=True)])


def _scale_zero(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Search scales and zero-points (or None) of rows [n, K], float32 [n, G]; `importance` is [K]."""
    at_once = len(weights) if weights.device.type == "cpu" else max(1, GPU_GRID_WEIGHTS // weights.shape[1])
    found = [_scale_zero_of(rows, importance[None], scheme, search) for rows in torch.split(weights, at_once)]
    zeros = [zero for _, zero in found if zero is not None]
    return torch.cat([scale for scale, _ in found]), torch.cat(zeros) if zeros else None


def _scale_zero_of(
    weights: torch.Tensor, importance: torch.Tensor, scheme: Scheme, search: ScaleSearch
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Search scales and zero-points (or None) of C equal parts of the rows [C * n, K]: float32 [C * n, G].

    `importance`, float32 [C, K], is that of the input features in each part.
    """
    count, columns = weights.shape
    parts = len(importance)
    scales, zeros = [], []
    # The shorter last group of every row is fitted separately: padding would shift its statistics.
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
