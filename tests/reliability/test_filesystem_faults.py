"""Outputs that cannot be written, disks that fail, processes that end early: rows 57 to 68."""

import errno
import os
import shutil
import signal
import stat
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.checkpoint.manifest import MANIFEST_NAME, extend_manifest, read_manifest
from quantkit.checkpoint.output.directory import OutputDirectory
from quantkit.checkpoint.output.lock import LOCK_NAME, DirectoryLock
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, OutputError
from quantkit.files import TEMP_PREFIX
from quantkit.verification import check_output

from ..conftest import Run
from .faults import (
    CONFIG,
    QUICK,
    SOURCE,
    STORIES,
    WEIGHTS,
    Message,
    check_message,
    edit_tensors,
    is_unfinished,
    refused,
    resumes,
    snapshot,
)

DATA = ("--calibration", STORIES, "--calibration-samples", 2, "--calibration-length", 16)
GPTQ = ("-m", "gptq", *DATA)
BUDGET = ("--bits-per-weight", 4.5, "--formats", "int3,int4:32,int5,fp8", *DATA)
SHARDS = ("--max-shard-size", "50KB")


def command(source: Path, out: Path, *more: object) -> tuple[object, ...]:
    """A run of several shards."""
    return ("quantize", source, out, *QUICK, *SHARDS, *more)


@pytest.fixture
def whole(source: Path, tmp_path: Path) -> dict[str, str]:
    """What an uninterrupted run writes."""
    quantkit.quantize(source, tmp_path / "whole", method="rtn", max_shard_bytes=50_000)
    return snapshot(tmp_path / "whole")


def fail_in_shard(monkeypatch: pytest.MonkeyPatch, number: int, fail: Callable[[], object]) -> None:
    """Do `fail` when the writing of this shard begins."""
    shard = OutputDirectory.shard

    def failing(self: OutputDirectory, filename: str, *rest: Any) -> Any:
        if filename.startswith(f"model-{number:05d}"):
            fail()
        return shard(self, filename, *rest)

    monkeypatch.setattr(OutputDirectory, "shard", failing)


#: What a file of a source may go through, and is still there.
CHANGES = ("touch", "truncate", "rewrite", "replace")


def write_again(path: Path, target: Path) -> None:
    """Write to `target` as many bytes as `path` has, with its time of modification."""
    before = path.stat()
    target.write_bytes(path.read_bytes())
    os.utime(target, ns=(before.st_atime_ns, before.st_mtime_ns))


def no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*arguments: object) -> None:
        raise AssertionError("a weight was read before the output was accepted")

    monkeypatch.setattr(Checkpoint, "read", read)


@pytest.mark.fault(57)
@pytest.mark.parametrize("name", ["notes.txt", "model.safetensors", ".tmp-x", "folder"])
@pytest.mark.parametrize("mode", [(), ("--resume",), ("--overwrite",)], ids=str)
def test_an_output_with_something_in_it(
    run: Run, source: Path, out: Path, name: str, mode: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    no_weight_is_read(monkeypatch)
    out.mkdir()
    (out / name).mkdir() if name == "folder" else (out / name).write_bytes(b"mine")
    said = {
        (): ("is not empty: it holds", "an empty or new directory", "Choose an empty"),
        ("--resume",): (
            "it has no journal of an unfinished run",
            "an unfinished run",
            "choose another directory",
        ),
        ("--overwrite",): ("quantkit did not write", "cannot overwrite", "choose another directory"),
    }[mode]
    for data in ((), GPTQ):
        done = refused(
            run, (*command(source, out), *data, *mode), OutputError, Message(out, *said), source.parent
        )
        assert name in done.err


@pytest.mark.fault(59)
@pytest.mark.parametrize("data", [(), GPTQ, BUDGET], ids=["plain", "gptq", "budget"])
def test_what_is_no_file_in_the_place_of_a_late_one(
    run: Run, source: Path, out: Path, data: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "LICENSE").write_text("MIT")
    with monkeypatch.context() as patch:
        fail_in_shard(patch, 1, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*command(source, out, *data)).code == 130
    no_weight_is_read(monkeypatch)
    for name in ("LICENSE", "config.json", MANIFEST_NAME, "model.safetensors.index.json"):
        for place in (out / name, out / f".tmp-{name}"):
            for kind, put in (("a folder", Path.mkdir), ("a pipe", os.mkfifo)):
                put(place)
                message = Message(place, f"is {kind}", "expected a file or nothing there", "or remove it")
                done = (*command(source, out, *data), "--resume")
                refused(run, done, OutputError, message, source.parent)
                place.rmdir() if kind == "a folder" else place.unlink()


@pytest.mark.fault(57)
def test_a_finished_and_an_unfinished_output(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_in_shard(patch, 3, lambda: (_ for _ in ()).throw(KeyboardInterrupt))
        assert run(*command(source, out)).code == 130
    message = Message(out, "holds an unfinished run", "Continue it with --resume", "--overwrite")
    refused(run, command(source, out), OutputError, message, source.parent)
    assert run(*command(source, out, "--resume")).code == 0
    message = Message(out, "already holds a finished quantkit checkpoint", "output", "--overwrite")
    refused(run, command(source, out), OutputError, message, source.parent)


@pytest.mark.fault(58)
@pytest.mark.parametrize("more", [(), GPTQ, BUDGET], ids=["plain", "calibrated", "budget"])
def test_an_output_that_is_in_the_source_or_around_it(
    run: Run, source: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    no_weight_is_read(monkeypatch)
    (source.parent / "link").symlink_to(source)
    for out, found in (
        (source, "is the source checkpoint itself"),
        (source.parent / "link", "is the source checkpoint itself"),
        (source / ".." / "source", "is the source checkpoint itself"),
        (source / "out", f"is inside the source {source}"),
        (source.parent / "link" / "out", "is inside the source"),
        (source.parent, "is inside the output"),
    ):
        message = Message("output", found, "source", "Choose an output directory elsewhere")
        refused(run, ("quantize", source, out, *more), OutputError, message, source.parent)


@pytest.mark.fault(58)
def test_an_output_that_the_source_links_into(run: Run, source: Path, out: Path) -> None:
    assert run(*command(SOURCE, out)).code == 0
    (source / "merges.txt").symlink_to(out / "tokenizer.json")
    message = Message(
        source / "merges.txt",
        "is a link to a file inside the output",
        str(out),
        "Choose an output directory elsewhere",
    )
    refused(run, command(source, out, "--overwrite"), OutputError, message, source.parent)


@pytest.mark.fault(59)
@pytest.mark.parametrize("more", [(), GPTQ, BUDGET], ids=["plain", "calibrated", "budget"])
def test_a_parent_that_is_not_there_or_a_file(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    no_weight_is_read(monkeypatch)
    message = Message(out, "does not exist", "the parent directory", f"Create it with: mkdir -p {out}")
    refused(run, ("quantize", source, out / "deep", *more), OutputError, message, source.parent)
    message = Message(out, "does not exist", "the parent directory", f"mkdir -p '{out} of mine'")
    refused(run, ("quantize", source, f"{out} of mine/deep", *more), OutputError, message, source.parent)
    out.write_bytes(b"notes")
    message = Message(out, "is a file", "not a directory", "Choose another name")
    refused(run, ("quantize", source, out, *more), OutputError, message, source.parent)


@pytest.mark.fault(59)
@pytest.mark.parametrize("more", [(), GPTQ, BUDGET], ids=["plain", "calibrated", "budget"])
def test_a_parent_that_cannot_be_written(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    """Simulated, since root may write everywhere."""
    no_weight_is_read(monkeypatch)
    mkdir = os.mkdir

    def fail(path: Any, *rest: Any, **options: Any) -> None:
        if Path(path) == out:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        mkdir(path, *rest, **options)

    monkeypatch.setattr(os, "mkdir", fail)
    message = Message(
        out, "Read-only file system (EROFS)", "cannot create the output directory", "Make its parent writable"
    )
    refused(run, ("quantize", source, out, *more), OutputError, message, source.parent)


@pytest.mark.fault(60)
@pytest.mark.parametrize("more", [(), GPTQ], ids=["plain", "calibrated"])
def test_too_little_space_is_known_before_a_weight_is_read(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, more: tuple[object, ...]
) -> None:
    no_weight_is_read(monkeypatch)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: namedtuple("usage", "free")(1000))
    message = Message(out, "1.00 kB free", " needed", "choose an output directory on another disk")
    refused(run, ("quantize", source, out, *more), OutputError, message, source.parent)


@pytest.mark.fault(60, 61)
@pytest.mark.parametrize(
    ("call", "code", "remedy"),
    [
        ("pwrite", errno.ENOSPC, "Free space on that disk"),
        ("pwrite", errno.EDQUOT, "Free space on that disk"),
        ("pwrite", errno.EIO, "Check the disk"),
        ("pwrite", None, "Check the disk"),
        ("fsync", errno.EIO, "Check the disk"),
        ("replace", errno.EIO, "Check the disk"),
    ],
)
def test_a_disk_that_fails_in_the_middle(
    run: Run,
    source: Path,
    out: Path,
    whole: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    call: str,
    code: int | None,
    remedy: str,
) -> None:
    """From the second shard on; a write that takes no bytes for no code."""
    done_one = out / "model-00001-of-00004.safetensors"
    real = getattr(os, call)

    def fail(*arguments: Any, **options: Any) -> Any:
        if not list(out.glob("model-00001*")):
            return real(*arguments, **options)
        if code is None:
            return 0
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, call, fail)
        done = run(*command(source, out))
    found = "short write" if code is None else f"({errno.errorcode[code]})"
    check_message(
        done, OutputError, Message(out, found, "cannot write", f"{remedy}, then run the same command")
    )
    assert "--resume: finished files are kept" in str(done.error)
    is_unfinished(out)
    assert list(out.glob("*.safetensors")) == [done_one]
    resumes(run, command(source, out), out, whole)


@pytest.mark.fault(63)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_run_that_can_go_on(
    run: Run,
    source: Path,
    out: Path,
    whole: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    with monkeypatch.context() as patch:
        fail_in_shard(patch, 3, lambda: os.kill(os.getpid(), number))
        done = run(*command(source, out))
    assert done.code == 128 + number
    assert done.err.endswith(
        "interrupted; finished files are kept. Continue with the same command and --resume.\n"
    )
    is_unfinished(out)
    kept = {path.name: path.stat().st_mtime_ns for path in out.glob("*.safetensors")}
    assert len(kept) == 2
    resumes(run, command(source, out), out, whole)
    assert kept.items() <= {path.name: path.stat().st_mtime_ns for path in out.iterdir()}.items()


@pytest.mark.fault(64)
def test_a_directory_that_another_process_writes(run: Run, source: Path, out: Path) -> None:
    out.mkdir()
    lock = DirectoryLock.acquire(out)
    try:
        for mode in ((), ("--resume",), ("--overwrite",)):
            message = Message(
                out,
                f"is LOCKED by process {os.getpid()} on host",
                "Wait until it ends",
                "choose another output",
            )
            refused(run, command(source, out, *mode), OutputError, message, source.parent)
    finally:
        lock.release()
    assert run(*command(source, out)).code == 0
    assert not (out / LOCK_NAME).exists()


@pytest.mark.fault(65)
@pytest.mark.parametrize("finished", [False, True])
@pytest.mark.parametrize(
    ("change", "found"),
    [
        (("-f", "int8"), 'recipe.default.format: "int4" -> "int8"'),
        (("-g", "32"), "recipe.default.group_size: null -> 32"),
        (("--max-shard-size", "60KB"), "max_shard_bytes: 50000 -> 60000"),
        (("--rule", "*.q_proj=keep"), "recipe.rules"),
        ("source", 'source: "'),
        ("version", 'versions.quantkit: "'),
    ],
    ids=["format", "group", "shards", "rules", "source", "version"],
)
def test_a_resume_of_another_run(
    run: Run,
    source: Path,
    out: Path,
    monkeypatch: pytest.MonkeyPatch,
    finished: bool,
    change: tuple[str, ...] | str,
    found: str,
) -> None:
    if not finished:
        with monkeypatch.context() as patch:
            fail_in_shard(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
            assert run(*command(source, out)).code == 130
    else:
        assert run(*command(source, out)).code == 0
    if change == "source":
        edit_tensors(source / WEIGHTS, lambda tensors: tensors["model.norm.weight"].add_(1))
    elif change == "version":
        monkeypatch.setattr(quantkit, "__version__", "99")
    more = change if isinstance(change, tuple) else ()
    message = Message(out, found, "(old -> new)", "start over with --overwrite")
    refused(run, command(source, out, *more, "--resume"), OutputError, message, source.parent)


@pytest.mark.fault(66)
def test_stale_temporary_files_are_removed_under_the_lock(
    run: Run, source: Path, out: Path, whole: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        fail_in_shard(patch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
        assert run(*command(source, out)).code == 130
    stale = [out / f"{TEMP_PREFIX}{name}" for name in ("model-00003-of-00004.safetensors", CONFIG, "x")]
    for path in stale:
        path.write_bytes(b"half")
    lock = DirectoryLock.acquire(out)
    assert run(*command(source, out, "--resume")).code == OutputError.exit_code
    assert all(path.exists() for path in stale)
    lock.release()
    resumes(run, command(source, out), out, whole)


@pytest.mark.fault(67)
@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_permissions_are_those_of_the_umask(run: Run, source: Path, out: Path, umask: int) -> None:
    for path in source.iterdir():
        path.chmod(0o600)
    before = os.umask(umask)
    try:
        assert run(*command(source, out)).code == 0
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in out.iterdir()} == {0o644 & ~umask}
    assert stat.S_IMODE(out.stat().st_mode) == 0o777 & ~umask


@pytest.mark.fault(68)
@pytest.mark.parametrize(
    ("name", "change"),
    [
        *((name, change) for name in (WEIGHTS, CONFIG) for change in (*CHANGES, "remove")),
        *(("tokenizer.json", change) for change in CHANGES),
    ],
)
def test_a_source_that_changes_during_the_run(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str, change: str
) -> None:
    path = source / name

    def act() -> None:
        if change == "touch":
            os.utime(path, ns=(1, 1))
        elif change == "truncate":
            os.truncate(path, path.stat().st_size - 1)
        elif change == "rewrite":
            write_again(path, path)
        elif change == "replace":
            write_again(path, path.with_name("other"))
            path.with_name("other").replace(path)
        else:
            path.unlink()

    with monkeypatch.context() as patch:
        fail_in_shard(patch, 3, act)
        done = run(*command(source, out))
    if change == "remove":
        found, expected = "No such file or directory", "expected "
        remedy = "Check the file and the disk" if name == WEIGHTS else "Restore it, and start again"
    else:
        found, expected = "the file has changed since it was opened", "expected "
        remedy = "Leave the source alone while quantkit runs, and start again"
    check_message(done, CheckpointError, Message(path, found, expected, remedy))
    is_unfinished(out)
    if change == "remove":
        return
    message = Message(out, "source: ", "(old -> new)", "start over with --overwrite")
    if name == "tokenizer.json":
        if change == "truncate":
            cut = Message(path, "is not a tokenizer (EOF while parsing", "expected one", "Download it again")
            check_message(run(*command(source, out, "--resume")), CheckpointError, cut)
            shutil.copyfile(SOURCE / name, path)
        # It is copied as a whole, after all else.
        assert run(*command(source, out, "--resume")).code == 0
        assert (out / name).read_bytes() == path.read_bytes()
    elif change in ("touch", "rewrite", "replace"):
        refused(run, command(source, out, "--resume"), OutputError, message, source.parent)


def during_the_check(monkeypatch: pytest.MonkeyPatch, do: Callable[[Path], object]) -> None:
    """Do this, with the directory, as the result is loaded to be run."""
    load = check_output.load_unfinished

    def loading(directory: Path, *rest: Any) -> Any:
        do(directory)
        return load(directory, *rest)

    monkeypatch.setattr(check_output, "load_unfinished", loading)


def checked(source: Path, out: Path, *more: object) -> tuple[object, ...]:
    """A run whose result is run on a prompt."""
    return ("quantize", source, out, "-m", "rtn", *more)


@pytest.mark.fault(64)
def test_the_result_is_checked_under_the_lock_and_before_it_is_finished(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def others(directory: Path) -> None:
        assert run("verify", directory, "--no-reload").code == CheckpointError.exit_code
        with pytest.raises(CheckpointError):
            quantkit.load(directory)
        with pytest.raises(OutputError, match="is LOCKED by process"):
            extend_manifest(directory, {"a": 1})
        for mode in ("--resume", "--overwrite"):
            done = run(*checked(source, directory, "-f", "int8", mode))
            assert done.code == OutputError.exit_code and "is LOCKED by process" in done.err
        seen.append(snapshot(directory))

    with monkeypatch.context() as patch:
        during_the_check(patch, others)
        assert run(*checked(source, out)).code == 0
    (left,) = seen
    assert not {CONFIG, MANIFEST_NAME} & left.keys() and {WEIGHTS, "LICENSE"} <= left.keys()
    assert "prompt_logits" in read_manifest(out)
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(64)
def test_a_run_that_lost_its_lock_in_the_check_leaves_the_other_output(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(directory: Path) -> None:
        monkeypatch.undo()
        (directory / LOCK_NAME).unlink()
        assert run(*checked(source, directory, "-f", "int8", "--overwrite")).code == 0
        assert run(*checked(source, out.with_name("int8"), "-f", "int8")).code == 0

    during_the_check(monkeypatch, other)
    done = run(*checked(source, out))
    remedy = "with --resume once no other process writes there"
    message = Message(out, "is no longer locked by this process", "Nothing more is written", remedy)
    check_message(done, OutputError, message)
    assert snapshot(out) == snapshot(out.with_name("int8"))
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(62)
@pytest.mark.parametrize("fault", ["interrupt", "kind"])
def test_a_result_that_was_not_run_is_not_finished(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def fail(directory: Path) -> None:
        if fault == "interrupt":
            raise KeyboardInterrupt
        raise ValueError("it does not fit together")

    for more in ((), ("--no-check",)):
        name = out.with_name("whole" + "".join(more))
        assert run(*checked(source, name, *more)).code == 0
    with monkeypatch.context() as patch:
        during_the_check(patch, fail)
        done = run(*checked(source, out))
    assert done.code == (130 if fault == "interrupt" else CheckpointError.exit_code)
    is_unfinished(out)
    if fault == "kind":
        assert "does not run, and " in done.err and "--resume --no-check" in done.err
    copy = Path(shutil.copytree(out, out.with_name("copy")))
    assert run(*checked(source, copy, "--resume", "--no-check")).code == 0
    assert snapshot(copy) == snapshot(out.with_name("whole--no-check"))
    resumes(run, checked(source, out), out, snapshot(out.with_name("whole")))
    # One that is finished and was not run is, if it is asked for.
    resumes(run, checked(source, copy), copy, snapshot(out))


def deny(monkeypatch: pytest.MonkeyPatch, out: Path, *names: str) -> None:
    """As for others than root, to whom permissions are nothing: functions of `os` that fail in `out`."""

    def denied(name: str) -> Callable[..., Any]:
        original = getattr(os, name)

        def call(path: Any = ".", *rest: Any, **options: Any) -> Any:
            inside = not isinstance(path, int) and Path(path).is_relative_to(out)
            if not inside or (name in ("stat", "open") and Path(path) == out):
                return original(path, *rest, **options)
            if name == "access":
                return False
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        return call

    for name in names:
        monkeypatch.setattr(os, name, denied(name))


@pytest.mark.fault(59)
def test_an_output_that_cannot_be_listed(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out.mkdir()
    message = Message(out, "Permission denied (EACCES)", "cannot list the output", "Make it readable")
    with monkeypatch.context() as patch:
        deny(patch, out, "access", "listdir", "scandir")
        refused(run, command(source, out), OutputError, message, source)
    assert not [*out.iterdir()]


@pytest.mark.fault(59)
@pytest.mark.parametrize("names", [("open",), ("listdir",), ("stat", "open")], ids=str)
@pytest.mark.parametrize("name", ["verify", "inspect"])
def test_a_checkpoint_that_cannot_be_listed(
    run: Run, source: Path, out: Path, monkeypatch: pytest.MonkeyPatch, name: str, names: tuple[str, ...]
) -> None:
    assert run(*command(source, out)).code == 0
    if name == "inspect" and names == ("listdir",):
        return  # It needs one file, whose name it knows.
    deny(monkeypatch, out, "access", "scandir", *names)
    done = run(name, out, *(("--no-reload",) if name == "verify" else ()))
    message = Message(out, "Permission denied", "cannot", ".")
    check_message(done, CheckpointError, message)
