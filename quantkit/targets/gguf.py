"""GGUF: one file with blocks of 32 or 256 weights, metadata and tokenizer, as llama.cpp reads it.

Names, permuted rows and block types are in the tables with which GGUF files are read.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.checkpoint.gguf.gguf_names import ARCHITECTURES, Architecture, Place, exported_as, place
from quantkit.checkpoint.gguf.header import ALIGNMENT, read_gguf_header
from quantkit.checkpoint.gguf.open_gguf import NO_TOKENIZER, gguf_tensors
from quantkit.checkpoint.gguf.rotary import HIGH, LOW, llama3_factors
from quantkit.checkpoint.gguf.rows import gguf_package, pairs_of_halves
from quantkit.checkpoint.output.directory import GGUF_FILE_NAME
from quantkit.checkpoint.output.shard_file import OtherHeader
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.stamp import FileStamp
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.errors import CheckpointError
from quantkit.files import temporary
from quantkit.model.model_class import model_config
from quantkit.model.structure import Structure
from quantkit.targets.config_fields import refuse_fields
from quantkit.targets.gguf_tokenizer import gguf_tokenizer
from quantkit.targets.packed_source import PIECE, StoredMatrix
from quantkit.targets.target import (
    Chunk,
    ExportPlan,
    Job,
    OutputFile,
    SupportedScheme,
    SupportedSchemes,
    Target,
    inexact,
    recoded_rows,
    why_unsupported,
)

#: Schemes of block types with a grid, the smallest first.
SCHEMES: Mapping[SupportedScheme, BlockType] = {
    SupportedScheme(
        row.name,
        row.grid.format,
        (row.elements,),
        (row.grid.scale_dtype,),
        frozenset({"minimum" if row.grid.affine == "biases" else "none"}),
    ): row
    for row in sorted(BLOCK_TYPES.values(), key=lambda row: row.nbytes / row.elements)
    if row.grid is not None
}
_SUPPORTED = SupportedSchemes(
    "gguf",
    tuple(SCHEMES),
    ", ".join(f"{one.name} ({one.format.name}, groups of {one.groups[0]})" for one in SCHEMES),
    "Quantize with --format int4 or int8, --group-size 32 and --scale-dtype float16, or --format mxfp4, "
    "without zero-points",
)
_REMEDY = "Export to another target, or use llama.cpp's converter on the original model."
#: Fields of a sliding window, which the context of a file is cut to.
_WINDOW = ("sliding_window", "use_sliding_window", "max_window_layers", "layer_types")
#: Fields of a rotary embedding that a file carries, and others with the only value that it may have.
_ROPE_CARRIED = ("rope_type", "rope_theta", "factor", "original_max_position_embeddings")
_ROPE_FIXED = {"low_freq_factor": LOW, "high_freq_factor": HIGH, "partial_rotary_factor": 1.0}
#: Metadata that llama.cpp takes as float32 only.
_FLOATS = ("rope.freq_base", "attention.layer_norm_rms_epsilon")
#: Parts of general.name by which llama.cpp treats special tokens otherwise, and may not load the file.
_NAMED_TOKENIZERS = ("phi-3", "phi3", "modern-bert")
_NUMBERS = {row.dtype: row for row in BLOCK_TYPES.values() if row.dtype is not None}


@dataclass(frozen=True)
class _Part:
    """Tensor of the source, and how it is stored in the GGUF file.

    place       name in the file, and number of the expert if experts are stacked
    block_type  type of a block of weights, or of plain numbers
    supported   scheme of a packed matrix; None for other tensors
    """

    place: Place
    source: StoredTensor
    block_type: BlockType
    supported: SupportedScheme | None


def plan(checkpoint: Checkpoint, structure: Structure, max_shard_bytes: int) -> ExportPlan:
    """Plan one GGUF file (see `Target`); `CheckpointError` if GGUF cannot hold a matrix.

    Reads scales and minimums, to check if float16 holds them exactly.
    """
    config = model_config(checkpoint.config, checkpoint.directory)
    name, arch = _architecture(checkpoint, config)
    parts = _parts(checkpoint, arch)
    metadata, factors = _metadata(checkpoint, config, name, arch)
    words = gguf_tokenizer(checkpoint.directory, config.vocab_size)
    metadata |= {"tokenizer.ggml.model": NO_TOKENIZER} if words is None else words.metadata
    kinds = [part.block_type.name for part in parts]
    by_tensor: dict[str, list[_Part]] = {}
    for part in parts:
        by_tensor.setdefault(part.place.name, []).append(part)
    jobs = [_job(of_one, metadata, name) for of_one in by_tensor.values()]
    shapes = {of[0].place.name: _shape(of) for of in by_tensor.values()}
    types = {of[0].place.name: of[0].block_type for of in by_tensor.values()}
    if factors is not None:
        spec = TensorSpec("rope_freqs.weight", "F32", (len(factors),))
        jobs.insert(0, Job((spec,), (), lambda checkpoint: iter([(spec.name, torch.tensor(factors), 0)])))
        shapes, types = {spec.name: spec.shape, **shapes}, {spec.name: _NUMBERS[torch.float32], **types}
    header = _header(name, metadata, shapes, types)
    notes = ["the directory has no tokenizer, and so has the file none"] if words is None else [*words.notes]
    window = _window(config)
    if window is not None:
        notes.append(
            f"llama.cpp knows no sliding window of {name}: the file's context is the window, {window} "
            "tokens, and longer texts differ"
        )
    return ExportPlan(
        (OutputFile(GGUF_FILE_NAME, tuple(jobs), header),),
        checkpoint.config,
        {part.source.name: kind for part, kind in zip(parts, kinds, strict=True)},
        _read,
        ("llama.cpp (llama-cpp-python 0.3.36)", "transformers 5.24.0, which dequantizes them"),
        tuple(notes),
    )


def _read(paths: Sequence[Path]) -> Checkpoint:
    (path,) = paths
    tensors = dict(gguf_tensors(read_gguf_header(path)))
    return Checkpoint(path.parent, {}, dict(tensors), (path,), (), (), {path: FileStamp.of(path)})


def _architecture(checkpoint: Checkpoint, config: Any) -> tuple[str, Architecture]:
    """Return the architecture of llama.cpp; raise `CheckpointError` if it computes something else."""
    found = exported_as(config.model_type)
    known = sorted(one for row in ARCHITECTURES.values() for one in row.exported)
    if found is None:
        raise CheckpointError(
            f"{checkpoint.directory}: model_type is {config.model_type!r}; quantkit exports "
            f"{', '.join(known)} to GGUF. {_REMEDY}"
        )
    name, arch = found
    carried = {*_known(config, arch).values(), "head_dim", "rope_parameters", *_WINDOW}
    fixed = {"hidden_act": "silu", **arch.fixed}
    refuse_fields(checkpoint.directory, config, "llama.cpp", carried, fixed)
    usual = config.hidden_size // config.num_attention_heads
    if _head_size(config) != usual and not arch.own_heads:
        raise CheckpointError(
            f"{checkpoint.directory}: head_dim is {_head_size(config)}; llama.cpp computes {name} with "
            f"{usual}, hidden_size / num_attention_heads. {_REMEDY}"
        )
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if kind not in arch.rotary:
        raise CheckpointError(
            f"{checkpoint.directory}: rope_type is {kind!r}; quantkit exports {name} with "
            f"{' and '.join(sorted(arch.rotary))} to GGUF. {_REMEDY}"
        )
    for key, value in rope.items():
        if key not in _ROPE_CARRIED and value != _ROPE_FIXED.get(key):
            raise CheckpointError(
                f"{checkpoint.directory}: {key} of the rotary embedding is {value!r}; quantkit exports "
                f"{_ROPE_FIXED.get(key)!r} to GGUF. {_REMEDY}"
            )
    return found


def _known(config: Any, arch: Architecture) -> dict[str, str]:
    """Return the field of config.json for each metadata key of a model."""
    from transformers.integrations import GGUF_CONFIG_MAPPING

    known = {**GGUF_CONFIG_MAPPING[config.model_type], **arch.config}
    return {key: attribute for key, attribute in known.items() if attribute}


def _head_size(config: Any) -> int:
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def _window(config: Any) -> int | None:
    """Return the attention window in tokens if it is shorter than the context, else None."""
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    return int(window) if window and window < config.max_position_embeddings else None


def _parts(checkpoint: Checkpoint, arch: Architecture) -> list[_Part]:
    """Return every tensor with its place and type; raise `CheckpointError` for the first without one."""
    refused: dict[str, str] = {}
    parts = []
    for name, tensor in checkpoint.tensors.items():
        found = place(arch, name)
        if found is None:
            raise CheckpointError(
                f"{checkpoint.directory}: llama.cpp has no tensor for {name!r} of shape "
                f"{list(tensor.shape)}. Export to another target."
            )
        if isinstance(tensor, StoredMatrix):
            supported = _smallest(checkpoint, tensor)
            if isinstance(supported, str):
                refused[tensor.module] = supported
                continue
            parts.append(_Part(found, tensor, SCHEMES[supported], supported))
        else:
            # llama.cpp multiplies by vectors in float32 only, which has the same numbers.
            wanted = torch.float32 if len(tensor.shape) == 1 or found.is_row else tensor.torch_dtype
            parts.append(_Part(found, tensor, _NUMBERS[wanted], None))
    matrices = (one for one in checkpoint.tensors.values() if isinstance(one, StoredMatrix))
    _SUPPORTED.refuse_unfit(refused, matrices, channels=False)
    return parts


def _smallest(checkpoint: Checkpoint, matrix: StoredMatrix) -> SupportedScheme | str:
    """Read scales of a matrix; return the smallest scheme that represents its weights, or why none does."""
    reasons = {supported: why_unsupported(matrix, supported) for supported in SCHEMES}
    fitting = [supported for supported, reason in reasons.items() if reason is None]
    if not fitting:
        of_format = [reasons[one] for one in SCHEMES if one.code_table(matrix.scheme.format) is not None]
        why = (of_format or list(reasons.values()))[0]
        return f"it is {matrix.scheme}, and {why}"
    for supported in fitting:
        wrong = _why_inexact(checkpoint, matrix, supported)
        if wrong is None:
            return supported
    return f"it is {matrix.scheme}, and {wrong}"


def _why_inexact(checkpoint: Checkpoint, matrix: StoredMatrix, supported: SupportedScheme) -> str | None:
    """Read scales and minimums of a matrix; return text on one that `supported` cannot store, else None."""
    dtype = supported.scale_dtypes[0]
    for rows in recoded_rows(checkpoint, matrix, supported, supported.groups[0]):
        for what, values in (("scale", rows.scales), ("minimum", rows.minimums)):
            wrong = None if values is None else inexact(values, dtype)
            if wrong is not None:
                return f"its {what} {wrong:.6g} is no {str(dtype).removeprefix('torch.')}"
    return None


def _shape(parts: Sequence[_Part]) -> tuple[int, ...]:
    """Return the shape of a tensor in the file, of one part or of all experts stacked."""
    shape = parts[0].source.shape[1:] if parts[0].place.is_row else parts[0].source.shape
    return shape if parts[0].place.part is None else (len(parts), *shape)


def _job(parts: Sequence[_Part], metadata: Mapping[str, Any], arch: str) -> Job:
    """Return the job that writes one tensor of the file: of one part, or of all experts stacked."""
    first = parts[0]
    shape, row = _shape(parts), first.block_type
    if row.dtype is not None:
        spec = TensorSpec(first.place.name, SAFETENSORS_DTYPES[row.dtype], shape)
    else:
        row_bytes = shape[-1] // row.elements * row.nbytes
        spec = TensorSpec(first.place.name, "U8", (*shape[:-1], row_bytes))
    if any(part.block_type != row or part.source.shape != first.source.shape for part in parts):
        kinds = sorted({part.block_type.name for part in parts})
        raise CheckpointError(
            f"{first.source.name!r} and the other experts of its layer are {' and '.join(kinds)}; one tensor "
            "of a GGUF file has all. Quantize the experts of a layer alike."
        )
    heads = None if first.place.heads is None else int(metadata[f"{arch}.{first.place.heads}"])
    ordered = sorted(parts, key=lambda part: part.place.part or 0)

    def chunks(checkpoint: Checkpoint) -> Iterator[Chunk]:
        offset = 0
        for part in ordered:
            pieces = _pieces(checkpoint, part)
            if heads is not None:
                rows = torch.cat(list(pieces))
                flat = rows.view(len(rows), -1)
                pieces = iter([pairs_of_halves(flat, len(rows) // heads)])
            for piece in pieces:
                yield spec.name, piece, offset
                offset += piece.numel()

    return Job((spec,), tuple(part.source for part in ordered), chunks)


def _pieces(checkpoint: Checkpoint, part: _Part) -> Iterator[torch.Tensor]:
    """Yield all rows of a part in order, as stored: bytes of blocks, or numbers."""
    source, row = part.source, part.block_type
    if part.supported is None or not isinstance(source, StoredMatrix):
        step = max(1, PIECE * source.shape[0] // source.elements)
        for start in range(0, source.shape[0], step):
            rows = checkpoint.read(source.name, start, min(start + step, source.shape[0]))
            yield rows.to(row.dtype)
        return
    assert row.grid is not None
    dtype = row.grid.scale_dtype
    for piece in recoded_rows(checkpoint, source, part.supported, row.elements):
        minimums = None if piece.minimums is None else piece.minimums.to(dtype).flatten()
        codes, scales = piece.codes.reshape(-1, row.elements), piece.scales.to(dtype).flatten()
        yield row.grid.join((codes, scales, minimums)).view(len(piece.codes), -1)


def _metadata(
    checkpoint: Checkpoint, config: Any, name: str, arch: Architecture
) -> tuple[dict[str, Any], list[float] | None]:
    """Return metadata of the model, and the factors of its rotary frequencies, if any."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    head_size = _head_size(config)
    found: dict[str, Any] = {}
    directory = checkpoint.directory.name
    if not any(part in directory.lower() for part in _NAMED_TOKENIZERS):
        found["general.name"] = directory
    for key, attribute in _known(config, arch).items():
        value = rope.get(attribute, getattr(config, attribute, None))
        if value is not None:
            found[f"{name}.{key}"] = float(value) if key in _FLOATS else value
    found |= {
        f"{name}.{key}": head_size
        for key in ("rope.dimension_count", "attention.key_length", "attention.value_length")
    }
    window = _window(config)
    if window is not None:
        found[f"{name}.context_length"] = window
    found["general.quantization_version"] = 2
    if rope.get("rope_type", "default") == "default":
        return found, None
    context = rope["original_max_position_embeddings"]
    return found, llama3_factors(head_size // 2, rope["rope_theta"], rope["factor"], context)


def _header(
    arch: str,
    metadata: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    types: Mapping[str, BlockType],
) -> OtherHeader:
    """Return the whole file without its data, written by the package gguf."""
    gguf = gguf_package("writing")
    with temporary("the header of a GGUF file"), tempfile.TemporaryDirectory(prefix="quantkit-gguf-") as view:
        path = Path(view, "header.gguf")
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            _add(writer, key, value)
        for name, shape in shapes.items():
            row = types[name]
            width = shape[-1] // row.elements * row.nbytes
            nbytes = math.prod(shape[:-1]) * width
            number = gguf.GGMLQuantizationType(row.number)
            writer.add_tensor_info(name, (*shape[:-1], width), np.dtype(np.uint8), nbytes, number)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        data = path.read_bytes()
    return OtherHeader(data + bytes(-len(data) % ALIGNMENT), ALIGNMENT)


def _add(writer: Any, key: str, value: Any) -> None:
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case float():
            writer.add_float32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


GGUF = Target("gguf", plan)
