"""Divide stored matrices for tensor parallelism: which rows and columns of a matrix a rank loads."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import CheckpointError, UsageError
from quantkit.packing.activations import INPUT_PARTS
from quantkit.packing.names import Container
from quantkit.packing.schemes import Scheme

#: Start and stop of rows or columns.
Range = tuple[int, int]
#: Parts that all rows and columns of a matrix share.
WHOLE = frozenset({"global_scale", "codebook", *INPUT_PARTS.values()})


@dataclass(frozen=True)
class Share:
    """Shard of the stored matrix of module `name`: the rows and columns that a rank loads.

    `shape` is (N, K), and `scheme` the scheme, of the whole matrix; `scheme` is None for a dense one. A range
    is (start, stop); `rows` has several if the stored matrix joins matrices that the engine divides, such as
    q, k and v. Raises `UsageError` for a range that starts or ends inside a word, group or block.
    """

    name: str
    scheme: Scheme | None
    shape: tuple[int, int]
    rows: tuple[Range, ...]
    columns: Range

    def __post_init__(self) -> None:
        if self.scheme is not None:
            rows, columns = self.shape
            self.scheme.check_features(self.name, columns)
            for cut in self.rows:
                self._check("rows", cut, rows, self.scheme.row_units())
            self._check("columns", self.columns, columns, self.scheme.column_units(columns))

    def _check(self, axis: str, cut: Range, length: int, units: Mapping[str, int]) -> None:
        for what, size in units.items():
            if cut[0] % size or (cut[1] % size and cut[1] != length):
                raise UsageError(
                    f"a rank has {axis} {cut[0]} to {cut[1]} of the {length} of {self.name!r}, which are no "
                    f"whole {what}. Use a smaller tensor parallel size, or quantize the model with another "
                    "format, group size or --activations."
                )

    @property
    def local_shape(self) -> tuple[int, int]:
        """Return (N, K) of the shard."""
        return sum(stop - start for start, stop in self.rows), self.columns[1] - self.columns[0]

    @property
    def local_scheme(self) -> Scheme | None:
        """Return the scheme of the shard; None if the matrix is dense.

        If a group is at least as long as a row of the shard, the shard has one scale per row.
        """
        return None if self.scheme is None else self.scheme.for_columns(self.local_shape[1])

    def take(self, part: str, loaded: torch.Tensor) -> torch.Tensor:
        """Return the shard of `loaded`, which is `part` of the whole packed matrix, or a dense matrix [N, K].

        Parts that all rows share are returned whole. Raises `CheckpointError` if dtype or shape of `loaded`
        are not those of the part.
        """
        if self.scheme is None:
            self._expect("weight", loaded, None, self.shape)
            return torch.cat([loaded[slice(*cut), slice(*self.columns)] for cut in self.rows])
        self._expect(part, loaded, *self.scheme.storage_shapes(self.shape)[part])
        if part in WHOLE or (part == "scale" and self.scheme.per_tensor):
            return loaded
        columns = _stored_columns(self.scheme, part, self.columns, self.shape[1])
        if part == "column_scale":
            return loaded[columns]
        taken = [
            loaded[stored_rows(self.scheme, part, start) : stored_rows(self.scheme, part, stop), columns]
            for start, stop in self.rows
        ]
        return taken[0] if len(taken) == 1 else torch.cat(taken)

    def read(self, part: str, loaded: torch.Tensor, container: Container) -> torch.Tensor:
        """Return `take(part, loaded)`, with `loaded` viewed in the dtype that `part` has in memory.

        `loaded` has the dtype of files of `container`.
        """
        assert self.scheme is not None
        stored = stored_format(self.scheme, self.shape[1], container)
        dtype = self.scheme.storage_shapes(self.shape)[part][0]
        return self.take(part, stored.from_file(part, loaded, dtype))

    def check_shape(self, loaded: torch.Tensor) -> None:
        """Raise `CheckpointError` unless `loaded`, the stored shape [2] of the matrix, is `shape`."""
        if loaded.tolist() != list(self.shape):
            raise CheckpointError(
                f"{self.name!r} is {loaded.tolist()} in the file and {list(self.shape)} in the engine's "
                "model. Check that config.json is that of the quantized model."
            )

    def _expect(
        self, part: str, loaded: torch.Tensor, dtype: torch.dtype | None, shape: tuple[int, ...]
    ) -> None:
        if tuple(loaded.shape) != shape or loaded.dtype != (dtype or loaded.dtype):
            packed = "dense" if self.scheme is None else str(self.scheme)
            raise CheckpointError(
                f"part {part!r} of {self.name!r} is {loaded.dtype} {tuple(loaded.shape)} in the file; "
                f"expected {dtype or 'floats'} {shape} for a {packed} matrix of {self.shape}. "
                "Verify the checkpoint: quantkit verify DIRECTORY."
            )


def stored_rows(scheme: Scheme, part: str, row: int) -> int:
    """Return the number of rows of the stored `part` that hold the first `row` rows of the matrix."""
    storage = scheme.zero_point_type.storage
    if part == "zero_point" and storage is not None:
        return storage.rows(row, scheme.format.bits)
    return -(-row // scheme.group_rows) if part == "scale" else row


def _stored_columns(scheme: Scheme, part: str, cut: Range, length: int) -> slice:
    """Return the columns of the stored `part` that hold columns `cut` of the matrix, of `length` columns."""
    if part == "column_scale":
        return slice(*cut)
    if part == "packed":
        return slice(scheme.words_per_row(cut[0]) if cut[0] else 0, scheme.words_per_row(cut[1]))
    # A row that is one group has the same scale on all ranks.
    group, planes = scheme.group_columns(length), scheme.planes if part == "scale" else 1
    return slice(cut[0] // group * planes, -(-cut[1] // group) * planes)
