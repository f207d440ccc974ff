"""Reading and writing safetensors headers. The numbers are those of the list of bad inputs."""

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.dtypes import TORCH_DTYPES
from quantkit.checkpoint.safetensors_header import MAX_HEADER_BYTES, encode_header, parse_json, read_header
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import CheckpointError

SAVED = "Write the file again with safetensors' save_file"
DOWNLOAD = "Download the file again"


def framed(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def entry(shape: Any = (2,), dtype: Any = "F32", offsets: Any = (0, 8), **extra: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets, **extra}


def file_of(entries: dict[str, Any], data_bytes: int = 8) -> bytes:
    return framed(json.dumps(entries).encode(), bytes(data_bytes))


def refusal(tmp_path: Path, content: bytes) -> str:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    return text.removeprefix(f"{path}: ")


TWICE = b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
BAD_FILES: dict[str, tuple[bytes, str]] = {
    "1 empty": (b"", f"the file is empty; expected safetensors data. {DOWNLOAD}."),
    "1 seven bytes": (b"1234567", f"the file has 7 bytes; expected at least 8. {DOWNLOAD}."),
    "1 no brace": (
        framed(b" {}     "),
        f"the header starts with b' {{}}     '; expected '{{'. {DOWNLOAD}.",
    ),
    "1 no tensors": (framed(b"{}"), f"0 tensors in the header; expected 1 to 1000000. {SAVED}."),
    "1 not JSON": (framed(b'{"a":'), "the header is invalid ("),
    "1 bad UTF-8": (framed(b'{"\xff":1}'), "the header is invalid ("),
    "1 nested deeply": (
        framed(b'{"a":' + b"[" * 100_000),
        f"the header is nested too deeply; expected a few levels of JSON. {DOWNLOAD}.",
    ),
    "2 length 2**63": (
        (2**63).to_bytes(8, "little") + bytes(100),
        f"the first 8 bytes announce a header of {2**63} bytes; allowed are {MAX_HEADER_BYTES}, "
        f"so this is no safetensors file or one of too many tensors. {DOWNLOAD}, or write smaller "
        "shards.",
    ),
    "2 just over the limit": (
        (MAX_HEADER_BYTES + 1).to_bytes(8, "little"),
        f"the first 8 bytes announce a header of {MAX_HEADER_BYTES + 1} bytes; allowed are",
    ),
    "3 header cut": (
        framed(b"{" + b" " * 99)[:50],
        f"the header needs 108 bytes, but the file has 50: it is truncated. {DOWNLOAD}.",
    ),
    "3 data cut": (
        file_of({"a": entry()}, 7),
        f"the file is truncated: expected 77 bytes, got 76. {DOWNLOAD}.",
    ),
    "4 trailing bytes": (
        file_of({"a": entry()}, 9),
        f"the file has trailing bytes: expected 77 bytes, got 78. {DOWNLOAD}.",
    ),
    "4 hole": (
        file_of({"a": entry(), "b": entry(offsets=(12, 20))}, 20),
        f"tensor 'b' starts at byte 12 of the data; expected 8, so there is a hole before it. {DOWNLOAD}.",
    ),
    "4 overlap": (
        file_of({"a": entry(), "b": entry(offsets=(4, 12))}, 12),
        f"tensor 'b' starts at byte 4 of the data; expected 8, so there is an overlap. {DOWNLOAD}.",
    ),
    "4 reversed offsets": (
        file_of({"a": entry(offsets=(8, 0))}),
        f"tensor 'a' has data_offsets [8, 0]; expected [begin, end] with 0 <= begin <= end. {SAVED}.",
    ),
    "4 negative offset": (
        file_of({"a": entry(offsets=(-8, 0))}),
        "tensor 'a' has data_offsets [-8, 0]; expected [begin, end] with",
    ),
    "4 fractional offset": (
        file_of({"a": entry(offsets=(0.0, 8))}),
        "tensor 'a' has data_offsets [0.0, 8]; expected [begin, end] with",
    ),
    "5 duplicate tensor": (
        framed(TWICE + TWICE[1:-1] + b"}", bytes(8)),
        f"key 'a' occurs twice in one JSON object; expected once. {SAVED}.",
    ),
    "5 duplicate field": (
        framed(b'{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', bytes(8)),
        f"key 'dtype' occurs twice in one JSON object; expected once. {SAVED}.",
    ),
    "6 unknown dtype": (
        file_of({"a": entry(dtype="float99")}),
        f"tensor 'a' has dtype 'float99'; supported are {', '.join(TORCH_DTYPES)}. Convert the "
        "tensor to one of these and write the file again.",
    ),
    "6 sub-byte dtype": (
        file_of({"a": entry(dtype="F4", offsets=(0, 1))}, 1),
        "tensor 'a' has dtype 'F4'; supported are BOOL, ",
    ),
    "6 dtype no string": (
        file_of({"a": entry(dtype=7)}),
        f"tensor 'a' has dtype 7; expected a name. {SAVED}.",
    ),
    "8 shape and bytes differ": (
        file_of({"a": entry(shape=(3,))}),
        f"tensor 'a' has 8 bytes of data; its dtype F32 and shape [3] need 12. {DOWNLOAD}.",
    ),
    "9 zero size": (
        file_of({"a": entry(shape=(0, 2**62), offsets=(0, 0))}, 0),
        f"tensor 'a' has shape [0, {2**62}]; expected at most 8 sizes, each an integer >= 1. "
        "Remove the tensor or write it with another shape.",
    ),
    "9 nine dimensions": (
        file_of({"a": entry(shape=(1,) * 8 + (2,))}),
        "tensor 'a' has shape [1, 1, 1, 1, 1, 1, 1, 1, 2]; expected at most 8 sizes",
    ),
    "9 2**33 x 2**33": (
        file_of({"a": entry(shape=(2**33, 2**33))}),
        f"tensor 'a' has shape [{2**33}, {2**33}]; allowed are {2**40} elements. {DOWNLOAD}, or "
        "split the tensor.",
    ),
    "9 size of 4000 digits": (
        file_of({"a": entry(shape=(10**4000,) * 8)}),
        "tensor 'a' has shape [1000",
    ),
    "9 size of 5000 digits": (
        framed(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b'],"data_offsets":[0,8]}}'),
        "the header is invalid (",
    ),
    "9 negative size": (file_of({"a": entry(shape=(-2,))}), "tensor 'a' has shape [-2]; expected"),
    "9 fractional size": (file_of({"a": entry(shape=(2.0,))}), "tensor 'a' has shape [2.0]; exp"),
    "9 boolean size": (
        file_of({"a": entry(shape=(True,), offsets=(0, 4))}, 4),
        "tensor 'a' has shape [True]; expected",
    ),
    "9 shape no list": (file_of({"a": entry(shape="2")}), "tensor 'a' has shape '2'; expected"),
    "12 LFS pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n",
        "the file is a git LFS pointer, which stands in for weights that were not downloaded; "
        "expected safetensors data. Run `git lfs pull` in the directory, or download the "
        "checkpoint with `hf download`.",
    ),
    "13 HTML page": (
        b"\n<!DOCTYPE html><html><body>403</body></html>",
        "the file is an HTML page; expected safetensors data. The download failed; check the "
        "address and access rights.",
    ),
    "13 HTML page without doctype": (b"<HTML>404</HTML>", "the file is an HTML page; expected"),
    "13 GGUF": (b"GGUF\x03\x00\x00\x00" + bytes(50), "the file is a GGUF file; expected"),
    "13 zip": (b"PK\x03\x04" + b"\x14" * 60, "the file is a zip archive or pickled checkpoint;"),
    "15 metadata value": (
        file_of({"__metadata__": {"format": 1}, "a": entry()}),
        f"__metadata__['format'] is 1; expected a string. {SAVED}.",
    ),
    "15 metadata no object": (
        file_of({"__metadata__": "pt", "a": entry()}),
        f"__metadata__ is 'pt'; expected strings by name. {SAVED}.",
    ),
    "unknown field": (
        file_of({"a": entry(strides=(1,))}),
        "tensor 'a' is {'data_offsets': [0, 8], 'dtype': 'F32', 'shape': [2], 'strides': [1]}; "
        f"expected the fields data_offsets, dtype, shape. {SAVED}.",
    ),
    "missing field": (file_of({"a": {"dtype": "F32"}}), "tensor 'a' is {'dtype': 'F32'}; expected"),
    "entry no object": (file_of({"a": 3}), "tensor 'a' is 3; expected the fields"),
}


@pytest.mark.fault(1, 2, 3, 4, 5, 6, 8, 9, 12, 13, 15)
@pytest.mark.parametrize("case", BAD_FILES)
def test_refuses_bad_file(tmp_path: Path, case: str) -> None:
    content, expected = BAD_FILES[case]
    assert refusal(tmp_path, content).startswith(expected)


BAD_NAMES = ["", "a..b", "../../etc/passwd", "a/b", "a\0b", "a b", "a\n", "x" * 513]


@pytest.mark.fault(10)
@pytest.mark.parametrize("name", BAD_NAMES)
def test_refuses_tensor_name(tmp_path: Path, name: str) -> None:  # 10
    text = refusal(tmp_path, file_of({name: entry()}))
    assert text.startswith("tensor name '")
    assert text.endswith(
        f"({len(name)} characters) is not allowed; expected 1 to 512 letters, digits, '_', '-' and "
        "single '.'. Rename the tensor."
    )
    text.encode()  # can be printed


@pytest.mark.parametrize(
    "entries", [{"\ud800": entry()}, {"a": entry(), "__metadata__": {"format": "\udfff"}}]
)
def test_refuses_half_a_character(tmp_path: Path, entries: dict[str, Any]) -> None:
    text = refusal(tmp_path, file_of(entries))
    assert "surrogates not allowed" in text
    text.encode()


@pytest.mark.fault(11)
@pytest.mark.parametrize("content", [b'"a":{},', b"[],"])
def test_refuses_a_million_entries_before_parsing(tmp_path: Path, content: bytes) -> None:  # 11
    header = b'{"x":[' + content * (2_100_000 if content == b"[]," else 1_000_003) + b"]}"
    text = refusal(tmp_path, framed(header))
    assert text == "the header lists more than 1000000 tensors. Write smaller shards."


@pytest.mark.fault(15)
def test_huge_metadata_is_accepted(tmp_path: Path) -> None:  # 15
    path = tmp_path / "a.safetensors"
    save_file({"a": torch.ones(2)}, path, metadata={"note": "x" * 2**20})
    assert list(read_header(path)) == ["a"]


@pytest.mark.parametrize("kind", ["missing", "directory", "pipe"])
def test_refuses_what_is_no_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.safetensors"
    make = {"missing": lambda path: None, "directory": os.mkdir, "pipe": os.mkfifo}
    make[kind](path)
    expected = (
        r"a\.safetensors: cannot be read \((No such file.*|not a regular file|Is a directory)\); "
        r"expected a readable safetensors file\. Check that it exists and its permissions\."
    )
    with pytest.raises(CheckpointError, match=expected):
        read_header(path)


def test_reads_every_dtype_in_file_order(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    tensors = {name: torch.ones(3, 2).to(dtype) for name, dtype in sorted(TORCH_DTYPES.items())} | {
        "scalar": torch.tensor(1.5)
    }
    save_file(tensors, path, metadata={"format": "pt"})
    header = read_header(path)
    assert header.keys() == tensors.keys()
    offsets = [tensor.offset for tensor in header.values()]
    assert offsets == sorted(offsets)
    for name, stored in header.items():
        assert stored.torch_dtype == tensors[name].dtype
        assert stored.shape == tuple(tensors[name].shape)
        assert stored.file == path


SPECS = [TensorSpec("b.weight", "F32", (2, 3)), TensorSpec("a", "U8", (5,)), TensorSpec("s", "I64", ())]


def test_encode_header_is_canonical_and_read_by_safetensors(tmp_path: Path) -> None:
    header = encode_header(SPECS, {"z": "1", "format": "pt"})
    assert header == encode_header(SPECS, {"format": "pt", "z": "1"})
    assert len(header) % 8 == 0
    assert header[8:].rstrip(b" ") == (
        b'{"__metadata__":{"format":"pt","z":"1"},'
        b'"b.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},'
        b'"a":{"dtype":"U8","shape":[5],"data_offsets":[24,29]},'
        b'"s":{"dtype":"I64","shape":[],"data_offsets":[29,37]}}'
    )
    path = tmp_path / "a.safetensors"
    path.write_bytes(header + bytes(range(37)))
    stored = read_header(path)
    assert [(t.name, t.dtype, t.shape) for t in stored.values()] == [
        (t.name, t.dtype, t.shape) for t in SPECS
    ]
    assert [t.offset - len(header) for t in stored.values()] == [0, 24, 29]
    loaded = load_file(path)
    assert loaded["a"].tolist() == [24, 25, 26, 27, 28]
    assert loaded["s"].item() == int.from_bytes(bytes(range(29, 37)), "little")


@pytest.mark.parametrize(
    ("specs", "message"),
    [
        ([], "a file of 0 tensors needs a header of 8 bytes; allowed are 1 to 1000000 tensors"),
        ([SPECS[0], SPECS[0]], "tensor 'b.weight' would be written twice to one file"),
        ([TensorSpec("a/b", "U8", (1,))], "tensor name 'a/b' (3 characters) is not allowed"),
        ([TensorSpec("a", "F4", (2,))], "tensor 'a' has dtype 'F4'; supported are BOOL"),
        ([TensorSpec("a", "U8", (0,))], "tensor 'a' has shape (0,); expected at most 8 sizes"),
    ],
)
def test_encode_header_refuses(specs: list[TensorSpec], message: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(message)):
        encode_header(specs, {})


def test_parse_json_refuses_what_is_no_object() -> None:
    with pytest.raises(CheckpointError, match=r"the index is \[1\]; expected a JSON object\. Down"):
        parse_json(b"[1]", "the index")
    with pytest.raises(CheckpointError, match=r"the index is empty; expected a JSON object\. Down"):
        parse_json(b" \n", "the index")


def valid_or_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    try:
        tensors = read_header(path)
    except CheckpointError as error:
        str(error).encode()
    else:
        assert sum(t.nbytes for t in tensors.values()) <= len(content)
        assert all(t.offset + t.nbytes <= len(content) for t in tensors.values())


FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=5), children, max_size=4)
    ),
    max_leaves=8,
)
SIZES = st.integers(-1, 5)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*TORCH_DTYPES, "F4"]) | JSON_VALUES,
        "shape": st.lists(SIZES, max_size=4) | JSON_VALUES,
        "data_offsets": st.lists(SIZES | st.integers(), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@FUZZ
@given(content=st.binary(max_size=64))
def test_any_bytes_are_valid_or_an_error(tmp_path: Path, content: bytes) -> None:
    valid_or_error(tmp_path / "a.safetensors", content)
    valid_or_error(tmp_path / "a.safetensors", framed(b"{" + content))


@FUZZ
@given(
    entries=st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | JSON_VALUES),
    data=st.binary(max_size=40),
)
def test_any_json_is_valid_or_an_error(tmp_path: Path, entries: dict[str, Any], data: bytes) -> None:
    valid_or_error(tmp_path / "a.safetensors", framed(json.dumps(entries).encode(), data))


@FUZZ
@given(position=st.integers(0, 400), flip=st.integers(1, 255), cut=st.integers(0, 60))
def test_a_damaged_file_is_valid_or_an_error(tmp_path: Path, position: int, flip: int, cut: int) -> None:
    content = bytearray(encode_header(SPECS, {"format": "pt"}) + bytes(37))
    content[position % len(content)] ^= flip
    valid_or_error(tmp_path / "a.safetensors", bytes(content[: len(content) - cut]))
