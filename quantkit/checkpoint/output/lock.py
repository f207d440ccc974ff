"""Lock an output directory for one writer: a kernel lock on a file that names the holder."""

import errno
import fcntl
import json
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from quantkit.errors import OutputError
from quantkit.files import os_error_text, write_all

LOCK_NAME = ".quantkit-lock"
_OWNER_LIMIT_BYTES = 4096


@dataclass(frozen=True)
class Owner:
    """Process that holds a lock; `started` is when it took the lock, ISO 8601 in UTC."""

    host: str
    pid: int
    started: str

    def __str__(self) -> str:
        return f"process {self.pid} on host {self.host} since {self.started}"


class DirectoryLock:
    """Exclusive right to write to a directory, held until `release` or the end of the process.

    The kernel releases the lock of a dead process, so a leftover lock file never blocks. Its owner entry is
    for messages only.
    """

    def __init__(self, path: Path, fd: int) -> None:
        self._path = path
        self._fd = fd

    @classmethod
    def acquire(cls, directory: Path) -> "DirectoryLock":
        """Lock `directory` without waiting; raise `OutputError` if it is locked or not writable."""
        path = directory / LOCK_NAME
        _check_place(path)
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            try:
                fd = os.open(path, flags, 0o644)
            except OSError as error:
                raise OutputError(
                    f"cannot create the lock file {path}: {os_error_text(error)}. Make the "
                    "directory writable or choose another output directory."
                ) from error
            try:
                _lock(fd, path)
                # The holder removes the file on release: a lock on a removed file protects nothing.
                if _is_at(fd, path):
                    _write_owner(fd, path)
                    return cls(path, fd)
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)

    def check(self) -> None:
        """Raise `OutputError` if the lock file was removed or replaced: another process may hold the lock."""
        if self._fd < 0 or not _is_at(self._fd, self._path):
            raise OutputError(
                f"{self._path.parent} is no longer locked by this process: {self._path.name} was removed or "
                "replaced, so another process may write there. Nothing more is written. Run the same "
                "command with --resume once no other process writes there."
            )

    def release(self) -> None:
        """Remove the lock file and unlock; does nothing the second time.

        The lock file of another process is kept.
        """
        fd, self._fd = self._fd, -1
        if fd < 0:
            return
        # A leftover lock file is harmless; the error that led here may not be.
        with suppress(OSError, OutputError):
            if _is_at(fd, self._path):
                self._path.unlink(missing_ok=True)
        # Explicit, because a forked child may still have the file open. If unlocking fails, closing the file
        # must suffice.
        with suppress(OSError):
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


@contextmanager
def locked(directory: Path) -> Iterator[DirectoryLock]:
    """Context manager: hold the lock of `directory`; raises `OutputError` if it is locked or not writable."""
    lock = DirectoryLock.acquire(directory)
    try:
        yield lock
    finally:
        lock.release()


def _check_place(path: Path) -> None:
    """Raise `OutputError` if the name is taken by anything but a file, which permissions cannot mend."""
    # If even this fails, opening the file gives the reason.
    with suppress(OSError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise OutputError(
                f"{path} is no regular file, which a lock file has to be. Move it elsewhere or choose "
                "another output directory."
            )


def _lock(fd: int, path: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise OutputError(
                f"{path.parent} is LOCKED by {_read_owner(fd)}. Wait until it ends or stop it, "
                "then run the same command with --resume; or choose another output directory."
            ) from None
        raise OutputError(
            f"cannot lock {path}: {os_error_text(error)}. Choose an output directory on a "
            "filesystem with file locks, such as a local disk."
        ) from error


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise OutputError(
            f"cannot examine the lock file {path}: {os_error_text(error)}. Check the disk."
        ) from error


def _write_owner(fd: int, path: Path) -> None:
    owner = Owner(socket.gethostname(), os.getpid(), datetime.now(UTC).isoformat(timespec="seconds"))
    try:
        os.ftruncate(fd, 0)
        write_all(fd, json.dumps(asdict(owner)).encode(), 0)
    except OSError as error:
        raise OutputError(
            f"cannot write the lock file {path}: {os_error_text(error)}. Free space on that disk "
            "or choose another output directory."
        ) from error


def _read_owner(fd: int) -> str:
    try:
        return str(Owner(**json.loads(os.pread(fd, _OWNER_LIMIT_BYTES, 0))))
    except (OSError, ValueError, TypeError):
        # Locked a moment ago and not yet signed.
        return "another process"
