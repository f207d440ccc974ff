"""MLX, mode `affine`: integers in uint32 words along rows, with a scale and a bias for each group."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.model.structure import Structure
from quantkit.packing import stream
from quantkit.packing.formats import number_format
from quantkit.targets.mlx_config import mlx_config
from quantkit.targets.mlx_types import MLX_LM
from quantkit.targets.packed_source import StoredMatrix
from quantkit.targets.shards import Fit, fit, scale_dtype, sharded
from quantkit.targets.target import (
    Chunk,
    ExportPlan,
    Job,
    Rows,
    SupportedScheme,
    SupportedSchemes,
    Target,
    recoded_rows,
)

_SUPPORTED = SupportedSchemes(
    "mlx",
    tuple(
        SupportedScheme(
            f"{bits} bits",
            number_format(f"int{bits}"),
            (128, 64, 32),
            (torch.float16, torch.bfloat16, torch.float32),
            frozenset({"none", "integer", "minimum"}),
        )
        for bits in (2, 3, 4, 5, 6, 8)
    ),
    "integers of 2, 3, 4, 5, 6 or 8 bits in groups of 32, 64 or 128, symmetric, with integer zero-points or "
    "with minimums",
    "Quantize with --format int4 or int8, --group-size 64 and --scale-dtype float16",
)


def plan(checkpoint: Checkpoint, structure: Structure, max_shard_bytes: int) -> ExportPlan:
    """Plan an MLX checkpoint (see `Target`); `CheckpointError` if MLX cannot hold a matrix.

    Reads scales and zero-points, to choose the first of float16, bfloat16 and float32 that holds all scales
    and biases exactly. Scales without minimums must be exact in 16 bits.
    """
    model, tried = mlx_config(checkpoint)
    matrices = {name: one for name, one in checkpoint.tensors.items() if isinstance(one, StoredMatrix)}
    found = {name: fit(matrix, _SUPPORTED.schemes, channels=False) for name, matrix in matrices.items()}
    refused = {matrices[name].module: one for name, one in found.items() if isinstance(one, str)}
    _SUPPORTED.refuse_unfit(refused, matrices.values(), channels=False)
    fits = {name: one for name, one in found.items() if isinstance(one, Fit)}

    def values(matrix: StoredMatrix, one: Fit) -> Iterator[torch.Tensor]:
        for rows in recoded_rows(checkpoint, matrix, one.supported, one.size):
            yield rows.scales
            yield _biases(rows, one.supported)

    def scales(matrix: StoredMatrix, one: Fit) -> Iterator[torch.Tensor]:
        for rows in recoded_rows(checkpoint, matrix, one.supported, one.size):
            if rows.minimums is None:
                yield rows.scales

    # Products with codes, and sums, are exact of scales with 16 bits.
    for dtypes in (torch.float16,), (torch.bfloat16,):
        _, inexact = scale_dtype(matrices, fits, scales, dtypes)
        if not inexact:
            break
    _SUPPORTED.refuse(inexact)
    dtype, inexact = scale_dtype(matrices, fits, values, _SUPPORTED.schemes[0].scale_dtypes)
    _SUPPORTED.refuse(inexact)
    assert dtype is not None
    jobs = {name: _job(matrices[name], one, dtype) for name, one in fits.items()}
    common, _ = Counter((one.supported.format.bits, one.size) for one in fits.values()).most_common(1)[0]
    section: dict[str, Any] = {"bits": common[0], "group_size": common[1], "mode": "affine"}
    for name, one in fits.items():
        own = {"bits": one.supported.format.bits, "group_size": one.size}
        if any(section[key] != value for key, value in own.items()):
            section[name.removesuffix(".weight")] = own
    stored = {
        name: f"MLX {one.supported.format.name}, groups of {one.size}, {SAFETENSORS_DTYPES[dtype]} scales"
        for name, one in fits.items()
    }
    notes = {
        "biases are float32, as no 16-bit dtype has them: MLX computes in float32 then": dtype
        == torch.float32,
        f"mlx-lm {MLX_LM} has models of type {model['model_type']!r}, and none was tried": not tried,
    }
    readers = (f"mlx-lm {MLX_LM}",) if tried else ()
    return sharded(
        checkpoint,
        jobs,
        stored,
        {**model, "quantization": section},
        max_shard_bytes,
        readers,
        tuple(text for text, applies in notes.items() if applies),
    )


def _biases(rows: Rows, supported: SupportedScheme) -> torch.Tensor:
    """Return the bias of each group, the value of code 0, float32 [R, G]."""
    if rows.minimums is not None:
        return rows.minimums
    zeros = 2 ** (supported.format.bits - 1) if rows.zeros is None else rows.zeros.float()
    return -rows.scales * zeros


def _job(matrix: StoredMatrix, one: Fit, dtype: torch.dtype) -> Job:
    """Return the job that writes a matrix [N, K] as the tensors weight, scales and biases of MLX."""
    base, (rows, columns) = matrix.name.removesuffix(".weight"), matrix.shape
    bits, groups = one.supported.format.bits, columns // one.size
    specs = (
        TensorSpec(f"{base}.weight", "U32", (rows, stream.words_per_row(columns, bits))),
        TensorSpec(f"{base}.scales", SAFETENSORS_DTYPES[dtype], (rows, groups)),
        TensorSpec(f"{base}.biases", SAFETENSORS_DTYPES[dtype], (rows, groups)),
    )

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        start = 0
        for found in recoded_rows(checkpoint, matrix, one.supported, one.size):
            words = stream.pack(found.codes, bits).view(torch.uint32)
            parts = words, found.scales.to(dtype), _biases(found, one.supported).to(dtype)
            for spec, part in zip(specs, parts, strict=True):
                yield spec.name, part, start * spec.shape[1]
            start += len(found.codes)

    return Job(specs, (matrix,), chunks)


MLX = Target("mlx", plan)
