"""Tensors as described by headers alone."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES, torch_dtype
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype name and shape of a tensor in a file or to be written."""

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


class Read(Protocol):
    """Reads rows `[start, stop)` of a tensor in a file; of a matrix also only its `columns` [first, last)."""

    def __call__(
        self,
        tensor: "StoredTensor",
        start: int = 0,
        stop: int | None = None,
        columns: tuple[int, int] | None = None,
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class StoredTensor(TensorSpec):
    """Tensor in a file: its bytes are `file[offset : offset + nbytes]`.

    `whole` is True if its rows depend on each other, so that reading some costs as much as reading all.
    Subclasses override `values` where numbers are computed from the stored bytes, such as low-bit weights.
    """

    file: Path
    offset: int
    whole: bool = False

    @property
    def location(self) -> tuple[Path, int, int]:
        """Return file, offset and number of the stored bytes; several tensors may share bytes."""
        return self.file, self.offset, self.stored_bytes

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read rows `[start, stop)` along the first dimension; `read` reads from files."""
        return read(self, start, stop)

    @property
    def stored_bytes(self) -> int:
        """Return the number of stored bytes."""
        return self.nbytes

    @property
    def stored_as(self) -> str | None:
        """Return the name of the low-bit format; None for unquantized numbers."""
        return None

    @property
    def grid_spec(self) -> GridSpec | None:
        """Return how codes and scales give the weights; None for unquantized numbers and scales of scales."""
        return None

    def grid(self, read: Read, start: int, stop: int) -> StoredGrid | None:
        """Read the codes and scales of rows `[start, stop)`, not multiplied; None if `grid_spec` is None."""
        return None

    @property
    def as_stored(self) -> "StoredTensor":
        """Return the tensor as it lies in the file: this one, or the [K, N] of which it is the transpose."""
        return self


@dataclass(frozen=True)
class TransposedTensor(StoredTensor):
    """Matrix [N, K] that the file stores as `inner` [K, N]."""

    inner: StoredTensor | None = None

    @classmethod
    def from_stored(cls, inner: StoredTensor) -> "TransposedTensor":
        """Return the transpose of `inner`, under its name."""
        return cls(inner.name, inner.dtype, inner.shape[::-1], inner.file, inner.offset, True, inner)

    @property
    def as_stored(self) -> StoredTensor:
        assert self.inner is not None
        return self.inner

    @property
    def stored_bytes(self) -> int:
        return self.as_stored.stored_bytes

    @property
    def stored_as(self) -> str | None:
        return self.as_stored.stored_as

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        found = self.as_stored.values(read, 0, self.as_stored.shape[0])
        return found.T[start:stop].contiguous()
