"""AWQ of version `gemm`: 4-bit integers, eight rows of the weight in an int32 word, with zero-points."""

from collections.abc import Iterator
from typing import Any

import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.low_bit.gptq import AWQ_ROWS
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.model.structure import Structure
from quantkit.packing import bitpack
from quantkit.packing.formats import number_format
from quantkit.targets.packed_source import StoredMatrix
from quantkit.targets.shards import (
    GPTQMODEL,
    VLLM,
    Fit,
    dense_linears,
    has_experts,
    linears_alike,
    sharded,
)
from quantkit.targets.target import (
    Chunk,
    ExportPlan,
    Job,
    SupportedScheme,
    SupportedSchemes,
    Target,
    recoded_rows,
)

_BITS = 4
_MIDDLE = 1 << (_BITS - 1)


def _why_not(matrix: StoredMatrix) -> str | None:
    rows = matrix.shape[0]
    return f"its {rows} rows are not a multiple of {len(AWQ_ROWS)}" if rows % len(AWQ_ROWS) else None


_SUPPORTED = SupportedSchemes(
    "awq",
    (
        SupportedScheme(
            f"{_BITS} bits",
            number_format(f"int{_BITS}"),
            (128, 64, 32, 16),
            (torch.float16, torch.bfloat16),
            frozenset({"none", "integer"}),
            _why_not,
        ),
    ),
    "integers of 4 bits, of one group size for all, symmetric or with integer zero-points, with float16 or "
    "bfloat16 scales",
    "Quantize with --format int4, --group-size 128 and --scale-dtype float16, all layers alike, without "
    "--lm-head and --embeddings; int8 goes to gptq",
)


def plan(checkpoint: Checkpoint, structure: Structure, max_shard_bytes: int) -> ExportPlan:
    """Plan an AWQ checkpoint (see `Target`); `CheckpointError` if AWQ cannot hold a matrix.

    Reads scales, to choose float16, or bfloat16 if only that holds them all exactly.
    """
    matrices, fits, dtype = linears_alike(checkpoint, structure, _SUPPORTED)
    first = next(iter(fits.values()))
    dense = dense_linears(checkpoint, structure.embedding, "lm_head.weight")
    section: dict[str, Any] = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": _BITS,
        "group_size": -1 if first.channel else first.size,
        "zero_point": True,
        "modules_to_not_convert": dense or None,
    }
    jobs = {name: _job(matrices[name], one, dtype) for name, one in fits.items()}
    stored = dict.fromkeys(fits, f"AWQ {_BITS} bits, groups of {section['group_size']}")
    config = {**checkpoint.config, "quantization_config": section}
    readers = () if has_experts(structure) else (GPTQMODEL, VLLM)
    return sharded(checkpoint, jobs, stored, config, max_shard_bytes, readers)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes uint8 [N, C] down columns to words int32 [C, N / 8], each of eight rows in AWQ's order."""
    ordered = codes.T.reshape(codes.shape[1], -1, len(AWQ_ROWS))[:, :, list(AWQ_ROWS)]
    return bitpack.pack(ordered.flatten(1), _BITS)


def _job(matrix: StoredMatrix, one: Fit, dtype: torch.dtype) -> Job:
    """Return the job that writes a matrix [N, K] as the tensors qweight, qzeros and scales of AWQ."""
    base, (rows, columns) = matrix.name.removesuffix("weight"), matrix.shape
    groups, in_word = columns // one.size, len(AWQ_ROWS)
    specs = (
        TensorSpec(f"{base}qweight", "I32", (columns, rows // in_word)),
        TensorSpec(f"{base}qzeros", "I32", (groups, rows // in_word)),
        TensorSpec(f"{base}scales", SAFETENSORS_DTYPES[dtype], (groups, rows)),
    )

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        words, zeros, scales = (torch.empty(spec.shape, dtype=spec.torch_dtype) for spec in specs)
        start = 0
        for found in recoded_rows(checkpoint, matrix, one.supported, one.size):
            stop = start + len(found.codes)
            of_words = slice(start // in_word, stop // in_word)
            middle = torch.full_like(found.scales, _MIDDLE, dtype=torch.uint8)
            words[:, of_words] = _words(found.codes)
            zeros[:, of_words] = _words(middle if found.zeros is None else found.zeros)
            scales[:, start:stop] = found.scales.to(dtype).T
            start = stop
        for spec, part in zip(specs, (words, zeros, scales), strict=True):
            yield spec.name, part, 0

    return Job(specs, (matrix,), chunks)


AWQ = Target("awq", plan)
