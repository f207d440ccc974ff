"""Describe low-bit weights in quantkit's terms: codes, scales and zero-points as stored.

`GridSpec` is known from headers and config, so a plan can choose a scheme. `StoredGrid` has the data of some
rows. Both define a weight as follows, with g the group of column k:

    scale = scales[n, g]                     or scales[n, g] / global_scale[n]
    w     = scale * format.values[code]      without zero-points
    w     = scale * (code - zeros[n, g])     with zero-points
    w     = scale * code + biases[n, g]      with biases

If `factor` is not 1, the last operation is a product with it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from quantkit.packing.formats import NumberFormat

InPlace = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class GridSpec:
    """Codes and scales of one weight, without their data.

    format          values of the codes, in quantkit's coding (int formats are offset binary)
    shape           [N, K] of the matrix of codes; of each matrix if there are several
    group_size      columns that share a scale; K for one scale a row. The last group may be smaller
    group_rows      rows that share a scale: 1, or more for scales of blocks or of the whole tensor
    affine          "zeros", "biases" or "none": offset that each group has besides its scale
    scale_dtype     dtype of the scales in `StoredGrid`
    global_scale    True if one float32 per matrix divides all scales
    permuted        True if groups are not consecutive columns (`desc_act`); `StoredGrid.groups` lists them
    matrices        number of matrices in the tensor, None for a tensor of two dimensions
    transposed      True if the parameter is [..., K, N]
    factor          multiplies every product of scale and value; no scheme of quantkit has one
    """

    format: NumberFormat
    shape: tuple[int, int]
    group_size: int
    group_rows: int = 1
    affine: Literal["none", "zeros", "biases"] = "none"
    scale_dtype: torch.dtype = torch.float32
    global_scale: bool = False
    permuted: bool = False
    matrices: int | None = None
    transposed: bool = False
    factor: float = 1.0

    @property
    def parameter_shape(self) -> tuple[int, ...]:
        """Return the shape of the model's parameter."""
        matrix = self.shape[::-1] if self.transposed else self.shape
        return matrix if self.matrices is None else (self.matrices, *matrix)


@dataclass(frozen=True)
class StoredGrid:
    """R rows of a weight, as stored. Rows are numbered through all matrices.

    codes           uint8 [R, K]
    scales          `spec.scale_dtype` [R, G], repeated for rows that share scales
    zeros           float32 [R, G], integers, not always codes; or None
    biases          float32 [R, G], or None
    global_scale    float32 [R], of each row's matrix, or None
    groups          int64 [K], the group of each column, None if groups are consecutive
    """

    spec: GridSpec
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    biases: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    groups: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """Return the weights, float32 [R, K]; each operation of the module docstring rounds once."""
        affine = self.spec.affine != "none"
        values = self.codes.float() if affine else self.spec.format.decode(self.codes)
        if self.zeros is not None:
            self._by_group(values, self.zeros, torch.Tensor.sub_)
        scales = self.scales.float()
        if self.global_scale is not None:
            scales = scales / self.global_scale[:, None]
        self._by_group(values, scales, torch.Tensor.mul_)
        if self.biases is not None:
            self._by_group(values, self.biases, torch.Tensor.add_)
        return values if self.spec.factor == 1.0 else values.mul_(self.spec.factor)

    def _by_group(self, values: torch.Tensor, groups: torch.Tensor, apply: InPlace) -> None:
        """Call `apply` on float32 `values` [R, K] and each column's value in `groups` [R, G], in place."""
        rows, columns = values.shape
        size = self.spec.group_size
        if self.groups is not None:
            apply(values, groups[:, self.groups])
        elif columns % size == 0:
            apply(values.view(rows, columns // size, size), groups[:, :, None])
        else:
            padded = F.pad(values, (0, -columns % size)).view(rows, -1, size)
            values.copy_(apply(padded, groups[:, :, None]).view(rows, -1)[:, :columns])
