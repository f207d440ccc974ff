"""Round weights to the scheme of the packed tensor that they replace."""

import math

import torch

from quantkit.calibrate.methods import (
    CHUNK_WEIGHTS,
    GPU_CHUNK_WEIGHTS,
    Method,
    packed_rows,
    quantize_rows,
)
from quantkit.calibrate.parameters import TensorParameters, fit_parameters
from quantkit.packing.tensor import PackedTensor

#: Largest weight that a single or global scale is kept for, relative to what it reaches.
CLIPPED = 1.25


def requantize(
    before: PackedTensor, weight: torch.Tensor, method: Method
) -> tuple[PackedTensor, tuple[float, float]]:
    """Round `weight` (float32 [N, K]) to the scheme of `before` and pack it.

    Returns the packed tensor, and the sums of (weight - stored)^2 and weight^2. Engines use one global or
    single scale for q, k and v, so that of `before` is kept, and weights beyond its range are clipped. It is
    fitted anew if weights exceed the range by more than the factor `CLIPPED`.
    """
    scheme = before.scheme
    limit = CHUNK_WEIGHTS if weight.device.type == "cpu" else GPU_CHUNK_WEIGHTS
    search = method.scale_search
    kept, reach = kept_scale(before, float(weight.abs().max()))
    chunks = torch.split(weight.clamp(-reach, reach), scheme.whole_blocks(limit // weight.shape[1]))
    shared = kept or fit_parameters(lambda: iter(chunks), before.shape, scheme, search.fit, search.fit_tensor)
    pieces = [quantize_rows(chunk, scheme, method, shared) for chunk in chunks]
    after = packed_rows(pieces, shared, scheme, before.shape)
    error, norm = (float(one.double().square().sum()) for one in (weight - after.dequantize(), weight))
    return after, (error, norm)


def kept_scale(before: PackedTensor, largest: float) -> tuple[TensorParameters | None, float]:
    """Return the global or single scale of `before` to keep, and the largest weight that it can represent.

    It is kept for weights up to `largest` if that is at most `CLIPPED` times what it reaches. Otherwise, and
    without such a scale, returns None and infinity.
    """
    reach = _reach(before)
    return (_shared(before), reach) if largest <= CLIPPED * reach else (None, math.inf)


def _shared(before: PackedTensor) -> TensorParameters | None:
    """Return the global or single scale of `before`; None without one, and if more is fitted to a tensor."""
    scheme, divisor = before.scheme, before.part("global_scale")
    if scheme.per_tensor:
        return TensorParameters(scale=float(before.scale.float()))
    if divisor is None or scheme.column_scale or scheme.is_fitted:
        return None
    return TensorParameters(global_scale=float(divisor))


def _reach(before: PackedTensor) -> float:
    """Return the largest weight that the global or single scale of `before` can represent."""
    shared, scheme = _shared(before), before.scheme
    if shared is None:
        return math.inf
    most = scheme.scale_type.max / shared.global_scale if shared.scale is None else shared.scale
    return most * scheme.format.absmax
