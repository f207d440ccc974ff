"""Check conditions before a run writes into an output directory; each refusal names its remedy."""

import os
import shlex
import shutil
from collections.abc import Iterable
from pathlib import Path

from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.checkpoint.output.lock import LOCK_NAME
from quantkit.errors import OutputError, first_of
from quantkit.files import TEMP_PREFIX, os_error_text, size_text

# Room for file system overhead, and for quantkit's small files.
DISK_MARGIN_BYTES = 1 << 20
_SHOWN_NAMES = 10
# All files that a process killed before it had a journal can leave behind.
_BEFORE_JOURNAL = frozenset({LOCK_NAME, f"{TEMP_PREFIX}{JOURNAL_NAME}"})
_ELSEWHERE = "Choose an output directory elsewhere."


def resolve_output(out: Path, source: Path) -> Path:
    """Return the real path of `out`; raise `OutputError` if writing there could touch the source."""
    try:
        return _resolved(out, source)
    except (OSError, RuntimeError) as error:
        raise OutputError(f"cannot follow {out} or {source}: {error}. {_ELSEWHERE}") from error


def _resolved(out: Path, source: Path) -> Path:
    real, real_source = out.resolve(), source.resolve()
    if _same(real, real_source):
        raise OutputError(f"output {out} is the source checkpoint itself. {_ELSEWHERE}")
    if _within(real, real_source):
        raise OutputError(f"output {out} is inside the source {source}. {_ELSEWHERE}")
    if _within(real_source, real):
        raise OutputError(f"source {source} is inside the output {out}. {_ELSEWHERE}")
    for link in _links(real_source):
        if _within(link.resolve(), real):
            raise OutputError(
                f"{link} of the source is a link to a file inside the output {out}. {_ELSEWHERE}"
            )
    return real


def make_directory(out: Path) -> bool:
    """Create `out` if needed; return True if it was created. Raises `OutputError` on failure."""
    try:
        if out.exists() and not out.is_dir():
            raise OutputError(f"output {out} is a file, not a directory. Choose another name.")
        if not out.parent.is_dir():
            raise OutputError(
                f"the parent directory {out.parent} of the output does not exist. "
                f"Create it with: mkdir -p {shlex.quote(str(out.parent))}"
            )
        out.mkdir()
    except FileExistsError:
        return False
    except OSError as error:
        raise OutputError(
            f"cannot create the output directory {out}: {os_error_text(error)}. "
            "Make its parent writable or choose another place."
        ) from error
    return True


def occupants(out: Path, *, known: bool) -> list[Path]:
    """Return the entries of `out`, sorted, without the lock and temporary files.

    With `known`, a journal or manifest proves that quantkit wrote to `out`: all `.tmp-*` files are temporary
    files of quantkit. Otherwise only `.tmp-` + the name of the journal is, which a run may leave before it
    has a journal. Other `.tmp-*` files may be someone else's, and are returned.
    """
    return [
        path for path in _listed(out) if path.name not in _BEFORE_JOURNAL and not (known and _is_temp(path))
    ]


def temp_files(out: Path, *, known: bool) -> list[Path]:
    """Return quantkit's temporary files in `out`, sorted.

    With `known`, a journal or manifest proves that quantkit wrote to `out`: all `.tmp-*` files are its own.
    Otherwise only `.tmp-` + the name of the journal is.
    """
    return [path for path in _listed(out) if _is_temp(path) and (known or path.name in _BEFORE_JOURNAL)]


def _listed(out: Path) -> list[Path]:
    try:
        return sorted(out.iterdir())
    except OSError as error:
        raise OutputError(
            f"cannot list the output {out}: {os_error_text(error)}. Make it readable (chmod u+rwx) or choose "
            "another output directory."
        ) from error


def check_space(out: Path, needed: int, reclaimed: int) -> None:
    """Raise `OutputError` unless the disk of `out` has room for `needed` bytes and a margin.

    `reclaimed` is the number of bytes that the run frees before it writes.
    """
    free = shutil.disk_usage(out).free + reclaimed
    required = max(needed, 0) + DISK_MARGIN_BYTES
    if free < required:
        raise OutputError(
            f"too little disk space for {out}: {size_text(required)} needed, {size_text(free)} free. "
            f"Free {size_text(required - free)} or choose an output directory on another disk."
        )


def name_list(paths: Iterable[Path]) -> str:
    """Return the file names of `paths`; only the first ten are written out."""
    return first_of((path.name for path in paths), _SHOWN_NAMES)


def _is_temp(path: Path) -> bool:
    return path.name.startswith(TEMP_PREFIX) and (path.is_symlink() or path.is_file())


def _links(source: Path) -> list[Path]:
    if not source.is_dir():
        return []
    return sorted(path for path in source.iterdir() if path.is_symlink())


def _within(inner: Path, outer: Path) -> bool:
    return any(_same(path, outer) for path in (inner, *inner.parents))


def _same(one: Path, other: Path) -> bool:
    # By inode, because mounts and case-insensitive file systems give a directory several paths.
    try:
        return os.path.samestat(one.stat(), other.stat())
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return one == other
