"""Open a GGUF file as a checkpoint: transformers' tensor names, and files made from its metadata.

transformers makes config.json and the tokenizer from the metadata. Both are written to a temporary directory,
like the files of any other checkpoint.
"""

import atexit
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quantkit.checkpoint.dtypes import SAFETENSORS_DTYPES
from quantkit.checkpoint.gguf.gguf_names import ARCHITECTURE_KEY, ROTARY, Named, architecture, named
from quantkit.checkpoint.gguf.header import ALIGNMENT_KEY, GgufHeader, read_gguf_header
from quantkit.checkpoint.gguf.rotary import llama3_parameters
from quantkit.checkpoint.gguf.rows import GgufRows, gguf_package
from quantkit.checkpoint.manifest import pretty_json
from quantkit.checkpoint.source import CONFIG_NAME, Checkpoint, examining
from quantkit.checkpoint.stamp import FileStamp
from quantkit.checkpoint.tensors import StoredTensor
from quantkit.errors import CheckpointError, QuantkitError, causes
from quantkit.files import disk_error, temporary

SUFFIX = ".gguf"
#: Tokenizer model of a file without a tokenizer.
NO_TOKENIZER = "no_vocab"
#: Longest arrays that a config may need, such as heads by layer; vocabularies are longer.
_OUTLINED = 1024
_GENERATION_CONFIG = "generation_config.json"
#: Metadata keys of tokens that end an answer.
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
_KEPT_OUT = ("_name_or_path", "_model_name_or_path", "quantization_config", "transformers_version")


def gguf_file(source: Path) -> Path | None:
    """Return `source` if it is a file, of any kind, or the only GGUF file of a directory; else None.

    None also for a directory with safetensors. Raises `CheckpointError` for a directory with several GGUF
    files and no safetensors.
    """
    with examining(source):
        if source.is_file():
            return source
        try:
            entries = sorted(source.iterdir())
        except OSError:
            return None
        found = [path for path in entries if path.suffix == SUFFIX and path.is_file()]
    if not found or any(path.suffix == ".safetensors" for path in entries):
        return None
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(f"{source}: has {names}; expected one. Give the path of the file to read.")
    return found[0]


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file: read its header and make config and tokenizer files, in about a second.

    Raises `CheckpointError` for a damaged file, an architecture without a table of names, or metadata that
    transformers cannot convert; `EnvironmentProblem` without the package gguf.
    """
    path = path.absolute()
    gguf_package()
    stamp = FileStamp.of(path)
    header = read_gguf_header(path)
    _check_not_split(header)
    tensors = gguf_tensors(header)
    rotary = _rotary(header, stamp)
    with temporary(f"{path}: its config.json and tokenizer"):
        directory = Path(tempfile.mkdtemp(prefix="quantkit-gguf-"))
        atexit.register(shutil.rmtree, directory, ignore_errors=True)
        _write_files(header, directory, rotary)
        files = sorted(directory.iterdir())
        return Checkpoint(
            directory=directory,
            config=json.loads((directory / CONFIG_NAME).read_text(encoding="utf-8")),
            tensors=dict(tensors),
            shards=(path,),
            side_files=tuple(file for file in files if file.name != CONFIG_NAME),
            warnings=_warnings(header) if rotary is None else (),
            stamps={path: stamp, **{file: FileStamp.of(file) for file in files}},
            notes=(_note(header),),
            derived=frozenset(files),
        )


def gguf_tensors(header: GgufHeader) -> dict[str, GgufRows]:
    """Return the tensors of the model in a file, by transformers' names; `CheckpointError` if unknown."""
    return {one.name: _stored(header.path, one) for one in named(header)}


def _check_not_split(header: GgufHeader) -> None:
    count = header.get("split.count", int, 1)
    if count > 1:
        raise CheckpointError(
            f"{header.path}: is one of {count} files of a model; expected all in one. Join them with "
            "llama.cpp: `llama-gguf-split --merge FIRST.gguf OUT.gguf`."
        )


def _stored(path: Path, one: Named) -> GgufRows:
    tensor = one.tensor
    shape = tensor.shape if one.part is None else tensor.shape[1:]
    if one.is_row:
        shape = (1, *shape)
    is_vector = len(shape) == 1
    if len(shape) > 2:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} has shape {tensor.shape}; expected a matrix or a vector. "
            "Download the file again."
        )
    rows = shape[0]
    row_bytes = tensor.nbytes // (rows * (1 if one.part is None else tensor.shape[0]))
    if is_vector and tensor.block_type.elements > 1:
        raise CheckpointError(
            f"{path}: tensor {tensor.name!r} is a vector of {tensor.block_type.name} blocks; expected "
            "numbers. Download the file again."
        )
    dtype = "F32" if tensor.block_type.dtype is None else SAFETENSORS_DTYPES[tensor.block_type.dtype]
    return GgufRows(
        one.name,
        dtype,
        shape,
        path,
        tensor.offset + (one.part or 0) * rows * row_bytes,
        block_type=tensor.block_type,
        row_bytes=row_bytes,
        heads=one.heads,
        added=one.added,
    )


def _rotary(header: GgufHeader, stamp: FileStamp) -> dict[str, Any] | None:
    """Return the `rope_parameters` of a file with rotary factors of Llama 3; None for any other."""
    found = header.tensors.get("rope_freqs.weight")
    if found is None or len(found.shape) != 1 or found.shape[0] > _OUTLINED or found.block_type.dtype is None:
        return None
    file = Checkpoint(header.path.parent, {}, {}, (header.path,), (), (), {header.path: stamp})
    dtype = SAFETENSORS_DTYPES[found.block_type.dtype]
    stored = StoredTensor(found.name, dtype, found.shape, header.path, found.offset)
    base = header.get(f"{header.get(ARCHITECTURE_KEY, str)}.rope.freq_base", float, 10000.0)
    return llama3_parameters(file.read_stored(stored).float().tolist(), base)


def _write_files(header: GgufHeader, directory: Path, rotary: dict[str, Any] | None) -> None:
    """Write config.json, the tokenizer with its chat template, and generation_config.json."""
    from transformers import AutoConfig, PreTrainedTokenizerFast
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    # In a directory of its own, because transformers also reads other files in a directory.
    with tempfile.TemporaryDirectory(prefix="quantkit-gguf-") as view:
        outline, file = Path(view, "outline.gguf"), Path(view, "model.gguf")
        with _explained(header.path, "config.json"):
            write_outline(header, outline)
            config = AutoConfig.from_pretrained(view, gguf_file=outline.name, trust_remote_code=False)
        if header.get("tokenizer.ggml.model", str, NO_TOKENIZER) != NO_TOKENIZER:
            file.symlink_to(header.path)
            with _explained(header.path, "tokenizer"):
                words = PreTrainedTokenizerFast.from_pretrained(view, gguf_file=file.name)
                words.save_pretrained(directory)
    values = {key: value for key, value in config.to_dict().items() if key not in _KEPT_OUT}
    values.update(_left_out(header))
    if rotary is not None:
        values["rope_parameters"] = rotary
    # Blocks dequantize to float32, which 16-bit dtypes would round.
    values["dtype"] = "float32"
    values["architectures"] = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    (directory / CONFIG_NAME).write_bytes(pretty_json(values))
    (directory / _GENERATION_CONFIG).write_bytes(pretty_json(_generation_config(header)))


def write_outline(header: GgufHeader, path: Path) -> None:
    """Write a GGUF file with all tensor names and the metadata of `header`, without vocabularies.

    transformers' reader of metadata takes a second per ten thousand tokens.
    """
    gguf = gguf_package()
    writer = gguf.GGUFWriter(path, header.get(ARCHITECTURE_KEY, str))
    for key, value in header.metadata.items():
        if key in (ARCHITECTURE_KEY, ALIGNMENT_KEY) or (isinstance(value, tuple) and len(value) > _OUTLINED):
            continue
        match value:
            case tuple():
                writer.add_array(key, list(value))
            case bool():
                writer.add_bool(key, value)
            case int():
                (writer.add_int64 if value < 0 else writer.add_uint64)(key, value)
            case float():
                writer.add_float64(key, value)
            case str():
                writer.add_string(key, value)
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _left_out(header: GgufHeader) -> dict[str, int]:
    """Return fields of config.json that transformers does not convert from the metadata."""
    prefix = header.get(ARCHITECTURE_KEY, str)
    found = {key: header.get(f"{prefix}.{name}", int) for name, key in architecture(header).config.items()}
    if (embedding := header.tensors.get("token_embd.weight")) is not None:
        found["vocab_size"] = embedding.shape[0]
    return {key: value for key, value in found.items() if value is not None}


def _generation_config(header: GgufHeader) -> Mapping[str, Any]:
    def token(name: str) -> int | None:
        found = header.get(f"tokenizer.ggml.{name}", int)
        return None if found is None else int(found)

    ends = list(dict.fromkeys(one for one in map(token, _ENDS) if one is not None))
    found = {
        "bos_token_id": token("bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": token("padding_token_id"),
    }
    return {key: value for key, value in found.items() if value is not None}


@contextmanager
def _explained(path: Path, what: str) -> Iterator[None]:
    """Context manager: raise errors of transformers about unknown metadata as `CheckpointError`."""
    try:
        yield
    except (QuantkitError, MemoryError):
        raise
    except BaseException as error:
        # transformers wraps errors of the disk; only those have an errno.
        if (refused := disk_error(causes(error))) is not None:
            raise refused from None
        # Panics of the tokenizers library have a class that cannot be imported.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise CheckpointError(
            f"{path}: transformers makes no {what} of the metadata ({text}). Use the safetensors checkpoint "
            "that the file was made from."
        ) from error


def _note(header: GgufHeader) -> str:
    """Return a note on the block types of the tensors."""
    counts: dict[str, int] = {}
    for tensor in header.tensors.values():
        counts[tensor.block_type.name] = counts.get(tensor.block_type.name, 0) + 1
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1]))
    return f"read from {header.path.name}: {kinds}. What is not packed is float32."


def _warnings(header: GgufHeader) -> tuple[str, ...]:
    rotary: Sequence[str] = [name for name in header.tensors if ROTARY.fullmatch(name)]
    if not rotary:
        return ()
    return (
        f"{header.path}: {rotary[0]} scales rotary embeddings, and the metadata does not say how: "
        "config.json has no rope_scaling. Copy it from the original model's; short texts need none.",
    )
