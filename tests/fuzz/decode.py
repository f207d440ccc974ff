"""The weights of a packed matrix as docs/format.md says them: Python numbers, one weight at a time."""

import math
from collections.abc import Mapping

import torch

from quantkit.packing.packings import base
from quantkit.packing.schemes import Scheme

from ..packing.references import unpack_bits, unpack_radix, unpack_stream


def decode(
    parts: Mapping[str, torch.Tensor], scheme: Scheme, shape: tuple[int, int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [N, K] in float64, and the sum of the magnitudes of what was added for each."""
    rows, columns = shape
    bits, planes = scheme.format.bits, scheme.planes
    group = columns if not isinstance(scheme.group_size, int) else min(scheme.group_size, columns)
    scales = parts["scale"].double()
    if "global_scale" in parts:
        scales = (parts["scale"].float() / parts["global_scale"]).double()
    values = list(scheme.format.values)
    if "codebook" in parts:
        values = parts["codebook"].double().tolist()
    zeros = _zero_points(parts, scheme, rows)
    factors = parts["column_scale"].double().tolist() if "column_scale" in parts else [1.0] * columns
    weights, sizes = (torch.empty(shape, dtype=torch.float64) for _ in range(2))
    for n in range(rows):
        row = [word & 0xFFFFFFFF for word in parts["packed"][n].tolist()]
        codes = {
            "bits": lambda row: unpack_bits(row, bits * planes, columns),
            "radix": lambda row: unpack_radix(row, base(scheme.format), columns),
            "stream": lambda row: unpack_stream(row, bits, columns),
        }[scheme.packing](row)
        for k, code in enumerate(codes):
            g, total, size = k // group, 0.0, 0.0
            for plane in range(planes):
                at = (0,) if scheme.per_tensor else (n // scheme.group_rows, g * planes + plane)
                one = code >> (plane * bits) & ((1 << bits) - 1)
                scale = float(scales[at])
                if scheme.zero_point == "minimum":
                    assert zeros is not None
                    size += abs(zeros[n][g]) if scale else 0.0
                    term = one * scale + (zeros[n][g] if scale else 0.0)
                else:
                    term = (one - zeros[n][g] if zeros is not None else values[one]) * scale
                total, size = total + term, size + abs(term)
            weights[n, k], sizes[n, k] = total * factors[k], size * abs(factors[k])
    return weights, sizes


def _zero_points(parts: Mapping[str, torch.Tensor], scheme: Scheme, rows: int) -> list[list[float]] | None:
    if "zero_point" not in parts:
        return None
    stored = parts["zero_point"]
    if scheme.zero_point in ("float", "minimum"):
        return [list(map(float, row)) for row in stored.tolist()]
    columns = [
        unpack_bits([word & 0xFFFFFFFF for word in column], scheme.format.bits, rows)
        for column in stored.T.tolist()
    ]
    return [[float(column[n]) for column in columns] for n in range(rows)]


def largest_term(parts: Mapping[str, torch.Tensor], scheme: Scheme) -> float:
    """What no scaled code, zero-point or column exceeds, in whatever order a kernel multiplies them."""
    scale = float(parts["scale"].float().abs().max())
    if "global_scale" in parts:
        # A quotient first, or the product first.
        scale = max(scale, float((parts["scale"].float() / parts["global_scale"]).abs().max()))
    most = max((abs(v) for v in scheme.format.values if not math.isnan(v)), default=1.0)
    most = max(most, 2.0**scheme.format.bits)
    if "codebook" in parts:
        most = max(most, float(parts["codebook"].abs().max()))
    if scheme.zero_point_type.is_continuous:
        most += float(parts["zero_point"].float().abs().max())
    columns = float(parts["column_scale"].float().abs().max()) if "column_scale" in parts else 1.0
    found = max(1.0, scale) * most * max(1.0, columns) * scheme.planes
    return found if found == found else math.inf
