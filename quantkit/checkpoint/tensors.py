"""What is known of a tensor from a safetensors header alone."""

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES, torch_dtype


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype name and shape of a tensor that is in a file or will be written to one."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "TensorSpec":
        return cls(name, SAFETENSORS_DTYPES[tensor.dtype], tuple(tensor.shape))

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch_dtype(self.dtype, tensor=self.name)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.elements * self.torch_dtype.itemsize


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """A tensor in a file: its bytes are `file[offset : offset + nbytes]`.

    `whole` if its rows depend on each other, so that reading some costs as much as reading all. `transposed`
    if the file has the transpose of what is read.
    """

    file: Path
    offset: int
    whole: bool = False
    transposed: bool = False

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the file."""
        return self.shape[::-1] if self.transposed else self.shape

    def transpose(self) -> "StoredTensor":
        """The same tensor, read as its transpose."""
        return replace(self, shape=self.shape[::-1], whole=True, transposed=not self.transposed)

    @property
    def location(self) -> tuple[Path, int, int]:
        """Where its bytes are: two tensors may be made of the same."""
        return self.file, self.offset, self.nbytes
