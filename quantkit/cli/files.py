"""Files that commands write beside checkpoints."""

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

import typer

from quantkit.checkpoint.output.beside import beside
from quantkit.errors import OutputError
from quantkit.files import TEMP_PREFIX, NoFileError, TempFile, check_places, replace_file

FiguresFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", readable=False, help="Write the figures to this file."),
]
ReportDirectory = Annotated[
    Path | None,
    typer.Option("--report", metavar="DIR", readable=False, help="Write a report with plots here."),
]
#: The files of reports, as patterns: which plots there are depends on what was found.
REPORT_FILES = ("*.md", "*.html", "*.json", "*.png")


def make_directory(path: Path, patterns: Iterable[str] = ()) -> None:
    """Make `path` a directory before the work, not after it; `OutputError` if that cannot be.

    Refused too is the output of a run that is at work or unfinished, a directory that takes no files, and
    what is no file where one that matches the `patterns` may be written.
    """
    with _explained(f"create the directory {path}"):
        path.mkdir(parents=True, exist_ok=True)
    with beside(path), _explained(f"write to the directory {path}"):
        names = [found.name.removeprefix(TEMP_PREFIX) for found in path.iterdir()]
        check_places(path, [name for name in names if any(fnmatch(name, one) for one in patterns)])
        TempFile(path, f"probe-{os.getpid()}").remove()


def check_writable(path: Path) -> None:
    """`OutputError` before the work, not after it, if `path` cannot be written; leaves it as it is."""
    with beside(path.parent, [path.name]), _explained(f"write {path}"):
        if not is_pipe(path):
            check_places(path.parent, [path.name])
        existed = path.exists()
        path.open("a").close()
        if not existed:
            # Of a link what it points to.
            path.resolve().unlink()


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
            with _explained(f"write {path}"):
                if is_pipe(path):
                    path.write_bytes(content)
                else:
                    replace_file(path, content)


def present(directory: Path, names: Iterable[str]) -> list[Path]:
    """Which of these files `directory` has; `OutputError` where the disk does not say."""
    with _explained(f"examine {directory}"):
        return [directory / name for name in names if (directory / name).exists()]


def resume_advice(directory: Path, *, overwrite: bool) -> str | None:
    """How to go on with the run that was stopped in `directory`; None if it left nothing to go on with."""
    from quantkit.checkpoint.output.existing import is_resumable

    if not is_resumable(directory):
        return None
    instead = " in place of --overwrite" if overwrite else ""
    return f"finished files are kept. Continue with the same command and --resume{instead}."


@contextmanager
def _explained(what: str) -> Iterator[None]:
    """Raise an `OSError` of the block as `OutputError`: it cannot do `what`."""
    try:
        yield
    except OSError as error:
        remedy = (
            ", or choose another place" if isinstance(error, NoFileError) else ". Choose a writable place"
        )
        raise OutputError(f"cannot {what}: {error.strerror or error}{remedy}.") from error
