"""The grid of a low-bit weight: codes, scales and zero-points as stored, in quantkit's terms.

`GridSpec` is known from headers and config alone, so that a plan can choose a scheme. `StoredGrid` has the
data of some rows. Both say the same thing of a weight:

    w[n, k] = global_scale * scales[n, g] * (format.values[codes[n, k]] + offset - zeros[n, g])

Without zero-points, `offset` and `zeros` are left out. With them, the value of an int format plus its offset
is the code itself, so a weight is `scale * (code - zero)`. g is `groups[k]`, or `k // group_size` where
`groups` is None.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat, NumberFormat


@dataclass(frozen=True)
class GridSpec:
    """What the codes and scales of one weight are, without their data.

    format          values of the codes, in quantkit's coding (int formats are offset binary)
    shape           [N, K] of the matrix that the codes are of; of each matrix where there are several
    group_size      columns that share a scale; K for one scale a row
    group_rows      rows that share a scale, 1 unless scales are of blocks or of the whole tensor
    zero_points     "none", "integer" (each an integer, but not always one of the codes) or "float"
    scale_dtype     that of the stored scales
    global_scale    whether one float32 a matrix multiplies all scales
    permuted        whether groups are not consecutive columns (`desc_act`), so that `groups` says which
    matrices        how many matrices the tensor has, None for one of two dimensions
    transposed      whether the model's parameter is [..., K, N]
    """

    format: NumberFormat
    shape: tuple[int, int]
    group_size: int
    group_rows: int = 1
    zero_points: Literal["none", "integer", "float"] = "none"
    scale_dtype: torch.dtype = torch.float32
    global_scale: bool = False
    permuted: bool = False
    matrices: int | None = None
    transposed: bool = False

    @property
    def groups_per_row(self) -> int:
        """Scales of a row; the last may be of fewer columns."""
        return -(-self.shape[1] // self.group_size)


@dataclass(frozen=True)
class StoredGrid:
    """R rows of a weight, as stored.

    codes           uint8 [R, K]
    scales          `spec.scale_dtype` [R, G], one row for each row of codes, also where rows share theirs
    zeros           float32 [R, G], None without zero-points
    global_scale    float32 [R], that of the matrix of each row, None without one
    groups          int64 [K], the group of each column, None where they are consecutive
    """

    spec: GridSpec
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The weights, float32 [R, K]: value less zero-point, times the scale, each product rounded once."""
        columns = self.groups
        if columns is None:
            columns = torch.arange(self.codes.shape[1]) // self.spec.group_size
        values = self.spec.format.decode(self.codes)
        if self.zeros is not None:
            if not isinstance(self.spec.format, IntFormat):
                raise FormatError(f"{self.spec.format.name!r} has zero-points; expected an int format.")
            values = values.add_(self.spec.format.offset).sub_(self.zeros[:, columns])
        scales = self.scales.float()
        if self.global_scale is not None:
            scales = scales * self.global_scale[:, None]
        return values.mul_(scales[:, columns])
