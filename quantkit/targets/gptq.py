"""GPTQ: integers of 2, 4 or 8 bits in int32 words down columns, of one width and group size for all."""

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
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

_GROUPS = (1024, 512, 256, 128, 64, 32, 16)
_DTYPES = (torch.float16, torch.bfloat16)


def _why_not(matrix: StoredMatrix, bits: int) -> str | None:
    rows, columns = matrix.shape
    unit = 32 // bits
    if rows % unit or columns % unit:
        return f"its {rows} rows or {columns} columns do not fill words of {unit} codes"
    return None


_SCHEMES = tuple(
    SupportedScheme(
        f"{bits} bits",
        number_format(f"int{bits}"),
        _GROUPS,
        _DTYPES,
        frozenset({"none", "integer"}),
        partial(_why_not, bits=bits),
    )
    for bits in (2, 4, 8)
)
_SUPPORTED = SupportedSchemes(
    "gptq",
    _SCHEMES,
    "integers of 2, 4 or 8 bits, of one width and group size for all, symmetric or with integer zero-points, "
    "with float16 or bfloat16 scales",
    "Quantize with --format int4 or int8, --group-size 128 and --scale-dtype float16, all layers alike, "
    "without --lm-head and --embeddings",
)


#: Tools tried with dense models of version 1, by bits, and True without zero-points, which vLLM refuses.
_READERS = {(4, True): (GPTQMODEL, VLLM), (4, False): (GPTQMODEL,), (8, True): (GPTQMODEL,)}


def plan(checkpoint: Checkpoint, structure: Structure, max_shard_bytes: int) -> ExportPlan:
    """Plan a GPTQ checkpoint (see `Target`); `CheckpointError` if GPTQ cannot hold a matrix.

    Reads scales, to choose float16, or bfloat16 if only that holds them all exactly. Reads zero-points: if
    one is 0, the format is gptq_v2, as version 1 stores them less 1.
    """
    matrices, fits, dtype = linears_alike(checkpoint, structure, _SUPPORTED)
    first = next(iter(fits.values()))
    bits = first.supported.format.bits
    # Version 1 stores zero-points less 1, and its readers disagree on what that is of a zero.
    added = 0 if any(_has_zero(checkpoint, matrices[name], one) for name, one in fits.items()) else 1
    symmetric = not any(matrices[name].scheme.has_zero_point for name in fits)
    section: dict[str, Any] = {
        "quant_method": "gptq",
        "checkpoint_format": "gptq" if added else "gptq_v2",
        "bits": bits,
        "group_size": -1 if first.channel else first.size,
        "desc_act": False,
        "sym": symmetric,
        "lm_head": False,
        "pack_dtype": "int32",
    }
    dense = dense_linears(checkpoint, structure.embedding, "lm_head.weight")
    if dense:
        # A minus leaves out the modules that the pattern fits.
        section["dynamic"] = {f"-:^{re.escape(name)}$": {} for name in dense}
    jobs = {name: _job(matrices[name], one, dtype, added) for name, one in fits.items()}
    notes = () if added else ("a zero-point is 0, which GPTQ of version 1 has not: the format is gptq_v2",)
    stored = dict.fromkeys(fits, f"GPTQ {bits} bits, groups of {section['group_size']}")
    return sharded(
        checkpoint,
        jobs,
        stored,
        {**checkpoint.config, "quantization_config": section},
        max_shard_bytes,
        () if has_experts(structure) or not added else _READERS.get((bits, symmetric), ()),
        notes,
    )


def _has_zero(checkpoint: Checkpoint, matrix: StoredMatrix, one: Fit) -> bool:
    """Read the zero-points of a matrix; return True if one of them is 0."""
    if not matrix.scheme.has_zero_point:
        return False
    rows = recoded_rows(checkpoint, matrix, one.supported, one.size)
    return any(found.zeros is not None and bool((found.zeros == 0).any()) for found in rows)


def _job(matrix: StoredMatrix, one: Fit, dtype: torch.dtype, added: int) -> Job:
    """Return the job that writes a matrix [N, K] as the tensors qweight, qzeros, g_idx and scales of GPTQ.

    `one` has its codes and group size, `dtype` is that of the scales. A stored zero-point is its code less
    `added`: 1 in version 1 of the format, 0 in version 2.
    """
    base, (rows, columns) = matrix.name.removesuffix("weight"), matrix.shape
    bits, groups = one.supported.format.bits, columns // one.size
    specs = (
        TensorSpec(f"{base}qweight", "I32", (columns * bits // 32, rows)),
        TensorSpec(f"{base}qzeros", "I32", (groups, rows * bits // 32)),
        TensorSpec(f"{base}g_idx", "I32", (columns,)),
        TensorSpec(f"{base}scales", SAFETENSORS_DTYPES[dtype], (groups, rows)),
    )

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        words, zeros, numbers, scales = (torch.empty(spec.shape, dtype=spec.torch_dtype) for spec in specs)
        numbers.copy_(torch.arange(columns) // one.size)
        middle = 1 << (bits - 1)
        start = 0
        for found in recoded_rows(checkpoint, matrix, one.supported, one.size):
            stop = start + len(found.codes)
            words[:, start:stop] = bitpack.pack(found.codes, bits).T
            scales[:, start:stop] = found.scales.to(dtype).T
            codes = torch.full_like(found.scales, middle) if found.zeros is None else found.zeros
            stored = (codes.to(torch.int32) - added) & ((1 << bits) - 1)
            zeros[:, start * bits // 32 : stop * bits // 32] = bitpack.pack(
                stored.to(torch.uint8).T.contiguous(), bits
            )
            start = stop
        for spec, part in zip(specs, (words, zeros, numbers, scales), strict=True):
            yield spec.name, part, 0

    return Job(specs, (matrix,), chunks)


GPTQ = Target("gptq", plan)
