"""Use the hub's cache on this machine: its folders, and the check of downloaded blobs by their hashes."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from quantkit.checkpoint.hub.answers import Repository
from quantkit.checkpoint.hub.content import check_content
from quantkit.checkpoint.hub.deadline import BadAnswer
from quantkit.errors import EnvironmentProblem
from quantkit.files import os_error_text

#: Suffix of an empty file that marks a blob not yet compared with its hash.
_UNCHECKED = ".unchecked"
_PIECE_BYTES = 8 << 20


def folder_of(repository: Repository, commit: str) -> Path:
    """Return the directory of the hub's cache for the files of a commit."""
    return storage_of(repository) / "snapshots" / commit


def storage_of(repository: Repository) -> Path:
    """Return the directory of the hub's cache for a repository."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"{repository.kind}s--{repository.name.replace('/', '--')}"


def cached_snapshot(
    repository: Repository,
    revision: str | None,
    patterns: Sequence[str] = ("*",),
    without: Sequence[str] = (),
) -> Path:
    """Return the cached folder of a revision; raises an error of huggingface_hub if nothing is cached."""
    import huggingface_hub

    folder = Path(
        huggingface_hub.snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(without),
            local_files_only=True,
        )
    )
    check_snapshot(folder, repository.api_url(revision))
    return folder


@contextmanager
def checking(blob: Path, url: str, path: Path) -> Iterator[None]:
    """Context manager: download `blob` of the hub's cache, then compare it with the hash in its name.

    `path` is its place in a snapshot: a link to the blob, or the file itself on systems without links. A
    process killed before the comparison leaves a mark, so that the next process compares.
    """
    mark = blob.with_name(f"{blob.name}{_UNCHECKED}")
    if not path.exists() and not blob.exists():
        blob.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    yield
    _check_marked(mark, blob if blob.exists() else path, url)


def check_snapshot(folder: Path, url: str) -> None:
    """Compare the files in `folder` that a killed process left unchecked; raise `BadAnswer` if one differs.

    Only links of a snapshot tell which blob a file is. Without links, the next download compares the file.
    """
    for path in folder.rglob("*"):
        blob = path.resolve()
        _check_marked(blob.with_name(f"{blob.name}{_UNCHECKED}"), blob, url)


def _check_marked(mark: Path, path: Path, url: str) -> None:
    """Compare a file that has a mark; remove the mark, or else the file.

    Other processes may do the same. A mark without a file is for the next download.
    """
    if not (mark.exists() and path.exists()):
        return
    with path.open("rb") as file:
        opened = os.fstat(file.fileno())
        pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
        try:
            check_content(url, mark.name.removesuffix(_UNCHECKED), opened.st_size, pieces)
        except BadAnswer:
            _remove(path, opened)
            raise
    # In a cache that cannot be written each run compares.
    with suppress(OSError):
        mark.unlink()


def _remove(path: Path, opened: os.stat_result) -> None:
    """Remove a wrong file, unless another process removed it and made a new one."""
    try:
        if os.path.samestat(opened, path.stat()):
            path.unlink()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise EnvironmentProblem(
            f"{path}: its bytes have another hash than its name says, and it cannot be removed "
            f"({os_error_text(error)}). Remove it, or set HF_HUB_CACHE to another directory."
        ) from error
