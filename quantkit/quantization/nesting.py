"""Convert grids of low-bit sources to schemes that represent the same values.

A grid nests in a scheme if each of its weights is a weight of the scheme, bit by bit in float32. `_CHECKS` is
the table of conditions for that.
"""

from collections.abc import Callable, Mapping

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZeroPoint

#: Smallest group: with fewer weights, scales take more bits than 16-bit weights would.
MIN_GROUP = 4
#: Kind of zero-point by the offset that a grid has.
_ZERO_POINTS: Mapping[str, ZeroPoint] = {"none": "none", "zeros": "integer", "biases": "minimum"}

#: Conditions for nesting, and the reason to give if one fails.
_CHECKS: tuple[tuple[Callable[[GridSpec], bool], Callable[[GridSpec], str]], ...] = (
    (
        lambda spec: not spec.permuted,
        lambda spec: (
            "its groups are not consecutive columns (desc_act), and a scheme has no order of columns"
        ),
    ),
    (
        lambda spec: spec.factor == 1.0,
        lambda spec: f"its weights are multiplied by {spec.factor:.6g} last, which no scheme does",
    ),
    (
        lambda spec: not spec.transposed,
        lambda spec: "it is stored [K, N], and groups would be of rows",
    ),
    (
        lambda spec: spec.matrices is None,
        lambda spec: f"it has {spec.matrices} matrices in one tensor",
    ),
    (
        lambda spec: spec.scale_dtype in SCALE_TYPES,
        lambda spec: f"its scales are {spec.scale_dtype}",
    ),
    (
        lambda spec: spec.affine == "none" or isinstance(spec.format, IntFormat),
        lambda spec: f"its codes have {spec.affine}, which is for int formats of 2 to 8 bits",
    ),
    (
        lambda spec: spec.group_size >= min(MIN_GROUP, spec.shape[1]),
        lambda spec: "its scales are of blocks that do not end where rows do",
    ),
)


def why_not_nested(spec: GridSpec) -> str | None:
    """Return why no scheme represents the values of a grid; None if one does."""
    return next((why(spec) for fits, why in _CHECKS if not fits(spec)), None)


def nested_scheme(spec: GridSpec) -> Scheme:
    """Return the scheme that represents the values of a grid; raise `FormatError` if there is none."""
    if (reason := why_not_nested(spec)) is not None:
        raise FormatError(f"no scheme has its values: {reason}.")
    rows, columns = spec.shape
    whole = spec.group_rows >= rows and spec.group_size >= columns
    plain = spec.affine == "none" and not spec.global_scale
    per_tensor = whole and plain and rows > 1 and spec.scale_dtype.itemsize > 1
    group_rows = spec.group_rows if plain and not per_tensor else 1
    # All blocks of a model have the same size, even if a matrix is smaller.
    size = spec.group_size if spec.group_size < columns or group_rows > 1 else None
    return Scheme(
        spec.format,
        "tensor" if per_tensor else size,
        _ZERO_POINTS[spec.affine],
        spec.scale_dtype,
        spec.global_scale,
        group_rows=group_rows,
    )


def nested_rows(grid: StoredGrid, scheme: Scheme) -> PackedTensor:
    """Convert rows of a grid to a packed tensor [R, K] of its scheme, with the same values.

    Raises `FormatError` for zero-points that are no codes, for minimums that are inexact in the scale dtype,
    and for scales that are not finite.
    """
    codes, scales, zeros = grid.codes, grid.scales, grid.zeros
    if grid.biases is not None:
        codes, scales, zeros = _without_zero_scales(codes, scales, grid.biases, scheme)
    if zeros is not None:
        zeros = _exactly(zeros, scheme)
    # Each row has its scale, even if rows share it: take the scale of the first row of each block.
    scales = scales[:1, 0] if scheme.per_tensor else scales[:: scheme.group_rows]
    return PackedTensor.from_codes(
        codes,
        scales.to(torch.float32),
        zeros,
        scheme,
        # `clone`, because one number for all rows may have stride 0.
        None
        if grid.global_scale is None
        else grid.global_scale[:1].float().clone(memory_format=torch.contiguous_format),
    )


def kept_rows(
    checkpoint: Checkpoint, source: StoredTensor, scheme: Scheme, start: int, stop: int
) -> tuple[PackedTensor, float]:
    """Convert rows `[start, stop)` of a source on a grid; return them packed, and the sum of squared weights.

    Raises `FormatError` unless every weight equals the source: in the dtype of the source's own reader, and
    in float32 by the definition of the grid.
    """
    grid = source.grid(checkpoint.read_stored, start, stop)
    assert grid is not None, "a source without a grid is not planned to be kept"
    packed = nested_rows(grid, scheme)
    weights, expected = packed.dequantize(), checkpoint.read(source.name, start, stop)
    for found, right in ((weights.to(expected.dtype), expected), (weights, grid.values())):
        if not torch.equal(found, right):
            row, column = ((found != right) | right.isnan()).nonzero()[0].tolist()
            raise FormatError(
                f"weight [{start + row}, {column}] is {found[row, column].item()!r} with {scheme} and "
                f"{right[row, column].item()!r} in the source; expected the same. `quantkit quantize` "
                "rounds to any format."
            )
    return packed, float(weights.double().square().sum())


def _without_zero_scales(
    codes: torch.Tensor, scales: torch.Tensor, biases: torch.Tensor, scheme: Scheme
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace scales of 0: a group of equal weights becomes code 1 with its minimum as scale, and minimum 0.

    `codes` are uint8 [N, K]; `scales`, and minimums `biases`, are [N, groups]. Returns all three.
    """
    constant = scales == 0
    if not bool(constant.any()):
        return codes, scales, biases
    of_columns = constant.repeat_interleave(scheme.group_columns(codes.shape[1]), dim=1)[:, : codes.shape[1]]
    return (
        torch.where(of_columns, torch.ones_like(codes), codes),
        torch.where(constant, biases.to(scales.dtype), scales),
        torch.where(constant, 0.0, biases),
    )


def _exactly(zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Return zero-points in the dtype of the scheme; raise `FormatError` if one cannot be stored exactly."""
    stored = zeros.to(scheme.zero_point_dtype)
    most = 2**scheme.format.bits - 1 if stored.dtype == torch.uint8 else float("inf")
    wrong = (stored.to(zeros.dtype) != zeros) | (stored.float() > most)
    if bool(wrong.any()):
        raise FormatError(
            f"the zero-point {zeros[wrong][0].item():.6g} cannot be stored with {scheme}; expected a code or "
            f"a number of {scheme.zero_point_dtype}."
        )
    return stored
