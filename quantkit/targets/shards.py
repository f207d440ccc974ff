"""Targets that are safetensors files: a few tensors for each packed matrix, and a section of config.json."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.open_source import exactly
from quantkit.checkpoint.output.directory import SINGLE_FILE_NAME
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.model.structure import Structure
from quantkit.targets.packed_source import PIECE, PackedMatrix
from quantkit.targets.target import (
    Chunk,
    ExportPlan,
    Held,
    Job,
    Layout,
    OutputFile,
    layout_rows,
    why_not_held,
)


@dataclass(frozen=True)
class Fit:
    """A layout that holds a matrix, and the columns of its groups; `channel` if a group is a row."""

    layout: Layout
    size: int
    channel: bool


def fit(matrix: PackedMatrix, layouts: Sequence[Layout], *, channels: bool) -> Fit | str:
    """The first of `layouts` that holds a matrix, with the largest groups, or why none does.

    With `channels` a group may be a row of any length.
    """
    reasons = []
    columns = matrix.shape[1]
    for layout in layouts:
        whole = channels and matrix.scheme.group_columns(columns) == columns
        sized = replace(layout, groups=(columns, *layout.groups)) if whole else layout
        if (reason := why_not_held(matrix, sized)) is None:
            size = next(size for size in sized.groups if sized.fits_group(matrix, size))
            return Fit(layout, size, whole)
        known = layout.recoded(matrix.scheme.format) is not None
        reasons.append((not known, reason))
    return f"it is {matrix.scheme}, and {min(reasons, key=lambda one: one[0])[1]}"


def why_not_alike(
    matrices: Mapping[str, PackedMatrix], fits: Mapping[str, Fit]
) -> tuple[dict[str, str], dict[str, Fit]]:
    """Return which matrices differ from most, with the reason, and fits with groups of one size for all."""
    layout, _ = Counter(fit.layout.name for fit in fits.values()).most_common(1)[0]
    refused: dict[str, str] = {}
    for name, one in fits.items():
        matrix = matrices[name]
        if one.layout.name != layout:
            refused[matrix.module] = (
                f"it is {matrix.scheme}, most others are {layout}, and all have one width"
            )
    if all(fit.channel for fit in fits.values()):
        return refused, dict(fits)
    size = min(fit.size for fit in fits.values() if not fit.channel)
    for name, one in fits.items():
        matrix = matrices[name]
        if not one.layout.fits_group(matrix, size):
            refused[matrix.module] = f"its rows of {matrix.shape[1]} are no whole groups of {size}"
    return refused, {name: replace(one, size=size, channel=False) for name, one in fits.items()}


def scale_dtype(
    matrices: Mapping[str, PackedMatrix],
    fits: Mapping[str, Fit],
    values: Callable[[PackedMatrix, Fit], Iterator[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
) -> tuple[torch.dtype | None, dict[str, str]]:
    """The first of `dtypes` that has all of the `values` (float32) of each matrix, or why none has."""
    left = list(dtypes)
    for name, one in fits.items():
        matrix = matrices[name]
        for found in values(matrix, one):
            kept = [dtype for dtype in left if torch.equal(found.to(dtype).float(), found)]
            if not kept:
                names = " or ".join(str(dtype).removeprefix("torch.") for dtype in left)
                return None, {matrix.module: f"it is {matrix.scheme}, and not all of its scales are {names}"}
            left = kept
    return left[0], {}


def scales_of(checkpoint: Checkpoint) -> Callable[[PackedMatrix, Fit], Iterator[torch.Tensor]]:
    """Return what gives the scales of a matrix, float32 [R, G], some rows at a time."""

    def scales(matrix: PackedMatrix, one: Fit) -> Iterator[torch.Tensor]:
        return (rows.scales for rows in layout_rows(checkpoint, matrix, one.layout, one.size))

    return scales


def linears_alike(
    checkpoint: Checkpoint, structure: Structure, held: Held
) -> tuple[dict[str, PackedMatrix], dict[str, Fit], torch.dtype]:
    """All packed matrices, how each is held, and the dtype of scales, where all have one layout.

    `CheckpointError` for a matrix that no layout holds, or another than that of most.
    """
    matrices = {name: one for name, one in checkpoint.tensors.items() if isinstance(one, PackedMatrix)}
    kinds = {one: linear.kind for linear in structure.linears.values() for one in linear.stored}
    refused: dict[str, str] = {}
    fits: dict[str, Fit] = {}
    for name, matrix in matrices.items():
        kind = kinds.get(name.removesuffix(".weight"), "embedding")
        found = fit(matrix, held.layouts, channels=True)
        if kind in ("lm_head", "embedding"):
            refused[matrix.module] = "it is the head or the token embedding"
        elif isinstance(found, str):
            refused[matrix.module] = found
        else:
            fits[name] = found
    held.refuse(refused)
    differing, fits = why_not_alike(matrices, fits)
    held.refuse(differing)
    dtype, inexact = scale_dtype(matrices, fits, scales_of(checkpoint), held.layouts[0].scale_dtypes)
    held.refuse(inexact)
    assert dtype is not None
    return matrices, fits, dtype


def dense_job(tensor: StoredTensor) -> Job:
    """The copy of a tensor of numbers."""
    spec = TensorSpec(tensor.name, tensor.dtype, tensor.shape)
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, PIECE * rows // max(1, tensor.elements))

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        for start in range(0, rows, step):
            data = checkpoint.read(tensor.name, start, min(start + step, rows))
            yield tensor.name, data, start * (tensor.elements // rows)

    return Job((spec,), (tensor,), chunks)


def dense_linears(checkpoint: Checkpoint, *without: str | None) -> list[str]:
    """Names of modules with a matrix of numbers, but for those of the tensors `without`."""
    return [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and name not in without
        if not isinstance(tensor, PackedMatrix)
    ]


def sharded(
    checkpoint: Checkpoint,
    jobs: Mapping[str, Job],
    stored: Mapping[str, str],
    config: Mapping[str, Any],
    max_shard_bytes: int,
    notes: tuple[str, ...] = (),
) -> ExportPlan:
    """The plan of files of about `max_shard_bytes` with `jobs`, by tensor, or copies where there is none."""
    groups: list[list[Job]] = [[]]
    size = 0
    for name, tensor in checkpoint.tensors.items():
        job = jobs.get(name) or dense_job(tensor)
        nbytes = sum(spec.nbytes for spec in job.specs)
        if groups[-1] and size + nbytes > max_shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += nbytes
    count = len(groups)
    names = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    names = names if count > 1 else [SINGLE_FILE_NAME]

    def read(paths: Sequence[Path]) -> Checkpoint:
        return exactly(dequantized(replace(Checkpoint.of_files(paths), config=dict(config))))

    return ExportPlan(
        tuple(OutputFile(name, tuple(group)) for name, group in zip(names, groups, strict=True)),
        config,
        {name: stored.get(name, tensor.dtype) for name, tensor in checkpoint.tensors.items()},
        read,
        notes,
    )
