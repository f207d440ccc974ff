"""Read safetensors headers strictly, without trusting any byte, and write canonical ones.

A file is an unsigned 64-bit little-endian header length, that many bytes of JSON, then the data of all
tensors back to back. The reader accepts less than the safetensors library: duplicate keys, path-like names
and empty tensors, which the format forbids but the library accepts, are errors here.
"""

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from quantkit import files
from quantkit.checkpoint.tensors import StoredTensor, TensorSpec
from quantkit.errors import CheckpointError
from quantkit.files import open_regular, shown

MAX_HEADER_BYTES = 32 * 2**20
MAX_JSON_BYTES = 64 * 2**20
MAX_TENSORS = 1_000_000
MAX_DIMS = 8
MAX_ELEMENTS = 2**40
MAX_NAME_CHARS = 512

_LENGTH_BYTES = 8
_METADATA = "__metadata__"
_FIELDS = {"dtype", "shape", "data_offsets"}
_NAME = re.compile(r"[\w.\-]+")
_DOWNLOAD_AGAIN = "Download the file again."
_WRITE_AGAIN = "Write the file again with safetensors' save_file."

# Files often found under a .safetensors name: their first bytes, their kind, and the remedy.
_IMPOSTORS: tuple[tuple[bytes, str, str], ...] = (
    (
        b"version https://git-lfs",
        "a git LFS pointer, which stands in for weights that were not downloaded",
        "Run `git lfs pull` in the directory, or download the checkpoint with `hf download`.",
    ),
    (b"<!doctype", "an HTML page", "The download failed; check the address and access rights."),
    (b"<html", "an HTML page", "The download failed; check the address and access rights."),
    (b"gguf", "a GGUF file", "Use the safetensors checkpoint that it was made from."),
    (b"pk\x03\x04", "a zip archive or pickled checkpoint", "Convert it to safetensors first."),
    (b"\x80\x02", "a pickled checkpoint", "Convert it to safetensors first."),
)


def encode_header(tensors: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    """Return the first bytes of a file: header length, JSON, and spaces up to a multiple of 8 bytes.

    The data of `tensors` must follow in the given order without holes. Equal arguments give equal bytes. Put
    tensors of wider dtypes first if each is to start at a multiple of its item size. Raises `CheckpointError`
    for anything that `read_header` would refuse.
    """
    entries: dict[str, Any] = {_METADATA: dict(sorted(metadata.items()))} if metadata else {}
    offset = 0
    for tensor in tensors:
        _check_name(tensor.name)
        _check_shape(tensor.name, tensor.shape)
        if tensor.name in entries:
            raise CheckpointError(
                f"tensor {tensor.name!r} would be written twice to one file; names must be unique. "
                "Rename one of the two."
            )
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES or not tensors or len(tensors) > MAX_TENSORS:
        raise CheckpointError(
            f"a file of {len(tensors)} tensors needs a header of {len(text)} bytes; allowed are 1 "
            f"to {MAX_TENSORS} tensors and {MAX_HEADER_BYTES} bytes. Write smaller shards."
        )
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Read the tensors of a safetensors file, by name and in the order of their data, but no data.

    The result is valid for any file content: every tensor's data is inside the file. Raises `CheckpointError`
    naming the file, what was found, what was expected, and the remedy.
    """
    try:
        text, file_bytes = _header_text(path)
        entries = parse_json(text, "the header")
        _check_metadata(entries.pop(_METADATA, {}))
        if not 1 <= len(entries) <= MAX_TENSORS:
            _fail(f"{len(entries)} tensors in the header; expected 1 to {MAX_TENSORS}", _WRITE_AGAIN)
        data_start = _LENGTH_BYTES + len(text)
        tensors = [_stored(path, name, entry, data_start) for name, entry in entries.items()]
        tensors.sort(key=lambda tensor: tensor.offset)
        _check_layout(tensors, data_start, file_bytes)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise _unreadable(path, error, "safetensors") from error
    return {tensor.name: tensor for tensor in tensors}


def read_json(path: Path, allowed: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """Read the JSON object in a file of at most `allowed` bytes.

    Raises `CheckpointError` naming the file for anything else.
    """
    try:
        with open_regular(path) as file:
            # Check the size first: reading as much as allowed would take that much memory.
            file_bytes = os.fstat(file.fileno()).st_size
            if file_bytes > allowed:
                _fail(f"the file is too large; allowed are {allowed} bytes", _DOWNLOAD_AGAIN)
            return parse_json(file.read(file_bytes), "the file")
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise _unreadable(path, error, "JSON") from error


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse `data` as a JSON object; raise a `CheckpointError` that calls the data `what`.

    Stricter than `json.loads`: UTF-8 only, no duplicate keys at any level, and limited nesting.
    """
    try:
        return files.parse_json(data, what)
    except files.RepeatedKeyError as error:
        _fail(str(error), _WRITE_AGAIN)
    except ValueError as error:
        _fail(str(error), _DOWNLOAD_AGAIN)


def _header_text(path: Path) -> tuple[bytes, int]:
    """Return the JSON bytes of the header, and the size of the file in bytes."""
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > MAX_HEADER_BYTES:
            _fail_start(start + file.read(64), length, file_bytes)
        if _LENGTH_BYTES + length > file_bytes:
            _fail(
                f"the header needs {_LENGTH_BYTES + length} bytes, but the file has "
                f"{file_bytes}: it is truncated",
                _DOWNLOAD_AGAIN,
            )
        text = file.read(length)
    if len(text) < length:
        _fail(f"expected {length} bytes of header, got {len(text)}", _DOWNLOAD_AGAIN)
    if not text.startswith(b"{"):
        _fail(f"the header starts with {text[:8]!r}; expected '{{'", _DOWNLOAD_AGAIN)
    # A tensor is one object with two lists, so counting brackets bounds the parser's memory.
    if text.count(b"{") > MAX_TENSORS + 2 or text.count(b"[") > 2 * MAX_TENSORS:
        _fail(f"the header lists more than {MAX_TENSORS} tensors", "Write smaller shards.")
    return text, file_bytes


def _fail_start(start: bytes, length: int, file_bytes: int) -> NoReturn:
    """Raise an error that names the kind of a file whose first 8 bytes are no header length."""
    if not start:
        _fail("the file is empty; expected safetensors data", _DOWNLOAD_AGAIN)
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    for prefix, kind, remedy in _IMPOSTORS:
        if text.startswith(prefix):
            _fail(f"the file is {kind}; expected safetensors data", remedy)
    if file_bytes < _LENGTH_BYTES:
        _fail(f"the file has {file_bytes} bytes; expected at least 8", _DOWNLOAD_AGAIN)
    _fail(
        f"the first 8 bytes announce a header of {length} bytes; allowed are "
        f"{MAX_HEADER_BYTES}, so this is no safetensors file or one of too many tensors",
        "Download the file again, or write smaller shards.",
    )


def _check_metadata(metadata: object) -> None:
    if not isinstance(metadata, dict):
        _fail(f"{_METADATA} is {shown(metadata)}; expected strings by name", _WRITE_AGAIN)
    for key, value in metadata.items():
        if not isinstance(value, str):
            _fail(f"{_METADATA}[{shown(key)}] is {shown(value)}; expected a string", _WRITE_AGAIN)


def _stored(path: Path, name: str, entry: object, data_start: int) -> StoredTensor:
    """Parse and check the header entry of one tensor by itself."""
    _check_name(name)
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        fields = ", ".join(sorted(_FIELDS))
        _fail(f"tensor {name!r} is {shown(entry)}; expected the fields {fields}", _WRITE_AGAIN)
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str):
        _fail(f"tensor {name!r} has dtype {shown(dtype)}; expected a name", _WRITE_AGAIN)
    if len(dtype) > MAX_NAME_CHARS:
        _fail(f"tensor {name!r} has dtype {shown(dtype)}; expected a short name", _WRITE_AGAIN)
    _check_shape(name, shape)
    if not (_is_integers(offsets) and len(offsets) == 2 and 0 <= offsets[0] <= offsets[1]):
        _fail(
            f"tensor {name!r} has data_offsets {shown(offsets)}; expected [begin, end] with "
            "0 <= begin <= end",
            _WRITE_AGAIN,
        )
    tensor = StoredTensor(name, dtype, tuple(shape), path, data_start + offsets[0])
    if offsets[1] - offsets[0] != tensor.nbytes:
        _fail(
            f"tensor {name!r} has {shown(offsets[1] - offsets[0])} bytes of data; its dtype "
            f"{dtype} and shape {shape} need {tensor.nbytes}",
            _DOWNLOAD_AGAIN,
        )
    return tensor


def _check_name(name: str) -> None:
    if len(name) > MAX_NAME_CHARS or ".." in name or not _NAME.fullmatch(name):
        _fail(
            f"tensor name {shown(name)} ({len(name)} characters) is not allowed; expected 1 to "
            f"{MAX_NAME_CHARS} letters, digits, '_', '-' and single '.'",
            "Rename the tensor.",
        )


def _check_shape(name: str, shape: Sequence[int]) -> None:
    if not _is_integers(shape) or len(shape) > MAX_DIMS or any(size < 1 for size in shape):
        _fail(
            f"tensor {name!r} has shape {shown(shape)}; expected at most {MAX_DIMS} sizes, each an "
            "integer >= 1",
            "Remove the tensor or write it with another shape.",
        )
    if max(shape, default=1) > MAX_ELEMENTS or math.prod(shape) > MAX_ELEMENTS:
        _fail(
            f"tensor {name!r} has shape {shown(shape)}; allowed are {MAX_ELEMENTS} elements",
            "Download the file again, or split the tensor.",
        )


def _is_integers(value: object) -> bool:
    # bool is a subclass of int, but JSON's `true` is no size.
    return isinstance(value, list | tuple) and all(type(item) is int for item in value)


def _check_layout(tensors: Sequence[StoredTensor], data_start: int, file_bytes: int) -> None:
    """Check that `tensors`, sorted by offset, cover the rest of the file exactly."""
    expected = data_start
    for tensor in tensors:
        if tensor.offset != expected:
            kind = "a hole before it" if tensor.offset > expected else "an overlap"
            _fail(
                f"tensor {tensor.name!r} starts at byte {shown(tensor.offset - data_start)} of the "
                f"data; expected {expected - data_start}, so there is {kind}",
                _DOWNLOAD_AGAIN,
            )
        expected += tensor.nbytes
    if expected != file_bytes:
        kind = "is truncated" if file_bytes < expected else "has trailing bytes"
        _fail(f"the file {kind}: expected {expected} bytes, got {file_bytes}", _DOWNLOAD_AGAIN)


def _fail(problem: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{problem}. {remedy}")


def _unreadable(path: Path, error: OSError, kind: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: cannot be read ({error.strerror or error}); expected a readable {kind} file. "
        "Check that it exists and its permissions."
    )
