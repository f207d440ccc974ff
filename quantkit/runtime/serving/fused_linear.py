"""Linear of several stored matrices along N, such as q, k and v, each dense or in a scheme of its own.

Adjacent matrices of one scheme become one packed matrix, which one launch multiplies. Matrices with a part
that all rows share, such as a codebook, stay apart.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import CheckpointError
from quantkit.packing.names import Container
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.serving.shares import WHOLE, Share, stored_rows


class DenseLinear(nn.Linear):
    """Dense matrices of a `FusedLinear`, stacked: y [..., N] = x [..., K] W^T + b; b is an argument."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return F.linear(x, self.weight, bias)


class FusedLinear(nn.Module):
    """Linear y [..., sum of N] = x [..., K] W^T + b; W stacks `shares`, shards of matrices, along N.

    `load` fills it from tensors of a checkpoint, and `finish` repacks them for kernels. `container` is the
    file format of the checkpoint, `dtype` that of dense matrices.
    """

    def __init__(self, shares: Sequence[Share], container: Container, dtype: torch.dtype) -> None:
        super().__init__()
        self.shares = tuple(shares)
        self._container: Container = container
        self.blocks = nn.ModuleList()
        #: Index in `blocks`, and first row there, of each share.
        self._places: list[tuple[int, int]] = []
        for run in _runs(self.shares):
            rows, columns = sum(share.local_shape[0] for share in run), run[0].local_shape[1]
            scheme, first = run[0].local_scheme, 0
            for share in run:
                self._places.append((len(self.blocks), first))
                first += share.local_shape[0]
            self.blocks.append(
                DenseLinear(columns, rows, bias=False, dtype=dtype)
                if scheme is None
                else PackedLinear(columns, rows, scheme, container)
            )
        for parameter in self.parameters():
            parameter.requires_grad_(False)
        self._missing = {
            (index, entry)
            for index in range(len(self.shares))
            for entry, _ in self._entries(index)
            if self._part(index, entry) != "shape"
        }

    def entries(self) -> dict[str, torch.dtype]:
        """Return the dtype of each stored tensor, by its name in the linear, such as "weight_scale"."""
        return {name: dtype for index in range(len(self.shares)) for name, dtype in self._entries(index)}

    def _entries(self, index: int) -> Iterator[tuple[str, torch.dtype]]:
        block = self._block(index)
        if isinstance(block, PackedLinear):
            yield from ((name, spec.dtype) for name, spec in block.part_specs().items())
        else:
            yield "weight", block.weight.dtype

    def has_rows(self, entry: str) -> bool:
        """Return True if the first dimension of stored tensor `entry` is rows, or blocks of rows, of W."""
        scheme, part = self.shares[0].scheme, self._part(0, entry)
        return scheme is None or (
            part not in (*WHOLE, "shape", "column_scale") and not (part == "scale" and scheme.per_tensor)
        )

    def _part(self, index: int, entry: str) -> str:
        block = self._block(index)
        return str(block.part_specs()[entry].part) if isinstance(block, PackedLinear) else entry

    def _block(self, index: int) -> Any:
        return self.blocks[self._places[index][0]]

    def load(self, index: int, entry: str, loaded: torch.Tensor) -> None:
        """Load this rank's shard of `loaded`, the whole tensor `entry` of matrix `index` in the checkpoint.

        Raises `CheckpointError` for a tensor that the scheme does not have, or of another dtype or shape.
        """
        share, (number, first) = self.shares[index], self._places[index]
        block: Any = self.blocks[number]
        if entry not in dict(self._entries(index)):
            raise CheckpointError(
                f"{share.name}.{entry} is in the file, and config.json says that the matrix is "
                f"{'dense' if share.scheme is None else share.scheme}. Quantize the model again."
            )
        self._missing.discard((index, entry))
        if not isinstance(block, PackedLinear):
            taken = share.take("weight", loaded)
            block.weight.data[first : first + len(taken)].copy_(taken)
            return
        spec = block.part_specs()[entry]
        if spec.part == "shape":
            share.check_shape(loaded)
            return
        scheme = share.local_scheme
        assert share.scheme is not None and scheme is not None
        stored = stored_format(share.scheme, share.shape[1], self._container)
        dtype = scheme.storage_shapes(share.local_shape)[spec.part][0]
        if loaded.ndim == 2 and loaded.stride(0) < loaded.stride(1):
            # vLLM transposes the weights of a Conv1D module, and does so with its words.
            loaded = loaded.T
        taken = share.read(spec.part, loaded, self._container)
        target = stored.from_file(spec.part, getattr(block, entry).data, dtype)
        at = 0 if spec.part in WHOLE else stored_rows(scheme, spec.part, first)
        target[at : at + len(taken)].copy_(taken)

    def finish(self, dtype: torch.dtype, *, layouts: bool = True) -> None:
        """Repack words for kernels with activations of `dtype`; if `layouts` is False, keep words as stored.

        Raises `CheckpointError` if tensors were not loaded.
        """
        if self._missing:
            index, entry = min(self._missing)
            others = f" and {len(self._missing) - 1} more" if len(self._missing) > 1 else ""
            raise CheckpointError(
                f"{self.shares[index].name}.{entry}{others} is not in the checkpoint. Verify it: "
                "quantkit verify DIRECTORY."
            )
        for block in self.blocks:
            if layouts and isinstance(block, PackedLinear):
                block.build_kernel_layouts(dtype)

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """Return y [..., sum of N] in the dtype of x [..., K]; `bias` is [sum of N]."""
        if len(self.blocks) == 1:
            return self.blocks[0](x, bias)  # type: ignore[no-any-return]
        rows: list[int] = [block.out_features for block in self.blocks]  # type: ignore[misc]
        biases = [None] * len(rows) if bias is None else torch.split(bias, rows)
        return torch.cat([block(x, one) for block, one in zip(self.blocks, biases, strict=True)], -1)


def _runs(shares: Sequence[Share]) -> Iterator[list[Share]]:
    """Yield runs of adjacent `shares`: those of a run can be stored as one packed or dense matrix."""
    run = [shares[0]]
    for above, share in pairwise(shares):
        if share.scheme == above.scheme and _ends_between_units(run):
            run.append(share)
        else:
            yield run
            run = [share]
    yield run


def _ends_between_units(run: Sequence[Share]) -> bool:
    """Return True if other rows can follow `run` in one packed matrix.

    Words and blocks must be full at the end of `run`, and no part may be shared by all rows.
    """
    scheme = run[0].scheme
    rows = sum(share.local_shape[0] for share in run)
    if scheme is None:
        return True
    static = scheme.activations is not None and scheme.activations.static
    shared = scheme.per_tensor or scheme.global_scale or scheme.column_scale or scheme.is_fitted or static
    return not shared and all(rows % unit == 0 for unit in scheme.row_units().values())
