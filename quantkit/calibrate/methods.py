"""Methods: from a weight to codes, scales and zero-points."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.calibrate.grids import Grid, global_scale, mse, rtn
from quantkit.calibrate.hqq import hqq
from quantkit.errors import FormatError, UsageError
from quantkit.packing.packings import PackingName
from quantkit.packing.schemes import Scheme, ZeroPoint, scheme
from quantkit.packing.tensor import PackedTensor, quantize_units, store_zero_points

#: Weights worked on at a time on a CPU, so that their float32 copies stay in a core's cache. On a GPU only
#: the memory of the search, up to 200 bytes a weight, sets a limit.
CHUNK_WEIGHTS = 1 << 18
GPU_CHUNK_WEIGHTS = 1 << 23


@dataclass(frozen=True)
class Method:
    """A way to choose grids. `fit` maps groups (float32 [R, g]) to their `Grid`."""

    name: str
    summary: str
    fit: Callable[[torch.Tensor, Scheme], Grid]


METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("rtn", "plain rounding to nearest, one pass", rtn),
        Method("mse", "scales searched for the smallest squared error, data-free", mse),
        Method("hqq", "half-quadratic search for a small l_0.7 error, data-free, int formats only", hqq),
    )
}


def method_named(name: str) -> Method:
    """The method called `name`; `UsageError` lists the known ones."""
    try:
        return METHODS[name]
    except KeyError:
        raise UsageError(f"unknown method {name!r}; known are {', '.join(METHODS)}.") from None


@dataclass(frozen=True)
class QuantizedRows:
    """Some rows of a weight, quantized: words int32 [n, W], scale [n, G], zero-points [n, G] or None.

    `squared_error` and `squared_norm` are sums over the rows, of (weight - stored)^2 and weight^2.
    """

    words: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    squared_error: float
    squared_norm: float


def quantize_rows(
    rows: torch.Tensor, scheme: Scheme, method: Method, global_scale: float = 1.0
) -> QuantizedRows:
    """Quantize rows ([n, K], any float dtype) of a weight; each row only depends on itself.

    `global_scale` is what all scales of the tensor are divided by.

    Raises `FormatError` if a weight is NaN or infinite, or a scale overflows its dtype.
    """
    # Other strides would add up in another order.
    weights = rows.to(torch.float32).contiguous()
    if global_scale != 1.0:
        weights = weights * global_scale
    count, columns = weights.shape
    size = scheme.group_size or columns
    full = columns // size * size
    # The ragged last group of every row is fitted on its own: padding would shift its statistics.
    spans = [s for s in (weights[:, :full], weights[:, full:]) if s.shape[1]]
    codes, scales, zeros, error, norm = [], [], [], 0.0, 0.0
    for span in spans:
        groups = span.reshape(-1, min(size, span.shape[1]))
        norm += _squared_norm(groups, weights)
        grid = method.fit(groups, scheme)
        units = groups / torch.where(grid.scale == 0, 1.0, grid.scale)
        span_codes, values = quantize_units(units, grid.zero_point, scheme)
        residual = torch.linalg.vector_norm(units.sub_(values), dim=-1, keepdim=True)
        error += float((residual.double() * grid.scale.double()).square().sum())
        codes.append(span_codes.view(count, -1))
        scales.append(grid.scale.view(count, -1))
        if grid.zero_point is not None:
            zeros.append(grid.zero_point.view(count, -1))
    return QuantizedRows(
        scheme.packer.pack(torch.cat(codes, 1) if len(codes) > 1 else codes[0], scheme.format),
        torch.cat(scales, 1).to(scheme.scale_dtype),
        torch.cat(zeros, 1).to(_zero_point_dtype(scheme)) if zeros else None,
        error / global_scale**2,
        norm / global_scale**2,
    )


def _zero_point_dtype(scheme: Scheme) -> torch.dtype:
    return scheme.zero_point_dtype if scheme.zero_point == "float" else torch.uint8


def _squared_norm(groups: torch.Tensor, weights: torch.Tensor) -> float:
    """Sum of the squares of `groups`; refuses `weights`, of which they are a part, if one is not finite."""
    # One fast pass in float32, and the slow exact one for what overflows or vanishes there.
    norm = float(torch.linalg.vector_norm(groups, dim=-1).double().square().sum())
    if not 1e-30 < norm < float("inf"):
        norm = float(torch.linalg.vector_norm(groups, dtype=torch.float64)) ** 2
    if not norm < float("inf"):
        nan, infinite = int(weights.isnan().sum()), int(weights.isinf().sum())
        raise FormatError(
            f"{nan} NaN and {infinite} infinite weights (as float32); a weight must be finite. "
            "Repair the checkpoint, or keep the layer dense with a rule."
        )
    return norm


def quantize_tensor(
    weight: torch.Tensor,
    format: str | Scheme = "int4",
    *,
    group_size: int | Literal["channel"] | None = None,
    method: str = "mse",
    zero_point: ZeroPoint = "none",
    scale_dtype: torch.dtype | None = None,
    packing: PackingName = "bits",
) -> PackedTensor:
    """Quantize one weight [N, K] (float16, bfloat16, float32 or float64) and pack it.

    `format` is a format name or a whole `Scheme`. Scales are stored as bfloat16, or float16 for a float16
    weight, unless `scale_dtype` says otherwise; `packing` "radix" stores ternary codes in 1.6 bits. Runs on
    the weight's device and returns a tensor there.

    Raises `FormatError` for a weight that is not a non-empty floating-point matrix, holds NaN or infinity,
    or whose scales overflow `scale_dtype`, and `UsageError` for an unknown method.
    """
    if not isinstance(weight, torch.Tensor):
        raise FormatError(f"the weight is a {type(weight).__name__}; expected a torch.Tensor [N, K].")
    if weight.dim() != 2 or not weight.numel() or not weight.is_floating_point() or weight.is_meta:
        raise FormatError(
            f"the weight is {weight.dtype} {tuple(weight.shape)} on {weight.device}; "
            "expected a non-empty floating-point matrix [N, K] with data."
        )
    if isinstance(format, Scheme):
        if group_size is not None or zero_point != "none" or scale_dtype is not None or packing != "bits":
            raise UsageError(
                "a Scheme says all about the grid; leave out group_size, zero_point, scale_dtype and "
                "packing, or give the format's name."
            )
        chosen = format
    else:
        chosen = scheme(
            format,
            group_size=group_size,
            zero_point=zero_point,
            scale_dtype=scale_dtype,
            packing=packing,
            weight_dtype=weight.dtype,
        )
    rows, columns = weight.shape
    chosen = chosen.for_columns(columns)
    limit = CHUNK_WEIGHTS if weight.device.type == "cpu" else GPU_CHUNK_WEIGHTS
    chunk = max(1, limit // columns)
    chosen_method = method_named(method)
    data = weight.detach()
    factor = global_scale(float(data.abs().max()), chosen) if chosen.global_scale else 1.0
    done = [
        quantize_rows(data[start : start + chunk], chosen, chosen_method, factor)
        for start in range(0, rows, chunk)
    ]
    zeros = [part.zero_point for part in done if part.zero_point is not None]
    return PackedTensor(
        torch.cat([part.words for part in done]),
        torch.cat([part.scale for part in done]),
        store_zero_points(torch.cat(zeros), chosen) if zeros else None,
        chosen,
        (rows, columns),
        torch.tensor([factor], device=data.device) if chosen.global_scale else None,
    )
