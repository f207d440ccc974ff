"""Cards, reports and plots that commands write into a directory which may be the output of a run."""

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
    """Hold the lock of `directory` in the block, which writes files of these `names`, if it is an output.

    An output has a manifest, a journal or a lock; of other directories nothing is asked. Raises `OutputError`
    where a run is at work or unfinished: a file that it did not write would be in its way. Raises it too for
    names of files of the checkpoint.
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
