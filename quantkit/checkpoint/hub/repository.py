"""Resolve a user's name for a model, a directory or a Hugging Face hub id, to a local directory."""

import atexit
import os
import queue
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from quantkit.checkpoint.hub.answers import (
    COMMIT,
    CONNECTION_PROBLEMS,
    FILE_SECONDS,
    MAX_FILE_BYTES,
    Listing,
    Repository,
    check_local_name,
    read_file,
    read_listing,
    read_start,
)
from quantkit.checkpoint.hub.cache import cached_snapshot, check_snapshot, checking, folder_of, storage_of
from quantkit.checkpoint.hub.deadline import SLOWEST_BYTES_PER_SECOND, BadAnswer, Deadline, fail, within
from quantkit.checkpoint.output.atomic_write import is_inside
from quantkit.checkpoint.side_names import is_side_name
from quantkit.checkpoint.source import HEADERS_ONLY_NAME
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError, first_of
from quantkit.files import open_regular, os_error_text, replace_file, shown

_T = TypeVar("_T")
_C = TypeVar("_C")

#: Files that a cached model needs.
_CACHED_PATTERNS = ("*.safetensors", "*.json", "*.txt", "*.model", "*.jinja")
# Folders hold other frameworks' copies; "consolidated" is a second copy of the weights.
_IGNORE_PATTERNS = ("*/*", "consolidated*")
_SHARD = re.compile(r"(?!consolidated)[A-Za-z0-9._-]{1,180}\.safetensors")
#: Parallel downloads of shards, and the longest time without bytes: huggingface_hub writes ten million bytes
#: at once.
_DOWNLOADS = 4
_WEIGHTS_SECONDS = 180.0
_MAX_SMALL_FILES = 1000
#: Characters shown of a server's error text.
_DETAIL_CHARS = 500
_ETAG = re.compile(r"(?!.*\.\.)[\w.\-]{1,200}", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)\w[\w.\-]*(/\w[\w.\-]*)*", re.ASCII)
_HUB_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.\-]*(/\w[\w.\-]*)?", re.ASCII)


@dataclass(frozen=True)
class Wanted:
    """Words for errors about something on the hub: the thing, its repository, and the local alternative."""

    what: str = "checkpoint"
    repository: str = "repository"
    place: str = "directory"


_NETWORK = "Check the network, HF_ENDPOINT and the proxy settings, or give a local {place}."
# By the name of the exception class or of a base class, closest first: the error to raise, the description,
# and the remedy, with the words of `Wanted`. Names, because huggingface_hub is imported only for hub ids.
_EXPLANATIONS: dict[str, tuple[type[QuantkitError], str, str]] = {
    "HFValidationError": (UsageError, "this is neither a {place} nor a hub id", "Check the path."),
    "GatedRepoError": (
        CheckpointError,
        "access to the repository is gated",
        "Ask for access on its page, then `hf auth login`.",
    ),
    "RepositoryNotFoundError": (
        CheckpointError,
        "the hub has no such {repository}, or it is private; no such local {place} either",
        "Check the name or path; for a private repository `hf auth login`.",
    ),
    "RevisionNotFoundError": (
        CheckpointError,
        "the repository has no such revision",
        "Check the branch, tag or commit.",
    ),
    "OfflineModeIsEnabled": (
        EnvironmentProblem,
        "HF_HUB_OFFLINE is set and the {what} is not complete in the local cache",
        "Unset HF_HUB_OFFLINE, or give a local {place}.",
    ),
    "HfHubHTTPError": (
        EnvironmentProblem,
        "the hub answered with an error",
        "Try again later, or give a local {place}.",
    ),
    **{
        name: (EnvironmentProblem, f"{problem} and the {{what}} is not complete in the local cache", _NETWORK)
        for name, problem in CONNECTION_PROBLEMS.items()
    },
    "OSError": (
        EnvironmentProblem,
        "the {what} cannot be downloaded",
        "Check the network and the free space of the cache directory.",
    ),
}
_FINAL = ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError")


@dataclass(frozen=True)
class Located:
    """Model: the user's name for it, its local directory, and its kind.

    `kind` is "directory", "file" for a GGUF file, or "hub" if `name` is a hub id; `commit` is the
    repository's, None if unknown.
    """

    name: str
    directory: Path
    kind: str
    commit: str | None = None


def is_hub_id(text: str) -> bool:
    """Return True if `text` has the form of a hub id, `org/name` or `name`."""
    return _HUB_ID.fullmatch(text) is not None


def resolve(source: str | Path, *, revision: str | None = None, headers_only: bool = False) -> Path:
    """Return the local directory of `source`; a hub id is downloaded to the cache, at `revision`.

    With `headers_only` no tensor data is downloaded. Raises as `locate` says: `UsageError` for a path that
    does not exist, `EnvironmentProblem` without the hub, `CheckpointError` for an unusable repository.
    """
    return locate(source, revision=revision, headers_only=headers_only).directory


def locate(source: str | Path, *, revision: str | None = None, headers_only: bool = False) -> Located:
    """Return the local directory of `source`; a hub id (`org/name` or `name`) is downloaded to the cache.

    With `headers_only` no tensor data is downloaded: the result is a temporary directory, removed at exit,
    whose `Checkpoint` supports everything but reading tensors.

    Raises `UsageError` for a path that does not exist, and `EnvironmentProblem` if the hub cannot be reached.
    Raises `CheckpointError` for a repository that is missing, gated or without safetensors. Without a network
    or with HF_HUB_OFFLINE the hub's local cache is used.
    """
    try:
        path = Path(source).expanduser()
        found = bool(str(source)) and path.is_dir()
        is_gguf_file = path.suffix == ".gguf" and path.is_file()
    except RuntimeError:
        raise UsageError(
            f"{str(source)!r} is in a home directory, and there is none. Set HOME, or give another path."
        ) from None
    except OSError as error:
        raise CheckpointError(
            f"{source}: cannot be examined: {os_error_text(error)}. Check the disk and the permissions."
        ) from error
    if found:
        if revision is not None:
            raise UsageError(
                f"revision {revision!r} was given for the local directory {path}; expected a hub id. "
                "Leave the revision out."
            )
        return Located(str(source), path, "directory")
    if is_gguf_file:
        return Located(str(source), path, "file")
    # A file name counts as a file even if it has the form of a hub id.
    if isinstance(source, Path) or path.suffix == ".gguf" or path.exists() or not is_hub_id(source):
        raise UsageError(
            f"{str(source)!r} is no directory; expected a checkpoint directory or a hub id such as "
            "org/name, or a .gguf file. Check the path."
        )
    from quantkit.checkpoint.hub.client import guarded

    # One client for all requests keeps connections open.
    with explained(source, revision, Wanted()), guarded(FILE_SECONDS):
        directory, commit = _from_hub(source, revision, headers_only)
    return Located(source, directory, "hub", commit)


@contextmanager
def explained(source: str, revision: str | None, wanted: Wanted) -> Iterator[None]:
    """Context manager: turn errors of huggingface_hub into a `QuantkitError` about `source`; bugs pass."""
    try:
        yield
    except QuantkitError:
        raise
    except Exception as error:
        explanation = _explanation(error)
        if explanation is None:
            raise
        kind, *texts = explanation
        problem, remedy = (text.format(**vars(wanted)) for text in texts)
        at = f" at revision {revision!r}" if revision else ""
        detail = str(error).strip().partition("\n")[0][:_DETAIL_CHARS]
        url = str(getattr(getattr(error, "response", None), "url", ""))
        detail += f" for {url}" if url not in detail else ""
        raise kind(
            f"{source}{at}: {problem} ({detail}); expected a downloadable {wanted.what}. {remedy}"
        ) from error


def _explanation(error: Exception) -> tuple[type[QuantkitError], str, str] | None:
    names = [base.__name__ for base in type(error).__mro__]
    return next((_EXPLANATIONS[name] for name in names if name in _EXPLANATIONS), None)


def _from_hub(name: str, revision: str | None, headers_only: bool) -> tuple[Path, str | None]:
    """Return the local directory of a repository, and its commit."""
    repository = Repository(name)
    found = online_or_cached(
        lambda: read_listing(repository, revision),
        lambda: cached_snapshot(repository, revision, _CACHED_PATTERNS, _IGNORE_PATTERNS),
    )
    if isinstance(found, Path):
        return found, found.name if COMMIT.fullmatch(found.name) else None
    shards = [one for one in found.files if _SHARD.fullmatch(one)]
    if not shards:
        raise CheckpointError(
            f"{name}: the repository has no safetensors among its {len(found.files)} files; expected "
            "model.safetensors or shards. Convert it at "
            "https://huggingface.co/spaces/safetensors/convert or choose another repository."
        )
    folder = _small_files(repository, found, revision)
    if headers_only:
        return _skeleton(repository, found.commit, shards, folder), found.commit
    with answered(repository, found.commit):
        _download_weights(repository, found.commit, shards)
    if missing := [one for one in shards if not (folder / one).is_file()]:
        fail(repository.file_url(missing[0], found.commit), "something else", first_of(missing))
    return folder, found.commit


def _download_weights(repository: Repository, commit: str, names: list[str]) -> None:
    """Download shards to the hub's cache in parallel; raise `BadAnswer` if hardly any bytes come.

    Uses daemon threads, because a thread blocked by a server would keep the process alive.
    """
    # Before the deadline, which only bytes that come put off.
    check_snapshot(folder_of(repository, commit), repository.api_url(commit))
    left = list(reversed(names))
    outcomes: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def work() -> None:
        while True:
            try:
                shard = left.pop()
            except IndexError:
                return
            try:
                download_large(repository, shard, commit)
                outcomes.put(None)
            except Exception as error:
                left.clear()
                outcomes.put(error)

    for _ in range(min(_DOWNLOADS, len(names))):
        threading.Thread(target=work, daemon=True).start()
    deadline, had = Deadline(_WEIGHTS_SECONDS), _bytes_of(repository)
    done = 0
    while done < len(names):
        with suppress(queue.Empty):
            error = outcomes.get(timeout=1.0)
            done += 1
            if error is not None:
                raise error
        has = _bytes_of(repository)
        # A shard that is being verified or moved may be counted twice, or briefly not at all.
        deadline.end += max(0, has - had) / SLOWEST_BYTES_PER_SECOND
        had = has
        if deadline.left <= 0 and done < len(names):
            left.clear()
            url = repository.file_url(names[done], commit)
            fail(url, "too slowly", f"{SLOWEST_BYTES_PER_SECOND} bytes a second")


def download_large(repository: Repository, name: str, revision: str | None) -> Path:
    """Return a file of a repository in the hub's cache, downloaded by huggingface_hub if missing.

    Raises `BadAnswer` if its hash is not the one that the hub states.
    """
    import huggingface_hub

    from quantkit.checkpoint.hub.client import guarded, streams_of

    url = repository.file_url(name, revision)
    with guarded(FILE_SECONDS):
        metadata = within(Deadline(FILE_SECONDS), lambda: huggingface_hub.get_hf_file_metadata(url))
    # Both become names in the cache, and huggingface_hub accepts any.
    if metadata.commit_hash is None or not COMMIT.fullmatch(metadata.commit_hash):
        fail(url, f"the commit {shown(metadata.commit_hash)}", "40 hex digits as X-Repo-Commit")
    if metadata.etag is None or not _ETAG.fullmatch(metadata.etag):
        fail(url, f"the ETag {shown(metadata.etag)}", "letters and digits")
    # An empty file would stay in the cache.
    if metadata.size is not None and not 0 < metadata.size <= MAX_FILE_BYTES:
        fail(url, f"the size {metadata.size}", f"1 to {MAX_FILE_BYTES} bytes")
    blob, path = (
        storage_of(repository) / "blobs" / metadata.etag,
        folder_of(repository, metadata.commit_hash) / name,
    )
    with checking(blob, url, path), guarded(FILE_SECONDS), streams_of(metadata.size):
        return Path(
            huggingface_hub.hf_hub_download(
                repository.name, name, repo_type=repository.kind, revision=revision
            )
        )


def _bytes_of(repository: Repository) -> int:
    """Return the bytes of all files of a repository in the cache, partial downloads included."""
    total = 0
    for path in storage_of(repository).glob("blobs/*"):
        # The file may be renamed meanwhile.
        with suppress(OSError):
            total += path.stat().st_size
    return total


def _small_files(repository: Repository, listing: Listing, revision: str | None) -> Path:
    """Return the cache folder with all files of a model but the weights, downloaded if missing.

    Each file is checked before it is added, as the cache keeps files forever.
    """
    names = [name for name in listing.files if is_side_name(name) and not name.startswith("consolidated")]
    if len(names) > _MAX_SMALL_FILES:
        fail(
            repository.api_url(revision),
            f"{len(names)} files beside the weights",
            f"at most {_MAX_SMALL_FILES}",
        )
    # Each file has its own deadline; this one is for all.
    deadline = Deadline(FILE_SECONDS * 3 + len(names))
    for name in names:
        path = cached_file(repository, name, listing.commit)
        deadline.end += path.stat().st_size / SLOWEST_BYTES_PER_SECOND
        if deadline.left < 0:
            url = repository.file_url(name, listing.commit)
            fail(
                url, f"too slowly: {names.index(name) + 1} of {len(names)} small files", "all within minutes"
            )
    _remember(repository, revision, listing.commit)
    folder = folder_of(repository, listing.commit)
    # If there are only weights, opening the folder later reports what is missing.
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def cached_file(repository: Repository, name: str, commit: str) -> Path:
    """Return a small file of a repository in the hub's cache, downloaded if missing.

    Raises `BadAnswer` if it is slow, truncated, or a proxy's page, or if its hash is not the hub's.
    """
    path = folder_of(repository, commit).joinpath(*name.split("/"))
    check_local_name(repository.file_url(name, commit), path.name)
    if path.is_file() and is_inside(path) and _looks_whole(path):
        return path
    data = read_file(repository, name, commit)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Another process may be writing the same file.
    part = path.with_name(f"{path.name[:200]}.{os.getpid()}")
    replace_file(part, data, durable=False)
    part.replace(path)
    return path


def _looks_whole(path: Path) -> bool:
    """Return True if the start of a cached file fits its type; earlier versions cached error pages too."""
    if path.suffix != ".json":
        return True
    with open_regular(path) as file:
        start = file.read(64).lstrip()[:1]
        file.seek(max(0, path.stat().st_size - 64))
        end = file.read().rstrip()[-1:]
    return (start, end) in ((b"{", b"}"), (b"[", b"]"))


def _remember(repository: Repository, revision: str | None, commit: str) -> None:
    """Record in the cache the commit of a branch or tag, for use without a network."""
    name = revision or "main"
    if COMMIT.fullmatch(name) or not _REVISION.fullmatch(name):
        return
    path = storage_of(repository) / "refs" / name
    # A read-only cache is still useful.
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, commit.encode(), durable=False)


def online_or_cached(ask: Callable[[], _T], cached: Callable[[], _C]) -> _T | _C:
    """Return the result of `ask` from the hub, or else of `cached` from the local cache.

    Raises the error of `ask` if the cache has nothing, or if the hub's answer is final.
    """
    try:
        return ask()
    except Exception as error:
        known = isinstance(error, BadAnswer) or _explanation(error) is not None
        if not known or type(error).__name__ in _FINAL:
            raise
        try:
            return cached()
        except (OSError, ValueError):
            raise error from None


@contextmanager
def answered(repository: Repository, revision: str | None) -> Iterator[None]:
    """Context manager: raise any error of huggingface_hub about an unusable answer as `BadAnswer`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, QuantkitError | MemoryError) or _explanation(error) is not None:
            raise
        text = " ".join(str(error).split())
        url = repository.api_url(revision)
        fail(url, f"what huggingface_hub cannot use ({type(error).__name__}: {text[:200]})", "files")


def _skeleton(repository: Repository, commit: str, shards: list[str], side_files: Path) -> Path:
    """Return a copy of `side_files` with the shards as sparse files that have only their headers."""
    place = tempfile.mkdtemp(prefix="quantkit-headers-")
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    # Errors about its files then name the repository.
    directory = Path(place, storage_of(repository).name)
    directory.mkdir()
    (directory / HEADERS_ONLY_NAME).touch()
    for path in side_files.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, directory / path.name)
    deadline = Deadline(FILE_SECONDS * 3 + len(shards))
    for number, name in enumerate(shards):
        start, file_bytes = read_start(repository, name, commit)
        deadline.end += len(start) / SLOWEST_BYTES_PER_SECOND
        if deadline.left < 0:
            url = repository.file_url(name, commit)
            fail(url, f"too slowly: {number + 1} of {len(shards)} headers", "all within minutes")
        with (directory / name).open("wb") as file:
            file.write(start)
            os.truncate(file.fileno(), file_bytes)
    return directory
