"""A shard is complete when every element was written exactly once, in whatever order."""

import errno
import os
import random
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest
import torch
from safetensors.torch import load_file

from quantkit.checkpoint.manifest import read_manifest, verify_files
from quantkit.checkpoint.output.directory import Mode, OutputDirectory
from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.checkpoint.output.lock import LOCK_NAME
from quantkit.checkpoint.output.shard_file import Coverage, PrefixHasher, ShardFile
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import OutputError

from ..support.compare import assert_equal

METADATA = {"format": "pt"}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    source = tmp_path / "source"
    source.mkdir()
    return source


def test_many_threads_fill_one_shard(tmp_path: Path, source: Path) -> None:
    weight = torch.rand(1_000_003)
    chunks = [(start, weight[start : start + 9973]) for start in range(0, len(weight), 9973)]
    random.Random(0).shuffle(chunks)

    with OutputDirectory.open(tmp_path / "out", source, Mode.NEW, {}, 0) as output:
        with output.shard("model.safetensors", [TensorSpec.of("w", weight)], METADATA) as file:

            def work(part: list[tuple[int, torch.Tensor]]) -> None:
                for start, chunk in part:
                    file.write("w", chunk, offset=start)

            threads = [threading.Thread(target=work, args=(chunks[i::4],)) for i in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        output.finish({"w": "model.safetensors"}, 0, {}, [], {})
    loaded = load_file(tmp_path / "out" / "model.safetensors")["w"]
    assert_equal(loaded, weight)
    assert verify_files(tmp_path / "out", read_manifest(tmp_path / "out")) == []


def test_views_are_written_in_row_major_order(tmp_path: Path, source: Path) -> None:
    weight = torch.arange(12.0).reshape(3, 4).t().requires_grad_()
    specs = [TensorSpec("w", "F32", (4, 3))]
    with OutputDirectory.open(tmp_path / "out", source, Mode.NEW, {}, 0) as output:
        with output.shard("model.safetensors", specs, METADATA) as file:
            file.write("w", weight)
        assert_equal(load_file(output.path / "model.safetensors")["w"], weight)


@pytest.mark.parametrize(
    ("writes", "message"),
    [
        ([("w", torch.zeros(3), 0)], "tensor 'w' was not written from element 3 on"),
        ([("w", torch.zeros(4), 0)], "tensor 'v' was not written from element 0 on"),
        ([("v", torch.zeros(2), 0)], "tensor 'w' was not written from element 0 on"),
        ([("w", torch.zeros(3), 0), ("w", torch.zeros(2), 2)], "elements 2 to 3 .*overlap"),
        ([("w", torch.zeros(1), 1), ("w", torch.zeros(4), 0)], "elements 0 to 3 .*overlap"),
        ([("w", torch.zeros(5), 0)], "do not fit into tensor 'w' with 4 elements"),
        ([("w", torch.zeros(1), -1)], "do not fit"),
        ([("w", torch.zeros(4).half(), 0)], "torch.float32 in the header.* torch.float16"),
        ([("x", torch.zeros(4), 0)], "'x' is not in the header"),
    ],
)
def test_every_element_must_be_written_exactly_once(
    tmp_path: Path, source: Path, writes: list[tuple[str, torch.Tensor, int]], message: str
) -> None:
    specs = [TensorSpec("w", "F32", (4,)), TensorSpec("v", "F32", (2,))]
    with OutputDirectory.open(tmp_path / "out", source, Mode.NEW, {}, 0) as output:
        with (
            pytest.raises(OutputError, match=message),
            output.shard("model.safetensors", specs, METADATA) as file,
        ):
            for name, tensor, offset in writes:
                file.write(name, tensor, offset=offset)
        assert not output.is_done("model.safetensors")
        assert sorted(path.name for path in output.path.iterdir()) == [JOURNAL_NAME, LOCK_NAME]


def test_coverage_agrees_with_a_set_of_bytes() -> None:
    chooser = random.Random(1)
    for _ in range(200):
        coverage, taken = Coverage(), set[int]()
        for _ in range(30):
            start = chooser.randrange(20)
            end = start + chooser.randrange(1, 6)
            wanted = set(range(start, end))
            assert coverage.add(start, end) == (not wanted & taken)
            if not wanted & taken:
                taken |= wanted
            assert coverage.prefix == next(i for i in range(30) if i not in taken)


def test_caught_write_error_still_fails_the_shard(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    specs = [TensorSpec("w", "F32", (4,))]
    with OutputDirectory.open(tmp_path / "out", source, Mode.NEW, {}, 0) as output:
        with (
            pytest.raises(OutputError, match="incomplete"),
            output.shard("model.safetensors", specs, METADATA) as file,
            monkeypatch.context() as patch,
            pytest.raises(OutputError, match="EIO"),
        ):
            patch.setattr(os, "pwrite", fail)
            file.write("w", torch.zeros(4))
        assert not output.is_done("model.safetensors")


@pytest.mark.parametrize("started", [False, True])
def test_a_signal_while_the_hasher_starts_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    start, threads = threading.Thread.start, []

    def interrupted(thread: threading.Thread) -> None:
        threads.append(thread)
        if started:
            start(thread)
        raise SystemExit(143)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(SystemExit, match="143"):
        ShardFile(tmp_path, "model.safetensors", [TensorSpec("w", "F32", (4, 3))], METADATA)
    assert not list(tmp_path.iterdir())
    assert len(threads) == 1 and not threads[0].is_alive()


def test_a_signal_at_any_instruction_leaves_a_hasher_that_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(100))
    fd = os.open(tmp_path / "file", os.O_RDONLY)
    left = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal left
        frame.f_trace_opcodes = True
        left -= event == "opcode"
        if left == 0 and event == "opcode":
            raise KeyboardInterrupt
        return trace

    # Python 3.12 traces instructions only if a frame asked for them before `settrace`.
    sys._getframe().f_trace_opcodes = True
    interrupted = 0
    while interrupted < 10_000:
        hasher = PrefixHasher(fd)
        hasher.start()
        hasher.advance(50)
        left = interrupted + 1
        sys.settrace(trace)
        try:
            hasher.advance(100)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        ending = threading.Thread(target=hasher.cancel, daemon=True)
        ending.start()
        ending.join(30)
        assert not ending.is_alive(), f"after an interruption at instruction {interrupted}"
        if left > 0:
            break
    os.close(fd)
    assert interrupted > 3 and left > 0
