"""Headers of GGUF files: whatever the bytes are, a header or an error that says what is wrong with them."""

import struct
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from quantkit.checkpoint.gguf import header as reader
from quantkit.checkpoint.gguf.header import read_gguf_header
from quantkit.errors import CheckpointError


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def tensor(name: str, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file(
    *parts: bytes,
    tensors: int = 0,
    keys: int = 0,
    version: int = 3,
    data: bytes = bytes(64),
    alignment: int = 32,
) -> bytes:
    """A file of these entries, padded to the alignment before its data."""
    start = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(parts)
    return start + bytes(-len(start) % alignment) + data


A = tensor("a", (2, 3))
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "the magic takes 4 bytes at byte 0, but the file has 0: it is truncated"),
    "magic": (b"PK\x03\x04" + bytes(40), r"starts with b'PK\\x03\\x04'; expected b'GGUF'"),
    "version 1": (
        file(version=1),
        "the file is of version 1; expected a little-endian GGUF file of version 2 or 3",
    ),
    "big-endian": (file(version=3 << 24), "the file is big-endian; expected a little-endian"),
    "tensors": (file(tensors=2**62), f"announces {2**62} tensors; allowed are 100000"),
    "keys": (file(keys=2**40), f"announces {2**40} metadata keys; allowed are 10000"),
    "cut": (file(A, tensors=1)[:40], "takes 8 bytes at byte .* it is truncated"),
    "long string": (file(struct.pack("<Q", 2**60), keys=1), f"a metadata key has {2**60} bytes; allowed are"),
    "string beyond": (
        file(struct.pack("<Q", 2**20), keys=1),
        "a metadata key takes 1048576 bytes at byte 32",
    ),
    "half characters": (
        file(struct.pack("<Q", 1) + b"\xff", keys=1),
        r"a metadata key is b'\\xff'; expected UTF-8",
    ),
    "type": (file(pair("k", 13, b""), keys=1), "metadata 'k' has type 13; expected 0 to 12"),
    "bool": (file(pair("k", 7, b"\2"), keys=1), "metadata 'k' has the byte 2; expected 0 or 1"),
    "nested": (
        file(pair("k", 9, struct.pack("<IQ", 9, 1)), keys=1),
        "metadata 'k' is an array of arrays; expected one of numbers or text",
    ),
    "array type": (file(pair("k", 9, struct.pack("<IQ", 77, 1)), keys=1), "is an array of type 77; expected"),
    "array count": (
        file(pair("k", 9, struct.pack("<IQ", 0, 2**50)), keys=1),
        f"metadata 'k' has {2**50} values; allowed are 1048576",
    ),
    "strings beyond": (
        file(pair("k", 9, struct.pack("<IQ", 8, 2**20)), keys=1),
        "metadata 'k' takes 8388608 bytes at byte",
    ),
    "numbers beyond": (
        file(pair("k", 9, struct.pack("<IQ", 10, 2**20)), keys=1),
        "metadata 'k' takes 8388608 bytes at byte",
    ),
    "key twice": (
        file(pair("k", 0, b"\1"), pair("k", 0, b"\1"), keys=2),
        "the metadata key 'k' is there twice; expected it once",
    ),
    "alignment 0": (
        file(pair("general.alignment", 4, struct.pack("<I", 0)), keys=1),
        "general.alignment is 0; expected a power of two",
    ),
    "alignment 24": (
        file(pair("general.alignment", 4, struct.pack("<I", 24)), keys=1),
        "general.alignment is 24; expected a power of two",
    ),
    "alignment text": (
        file(pair("general.alignment", 8, text("32")), keys=1),
        "general.alignment has type 8; expected 4, an unsigned integer",
    ),
    "name": (file(tensor("../a", (1,)), tensors=1), r"tensor name '\.\./a' \(4 characters\) is not allowed"),
    "long name": (file(tensor("a" * 65, (1,)), tensors=1), r"\(65 characters\) is not allowed"),
    "name twice": (file(A, A, tensors=2), "tensor 'a' is there twice; expected it once"),
    "no dimension": (file(tensor("a", ()), tensors=1), "tensor 'a' has 0 dimensions; expected 1 to 4"),
    "dimensions": (file(tensor("a", (1,) * 5), tensors=1), "tensor 'a' has 5 dimensions; expected 1 to 4"),
    "size 0": (file(tensor("a", (3, 0)), tensors=1), r"has shape \(0, 3\); allowed are 1 to"),
    "too large": (file(tensor("a", (2**40, 2**40)), tensors=1), "allowed are 1 to 1099511627776 elements"),
    "unknown type": (
        file(tensor("a", (4,), kind=4), tensors=1),
        "the type number 4; quantkit reads F32, F16",
    ),
    "half a block": (
        file(tensor("a", (48, 2), kind=3), tensors=1),
        r"has rows of 48 in blocks of 32 \(Q4_1\); expected whole blocks",
    ),
    "hole": (
        file(tensor("a", (4,), offset=32), tensors=1),
        "starts at byte 32 of the data; expected 0, so there is a",
    ),
    "overlap": (
        file(tensor("a", (16,)), tensor("b", (4,), offset=32), tensors=2),
        "tensor 'b' starts at byte 32 of the data; expected 64, so there is an overlap",
    ),
    "unaligned": (file(tensor("a", (4,)), tensor("b", (4,), offset=16), tensors=2), "'b' starts at byte 16"),
    "huge offset": (file(tensor("a", (4,), offset=2**63), tensors=1), "so there is a hole before it"),
    "data cut": (file(tensor("a", (64,)), tensors=1), "tensor 'a' ends at byte 320, but the file has 128"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_file_is_said_to_be_none(name: str, tmp_path: Path) -> None:
    data, expected = HOSTILE[name]
    path = tmp_path / "a.gguf"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=expected) as caught:
        read_gguf_header(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert str(caught.value).endswith(".")


def test_a_header_has_at_most_so_many_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_HEADER_BYTES", 64)
    path = tmp_path / "a.gguf"
    path.write_bytes(file(pair("k", 8, text("x" * 100)), keys=1))
    with pytest.raises(CheckpointError, match="takes 100 bytes at byte 45; a header has at most 64"):
        read_gguf_header(path)


@pytest.mark.parametrize("make", [Path.mkdir, lambda path: None], ids=["directory", "nothing"])
def test_what_cannot_be_read_is_named(make: Callable[[Path], None], tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    make(path)
    with pytest.raises(
        CheckpointError, match=r"a\.gguf: cannot be read \(.*\); expected a readable GGUF file"
    ):
        read_gguf_header(path)


def test_a_header_is_what_the_package_gguf_reads(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(64)
    writer.add_bool("a.bool", True)
    writer.add_float32("a.float", 0.5)
    writer.add_int64("a.int", -3)
    writer.add_string("a.text", "né")
    writer.add_array("a.texts", ["", "b"])
    writer.add_array("a.numbers", [1, 2, 3])
    random = np.random.default_rng(0)
    for i, kind in enumerate(("F32", "Q4_1", "Q8_0", "F16")):
        number = gguf.GGMLQuantizationType[kind]
        weights = random.standard_normal((3, 32 * (i + 1)), dtype=np.float32)
        writer.add_tensor(f"t{i}.weight", gguf.quantize(weights, number), raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found, expected = read_gguf_header(path), gguf.GGUFReader(path)
    assert dict(found.metadata) == {
        key: tuple(value) if isinstance(value := field.contents(), list) else value
        for key, field in expected.fields.items()
        if not key.startswith("GGUF.")
    }
    assert [
        (one.name, one.shape[::-1], one.block_type.name, one.offset, one.nbytes)
        for one in found.tensors.values()
    ] == [
        (one.name, tuple(map(int, one.shape)), one.tensor_type.name, one.data_offset, one.n_bytes)
        for one in expected.tensors
    ]
    assert found.get("a.int", int) == -3
    assert found.get("a.missing", int, 7) == 7
    with pytest.raises(CheckpointError, match=r"metadata 'a\.bool' is True; expected int"):
        found.get("a.bool", int)
