"""Files that commands write beside checkpoints."""

from collections.abc import Mapping
from pathlib import Path

from quantkit.checkpoint.beside import beside
from quantkit.errors import OutputError
from quantkit.files import replace_file


def make_directory(path: Path) -> None:
    """Make `path` a directory before the work, not after it; `OutputError` if that cannot be.

    Refused too is the output of a run that is at work or unfinished.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(f"create the directory {path}", error) from error
    with beside(path):
        pass


def check_writable(path: Path) -> None:
    """`OutputError` before the work, not after it, if `path` cannot be written; leaves it as it is."""
    with beside(path.parent, [path.name]):
        try:
            existed = path.exists()
            path.open("a").close()
            if not existed:
                # Of a link what it points to.
                path.resolve().unlink()
        except OSError as error:
            raise _refused(f"write {path}", error) from error


def is_pipe(path: Path) -> bool:
    """Whether `path` is written to and not replaced, as a pipe or /dev/stdout is."""
    return path.exists() and not path.is_file()


def write_file(path: Path, data: str | bytes) -> None:
    """Write `path`, text as UTF-8; `OutputError` leaves what was there."""
    write_files(path.parent, {path.name: data})


def write_files(directory: Path, files: Mapping[str, str | bytes]) -> None:
    """Write `files` by name, text as UTF-8, under the lock of `directory` if that is the output of a run.

    `OutputError` leaves what was there of the file that it names.
    """
    with beside(directory, files):
        for name, data in files.items():
            path, content = directory / name, data.encode() if isinstance(data, str) else data
            try:
                if is_pipe(path):
                    path.write_bytes(content)
                else:
                    replace_file(path, content)
            except OSError as error:
                raise _refused(f"write {path}", error) from error


def _refused(what: str, error: OSError) -> OutputError:
    return OutputError(f"cannot {what}: {error.strerror or error}. Choose a writable place.")
