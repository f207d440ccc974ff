"""Write files of a checkpoint atomically, with their hashes: whole and on the disk, or absent."""

import errno
import hashlib
import mmap
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError, OutputError
from quantkit.files import TEMP_PREFIX, NoFileError, TempFile, open_regular, os_error_text, write_all

# Small enough to stay in a core's cache between reading and hashing.
BLOCK_BYTES = 1 << 20
_NAME_BYTES = 255
_PLAIN_NAME = re.compile(r"[^/\\\x00-\x1f]{1,255}")


@dataclass(frozen=True)
class FileRecord:
    """File of an output directory: its name, lower-case hex sha256 and size in bytes."""

    file: str
    sha256: str
    size: int


def is_plain_name(name: object) -> bool:
    """Return True if `name` names a file directly inside a directory, and cannot lead out of it."""
    if not isinstance(name, str) or name in (".", "..") or not _PLAIN_NAME.fullmatch(name):
        return False
    # Limit of file systems; a longer name would raise another error.
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
    """Read at most `limit + 1` bytes of a file of a directory.

    Raises `OSError` if it cannot be read, is no regular file, or links out of the directory.
    """
    if not is_inside(path):
        raise OSError(errno.ELOOP, "it links out of its directory")
    with open_regular(path) as file:
        return file.read(min(limit, os.fstat(file.fileno()).st_size) + 1)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context manager: raise an `OSError` as `OutputError` naming `path` and the remedy."""
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
    """Map `size` bytes of an unnamed file in `directory` as memory; the file is deleted with the memory.

    Raises `OutputError` if the disk lacks room for all of them: writing to missing room would end the
    process.
    """
    # Threads and ranks share the directory: a name would be that of another's file.
    with writing(directory), tempfile.TemporaryFile(dir=directory, prefix=TEMP_PREFIX) as file:
        os.posix_fallocate(file.fileno(), 0, size)
        return mmap.mmap(file.fileno(), size)


def write_file(directory: Path, name: str, chunks: Iterable[bytes | memoryview]) -> FileRecord:
    """Write `chunks` as `directory/name`, replacing it in one step; raise `OutputError` on failure."""
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
    """Write `chunks` to the disk under a temporary name for `name`; raise `OutputError` on failure."""
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
    """Yield the bytes of `path` in blocks, in one reused buffer; raise `CheckpointError` on failure."""
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
    """Return the hex sha256 of a file, in bounded memory.

    `progress` is called with the bytes hashed since its last call. Raises `CheckpointError` for a file that
    cannot be read.
    """
    digest = hashlib.sha256()
    for block in read_blocks(path):
        digest.update(block)
        if progress is not None:
            progress(len(block))
    return digest.hexdigest()
