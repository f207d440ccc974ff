"""What may be in an output directory before a run, and how each refusal reads."""

import errno
import json
import os
import shutil
import socket
import subprocess
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.manifest import MANIFEST_NAME, extend_manifest, read_manifest, verify_manifest
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.existing import CONFIG_NAME, INDEX_NAME
from quantkit.checkpoint.output.journal import JOURNAL_NAME, canonical_json, read_journal, run_differences
from quantkit.checkpoint.output.lock import LOCK_NAME, DirectoryLock
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import CheckpointError, OutputError
from quantkit.files import TEMP_PREFIX

from .test_writer import contents

RUN: dict[str, Any] = {"version": "1", "options": {"bits": 4, "rules": ["a", "b"]}}
NAMES = [f"model-{i}.safetensors" for i in range(3)]
DATA = torch.arange(1000, dtype=torch.int32)


def drive(
    out: Path,
    source: Path,
    mode: Mode,
    run: dict[str, Any] = RUN,
    expected_bytes: int = 0,
    stop_after: int = len(NAMES),
) -> list[str]:
    """Write three shards, or stop before the end; returns the names that had to be written."""
    written = []
    late = [path.name for path in source.glob("*.txt")] + [INDEX_NAME, MANIFEST_NAME, CONFIG_NAME]
    opened = OutputDirectory.open(out, source, mode, run, expected_bytes, names=[*NAMES, *late])
    with opened as output:
        if output.complete:
            assert all(map(output.is_done, NAMES))
            return []
        for number, name in enumerate(NAMES[:stop_after]):
            if output.is_done(name):
                continue
            with output.shard(name, [TensorSpec.of(f"t{number}", DATA)], {}) as file:
                file.write(f"t{number}", DATA)
            written.append(name)
        if stop_after == len(NAMES):
            weight_map = {f"t{number}": name for number, name in enumerate(NAMES)}
            output.finish(weight_map, 12000, {"a": 1}, sorted(source.glob("*.txt")), {"seed": 1})
    return written


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def refusal(out: Path, source: Path, mode: Mode, **options: Any) -> str:
    """The text of the refusal, which must leave everything as it was."""

    def contents() -> dict[Path, object]:
        places = {*out.rglob("*"), *source.rglob("*")}
        return {path: path.is_file() and path.read_bytes() for path in places}

    before = contents()
    with pytest.raises(OutputError) as raised:
        drive(out, source, mode, **options)
    assert contents() == before
    return str(raised.value)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "model.safetensors").write_bytes(b"the only copy")
    (source / "merges.txt").write_bytes(b"a b")
    return source


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.mark.parametrize("mode", Mode)
def test_output_and_source_must_be_apart(tmp_path: Path, source: Path, mode: Mode) -> None:
    assert "is the source checkpoint itself" in refusal(source, source, mode)
    assert "is inside the source" in refusal(source / "out", source, mode)
    assert "is inside the output" in refusal(tmp_path, source, mode)
    (tmp_path / "link").symlink_to(source)
    assert "is the source checkpoint itself" in refusal(tmp_path / "link", source, mode)
    assert "is inside the source" in refusal(tmp_path / "link" / "out", source, mode)
    assert "elsewhere" in refusal(source, source / ".." / "source", mode)


def test_overwrite_refuses_an_output_that_the_source_links_into(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW)
    (source / "linked.safetensors").symlink_to(out / NAMES[0])
    assert "linked.safetensors of the source is a link" in refusal(out, source, Mode.OVERWRITE)


@pytest.mark.parametrize("mode", Mode)
def test_output_that_is_a_file_is_refused(out: Path, source: Path, mode: Mode) -> None:
    out.write_bytes(b"notes")
    assert "is a file, not a directory. Choose another name" in refusal(out, source, mode)


@pytest.mark.parametrize("mode", Mode)
def test_missing_parent_is_refused(out: Path, source: Path, mode: Mode) -> None:
    assert f"mkdir -p {out}" in refusal(out / "deep", source, mode)


def test_read_only_parent_is_refused(out: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "mkdir", fail)
    text = refusal(out, source, Mode.NEW)
    assert "cannot create the output directory" in text and "EROFS" in text and "writable" in text


@pytest.mark.fault(59)
@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_read_only_output_is_refused(out: Path, source: Path) -> None:
    out.mkdir(mode=0o555)
    assert "EACCES" in refusal(out, source, Mode.NEW)


@pytest.mark.fault(60)
def test_too_little_disk_is_refused_with_figures(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(50 << 20))
    text = refusal(out, source, Mode.NEW, expected_bytes=50 << 20)
    assert "53.48 MB needed, 52.43 MB free. Free 1.05 MB or" in text
    assert not out.exists()
    page = Path(__file__).parents[2] / "docs" / "guide" / "troubleshooting.md"
    for name in (str(out), "53.48 MB", "52.43 MB", "1.05 MB"):
        text = text.replace(name, "...")
    assert text.rstrip() in page.read_text(encoding="utf-8")

    drive(out, source, Mode.NEW, expected_bytes=12000, stop_after=2)
    done = sum((out / name).stat().st_size for name in NAMES[:2])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20))
    assert "too little disk space" in refusal(out, source, Mode.RESUME, expected_bytes=done + 1)
    drive(out, source, Mode.RESUME, expected_bytes=done)

    # What OVERWRITE removes counts as free.
    size = sum(path.stat().st_size for path in out.iterdir())
    assert "too little" in refusal(out, source, Mode.OVERWRITE, expected_bytes=size + 1)
    drive(out, source, Mode.OVERWRITE, expected_bytes=size)


def test_new_needs_an_empty_directory(out: Path, source: Path) -> None:
    out.mkdir()
    (out / LOCK_NAME).write_bytes(b"left by a killed process")
    (out / f"{TEMP_PREFIX}{JOURNAL_NAME}").write_bytes(b"half")
    drive(out, source, Mode.NEW, stop_after=1)
    text = refusal(out, source, Mode.NEW)
    assert "unfinished run" in text and "--resume" in text and "--overwrite" in text
    drive(out, source, Mode.RESUME)
    assert "finished quantkit checkpoint" in refusal(out, source, Mode.NEW)


@pytest.mark.parametrize("name", ["a.txt", "model.safetensors", "config.json", ".tmp-x", "dir"])
@pytest.mark.parametrize("mode", Mode)
def test_foreign_directory_is_refused_in_every_mode(out: Path, source: Path, name: str, mode: Mode) -> None:
    out.mkdir()
    (out / name).mkdir() if name == "dir" else (out / name).write_bytes(b"not ours")
    assert name in refusal(out, source, mode)


def test_locked_directory_is_refused(out: Path, source: Path) -> None:
    out.mkdir()
    lock = DirectoryLock.acquire(out)
    for mode in Mode:
        with pytest.raises(OutputError, match="LOCKED by process"):
            drive(out, source, mode)
    lock.release()


@pytest.mark.parametrize("prepared", [False, True])
def test_resume_without_a_run_starts_anew(out: Path, source: Path, prepared: bool) -> None:
    if prepared:
        out.mkdir()
    assert drive(out, source, Mode.RESUME) == NAMES


def test_resume_of_a_finished_directory_is_complete(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW)
    (out / JOURNAL_NAME).write_text('{"run":{}}\n')
    with OutputDirectory.open(out, source, Mode.RESUME, RUN, 0) as output:
        assert output.complete
        assert output.is_done(NAMES[0]) and output.details(NAMES[0]) == {}
        output.finish({}, 0, {}, [], {})
    assert names(out) == sorted([*read_manifest(out)["files"], MANIFEST_NAME])
    text = refusal(out, source, Mode.RESUME, run={**RUN, "version": "2"})
    assert "finished by a run that differs" in text and 'version: "1" -> "2"' in text

    # One bit, which only the hash tells.
    data = bytearray((out / NAMES[0]).read_bytes())
    data[-1] ^= 1
    (out / NAMES[0]).write_bytes(data)
    text = refusal(out, source, Mode.RESUME)
    assert f"{NAMES[0]} has sha256" in text and "--overwrite" in text

    (out / NAMES[1]).write_bytes(b"")
    (out / "merges.txt").unlink()
    text = refusal(out, source, Mode.RESUME)
    assert "merges.txt is missing" in text and f"{NAMES[1]} has 0 bytes" in text


def test_resume_of_another_run_names_what_differs(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    run = {"version": "1", "options": {"bits": 3, "rules": ["a", "c"], "seed": None}}
    text = refusal(out, source, Mode.RESUME, run=run)
    assert "options.bits: 4 -> 3" in text
    assert 'options.rules[1]: "b" -> "c"' in text
    assert "options.seed: (absent) -> null" in text
    assert "version" not in text and "--overwrite" in text
    same = json.loads(json.dumps(RUN, sort_keys=True))
    assert drive(out, source, Mode.RESUME, run={**same, "options": dict(same["options"])}) != []


def test_differences_are_cut_to_a_readable_length() -> None:
    long = "x" * 1000
    (line,) = run_differences({"text": long + "a"}, {"text": long + "b"})
    assert len(line) < 500
    many = run_differences({}, {f"k{i:02}": i for i in range(30)})
    assert len(many) == 21 and many[-1] == "and 10 more"


@pytest.mark.parametrize("damage", ["missing", "truncated", "changed"])
def test_resume_writes_again_what_is_not_intact(out: Path, source: Path, damage: str) -> None:
    drive(out, source, Mode.NEW, stop_after=2)
    file = out / NAMES[0]
    data = file.read_bytes()
    if damage == "missing":
        file.unlink()
    else:
        file.write_bytes(data[:-1] if damage == "truncated" else data[:-1] + b"\xff")
    assert drive(out, source, Mode.RESUME) == [NAMES[0], NAMES[2]]
    assert file.read_bytes() == data


@pytest.mark.parametrize(
    ("tail", "expected"),
    [
        (b'{"file":"model-1', NAMES[1:]),
        (b"\x00" * 100, NAMES[1:]),
        (b'{"claim":["../../victim"]}', NAMES[1:]),
    ],
)
def test_an_unfinished_end_of_the_journal_is_cut_off(
    out: Path, source: Path, tail: bytes, expected: list[str]
) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    journal = out / JOURNAL_NAME
    whole = journal.read_bytes()
    journal.write_bytes(whole + tail)
    drive(out, source, Mode.RESUME, stop_after=1)
    assert journal.read_bytes() == whole
    journal.write_bytes(whole + tail)
    assert drive(out, source, Mode.RESUME) == expected


def test_line_without_newline_is_not_trusted(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW, stop_after=2)
    journal = out / JOURNAL_NAME
    journal.write_bytes(journal.read_bytes()[:-1])
    assert drive(out, source, Mode.RESUME) == NAMES[1:]


@pytest.mark.parametrize("first", [b"", b"garbage\n", b'{"run":', b'{"run":1}\n'])
def test_journal_without_a_run_record_is_refused(out: Path, source: Path, first: bytes) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    (out / JOURNAL_NAME).write_bytes(first)
    for mode in Mode:
        assert "does not hold the run record" in refusal(out, source, mode)


def changed_lines(raw: bytes) -> Iterator[bytes]:
    """A line with another type or value in every place, with keys less and more, and with other bytes."""
    line = json.loads(raw)
    for place in places(line):
        for value in (None, True, -1, 2**70, 0.5, "x", [], {}, ["../../victim"]):
            yield changed(line, place, value)
        yield changed(line, place)
    yield changed(line, ("more",), 1)
    for at in range(0, len(raw), 7):
        yield raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1 :]
    yield from (
        raw[:-1],
        raw + b" ",
        raw + raw,
        b"",
        b"[]",
        b"null",
        b"\xff" * 20,
        raw.replace(b":", b": ", 1),
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inside: Any = value.items() if isinstance(value, dict) else ()
    inside = enumerate(value) if isinstance(value, list) else inside
    found = [place for key, item in inside for place in places(item, (*path, key))]
    return [path, *found] if path else found


def changed(line: Any, place: tuple[Any, ...], *value: object) -> bytes:
    line = json.loads(json.dumps(line))
    node = line
    for key in place[:-1]:
        node = node[key]
    if value:
        node[place[-1]] = value[0]
    else:
        del node[place[-1]]
    return canonical_json(line)


@pytest.mark.fault(65)
def test_a_damaged_line_of_the_journal_is_named_with_a_remedy_that_works(out: Path, source: Path) -> None:
    reference = out.with_name("reference")
    drive(reference, source, Mode.NEW)
    drive(out, source, Mode.NEW, stop_after=2)
    journal = out / JOURNAL_NAME
    lines = journal.read_bytes().splitlines()
    tried = 0
    for number, raw in enumerate(lines, 1):
        for damage in changed_lines(raw):
            if damage == raw:
                continue
            journal.write_bytes(
                b"".join(line + b"\n" for line in [*lines[: number - 1], damage, *lines[number:]])
            )
            with pytest.raises(OutputError) as raised:
                read_journal(out)
            text = str(raised.value)
            assert f"{journal} is damaged in line {number}" in text
            assert f"sed -i {number}d {journal}" in text or number == 1
            assert f"emove {out} and start anew" in text
            tried += 1
        for mode in Mode:
            assert f"in line {number}" in refusal(out, source, mode)
        if number > 1:
            copy = Path(shutil.copytree(out, out.with_name(f"copy{number}")))
            journal = copy / JOURNAL_NAME
            subprocess.run(["sed", "-i", f"{number}d", journal], check=True)
            drive(copy, source, Mode.RESUME)
            assert contents(copy) == contents(reference)
            journal = out / JOURNAL_NAME
    assert tried > 500


@pytest.mark.fault(65)
def test_damaged_figures_of_a_finished_directory_are_refused(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW)
    text = (out / MANIFEST_NAME).read_text()
    (out / MANIFEST_NAME).write_text(text.replace('"seed": 1', '"seed": 2'))
    assert f"{MANIFEST_NAME} has changed since it was written" in refusal(out, source, Mode.RESUME)
    with pytest.raises(CheckpointError, match=f"{MANIFEST_NAME} has changed since it was written"):
        extend_manifest(out, {"more": 1})
    (out / MANIFEST_NAME).write_text(text)
    extend_manifest(out, {"more": 1})
    assert read_manifest(out)["more"] == 1 and not verify_manifest(out)


@pytest.mark.fault(66)
def test_stale_temporary_files_are_removed_on_resume(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    (out / f"{TEMP_PREFIX}{NAMES[1]}").write_bytes(b"half")
    (out / f"{TEMP_PREFIX}anything").write_bytes(b"half")
    drive(out, source, Mode.RESUME, stop_after=1)
    assert names(out) == sorted([JOURNAL_NAME, NAMES[0]])


def test_resume_refuses_foreign_weights_and_never_replaces_a_foreign_file(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    (out / "model.safetensors").write_bytes(b"mine")
    assert "model.safetensors" in refusal(out, source, Mode.RESUME)
    (out / "model.safetensors").unlink()
    (out / "notes").write_bytes(b"mine")
    (out / "merges.txt").write_bytes(b"mine")
    with pytest.raises(OutputError, match=r"merges.txt was not written by quantkit"):
        drive(out, source, Mode.RESUME)
    assert (out / "merges.txt").read_bytes() == b"mine"
    (out / "merges.txt").unlink()
    drive(out, source, Mode.RESUME)
    assert (out / "notes").read_bytes() == b"mine"
    assert "notes" not in read_manifest(out)["files"]


@pytest.mark.fault(26)
@pytest.mark.parametrize("stop_after", [1, 3])
def test_overwrite_removes_what_quantkit_wrote_and_keeps_foreign_files(
    out: Path, source: Path, stop_after: int
) -> None:
    drive(out, source, Mode.NEW, stop_after=stop_after)
    foreign = ["old.safetensors", "figures"]
    (out / foreign[0]).write_bytes(b"mine")
    (out / foreign[1]).mkdir()
    text = refusal(out, source, Mode.OVERWRITE)
    assert "figures, old.safetensors" in text and NAMES[0] not in text
    (out / foreign[0]).unlink()
    (out / foreign[1]).rmdir()
    (out / f"{TEMP_PREFIX}{NAMES[1]}").write_bytes(b"half")
    assert drive(out, source, Mode.OVERWRITE, run={"other": 1}, stop_after=1) == NAMES[:1]
    assert names(out) == sorted([JOURNAL_NAME, NAMES[0]])


def test_a_manifest_that_the_disk_does_not_give_makes_no_file_foreign(
    out: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drive(out, source, Mode.NEW)
    before = names(out)

    def read_inside(path: Path, limit: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    monkeypatch.setattr("quantkit.checkpoint.manifest.read_inside", read_inside)
    text = refusal(out, source, Mode.OVERWRITE)
    assert MANIFEST_NAME in text and "Input/output error" in text and "did not write" not in text
    assert names(out) == before


def test_overwrite_of_nothing_is_a_new_run(out: Path, source: Path) -> None:
    assert drive(out, source, Mode.OVERWRITE) == NAMES


def test_finish_refuses_wrong_shards_names_and_keys(out: Path, source: Path) -> None:
    drive(out, source, Mode.NEW, stop_after=1)
    mine = {"t0": NAMES[0]}
    with OutputDirectory.open(out, source, Mode.RESUME, RUN, 0) as output:
        with pytest.raises(OutputError, match=r"not written: \['x.safetensors'\]"):
            output.finish({**mine, "t": "x.safetensors"}, 0, {}, [], {})
        with pytest.raises(OutputError, match=r"not in the index: \['model-0.safetensors'\]"):
            output.finish({}, 0, {}, [], {})
        with pytest.raises(ValueError, match="files"):
            output.finish(mine, 0, {}, [], {"files": {}})
        for taken in ("config.json", "CONFIG.json", NAMES[0], JOURNAL_NAME, ".tmp-a"):
            with pytest.raises(OutputError, match="is taken"):
                output.finish(mine, 0, {}, [source / taken], {})
        with pytest.raises(OutputError, match="is taken"):
            output.finish(mine, 0, {}, [source / "merges.txt", source / "a/Merges.txt"], {})
        with pytest.raises(CheckpointError, match=r"cannot read .*gone.txt.*ENOENT"):
            output.finish(mine, 0, {}, [source / "gone.txt"], {})
        assert not output.complete
    assert names(out) == sorted([JOURNAL_NAME, NAMES[0]])


@pytest.mark.parametrize("name", ["../a.safetensors", ".tmp-a.safetensors", "a.bin", "", "a/b"])
def test_shard_names_are_plain(out: Path, source: Path, name: str) -> None:
    with OutputDirectory.open(out, source, Mode.NEW, RUN, 0) as output:
        specs = [TensorSpec.of("t", DATA)]
        with pytest.raises(OutputError, match="is not a shard name"), output.shard(name, specs, {}):
            pass


LATE = ["merges.txt", INDEX_NAME, MANIFEST_NAME, CONFIG_NAME, NAMES[0], NAMES[2]]


def put(path: Path, kind: str) -> None:
    """Something that is no file."""
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    else:
        # Its path may be too long for `bind`.
        here = os.open(path.parent, os.O_RDONLY)
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(f"/proc/self/fd/{here}/{path.name}")
        os.close(here)


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket"])
@pytest.mark.parametrize("name", [*LATE, *(TEMP_PREFIX + name for name in [*LATE, JOURNAL_NAME])])
def test_what_is_no_file_is_refused_before_a_resume(
    tmp_path: Path, source: Path, name: str, kind: str
) -> None:
    out = tmp_path / "out"
    drive(out, source, Mode.NEW, stop_after=2)
    before = names(out)
    (out / name).unlink(missing_ok=True)
    put(out / name, kind)
    for mode in (Mode.RESUME, Mode.OVERWRITE):
        text = refusal(out, source, mode)
        assert name in text and ("Move" in text or "Remove" in text), text
    text = refusal(out, source, Mode.RESUME)
    if name in LATE[:4] or name.startswith(TEMP_PREFIX):
        assert (
            f"{out / name} is {kind}; expected a file or nothing there. Move it elsewhere or remove it"
            in text
        )
    (out / name).rmdir() if kind == "a folder" else (out / name).unlink()
    drive(out, source, Mode.RESUME)
    assert (out / CONFIG_NAME).is_file() and {*before} - {JOURNAL_NAME} <= {*names(out)}


@pytest.mark.parametrize("kind", ["a folder", "a pipe", "a socket"])
@pytest.mark.parametrize("name", [JOURNAL_NAME, TEMP_PREFIX + JOURNAL_NAME, TEMP_PREFIX + MANIFEST_NAME])
def test_what_is_no_file_is_refused_before_a_start(
    tmp_path: Path, source: Path, name: str, kind: str
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    put(out / name, kind)
    for mode in Mode:
        text = refusal(out, source, mode)
        assert name in text and "Check the disk" not in text, text


@pytest.mark.parametrize("name", ["merges.txt", CONFIG_NAME, INDEX_NAME])
def test_a_file_of_others_is_refused_before_a_resume(tmp_path: Path, source: Path, name: str) -> None:
    out = tmp_path / "out"
    drive(out, source, Mode.NEW, stop_after=1)
    (out / name).write_text("mine")
    assert f"{out / name} was not written by quantkit and is in the way" in refusal(out, source, Mode.RESUME)
