"""Read the header of a GGUF file strictly; no byte of the file is trusted.

A file is the magic `GGUF`, a version, and the counts of tensors and of metadata. Then come the metadata as
key, type and value, and the tensors as name, shape, type and offset. Last is the data, each tensor at a
multiple of the alignment. All numbers are little-endian.
"""

import math
import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.errors import CheckpointError
from quantkit.files import open_regular, shown

MAGIC = b"GGUF"
VERSIONS = (2, 3)
ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"

MAX_HEADER_BYTES = 128 * 2**20
MAX_TENSORS = 100_000
MAX_KEYS = 10_000
#: Most values of an array; the longest are vocabularies and their merges.
MAX_ARRAY = 2**20
MAX_STRING_BYTES = 4 * 2**20
MAX_NAME_CHARS = 64
MAX_DIMS = 4
MAX_ELEMENTS = 2**40

_NAME = re.compile(r"[\w.\-]+", re.ASCII)
_DOWNLOAD_AGAIN = "Download the file again."
_UINT32, _STRING, _ARRAY = 4, 8, 9
#: Metadata types of fixed size, by number: their `struct` formats.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}

Value = int | float | bool | str | tuple[int, ...] | tuple[float, ...] | tuple[bool, ...] | tuple[str, ...]


@dataclass(frozen=True)
class GgufTensor:
    """Tensor in a header: its shape [..., N, K] in torch's order, and the place of its bytes in the file."""

    name: str
    shape: tuple[int, ...]
    block_type: BlockType
    offset: int

    @property
    def row_bytes(self) -> int:
        """Return the number of bytes of a row of K weights."""
        columns = self.shape[-1] if self.shape else 1
        return columns // self.block_type.elements * self.block_type.nbytes

    @property
    def nbytes(self) -> int:
        """Return the bytes of all rows."""
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GgufHeader:
    """Metadata by key and tensors by name, in the order of the file."""

    path: Path
    metadata: Mapping[str, Value]
    tensors: Mapping[str, GgufTensor]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = None) -> Any:
        """Return the metadata value of `key`, or `default`; raise `CheckpointError` for another type."""
        if key not in self.metadata:
            return default
        value = self.metadata[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            expected = " or ".join(one.__name__ for one in kinds)
            raise CheckpointError(
                f"{self.path}: metadata {key!r} is {shown(value)}; expected {expected}. {_DOWNLOAD_AGAIN}"
            )
        return value


def read_gguf_header(path: Path) -> GgufHeader:
    """Read metadata and tensors of a GGUF file, but no data.

    Whatever the file holds, the data of every tensor returned is inside it and overlaps no other. Raises
    `CheckpointError` naming the file, what was found, what was expected, and the remedy.
    """
    try:
        with open_regular(path) as file:
            return _Reader(file, os.fstat(file.fileno()).st_size).header(path)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror or error}); expected a readable GGUF file. Check that "
            "it exists and its permissions."
        ) from error


class _Reader:
    """Reads a header sequentially. Every length is checked against the remaining bytes before it is read."""

    def __init__(self, file: BufferedReader, file_bytes: int) -> None:
        self._file = file
        self._file_bytes = file_bytes
        self._limit = min(file_bytes, MAX_HEADER_BYTES)
        self._at = 0

    def header(self, path: Path) -> GgufHeader:
        self._check_start()
        tensors = self._count("tensors", MAX_TENSORS)
        keys = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, Value] = {}
        for _ in range(keys):
            key = self._string("a metadata key")
            if key in metadata:
                _fail(f"the metadata key {shown(key)} is there twice; expected it once", _DOWNLOAD_AGAIN)
            kind = self._number("I")
            if key == ALIGNMENT_KEY and kind != _UINT32:
                _fail(f"{key} has type {kind}; expected {_UINT32}, an unsigned integer", _DOWNLOAD_AGAIN)
            metadata[key] = self._value(key, kind)
        alignment = metadata.get(ALIGNMENT_KEY, ALIGNMENT)
        if type(alignment) is not int or not 1 <= alignment <= 2**16 or alignment & (alignment - 1):
            _fail(
                f"{ALIGNMENT_KEY} is {shown(alignment)}; expected a power of two up to 65536", _DOWNLOAD_AGAIN
            )
        found: dict[str, GgufTensor] = {}
        for _ in range(tensors):
            tensor = self._tensor()
            if tensor.name in found:
                _fail(f"tensor {tensor.name!r} is there twice; expected it once", _DOWNLOAD_AGAIN)
            found[tensor.name] = tensor
        start = -(-self._at // alignment) * alignment
        placed = self._placed(list(found.values()), start, alignment)
        return GgufHeader(path, metadata, {tensor.name: tensor for tensor in placed})

    def _check_start(self) -> None:
        magic = self._bytes(4, "the magic")
        if magic != MAGIC:
            _fail(
                f"the file starts with {magic!r}; expected {MAGIC!r}, as a GGUF file does", "Check the path."
            )
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            kind = "big-endian" if swapped in VERSIONS else f"of version {version}"
            expected = " or ".join(map(str, VERSIONS))
            _fail(
                f"the file is {kind}; expected a little-endian GGUF file of version {expected}",
                "Convert it with llama.cpp, or download another.",
            )

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._limit - self._at:
            if self._limit < self._file_bytes:
                _fail(
                    f"{what} takes {count} bytes at byte {self._at}; a header has at most {MAX_HEADER_BYTES}",
                    _DOWNLOAD_AGAIN,
                )
            _fail(
                f"{what} takes {count} bytes at byte {self._at}, but the file has {self._file_bytes}: it is "
                "truncated or damaged",
                _DOWNLOAD_AGAIN,
            )
        data = self._file.read(count)
        if len(data) < count:
            _fail(f"{what} ends early: the file was truncated", _DOWNLOAD_AGAIN)
        self._at += count
        return data

    def _number(self, kind: str) -> Any:
        return struct.unpack(f"<{kind}", self._bytes(struct.calcsize(f"<{kind}"), "a number"))[0]

    def _count(self, what: str, most: int) -> int:
        count: int = self._number("Q")
        if count > most:
            _fail(f"the header announces {count} {what}; allowed are {most}", _DOWNLOAD_AGAIN)
        return count

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if length > MAX_STRING_BYTES:
            _fail(f"{what} has {length} bytes; allowed are {MAX_STRING_BYTES}", _DOWNLOAD_AGAIN)
        data = self._bytes(length, what)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError:
            _fail(f"{what} is {shown(data)}; expected UTF-8", _DOWNLOAD_AGAIN)

    def _value(self, key: str, kind: int) -> Value:
        where = f"metadata {shown(key)}"
        if kind == _STRING:
            return self._string(where)
        if kind == _ARRAY:
            return self._array(where)
        if kind not in _SCALARS:
            _fail(f"{where} has type {kind}; expected 0 to 12", _DOWNLOAD_AGAIN)
        found: Value = self._scalars(where, kind, 1)[0]
        return found

    def _array(self, where: str) -> Value:
        kind, count = self._number("I"), self._number("Q")
        if kind == _ARRAY:
            _fail(f"{where} is an array of arrays; expected one of numbers or text", _DOWNLOAD_AGAIN)
        if kind != _STRING and kind not in _SCALARS:
            _fail(f"{where} is an array of type {kind}; expected 0 to 12", _DOWNLOAD_AGAIN)
        if count > MAX_ARRAY:
            _fail(f"{where} has {count} values; allowed are {MAX_ARRAY}", _DOWNLOAD_AGAIN)
        if kind == _STRING:
            # A string takes at least 8 bytes: refuse the count before the list grows.
            if 8 * count > self._limit - self._at:
                self._bytes(8 * count, where)
            return tuple(self._string(where) for _ in range(count))
        return self._scalars(where, kind, count)

    def _scalars(self, where: str, kind: int, count: int) -> tuple[Any, ...]:
        layout = f"<{count}{_SCALARS[kind]}"
        data = self._bytes(struct.calcsize(layout), where)
        if kind == 7 and data.strip(b"\0\1"):
            _fail(f"{where} has the byte {max(data)}; expected 0 or 1", _DOWNLOAD_AGAIN)
        return struct.unpack(layout, data)

    def _tensor(self) -> GgufTensor:
        name = self._string("the name of a tensor")
        if len(name) > MAX_NAME_CHARS or ".." in name or not _NAME.fullmatch(name):
            _fail(
                f"tensor name {shown(name)} ({len(name)} characters) is not allowed; expected 1 to "
                f"{MAX_NAME_CHARS} letters, digits, '_', '-' and single '.'",
                _DOWNLOAD_AGAIN,
            )
        dims = self._number("I")
        if not 1 <= dims <= MAX_DIMS:
            _fail(f"tensor {name!r} has {dims} dimensions; expected 1 to {MAX_DIMS}", _DOWNLOAD_AGAIN)
        # ggml lists the fastest dimension first.
        shape = tuple(reversed([self._number("Q") for _ in range(dims)]))
        if min(shape) < 1 or max(shape) > MAX_ELEMENTS or math.prod(shape) > MAX_ELEMENTS:
            _fail(
                f"tensor {name!r} has shape {shown(shape)}; allowed are 1 to {MAX_ELEMENTS} elements",
                _DOWNLOAD_AGAIN,
            )
        number, offset = self._number("I"), self._number("Q")
        block_type = BLOCK_TYPES.get(number)
        if block_type is None:
            known = ", ".join(one.name for one in BLOCK_TYPES.values())
            _fail(
                f"tensor {name!r} has the type number {number}; quantkit reads {known}",
                "Use a file of another type.",
            )
        if shape[-1] % block_type.elements:
            _fail(
                f"tensor {name!r} has rows of {shape[-1]} in blocks of {block_type.elements} "
                f"({block_type.name}); expected whole blocks",
                _DOWNLOAD_AGAIN,
            )
        return GgufTensor(name, shape, block_type, offset)

    def _placed(self, tensors: list[GgufTensor], start: int, alignment: int) -> list[GgufTensor]:
        """Return the tensors in the order of their data, with offsets from the start of the file."""
        placed = []
        expected = 0
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if tensor.offset != expected:
                kind = "a hole before it" if tensor.offset > expected else "an overlap"
                _fail(
                    f"tensor {tensor.name!r} starts at byte {tensor.offset} of the data; expected "
                    f"{expected}, so there is {kind}",
                    _DOWNLOAD_AGAIN,
                )
            placed.append(GgufTensor(tensor.name, tensor.shape, tensor.block_type, start + tensor.offset))
            if placed[-1].offset + tensor.nbytes > self._file_bytes:
                _fail(
                    f"tensor {tensor.name!r} ends at byte {placed[-1].offset + tensor.nbytes}, but the file "
                    f"has {self._file_bytes}: it is truncated",
                    _DOWNLOAD_AGAIN,
                )
            expected += -(-tensor.nbytes // alignment) * alignment
        return placed


def _fail(problem: str, remedy: str) -> NoReturn:
    raise CheckpointError(f"{problem}. {remedy}")
