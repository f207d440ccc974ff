"""Files that are no safetensors files, or lie: rows 1 to 15."""

import json
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.safetensors_header import MAX_HEADER_BYTES, MAX_TENSORS
from quantkit.errors import CheckpointError, EnvironmentProblem

from ..conftest import Run
from .faults import QUICK, SOURCE, STORIES, WEIGHTS, Message, edit_tensors, refused, snapshot

DOWNLOAD, WRITE = "Download the file again", "Write the file again with safetensors' save_file"
NORM = "model.norm.weight"


def framed(header: bytes, data: int = 0) -> bytes:
    return len(header).to_bytes(8, "little") + header + bytes(data)


def file_of(data: int = 8, **entries: Any) -> bytes:
    """A file whose header has these entries; tensor `a` is two float32."""
    given = {"a": entry(), **entries}
    return framed(json.dumps(given).encode(), data)


def entry(**changes: Any) -> dict[str, Any]:
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}


def is_refused(run: Run, source: Path, out: Path, content: bytes, *says: str) -> None:
    """`quantize`, `plan` and `eval` refuse a checkpoint with this file, and nothing is written."""
    file = source / WEIGHTS
    file.write_bytes(content)
    message = Message(file, *says)
    for arguments in (
        ("quantize", source, out),
        ("plan", source),
        ("eval", source, "--text", STORIES),
    ):
        refused(run, arguments, CheckpointError, message, source.parent)


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("content", "found", "expected"),
    [
        (b"", "the file is empty", "expected safetensors data"),
        (b"1234567", "the file has 7 bytes", "expected at least 8"),
        (framed(b" {}     "), "the header starts with b' {}     '", "expected '{'"),
        (framed(b'{"a": 1'), "the header is invalid (", "expected a JSON object"),
    ],
    ids=["empty", "7 bytes", "no brace", "no JSON"],
)
def test_what_is_no_safetensors_file(
    run: Run, source: Path, out: Path, content: bytes, found: str, expected: str
) -> None:
    is_refused(run, source, out, content, found, expected, DOWNLOAD)


@pytest.mark.fault(2)
@pytest.mark.parametrize("length", [2**63, MAX_HEADER_BYTES + 1])
def test_a_header_longer_than_allowed_is_not_even_allocated(
    run: Run, source: Path, out: Path, length: int
) -> None:
    content = length.to_bytes(8, "little") + b"{" + bytes(99)
    found = f"the first 8 bytes announce a header of {length} bytes"
    is_refused(run, source, out, content, found, f"allowed are {MAX_HEADER_BYTES}", DOWNLOAD)
    tracemalloc.start()
    with pytest.raises(CheckpointError):
        quantkit.quantize(source, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.fault(3)
@pytest.mark.parametrize("cut", [1, 1_000_000])
def test_a_truncated_file(run: Run, source: Path, out: Path, cut: int) -> None:
    whole = (source / WEIGHTS).read_bytes()
    says = (f"expected {len(whole)} bytes", f"got {len(whole) - cut}")
    is_refused(run, source, out, whole[:-cut], "the file is truncated", ", ".join(says), DOWNLOAD)


@pytest.mark.fault(3)
def test_a_truncated_header(run: Run, source: Path, out: Path) -> None:
    is_refused(
        run, source, out, framed(b"{" + b" " * 99)[:50], "the file has 50", "the header needs 108", DOWNLOAD
    )


@pytest.mark.fault(4)
@pytest.mark.parametrize(
    ("content", "found", "expected"),
    [
        (file_of(9), "trailing bytes", "expected 77 bytes, got 78"),
        (file_of(20, b=entry(data_offsets=[12, 20])), "a hole before it", "expected 8"),
        (file_of(12, b=entry(data_offsets=[4, 12])), "an overlap", "expected 8"),
    ],
    ids=["trailing", "hole", "overlap"],
)
def test_data_that_the_header_does_not_cover_once(
    run: Run, source: Path, out: Path, content: bytes, found: str, expected: str
) -> None:
    is_refused(run, source, out, content, found, expected, DOWNLOAD)


@pytest.mark.fault(5)
def test_a_tensor_that_is_listed_twice(run: Run, source: Path, out: Path) -> None:
    one = b'"a":' + json.dumps(entry()).encode()
    is_refused(
        run,
        source,
        out,
        framed(b"{" + one + b"," + one + b"}", 8),
        "key 'a' occurs twice",
        "expected once",
        WRITE,
    )


@pytest.mark.fault(6)
@pytest.mark.parametrize("dtype", ["float99", "F4", "__class__"])
def test_an_unknown_dtype(run: Run, source: Path, out: Path, dtype: str) -> None:
    is_refused(
        run,
        source,
        out,
        file_of(a=entry(dtype=dtype)),
        f"tensor 'a' has dtype '{dtype}'",
        "supported are BOOL, U8",
        "Convert the tensor to one of these",
    )


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """stories260K in int4, to damage."""
    quantkit.quantize(SOURCE, tmp_path / "packed", format="int4", group_size=4, method="rtn")
    return tmp_path / "packed"


UP = "model.layers.1.mlp.up_proj.weight_packed"


@pytest.mark.fault(7)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.uint32])
@pytest.mark.parametrize("command", ["generate", "eval"])
def test_packed_weights_of_another_dtype(run: Run, packed: Path, dtype: torch.dtype, command: str) -> None:
    edit_tensors(packed / WEIGHTS, lambda tensors: tensors.update({UP: tensors[UP].to(dtype)}))
    found = f"tensor '{UP}' in {packed / WEIGHTS} is {dtype} (172, 8)"
    rest = ("hello",) if command == "generate" else ("--text", STORIES)
    message = Message(packed / WEIGHTS, found, "expected torch.int32 (172, 8)", "again")
    refused(run, (command, packed, *rest), CheckpointError, message, packed.parent)


@pytest.mark.fault(8)
@pytest.mark.parametrize("shape", [(8, 172), (86, 16), (172 * 8,)])
def test_packed_weights_of_another_shape(run: Run, packed: Path, shape: tuple[int, ...]) -> None:
    edit_tensors(packed / WEIGHTS, lambda tensors: tensors.update({UP: tensors[UP].reshape(shape)}))
    found = f"tensor '{UP}' in {packed / WEIGHTS} is torch.int32 {shape}"
    message = Message(packed / WEIGHTS, found, "expected torch.int32 (172, 8)", "again")
    refused(run, ("generate", packed, "hello"), CheckpointError, message, packed.parent)


@pytest.mark.fault(8)
def test_a_weight_that_is_transposed(run: Run, source: Path, out: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(source / WEIGHTS, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    message = Message(name, "(64, 172)", "(172, 64)", "config.json")
    refused(run, ("quantize", source, out), CheckpointError, message, source.parent)


@pytest.mark.fault(8)
def test_a_shape_that_the_bytes_do_not_have(run: Run, source: Path, out: Path) -> None:
    found = "tensor 'a' has 8 bytes of data"
    is_refused(run, source, out, file_of(a=entry(shape=[3])), found, "shape [3] need 12", DOWNLOAD)


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    ("shape", "expected", "remedy"),
    [
        ([0, 4], "expected at most 8 sizes, each an integer >= 1", "write it with another shape"),
        ([1] * 9, "expected at most 8 sizes, each an integer >= 1", "write it with another shape"),
        ([2**33, 2**33], f"allowed are {2**40} elements", "split the tensor"),
    ],
    ids=["zero", "9 dimensions", "2**66 elements"],
)
def test_sizes_that_no_tensor_has(
    run: Run, source: Path, out: Path, shape: list[int], expected: str, remedy: str
) -> None:
    found = f"tensor 'a' has shape {shape}"
    is_refused(run, source, out, file_of(a=entry(shape=shape)), found, expected, remedy)


@pytest.mark.fault(10)
@pytest.mark.parametrize("name", ["../../etc/passwd", "a..b", "a/b", "a\0b", "", "x" * 513, "a\nb"])
def test_names_of_tensors_that_could_be_paths(run: Run, source: Path, out: Path, name: str) -> None:
    content = framed(json.dumps({name: entry()}).encode(), 8)
    found = f"({len(name)} characters) is not allowed"
    is_refused(run, source, out, content, found, "expected 1 to 512 letters, digits", "Rename the tensor")


@pytest.mark.fault(11)
def test_more_tensors_than_any_model_has(run: Run, source: Path, out: Path) -> None:
    header = b'{"x":[' + b'"a":{},' * (MAX_TENSORS + 3) + b"]}"
    (source / WEIGHTS).write_bytes(framed(header))
    message = Message(
        source / WEIGHTS, "the header lists more than", f"{MAX_TENSORS} tensors", "smaller shards"
    )
    refused(run, ("quantize", source, out), CheckpointError, message, source.parent)


@pytest.mark.fault(12)
def test_a_git_lfs_pointer(run: Run, source: Path, out: Path) -> None:
    content = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab\nsize 12345\n"
    says = ("the file is a git LFS pointer", "expected safetensors data", "Run `git lfs pull`")
    is_refused(run, source, out, content, *says)


@pytest.mark.fault(13)
@pytest.mark.parametrize(
    ("content", "found", "remedy"),
    [
        (b"<!DOCTYPE html><html>403</html>", "an HTML page", "The download failed"),
        (b"\n<html><body>404</body></html>", "an HTML page", "The download failed"),
        (b"GGUF\x03\x00\x00\x00" + bytes(50), "a GGUF file", "Use the safetensors checkpoint"),
        (b"PK\x03\x04" + b"\x14" * 60, "a zip archive or pickled checkpoint", "Convert it to safetensors"),
        (b"\x80\x02}q\x00." + bytes(60), "a pickled checkpoint", "Convert it to safetensors"),
    ],
    ids=["HTML", "HTML without doctype", "GGUF", "zip", "pickle"],
)
def test_another_file_under_the_name(
    run: Run, source: Path, out: Path, content: bytes, found: str, remedy: str
) -> None:
    is_refused(run, source, out, content, f"the file is {found}", "expected safetensors data", remedy)


@pytest.mark.fault(14)
def test_a_big_endian_host(run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    message = Message(
        "this host", "is big-endian", "expected a little-endian host", "Run quantkit on x86-64 or ARM64"
    )
    for arguments in (("quantize", source, out), ("generate", source, "hello")):
        refused(run, arguments, EnvironmentProblem, message, source.parent)


@pytest.mark.fault(15)
@pytest.mark.parametrize(
    ("metadata", "found", "expected"),
    [
        ({"format": 1}, "__metadata__['format'] is 1", "expected a string"),
        ("pt", "__metadata__ is 'pt'", "expected strings by name"),
    ],
)
def test_metadata_that_is_no_text(
    run: Run, source: Path, out: Path, metadata: object, found: str, expected: str
) -> None:
    is_refused(run, source, out, file_of(__metadata__=metadata), found, expected, WRITE)


@pytest.mark.fault(15)
def test_large_metadata_is_ignored(run: Run, source: Path, out: Path) -> None:
    expected = out.with_name("expected")
    assert run("quantize", source, expected, *QUICK).code == 0
    save_file(load_file(source / WEIGHTS), source / WEIGHTS, metadata={"note": "x" * 2**20})
    assert run("quantize", source, out, *QUICK).code == 0
    assert snapshot(out)[WEIGHTS] == snapshot(expected)[WEIGHTS]
