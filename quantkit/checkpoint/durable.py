"""Files that are either whole and on the disk, or not there: temporary name, fsync, rename.

All writing goes through `os.pwrite`, `os.fsync` and `os.replace`, so that tests can fail each call.
"""

import errno
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError, OutputError

TEMP_PREFIX = ".tmp-"
# Small enough to stay in a core's cache between reading and hashing.
BLOCK_BYTES = 1 << 20
_FILE_MODE = 0o644  # the kernel takes the umask away
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")


@dataclass(frozen=True)
class FileRecord:
    """A file of an output directory: its name, lower-case hex sha256 and size in bytes."""

    file: str
    sha256: str
    size: int


def is_plain_name(name: object) -> bool:
    """Whether `name` names a file directly inside a directory, and can never lead out of it."""
    return isinstance(name, str) and name not in (".", "..") and bool(_PLAIN_NAME.fullmatch(name))


def os_error_text(error: OSError) -> str:
    """`No space left on device (ENOSPC)`."""
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return f"{error.strerror or error} ({code})"


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as an `OutputError` that names `path` and how to go on."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            remedy = "Free space on that disk"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            remedy = "Make the directory writable"
        else:
            remedy = "Check the disk"
        raise OutputError(
            f"cannot write {path}: {os_error_text(error)}. {remedy}, then run the same command "
            "with --resume: finished files are kept and the run continues after them."
        ) from error


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`; `OSError` if the file takes no more bytes."""
    rest = memoryview(data)
    while rest:
        # One call may take less than it was given: Linux stops at 2 GiB, a full disk at its end.
        written = os.pwrite(fd, rest, offset)
        if written <= 0:
            raise OSError(errno.EIO, "short write: the file takes no more bytes")
        rest = rest[written:]
        offset += written


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TempFile:
    """`.tmp-<name>` beside its final place, open for reading and writing until published."""

    def __init__(self, directory: Path, name: str) -> None:
        """Create the file with mode 0644 less the umask; `OSError` as from `open`."""
        self.path = directory / name
        self._temp = directory / f"{TEMP_PREFIX}{name}"
        self._temp.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self._temp, flags, _FILE_MODE)

    def sync(self) -> None:
        """Put the bytes on the disk."""
        os.fsync(self.fd)

    def publish(self) -> None:
        """Give the synced file its final name, durably."""
        self._close()
        self._temp.replace(self.path)
        sync_directory(self.path.parent)

    def discard(self) -> None:
        """Remove the temporary file. Never raises: the error that led here is the one to show."""
        with suppress(OSError):
            self._close()
        with suppress(OSError):
            self._temp.unlink(missing_ok=True)

    def _close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def write_file(directory: Path, name: str, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks` as `directory/name`, replacing it in one step; `OutputError` on failure."""
    path = directory / name
    digest = hashlib.sha256()
    size = 0
    with writing(path):
        file = TempFile(directory, name)
        try:
            for chunk in chunks:
                write_all(file.fd, chunk, size)
                digest.update(chunk)
                size += len(chunk)
            file.sync()
            file.publish()
        except BaseException:
            file.discard()
            raise
    return FileRecord(name, digest.hexdigest(), size)


def read_blocks(path: Path) -> Iterator[memoryview]:
    """The bytes of `path`, block by block in one reused buffer; `CheckpointError` on failure."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield buffer[:count]
    except OSError as error:
        raise CheckpointError(
            f"cannot read {path}: {os_error_text(error)}. Restore the file or make it readable."
        ) from error


def hash_file(path: Path, progress: Callable[[int], None] | None = None) -> str:
    """sha256 of a file in hex, in bounded memory.

    `progress` is called with the number of bytes hashed since its last call. A file that cannot be
    read is a `CheckpointError`.
    """
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
        if progress is not None:
            progress(len(block))
    return digest.hexdigest()
