"""Records of a target of `export`, and the schemes that its file format supports.

A scheme supports a matrix if it has every weight, bit by bit in float32: the same product of a scale and a
value. Codes of the values may differ, and groups may be smaller; their scales repeat.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.shard_file import OtherHeader
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.errors import CheckpointError
from quantkit.model.structure import Structure
from quantkit.packing.formats import NumberFormat
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.zero_points import ZERO_POINTS, ZeroPoint
from quantkit.targets.packed_source import StoredMatrix

#: Elements of a tensor, the first of which is number `offset` of the tensor called `name`.
Chunk = tuple[str, torch.Tensor, int]


@dataclass(frozen=True)
class Job:
    """Work that writes one or more whole tensors of a file.

    specs    tensors that it writes
    sources  tensors of the source that it reads
    chunks   function of the source's checkpoint that reads, converts and yields all elements in chunks
    """

    specs: tuple[TensorSpec, ...]
    sources: tuple[StoredTensor, ...]
    chunks: Callable[[Checkpoint], Iterator[Chunk]]


@dataclass(frozen=True)
class OutputFile:
    """File to write: a safetensors file, unless it has another `header`.

    name    name of the file
    jobs    work that writes its tensors, in order
    header  first bytes of another kind of file; None for safetensors
    """

    name: str
    jobs: tuple[Job, ...]
    header: OtherHeader | None = None

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        return tuple(spec for job in self.jobs for spec in job.specs)


@dataclass(frozen=True)
class ExportPlan:
    """Plan of an export, before any weight is written.

    files    files with tensors
    config   fields of config.json
    stored   text on the stored form, by source tensor
    read     opens the written files, given their paths, as a checkpoint
    readers  tools, with their version, that were tried with such files
    notes    texts for the user
    """

    files: tuple[OutputFile, ...]
    config: Mapping[str, Any]
    stored: Mapping[str, str]
    read: Callable[[Sequence[Path]], Checkpoint]
    readers: tuple[str, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Target:
    """A row of `TARGETS`: `plan(checkpoint, structure, max_shard_bytes)` decides all, or refuses by name."""

    name: str
    plan: Callable[[Checkpoint, Structure, int], ExportPlan]


@dataclass(frozen=True)
class SupportedScheme:
    """Codes of a format in groups of columns, each with a scale, and perhaps a zero-point or a minimum.

    `groups` are the allowed group sizes, the largest first. `scale_dtypes` are the dtypes of scales and
    minimums, the preferred first; `zero_points` the kinds of zero-points. `why_not` returns another reason
    why a matrix cannot be stored so, None for none.
    """

    name: str
    format: NumberFormat
    groups: tuple[int, ...]
    scale_dtypes: tuple[torch.dtype, ...]
    zero_points: frozenset[ZeroPoint] = frozenset({"none"})
    why_not: Callable[[StoredMatrix], str | None] = lambda matrix: None

    def code_table(self, source: NumberFormat) -> torch.Tensor | None:
        """Return this format's code for each code of `source`, uint8 [2**bits]; None if one is missing."""
        if source == self.format:
            return torch.arange(2**source.bits, dtype=torch.uint8)
        # A zero has a sign in some formats, and 0.0 == -0.0.
        codes = {(value, str(value)): code for code, value in enumerate(self.format.values)}
        found = [0 if math.isnan(value) else codes.get((value, str(value))) for value in source.values]
        return None if None in found else torch.tensor(found, dtype=torch.uint8)

    def fits_group(self, matrix: StoredMatrix, size: int) -> bool:
        """Return True if `size` divides the groups and the rows of the matrix."""
        columns = matrix.shape[1]
        return columns % size == 0 and (matrix.scheme.group_columns(columns) % size == 0)


@dataclass(frozen=True)
class SupportedSchemes:
    """The `schemes` of a target, described by `text`, and the `remedy` for a matrix that none supports."""

    target: str
    schemes: tuple[SupportedScheme, ...]
    text: str
    remedy: str

    def refuse(self, refused: Mapping[str, str]) -> None:
        """Raise `CheckpointError` unless `refused`, reasons by module, is empty."""
        if refused:
            reason = f"{next(iter(refused.values()))}; {self.target} holds {self.text}. {self.remedy}."
            raise CheckpointError(f"{self._cannot(tuple(refused))}: {reason}")

    def refuse_unfit(
        self, refused: Mapping[str, str], matrices: Iterable[StoredMatrix], *, channels: bool
    ) -> None:
        """Raise `CheckpointError` unless `refused`, reasons by module of `matrices`, is empty.

        If rows of all these are whole groups of no scheme, no group size helps, and the error says so. With
        `channels` a group may be a row of any length.
        """
        if not refused:
            return
        every = {size for scheme in self.schemes for size in scheme.groups}
        # Rows that a size divides are divided by what divides the size.
        sizes = sorted(one for one in every if not any(one % other == 0 for other in every - {one}))
        lengths = {
            one.module: one.shape[1]
            for one in matrices
            if all(one.shape[1] % size for size in sizes)
            and not (channels and one.scheme.group_columns(one.shape[1]) == one.shape[1])
        }
        if not refused.keys() <= lengths.keys():
            self.refuse(refused)
        length = next(iter(lengths.values()))
        alike = dict.fromkeys(f"*.{name.rpartition('.')[2]}" if "." in name else name for name in lengths)
        rules = " ".join(f"--rule '{pattern}=keep'" for pattern in alike)
        raise CheckpointError(
            f"{self._cannot(tuple(lengths))}: rows of {length} have no whole groups of "
            f"{' or '.join(map(str, sizes))}, so they cannot be exported as they are. Quantize with {rules}, "
            "which leaves such linears dense, or export to another target."
        )

    def _cannot(self, names: Sequence[str]) -> str:
        """Return the start of an error: modules, and what cannot be done with them."""
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"{names[0]!r}{more} cannot be exported to {self.target} with the same values"


@dataclass(frozen=True)
class Rows:
    """R rows of K columns in G groups: codes uint8 [R, K], scales float32 [R, G].

    `zeros` are zero-points [R, G] as codes, and `minimums` float32 [R, G]; a symmetric matrix has neither.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None = None
    minimums: torch.Tensor | None = None


#: Conditions on a matrix for any supported scheme, and the reason if one is not met.
_CHECKS: tuple[tuple[Callable[[StoredMatrix], bool], str], ...] = (
    (lambda one: one.scheme.planes == 1, "its weights are sums of several values"),
    (lambda one: not one.scheme.column_scale, "it has scales of columns"),
    (lambda one: one.scheme.activations is None, "its inputs are rounded, which that layout does not say"),
    (lambda one: not one.scheme.is_fitted, "its code book is fitted to it"),
)


def why_unsupported(matrix: StoredMatrix, supported: SupportedScheme) -> str | None:
    """Return why `supported` does not have the weights of a matrix, by its scheme; None if it does."""
    scheme = matrix.scheme
    for fits, reason in _CHECKS:
        if not fits(matrix):
            return reason
    if supported.code_table(scheme.format) is None:
        return f"its values are those of {scheme.format.name}"
    if scheme.zero_point not in supported.zero_points:
        return f"it has {ZERO_POINTS[scheme.zero_point].plural}"
    if not any(supported.fits_group(matrix, size) for size in supported.groups):
        sizes = ", ".join(map(str, supported.groups))
        return (
            f"its groups of {scheme.group_columns(matrix.shape[1])} in rows of {matrix.shape[1]} are of no "
            f"whole groups of {sizes}"
        )
    return supported.why_not(matrix)


def recoded(packed: PackedTensor, supported: SupportedScheme, size: int) -> Rows:
    """Convert a packed tensor to codes of `supported` with the same weights, in groups of `size` columns.

    Scales, zero-points and minimums of larger groups repeat.
    """
    scheme, columns = packed.scheme, packed.shape[1]
    table = supported.code_table(scheme.format)
    assert table is not None
    codes = packed.codes()
    if scheme.format != supported.format:
        codes = table.index_select(0, codes.flatten().int()).view(codes.shape)

    def of_groups(values: torch.Tensor) -> torch.Tensor:
        repeats = scheme.group_columns(columns) // size
        return values.repeat_interleave(repeats, dim=1)[:, : columns // size]

    scales, zeros = packed.group_scale(), packed.zero_points()
    if zeros is None:
        return Rows(codes, of_groups(scales))
    if ZERO_POINTS[scheme.zero_point].is_minimum:
        # A scale of zero stands for zeros, whatever the minimum.
        minimums = torch.where(scales == 0, 0.0, zeros.float())
        return Rows(codes, of_groups(scales), minimums=of_groups(minimums))
    if scheme.format != supported.format:
        # Zero-points are codes too.
        zeros = table.index_select(0, zeros.flatten().int()).view(zeros.shape)
    return Rows(codes, of_groups(scales), zeros=of_groups(zeros))


def recoded_rows(
    checkpoint: Checkpoint, matrix: StoredMatrix, supported: SupportedScheme, size: int
) -> Iterator[Rows]:
    """Yield all rows of a matrix in `supported`, about `PIECE` weights at a time."""
    for start, stop in matrix.pieces():
        yield recoded(matrix.packed(checkpoint.read_stored, start, stop), supported, size)


def inexact(values: torch.Tensor, dtype: torch.dtype) -> float | None:
    """Return the first of `values` (float32) that is inexact in `dtype`; None if all are exact."""
    wrong = values.to(dtype).to(torch.float32) != values
    return float(values[wrong][0]) if bool(wrong.any()) else None
