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
from quantkit.targets.packed_source import PIECE, StoredMatrix
from quantkit.targets.target import (
    Chunk,
    ExportPlan,
    Job,
    OutputFile,
    SupportedScheme,
    SupportedSchemes,
    recoded_rows,
    why_unsupported,
)

#: Tools that read GPTQ and AWQ, as tried: dense models only.
GPTQMODEL, VLLM = "transformers with gptqmodel 7.7.0", "vLLM 0.32.0"


@dataclass(frozen=True)
class Fit:
    """Stored form of a matrix in a target.

    supported  scheme of its codes
    size       columns of a group, which share a scale
    channel    True if a group is a whole row
    """

    supported: SupportedScheme
    size: int
    channel: bool


def fit(matrix: StoredMatrix, schemes: Sequence[SupportedScheme], *, channels: bool) -> Fit | str:
    """Choose the first of `schemes` that has the weights of a matrix, with the largest groups it allows.

    With `channels` a group may be a row of any length. Returns the reason as text if no scheme fits.
    """
    reasons = []
    columns = matrix.shape[1]
    for supported in schemes:
        whole = channels and matrix.scheme.group_columns(columns) == columns
        sized = replace(supported, groups=(columns, *supported.groups)) if whole else supported
        if (reason := why_unsupported(matrix, sized)) is None:
            size = next(size for size in sized.groups if sized.fits_group(matrix, size))
            return Fit(supported, size, whole)
        known = supported.code_table(matrix.scheme.format) is not None
        reasons.append((not known, reason))
    return f"it is {matrix.scheme}, and {min(reasons, key=lambda one: one[0])[1]}"


def why_not_alike(
    matrices: Mapping[str, StoredMatrix], fits: Mapping[str, Fit]
) -> tuple[dict[str, str], dict[str, Fit]]:
    """Give all matrices one group size; return reasons of those that cannot, by module, and the new fits.

    A matrix cannot if its scheme is not that of most, or if the smallest group does not divide its groups and
    rows. Groups stay whole rows if all are.
    """
    supported, _ = Counter(fit.supported.name for fit in fits.values()).most_common(1)[0]
    refused: dict[str, str] = {}
    for name, one in fits.items():
        matrix = matrices[name]
        if one.supported.name != supported:
            refused[matrix.module] = (
                f"it is {matrix.scheme}, most others are {supported}, and all have one width"
            )
    if all(fit.channel for fit in fits.values()):
        return refused, dict(fits)
    size = min(fit.size for fit in fits.values() if not fit.channel)
    for name, one in fits.items():
        matrix = matrices[name]
        if not one.supported.fits_group(matrix, size):
            refused[matrix.module] = f"its rows of {matrix.shape[1]} are no whole groups of {size}"
    return refused, {name: replace(one, size=size, channel=False) for name, one in fits.items()}


def scale_dtype(
    matrices: Mapping[str, StoredMatrix],
    fits: Mapping[str, Fit],
    values: Callable[[StoredMatrix, Fit], Iterator[torch.Tensor]],
    dtypes: Sequence[torch.dtype],
) -> tuple[torch.dtype | None, dict[str, str]]:
    """Read `values` (float32) of every matrix; return the first of `dtypes` in which all are exact.

    Returns None if there is none, and then also the reason for the first such matrix, by module.
    """
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


def scales_of(checkpoint: Checkpoint) -> Callable[[StoredMatrix, Fit], Iterator[torch.Tensor]]:
    """Return a function that reads and yields the scales of a matrix, float32 [R, G], some rows at a time."""

    def scales(matrix: StoredMatrix, one: Fit) -> Iterator[torch.Tensor]:
        return (rows.scales for rows in recoded_rows(checkpoint, matrix, one.supported, one.size))

    return scales


def linears_alike(
    checkpoint: Checkpoint, structure: Structure, supported: SupportedSchemes
) -> tuple[dict[str, StoredMatrix], dict[str, Fit], torch.dtype]:
    """Choose one scheme, group size and dtype of scales for all packed matrices; reads their scales.

    Returns the matrices and their fits by tensor, and the dtype. Raises `CheckpointError` for a matrix
    without a supported scheme, with another than most, or of the head or token embedding.
    """
    matrices = {name: one for name, one in checkpoint.tensors.items() if isinstance(one, StoredMatrix)}
    kinds = {one: linear.kind for linear in structure.linears.values() for one in linear.stored}
    refused: dict[str, str] = {}
    fits: dict[str, Fit] = {}
    for name, matrix in matrices.items():
        kind = kinds.get(name.removesuffix(".weight"), "embedding")
        found = fit(matrix, supported.schemes, channels=True)
        if kind in ("lm_head", "embedding"):
            refused[matrix.module] = "it is the head or the token embedding"
        elif isinstance(found, str):
            refused[matrix.module] = found
        else:
            fits[name] = found
    supported.refuse_unfit(refused, matrices.values(), channels=True)
    differing, fits = why_not_alike(matrices, fits)
    supported.refuse(differing)
    dtype, inexact = scale_dtype(matrices, fits, scales_of(checkpoint), supported.schemes[0].scale_dtypes)
    supported.refuse(inexact)
    assert dtype is not None
    return matrices, fits, dtype


def dense_job(tensor: StoredTensor) -> Job:
    """Return the job that copies an unquantized tensor."""
    spec = TensorSpec(tensor.name, tensor.dtype, tensor.shape)
    rows = tensor.shape[0] if tensor.shape else 1
    step = max(1, PIECE * rows // max(1, tensor.elements))

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        for start in range(0, rows, step):
            data = checkpoint.read(tensor.name, start, min(start + step, rows))
            yield tensor.name, data, start * (tensor.elements // rows)

    return Job((spec,), (tensor,), chunks)


def has_experts(structure: Structure) -> bool:
    """Return True if linears of the model are experts of a mixture."""
    return any(linear.kind == "experts" for linear in structure.linears.values())


def dense_linears(checkpoint: Checkpoint, *without: str | None) -> list[str]:
    """Return the names of modules with an unpacked matrix, except for the tensors `without`."""
    return [
        name.removesuffix(".weight")
        for name, tensor in checkpoint.tensors.items()
        if name.endswith(".weight") and len(tensor.shape) == 2 and name not in without
        if not isinstance(tensor, StoredMatrix)
    ]


def sharded(
    checkpoint: Checkpoint,
    jobs: Mapping[str, Job],
    stored: Mapping[str, str],
    config: Mapping[str, Any],
    max_shard_bytes: int,
    readers: tuple[str, ...],
    notes: tuple[str, ...] = (),
) -> ExportPlan:
    """Plan safetensors files of about `max_shard_bytes`.

    jobs     job of each packed matrix, by source tensor; other tensors are copied
    stored   text on the stored form, by source tensor
    config   config.json of the files
    readers  tools, with their version, that were tried with such files
    notes    texts for the user
    """
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
        readers,
        notes,
    )
