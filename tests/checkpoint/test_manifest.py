"""A manifest is validated before it is trusted, and finds every difference."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest

from quantkit.checkpoint import manifest as manifest_module
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest, unlisted_files, verify_files
from quantkit.errors import CheckpointError

SHARD = b"\x01\x02" * 3_000_000  # more than one block of the hash


def entry(data: bytes) -> dict[str, Any]:
    return {"sha256": hashlib.sha256(data).hexdigest(), "size": len(data)}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "a.safetensors").write_bytes(SHARD)
    (tmp_path / "config.json").write_bytes(b"{}\n")
    files = {"a.safetensors": entry(SHARD), "config.json": entry(b"{}\n")}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps({"recipe": "int4", "files": files}))
    return tmp_path


def test_untouched_directory_has_no_problem_and_progress_counts_every_byte(directory: Path) -> None:
    seen: list[int] = []
    manifest = read_manifest(directory)
    assert manifest["recipe"] == "int4"
    assert verify_files(directory, manifest, seen.append) == []
    assert sum(seen) == len(SHARD) + 3
    assert len(seen) > 2


def test_every_kind_of_difference_is_named(directory: Path) -> None:
    manifest = read_manifest(directory)
    (directory / "a.safetensors").write_bytes(b"\x03" + SHARD[1:])
    (directory / "b.safetensors").write_bytes(b"")
    (directory / "notes.txt").write_bytes(b"not weights, so nobody minds")
    (directory / "config.json").unlink()
    problems = verify_files(directory, manifest)
    assert [(problem.file, problem.kind) for problem in problems] == [
        ("a.safetensors", "sha256"),
        ("b.safetensors", "extra"),
        ("config.json", "missing"),
    ]
    assert [str(problem).split(" ", 1)[0] for problem in problems] == [p.file for p in problems]

    (directory / "a.safetensors").write_bytes(SHARD[:-1])
    (size_problem,) = [p for p in verify_files(directory, manifest) if p.kind == "size"]
    assert str(size_problem) == "a.safetensors has 5999999 bytes, the manifest says 6000000"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not valid JSON"),
        ('{"files": {', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("\ud800", "not valid JSON"),
        ("[]", "not valid JSON: it is \\[\\]; expected a JSON object"),
        ("{}", "'files' must be an object"),
        ('{"files": []}', "'files' must be an object"),
        ('{"files": {"../a": {}}}', "must name a file in the directory itself"),
        ('{"files": {"/a": {}}}', "must name a file in the directory itself"),
        ('{"files": {"..": {}}}', "must name a file in the directory itself"),
        ('{"files": {"": {}}}', "must name a file in the directory itself"),
        ('{"files": {"a\\u0000": {}}}', "must name a file in the directory itself"),
        ('{"files": {"a": 1}}', "must be an object with sha256 and size"),
        ('{"files": {"a": {"sha256": "AB", "size": 1}}}', "64 lower-case hex digits, found 'AB'"),
        (f'{{"files": {{"a": {{"sha256": "{"0" * 64}", "size": -1}}}}}}', "found -1"),
        (f'{{"files": {{"a": {{"sha256": "{"0" * 64}", "size": true}}}}}}', "found True"),
    ],
)
def test_broken_manifest_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / MANIFEST_NAME).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(CheckpointError, match=message) as refusal:
        read_manifest(tmp_path)
    assert str(tmp_path / MANIFEST_NAME) in str(refusal.value)


def test_missing_manifest_names_the_way_on(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"not a finished quantkit checkpoint.*--resume"):
        read_manifest(tmp_path)


def test_manifest_that_is_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).mkdir()
    with pytest.raises(CheckpointError, match=r"cannot read .*not a regular file"):
        read_manifest(tmp_path)


def test_too_large_manifest_is_refused_unread(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest_module, "MAX_MANIFEST_BYTES", 10)
    with pytest.raises(CheckpointError, match="more than the 10"):
        read_manifest(directory)


def test_all_that_is_beside_the_checkpoint_is_named(directory: Path) -> None:
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates/tool.jinja").write_text("{{ 1 }}")
    (directory / ".hidden").write_bytes(b"")
    (directory / "dangling").symlink_to("nowhere")
    os.mkfifo(directory / "pipe")
    os.mkfifo(directory / "more.safetensors")
    (directory / "folder.safetensors").mkdir()
    manifest = read_manifest(directory)
    assert unlisted_files(directory, manifest) == [
        *(".hidden", "additional_chat_templates/", "dangling", "folder.safetensors/", "more.safetensors"),
        "pipe",
    ]
    assert [problem.file for problem in verify_files(directory, manifest)] == [
        "folder.safetensors/",
        "more.safetensors",
    ]
    (directory / "config.json").unlink()
    os.mkfifo(directory / "config.json")
    assert "config.json is no file" in map(str, verify_files(directory, manifest))
