"""Files of a checkpoint that are either whole and on the disk, or not there, with their hashes."""

import errno
import hashlib
import mmap
import os
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError, OutputError
from quantkit.files import NoFileError, TempFile, open_regular, os_error_text, write_all

# Small enough to stay in a core's cache between reading and hashing.
BLOCK_BYTES = 1 << 20
_NAME_BYTES = 255
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")


@dataclass(frozen=True)
class FileRecord:
    """A file of an output directory: its name, lower-case hex sha256 and size in bytes."""

    file: str
    sha256: str
    size: int


def is_plain_name(name: object) -> bool:
    """Return True if `name` names a file directly inside a directory, and can never lead out of it."""
    if not isinstance(name, str) or name in (".", "..") or not _PLAIN_NAME.fullmatch(name):
        return False
    # What file systems hold; asking for a longer name is an error of its own.
    return len(name.encode(errors="replace")) <= _NAME_BYTES


def is_inside(path: Path) -> bool:
    """Return True if `path`, links followed, is in its directory or in the blobs of the same hub cache."""
    root = Path(os.path.realpath(path.parent))
    allowed = [root]
    if root.parent.name == "snapshots":
        allowed.append(root.parent.parent / "blobs")
    target = Path(os.path.realpath(path))
    return any(target.is_relative_to(place) for place in allowed)


def read_inside(path: Path, limit: int) -> bytes:
    """The bytes of a file of a directory, at most `limit + 1` of them.

    `OSError` if it cannot be read, is no regular file, or links out of the directory.
    """
    if not is_inside(path):
        raise OSError(errno.ELOOP, "it links out of its directory")
    with open_regular(path) as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Raise an `OSError` of the block as an `OutputError` that names `path` and how to go on."""
    try:
        yield
    except NoFileError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror}, then run the same command again, with --resume if a run "
            "was interrupted."
        ) from error
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


def disk_memory(directory: Path, size: int) -> mmap.mmap:
    """Return `size` bytes of a file in `directory` as memory; the file has no name, and goes with the memory.

    Raises `OutputError` where the disk has no room for all of them: writing to what it lacks ends a process.
    """
    with writing(directory):
        # Ranks share the directory.
        file = TempFile(directory, f"memory-{os.getpid()}")
        try:
            os.posix_fallocate(file.fd, 0, size)
            return mmap.mmap(file.fd, size)
        finally:
            file.discard()


def write_file(directory: Path, name: str, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks` as `directory/name`, replacing it in one step; `OutputError` on failure."""
    file, record = prepare_file(directory, name, chunks)
    with writing(file.path):
        try:
            file.publish()
        except BaseException:
            file.discard()
            raise
    return record


def prepare_file(
    directory: Path, name: str, chunks: Iterable[bytes | memoryview]
) -> tuple[TempFile, FileRecord]:
    """Write `chunks` to the disk under the temporary name of `name`; `OutputError` on failure."""
    digest = hashlib.sha256()
    size = 0
    with writing(directory / name):
        file = TempFile(directory, name)
        try:
            for chunk in chunks:
                write_all(file.fd, chunk, size)
                digest.update(chunk)
                size += len(chunk)
            file.sync()
        except BaseException:
            file.discard()
            raise
    return file, FileRecord(name, digest.hexdigest(), size)


def read_blocks(path: Path) -> Iterator[memoryview]:
    """The bytes of `path`, block by block in one reused buffer; `CheckpointError` on failure."""
    buffer = memoryview(bytearray(BLOCK_BYTES))
    try:
        with open_regular(path) as file:
            while count := os.readv(file.fileno(), [buffer]):
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
