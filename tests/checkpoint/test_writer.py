"""An output directory is bit-identical however often its writer is killed, fails or is resumed."""

import errno
import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_files
from quantkit.checkpoint.output.atomic_write import disk_memory
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.checkpoint.output.lock import LOCK_NAME
from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import OutputError
from quantkit.files import TEMP_PREFIX

from ..support.compare import assert_equal

RUN: dict[str, Any] = {"version": "1", "options": {"bits": 4, "rules": ["a", "b"]}}
CONFIG = {"model_type": "llama", "quantization_config": {"bits": 4}}
METADATA = {"format": "pt"}


def random_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    width = dtype.itemsize
    words = torch.randint(0, 256, (*shape, width), dtype=torch.uint8, generator=generator)
    return words.view(dtype).reshape(shape)


def random_shard(seed: int) -> dict[str, torch.Tensor]:
    return {
        "words": random_tensor(torch.int32, (24, 17), seed),
        "norm": random_tensor(torch.bfloat16, (33,), seed + 1),
        "scale": random_tensor(torch.float8_e8m0fnu, (5, 3), seed + 2),
        "mask": random_tensor(torch.bool, (7,), seed + 3),
        "shape": random_tensor(torch.int64, (), seed + 4),
    }


def shards_of(count: int) -> dict[str, dict[str, torch.Tensor]]:
    return {
        f"model-{i + 1:05}-of-{count:05}.safetensors": {
            f"layers.{i}.{name}": tensor for name, tensor in random_shard(10 * i).items()
        }
        for i in range(count)
    }


SHARDS = shards_of(3)


def fill(file: ShardFile, tensors: dict[str, torch.Tensor]) -> None:
    """Write each tensor in two chunks, the last chunk of the last tensor first."""
    for name, tensor in reversed(tensors.items()):
        flat = tensor.reshape(-1)
        half = flat.numel() // 2
        file.write(name, flat[half:], offset=half)
        file.write(name, flat[:half])


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec.of(name, tensor) for name, tensor in tensors.items()]


def drive(
    out: Path,
    source: Path,
    mode: Mode,
    shards: dict[str, dict[str, torch.Tensor]] = SHARDS,
    run: dict[str, Any] = RUN,
    pause: float = 0.0,
    check: Callable[[], Mapping[str, Any]] | None = None,
) -> list[str]:
    """What a streaming driver does; returns the shards that it had to write."""
    written = []
    with OutputDirectory.open(out, source, mode, run, 1000) as output:
        if output.complete:
            return []
        for name, tensors in shards.items():
            if output.is_done(name):
                assert output.details(name) == {"error": len(name)}
                continue
            with output.shard(name, specs_of(tensors), METADATA) as file:
                time.sleep(pause)
                fill(file, tensors)
                file.detail["error"] = len(name)
            written.append(name)
        weight_map = {tensor: name for name, tensors in shards.items() for tensor in tensors}
        side_files = [source / "tokenizer.json"]
        details = {name: output.details(name) for name in shards}
        output.finish(weight_map, 999, CONFIG, side_files, {"seed": 7, "layers": details}, check)
        assert output.complete
    return written


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_bytes(bytes(range(256)) * 100)
    return source


@pytest.fixture
def reference(tmp_path: Path, source: Path) -> dict[str, bytes]:
    drive(tmp_path / "reference", source, Mode.NEW)
    return contents(tmp_path / "reference")


def in_child(work: Callable[[], object]) -> int:
    """Fork a child that does `work`: exit status 0, 5 for LOCKED, 9 for any other error."""
    child = os.fork()
    if child:
        return child
    status = 9
    try:
        work()
        status = 0
    except OutputError as error:
        status = 5 if "LOCKED" in str(error) else 9
    finally:
        os._exit(status)


def exit_status(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@contextmanager
def nth_call(n: int, then: Callable[[], None]) -> Iterator[list[str]]:
    """Do `then` before the n-th (from 1) of all calls that change the disk; yields the calls."""
    names = ("pwrite", "fsync", "replace", "rename", "unlink", "ftruncate")
    calls: list[str] = []

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            if len(calls) == n:
                then()
            return function(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in names:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield calls


def fail_with(code: int) -> Callable[[], None]:
    def fail() -> None:
        raise OSError(code, os.strerror(code))

    return fail


def test_finished_directory_holds_what_was_written(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    assert drive(out, source, Mode.NEW) == list(SHARDS)
    for name, tensors in SHARDS.items():
        save_file(tensors, tmp_path / "expected", metadata=METADATA)
        expected, loaded = load_file(tmp_path / "expected"), load_file(out / name)
        assert loaded.keys() == expected.keys()
        for key, tensor in expected.items():
            assert loaded[key].dtype == tensor.dtype and loaded[key].shape == tensor.shape
            as_bytes = (t.reshape(-1).view(torch.uint8) for t in (loaded[key], tensor))
            assert_equal(*as_bytes)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    assert (out / "config.json").read_text() == json.dumps(CONFIG, indent=2, sort_keys=True) + "\n"
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 999}
    assert index["weight_map"]["layers.1.norm"] == "model-00002-of-00003.safetensors"
    manifest = read_manifest(out)
    assert manifest["seed"] == 7 and manifest["run"] == RUN
    assert {*manifest["files"], MANIFEST_NAME} == {path.name for path in out.iterdir()}
    assert verify_files(out, manifest) == []


def test_single_file_needs_no_index(tmp_path: Path, source: Path) -> None:
    drive(tmp_path / "out", source, Mode.NEW, {"model.safetensors": random_shard(1)})
    assert sorted(contents(tmp_path / "out")) == [
        "config.json",
        "model.safetensors",
        MANIFEST_NAME,
        "tokenizer.json",
    ]


@pytest.mark.fault(67)
def test_files_have_mode_0644_less_the_umask(tmp_path: Path, source: Path) -> None:
    previous = os.umask(0o027)
    try:
        drive(tmp_path / "out", source, Mode.NEW)
    finally:
        os.umask(previous)
    assert {path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()} == {0o640}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("driver"), OSError(5, "read")])
def test_error_of_the_block_removes_its_shard_only(
    tmp_path: Path, source: Path, reference: dict[str, bytes], error: BaseException
) -> None:
    out, (first, second, _) = tmp_path / "out", SHARDS
    with (
        pytest.raises(type(error)) as raised,
        OutputDirectory.open(out, source, Mode.NEW, RUN, 0) as output,
    ):
        for name in (first, second):
            with output.shard(name, specs_of(SHARDS[name]), METADATA) as file:
                fill(file, SHARDS[name])
                file.detail["error"] = len(name)
                if name == second:
                    raise error
    assert raised.value is error
    assert sorted(contents(out)) == [JOURNAL_NAME, first]
    assert drive(out, source, Mode.RESUME) == list(SHARDS)[1:]
    assert contents(out) == reference


@pytest.mark.fault(60, 61)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_every_failing_call_leaves_a_directory_that_resumes(
    tmp_path: Path, source: Path, reference: dict[str, bytes], code: int
) -> None:
    for n in range(1, 1000):
        out = tmp_path / f"out{n}"
        with nth_call(n, fail_with(code)) as calls:
            try:
                drive(out, source, Mode.NEW)
            except OutputError as error:
                text = str(error)
            else:
                text = ""
        if len(calls) < n:
            break
        # Removing a temporary or lock file may fail unnoticed; all else must be reported.
        if calls[n - 1] != "unlink":
            assert errno.errorcode[code] in text and str(out) in text
            assert "--resume" in text or "lock file" in text
        left = contents(out) if out.exists() else {}
        if "config.json" in left:
            own = (JOURNAL_NAME, LOCK_NAME)
            assert {k: v for k, v in left.items() if k not in own} == reference
        drive(out, source, Mode.RESUME)
        assert contents(out) == reference
    assert n > 40


@pytest.mark.fault(62)
@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.sampled(3)
def test_every_kill_point_resumes(
    tmp_path: Path, source: Path, reference: dict[str, bytes], first: int
) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def killed_at(n: int, out: Path, mode: Mode) -> bool:
        def work() -> None:
            with nth_call(n, kill):
                drive(out, source, mode)

        return exit_status(in_child(work)) == -signal.SIGKILL

    n = first
    while killed_at(n, out := tmp_path / f"out{n}", Mode.NEW):
        if (out / "config.json").exists():
            assert verify_files(out, read_manifest(out)) == []
        # Killed a second time while resuming, at a point that moves with the first.
        killed_at(n % 7 + 2, out, Mode.RESUME)
        drive(out, source, Mode.RESUME)
        assert contents(out) == reference
        n += 3
    assert n > 40


@pytest.mark.fault(62)
def test_overwrite_can_be_killed_anywhere(tmp_path: Path, source: Path, reference: dict[str, bytes]) -> None:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    out = tmp_path / "out"
    for n in range(1, 25):
        drive(out, source, Mode.OVERWRITE, run={**RUN, "version": "old"})

        def work(n: int = n) -> None:
            with nth_call(n, kill):
                drive(out, source, Mode.OVERWRITE)

        assert exit_status(in_child(work)) == -signal.SIGKILL
        if (out / "config.json").exists():
            assert verify_files(out, read_manifest(out)) == []
        drive(out, source, Mode.OVERWRITE)
        assert contents(out) == reference


@pytest.mark.fault(62)
def test_random_kills_resume_to_identical_bytes(tmp_path: Path, source: Path) -> None:
    chooser = random.Random(2026)
    shards = shards_of(6)
    begin = time.monotonic()
    drive(tmp_path / "reference", source, Mode.NEW, shards, pause=0.005)
    duration = time.monotonic() - begin
    expected = contents(tmp_path / "reference")
    kills = 0
    for attempt in range(1000):
        out = tmp_path / f"out{attempt}"
        status = -signal.SIGKILL
        while status == -signal.SIGKILL:
            child = in_child(lambda out=out: drive(out, source, Mode.RESUME, shards, pause=0.005))
            time.sleep(chooser.uniform(0, duration))
            if kills < 25:
                os.kill(child, signal.SIGKILL)
            status = exit_status(child)
            kills += status == -signal.SIGKILL
        assert status == 0
        assert contents(out) == expected
        if kills >= 25:
            break
    assert kills >= 25


@pytest.mark.fault(64)
def test_one_of_three_writers_finishes_and_the_others_are_locked_out(
    tmp_path: Path, source: Path, reference: dict[str, bytes]
) -> None:
    out = tmp_path / "out"
    children = [in_child(lambda: drive(out, source, Mode.NEW, pause=0.2)) for _ in range(3)]
    assert sorted(exit_status(child) for child in children) == [0, 5, 5]
    assert contents(out) == reference


@pytest.mark.parametrize("limit", [1, 7, 1000])
def test_partial_writes_are_continued(
    tmp_path: Path,
    source: Path,
    reference: dict[str, bytes],
    limit: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pwrite = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: pwrite(fd, data[:limit], at))
    drive(tmp_path / "out", source, Mode.NEW)
    assert contents(tmp_path / "out") == reference


@pytest.mark.fault(61)
def test_write_that_takes_no_bytes_is_an_error(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pwrite = os.pwrite

    def take_nothing(fd: int, data: memoryview, at: int) -> int:
        return 0 if at > 1000 else pwrite(fd, data, at)

    monkeypatch.setattr(os, "pwrite", take_nothing)
    with pytest.raises(OutputError, match=r"model-00001.*short write.*--resume"):
        drive(tmp_path / "out", source, Mode.NEW)
    assert sorted(contents(tmp_path / "out")) == [JOURNAL_NAME]


def test_shard_is_synced_before_it_is_renamed_and_renamed_before_it_is_done(
    tmp_path: Path, source: Path
) -> None:
    specs = [TensorSpec("w", "F32", (4,))]
    with (
        OutputDirectory.open(tmp_path / "out", source, Mode.NEW, RUN, 0) as output,
        nth_call(0, lambda: None) as calls,
        output.shard("model.safetensors", specs, METADATA) as file,
    ):
        file.write("w", torch.zeros(4))
    claim, header_and_data = ["pwrite", "fsync"], ["unlink", "pwrite", "pwrite"]
    assert calls == [*claim, *header_and_data, "fsync", "replace", "fsync", "pwrite", "fsync"]


@pytest.mark.fault(64)
@pytest.mark.parametrize("stage", range(6))
def test_a_writer_that_lost_its_lock_leaves_the_other_one_alone(
    tmp_path: Path, source: Path, reference: dict[str, bytes], stage: int
) -> None:
    out, names = tmp_path / "out", list(SHARDS)
    left: dict[str, bytes] = {}

    def lose() -> Mapping[str, Any]:
        """Someone removes the lock file, and the next writer starts over and stops after a shard."""
        (out / LOCK_NAME).unlink()
        other = OutputDirectory.open(out, source, Mode.OVERWRITE, {**RUN, "version": "2"}, 0)
        with other.shard(names[0], specs_of(SHARDS[names[0]]), METADATA) as file:
            fill(file, SHARDS[names[0]])
        (out / f"{TEMP_PREFIX}{names[1]}").write_bytes(b"theirs")
        others.append(other)
        left.update(contents(out))
        return {}

    others: list[OutputDirectory] = []
    with (
        pytest.raises(OutputError, match="no longer locked by this process") as raised,
        OutputDirectory.open(out, source, Mode.NEW, RUN, 0) as output,
    ):
        for number, name in enumerate(names):
            if stage == number:
                lose()
            with output.shard(name, specs_of(SHARDS[name]), METADATA) as file:
                if stage == 3 and number == 1:
                    lose()
                fill(file, SHARDS[name])
        if stage == 4:
            lose()
        weight_map = {tensor: name for name, tensors in SHARDS.items() for tensor in tensors}
        output.finish(weight_map, 999, CONFIG, [source / "tokenizer.json"], {}, lose)
    assert "--resume" in str(raised.value)
    assert contents(out) == left
    for other in others:
        other.__exit__(None, None, None)


@pytest.mark.fault(62)
@pytest.mark.parametrize("after", ["check", "manifest", "journal"])
def test_config_appears_last(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, reference: dict[str, bytes], after: str
) -> None:
    out = tmp_path / "out"
    seen: list[str] = []

    def stop() -> None:
        seen.append(after)
        assert "config.json" not in contents(out)
        raise KeyboardInterrupt

    replace = os.replace

    def replaced(one: Path, other: Path) -> None:
        if after == "journal" and other.name == "config.json":
            assert JOURNAL_NAME not in contents(out)
            stop()
        replace(one, other)
        if after == "manifest" and other.name == MANIFEST_NAME:
            stop()

    def check() -> Mapping[str, Any]:
        assert sorted(contents(out)) == sorted(
            [JOURNAL_NAME, LOCK_NAME, *reference.keys() - {"config.json", MANIFEST_NAME}]
        )
        if after == "check":
            stop()
        return {}

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replaced)
        drive(out, source, Mode.NEW, check=check)
    assert seen
    with pytest.raises(OutputError, match="holds an unfinished run"):
        drive(out, source, Mode.NEW)
    drive(out, source, Mode.RESUME)
    assert contents(out) == reference


def test_what_a_check_finds_is_in_the_manifest_and_its_error_leaves_the_run_unfinished(
    tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "out"

    def fail() -> Mapping[str, Any]:
        raise OutputError("it does not run")

    with pytest.raises(OutputError, match="it does not run"):
        drive(out, source, Mode.NEW, check=fail)
    assert not {"config.json", MANIFEST_NAME} & contents(out).keys()
    assert drive(out, source, Mode.RESUME, check=lambda: {"answers": [1]}) == []
    manifest = read_manifest(out)
    assert manifest["answers"] == [1] and verify_files(out, manifest) == []


def test_memory_on_the_disk_is_of_one_thread_and_leaves_no_file(tmp_path: Path) -> None:
    def fill(number: int) -> bool:
        memory = disk_memory(tmp_path, 4096)
        memory[:] = bytes([number]) * 4096
        time.sleep(0.001)
        return memory[:] == bytes([number]) * 4096

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(fill, range(200)))
    assert not list(tmp_path.iterdir())
