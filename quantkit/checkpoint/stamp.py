"""Stamps: detect if a file changed since it was opened."""

import os
from dataclasses import dataclass
from pathlib import Path

from quantkit.errors import CheckpointError


@dataclass(frozen=True)
class FileStamp:
    """Attributes that reveal a changed file: size in bytes, mtime and ctime in nanoseconds, inode.

    Tools may set mtime, for example when copying, but neither ctime nor inode.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int

    @classmethod
    def of(cls, path: Path, descriptor: int | None = None) -> "FileStamp":
        """Read the stamp of `path`, or of the open file of `descriptor`, from the file system.

        Raises `CheckpointError` naming `path` if that fails.
        """
        try:
            status = path.stat() if descriptor is None else os.fstat(descriptor)
        except OSError as error:
            raise CheckpointError(
                f"{path}: it cannot be read any more ({error.strerror}); expected it as it was opened. "
                "Restore it, and start again."
            ) from error
        return cls(status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)

    def check(self, path: Path, descriptor: int | None = None) -> None:
        """Raise `CheckpointError` unless `path`, or the open file of the descriptor, has this stamp."""
        now = FileStamp.of(path, descriptor)
        if now == self:
            return
        # If a visible attribute differs, show only those.
        seen = (self.size, self.mtime_ns) != (now.size, now.mtime_ns)
        expected, found = (
            f"{stamp.size} bytes of mtime {stamp.mtime_ns} ns"
            if seen
            else f"ctime {stamp.ctime_ns} ns and inode {stamp.inode}"
            for stamp in (self, now)
        )
        raise CheckpointError(
            f"{path}: the file has changed since it was opened: expected {expected}, got {found}. Leave the "
            "source alone while quantkit runs, and start again."
        )
