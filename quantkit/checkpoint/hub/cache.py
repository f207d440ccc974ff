"""Use the hub's cache on this machine: its folders, and the check of downloaded blobs by their hashes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quantkit.checkpoint.hub.answers import Repository
from quantkit.checkpoint.hub.content import check_content
from quantkit.checkpoint.hub.deadline import BadAnswer

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

    check_blobs(storage_of(repository) / "blobs", repository.api_url(revision))
    return Path(
        huggingface_hub.snapshot_download(
            repository.name,
            repo_type=repository.kind,
            revision=revision,
            allow_patterns=list(patterns),
            ignore_patterns=list(without),
            local_files_only=True,
        )
    )


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


def check_blobs(blobs: Path, url: str) -> None:
    """Compare all marked blobs, left unchecked by killed processes; raise `BadAnswer` as `checking`."""
    for mark in blobs.glob(f"*{_UNCHECKED}"):
        blob = mark.with_name(mark.name.removesuffix(_UNCHECKED))
        if blob.exists():
            _check_marked(mark, blob, url)


def _check_marked(mark: Path, path: Path, url: str) -> None:
    if not mark.exists():
        return
    with path.open("rb") as file:
        nbytes = path.stat().st_size
        pieces = iter(lambda: file.read(_PIECE_BYTES), b"")
        try:
            check_content(url, mark.name.removesuffix(_UNCHECKED), nbytes, pieces)
        except BadAnswer:
            path.unlink(missing_ok=True)
            mark.unlink(missing_ok=True)
            raise
    mark.unlink(missing_ok=True)
