"""Read rows of a GGUF tensor: as numbers, or as codes, scales and minimums."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quantkit.about import pip_install
from quantkit.checkpoint.gguf.block_types import BlockType
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.errors import EnvironmentProblem

#: Bytes that are dequantized at a time: float32 takes up to 25 times as many.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True)
class GgufRows(StoredTensor):
    """Matrix [N, K], or vector [N], whose rows are consecutive in `file` from byte `offset` on.

    heads   number of heads whose rows llama.cpp permuted to pairs of rotary halves, 0 D/2 1 D/2+1 ..., as in
            q and k of some models; None if rows are in order
    added   constant that llama.cpp added to the weights; subtracted here
    """

    block_type: BlockType
    row_bytes: int
    heads: int | None = None
    added: float = 0.0

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all rows in the file."""
        return self.shape[0] * self.row_bytes

    @property
    def stored_as(self) -> str | None:
        """Return the name of the block type, such as `Q4_K`; None for unquantized numbers."""
        return self.block_type.name if self.block_type.dtype is None else None

    @property
    def grid_spec(self) -> GridSpec | None:
        """Return the grid of the weights; None for plain numbers and for blocks with scales of scales."""
        grid = self.block_type.grid
        if grid is None or len(self.shape) != 2 or self.added:
            return None
        return GridSpec(
            grid.format,
            (self.shape[0], self.shape[1]),
            self.block_type.elements,
            affine=grid.affine,
            scale_dtype=grid.scale_dtype,
        )

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read rows `[start, stop)`: [R, K] or [R], float32 unless the file stores another float dtype."""
        data = self._bytes(read, start, stop)
        if self.block_type.dtype is not None:
            found = data.view(self.block_type.dtype)
        else:
            step = max(1, _PIECE_BYTES // self.row_bytes)
            found = torch.cat([_dequantized(rows, self.block_type) for rows in torch.split(data, step)])
        if self.added:
            found = (found.float() - self.added).to(self.torch_dtype)
        return found.view(stop - start, *self.shape[1:])

    def grid(self, read: Read, start: int, stop: int) -> StoredGrid | None:
        """Read codes, scales and minimums of rows `[start, stop)`; None without `grid_spec`."""
        spec, grid = self.grid_spec, self.block_type.grid
        if spec is None or grid is None:
            return None
        blocks = self._bytes(read, start, stop).reshape(-1, self.block_type.nbytes)
        codes, scales, minimums = grid.split(blocks)
        rows = stop - start
        biases = None if minimums is None else minimums.float().view(rows, -1)
        return StoredGrid(spec, codes.reshape(rows, -1), scales.view(rows, -1), biases=biases)

    def _bytes(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read the stored rows, uint8 [R, row_bytes], in the order of the model."""
        stored = StoredTensor(self.name, "U8", (self.shape[0], self.row_bytes), self.file, self.offset)
        if self.heads is None:
            return read(stored, start, stop)
        # Rows are permuted within a head, so whole heads are read.
        size = self.shape[0] // self.heads
        first = start // size * size
        rows = read(stored, first, -(-stop // size) * size)
        return halves_of_pairs(rows, size)[start - first : stop - first]


def halves_of_pairs(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder rows [R, B] of whole heads of `size` rows: even places first, then odd places."""
    return rows.view(-1, size // 2, 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def pairs_of_halves(rows: torch.Tensor, size: int) -> torch.Tensor:
    """Reorder rows [R, B] of whole heads of `size` rows: those of both halves by turns, one from each."""
    return rows.view(-1, 2, size // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def _dequantized(rows: torch.Tensor, block_type: BlockType) -> torch.Tensor:
    """Dequantize rows of blocks (uint8 [R, row_bytes]) to float32 [R, K], by the package gguf."""
    quants = gguf_package()
    kind = quants.GGMLQuantizationType(block_type.number)
    # Scales of damaged files may overflow; a later check reports that.
    with np.errstate(all="ignore"):
        return torch.from_numpy(quants.dequantize(rows.numpy(), kind))


def gguf_package(use: str = "reading") -> Any:
    """Import the package gguf; raise `EnvironmentProblem`, which names the `use`, if it is not installed."""
    try:
        import gguf
    except ImportError:
        raise EnvironmentProblem(
            f"{use} GGUF files takes the package gguf, which is not installed. Run {pip_install('gguf')}."
        ) from None
    return gguf
