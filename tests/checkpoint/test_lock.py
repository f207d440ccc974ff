"""One writer at a time, and no lock that outlives its process."""

import errno
import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quantkit.checkpoint.output.lock import LOCK_NAME, DirectoryLock
from quantkit.errors import OutputError


def test_holder_is_named_to_the_second_writer(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    with pytest.raises(OutputError) as refusal:
        DirectoryLock.acquire(tmp_path)
    text = str(refusal.value)
    assert "LOCKED" in text and "--resume" in text
    assert f"process {os.getpid()} on host {socket.gethostname()} since 2" in text
    lock.release()


def test_release_removes_the_file_and_frees_the_directory(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    lock.release()
    lock.release()
    assert list(tmp_path.iterdir()) == []
    DirectoryLock.acquire(tmp_path).release()


@pytest.mark.fault(64)
def test_lock_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        DirectoryLock.acquire(tmp_path)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == child
    lock = DirectoryLock.acquire(tmp_path)
    assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == os.getpid()
    lock.release()


def test_lock_that_is_removed_while_it_is_being_taken_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock = fcntl.flock

    def remove_first(fd: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", flock)
        (tmp_path / LOCK_NAME).unlink()
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = DirectoryLock.acquire(tmp_path)
    with pytest.raises(OutputError, match="LOCKED"):
        DirectoryLock.acquire(tmp_path)
    lock.release()


def test_unsigned_lock_still_refuses(tmp_path: Path) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    (tmp_path / LOCK_NAME).write_text('{"host": "here"')
    with pytest.raises(OutputError, match="LOCKED by another process"):
        DirectoryLock.acquire(tmp_path)
    lock.release()


@pytest.mark.parametrize("call", ["open", "pwrite"])
def test_lock_file_that_cannot_be_written_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OutputError, match=r"lock file .*EROFS.* choose another"):
        DirectoryLock.acquire(tmp_path)


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo, lambda path: path.symlink_to("nowhere")])
def test_what_is_no_file_in_its_place_is_reported(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / LOCK_NAME)
    with pytest.raises(OutputError, match=rf"{LOCK_NAME} is no regular file.* Move it elsewhere"):
        DirectoryLock.acquire(tmp_path)
    (tmp_path / LOCK_NAME).rename(tmp_path / "elsewhere")
    DirectoryLock.acquire(tmp_path).release()


def test_filesystem_without_locks_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(OutputError, match=r"ENOLCK.* local disk"):
        DirectoryLock.acquire(tmp_path)


@pytest.mark.fault(64)
def test_only_one_of_three_processes_gets_the_lock(tmp_path: Path) -> None:
    start = time.monotonic() + 0.1
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            status = 9
            try:
                time.sleep(max(0.0, start - time.monotonic()))
                DirectoryLock.acquire(tmp_path)
                time.sleep(0.5)
                status = 0
            except OutputError as error:
                status = 5 if "LOCKED" in str(error) else 9
            finally:
                os._exit(status)
        children.append(child)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert sorted(statuses) == [0, 5, 5]


def test_release_lets_go_where_unlocking_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = DirectoryLock.acquire(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", fail)
        lock.release()
    DirectoryLock.acquire(tmp_path).release()


@pytest.mark.fault(64)
@pytest.mark.parametrize("theirs", [False, True])
def test_a_lock_whose_file_was_removed_is_lost_and_the_next_one_stays(tmp_path: Path, theirs: bool) -> None:
    lock = DirectoryLock.acquire(tmp_path)
    lock.check()
    (tmp_path / LOCK_NAME).unlink()
    other = DirectoryLock.acquire(tmp_path) if theirs else None
    with pytest.raises(OutputError, match=r"no longer locked by this process: \.quantkit-lock was removed"):
        lock.check()
    lock.release()
    assert (tmp_path / LOCK_NAME).exists() is theirs
    if other is not None:
        other.check()
        other.release()
    with pytest.raises(OutputError, match="no longer locked"):
        lock.check()
