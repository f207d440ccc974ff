"""Files that commands write beside checkpoints."""

import os
from collections.abc import Iterable, Mapping
from fnmatch import fnmatch
from pathlib import Path

from quantkit.checkpoint.output.beside import beside
from quantkit.errors import OutputError
from quantkit.files import TEMP_PREFIX, NoFileError, TempFile, check_places, replace_file

#: The files of reports, as patterns: which plots there are depends on what was found.
REPORT_FILES = ("*.md", "*.html", "*.json", "*.png")


def make_directory(path: Path, patterns: Iterable[str] = ()) -> None:
    """Make `path` a directory before the work, not after it; `OutputError` if that cannot be.

    Refused too is the output of a run that is at work or unfinished, a directory that takes no files, and
    what is no file where one that matches the `patterns` may be written.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _refused(f"create the directory {path}", error) from error
    with beside(path):
        try:
            names = [found.name.removeprefix(TEMP_PREFIX) for found in path.iterdir()]
            check_places(path, [name for name in names if any(fnmatch(name, one) for one in patterns)])
            TempFile(path, f"probe-{os.getpid()}").remove()
        except OSError as error:
            raise _refused(f"write to the directory {path}", error) from error


def check_writable(path: Path) -> None:
    """`OutputError` before the work, not after it, if `path` cannot be written; leaves it as it is."""
    with beside(path.parent, [path.name]):
        try:
            if not is_pipe(path):
                check_places(path.parent, [path.name])
            existed = path.exists()
            path.open("a").close()
            if not existed:
                # Of a link what it points to.
                path.resolve().unlink()
        except OSError as error:
            raise _refused(f"write {path}", error) from error


def is_pipe(path: Path) -> bool:
    """Whether `path` is written to and not replaced, as a pipe or /dev/stdout is."""
    return path.exists() and not path.is_file() and not path.is_dir()


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
    remedy = ", or choose another place" if isinstance(error, NoFileError) else ". Choose a writable place"
    return OutputError(f"cannot {what}: {error.strerror or error}{remedy}.")
