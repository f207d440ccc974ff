"""Write cards, reports and plots into a directory that may be the output of a run."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.output.journal import JOURNAL_NAME
from quantkit.checkpoint.output.lock import LOCK_NAME, locked
from quantkit.errors import OutputError
from quantkit.files import os_error_text

_ELSEWHERE = "Choose another place for it."


@contextmanager
def beside(directory: Path, names: Iterable[str] = ()) -> Iterator[None]:
    """Context manager: hold the lock of `directory` while files `names` are written, if it is an output.

    A directory is an output if it has a manifest, a journal or a lock. Raises `OutputError` if a run is
    active or unfinished, because an extra file would obstruct it, and for names of checkpoint files.
    """
    if not _is_output(directory):
        yield
        return
    with locked(directory):
        if (directory / JOURNAL_NAME).exists():
            raise OutputError(f"{directory} holds an unfinished run, which writes there. {_ELSEWHERE}")
        own = {JOURNAL_NAME, LOCK_NAME, MANIFEST_NAME}
        if (directory / MANIFEST_NAME).exists():
            own |= read_manifest(directory)["files"].keys()
        for name in names:
            if name in own:
                raise OutputError(
                    f"{directory / name} is a file of the checkpoint in {directory}. {_ELSEWHERE}"
                )
        yield


def _is_output(directory: Path) -> bool:
    try:
        return any((directory / name).exists() for name in (JOURNAL_NAME, LOCK_NAME, MANIFEST_NAME))
    except OSError as error:
        raise OutputError(f"cannot examine {directory}: {os_error_text(error)}. {_ELSEWHERE}") from error
