"""From what a user calls a model, a directory or a Hugging Face hub id, to a local directory."""

import atexit
import os
import queue
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from quantkit.checkpoint.header import MAX_HEADER_BYTES
from quantkit.checkpoint.source import HEADERS_ONLY_NAME
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError
from quantkit.files import os_error_text

_T = TypeVar("_T")
_C = TypeVar("_C")

# For the first answer of the hub, tried once; and for each header after that.
_DEADLINE_SECONDS = 4.0
_TIMEOUT_SECONDS = 10.0

_SIDE_PATTERNS = ("*.json", "*.txt", "*.model", "*.jinja")
# Folders hold other frameworks' copies; "consolidated" is a second copy of the weights.
_IGNORE_PATTERNS = ("*/*", "consolidated*")
_HUB_ID = re.compile(r"(?!.*(--|\.\.))\w[\w.\-]*(/\w[\w.\-]*)?", re.ASCII)


@dataclass(frozen=True)
class Wanted:
    """What is looked for on the hub, in the words of its errors: the thing, its repository, the local way."""

    what: str = "checkpoint"
    repository: str = "repository"
    place: str = "directory"


_UNREACHABLE = (
    EnvironmentProblem,
    "the hub cannot be reached and the {what} is not complete in the local cache",
    "Check the network, HF_ENDPOINT and the proxy settings, or give a local {place}.",
)
# By the name of the exception class or of one of its bases, closest first: the error to raise, what
# happened, the remedy, both with the words of `Wanted`. Names, because huggingface_hub is imported only when
# a hub id is used.
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
    "HTTPError": _UNREACHABLE,
    "TimeoutError": _UNREACHABLE,
    "OSError": (
        EnvironmentProblem,
        "the {what} cannot be downloaded",
        "Check the network and the free space of the cache directory.",
    ),
}
_FINAL = ("GatedRepoError", "RepositoryNotFoundError", "RevisionNotFoundError")


@dataclass(frozen=True)
class Located:
    """A model: what the user called it, its local directory, and what that is.

    `kind` is "directory", or "hub" where `name` is a hub id; `commit` is that of the repository, None where
    it is not known.
    """

    name: str
    directory: Path
    kind: str
    commit: str | None = None


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, `org/name` or `name`."""
    return _HUB_ID.fullmatch(text) is not None


def resolve(source: str | Path, *, revision: str | None = None, headers_only: bool = False) -> Path:
    """The directory of `locate(source)`."""
    return locate(source, revision=revision, headers_only=headers_only).directory


def locate(source: str | Path, *, revision: str | None = None, headers_only: bool = False) -> Located:
    """The local directory of `source`; a hub id (`org/name` or `name`) is downloaded to the cache.

    With `headers_only` no tensor data is downloaded: the result is a temporary directory, removed
    at exit, of which `Checkpoint` can do everything but read tensors.

    `UsageError` for a path that does not exist, `CheckpointError` for a repository that is missing,
    gated or without safetensors, `EnvironmentProblem` if the hub cannot be reached. Without a
    network or with HF_HUB_OFFLINE the hub's local cache is used.
    """
    try:
        path = Path(source).expanduser()
        found = bool(str(source)) and path.is_dir()
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
    if isinstance(source, Path) or path.exists() or not is_hub_id(source):
        raise UsageError(
            f"{str(source)!r} is no directory; expected a checkpoint directory or a hub id such as "
            "org/name. Check the path."
        )
    with explained(source, revision, Wanted()):
        directory, commit = _from_hub(source, revision, headers_only)
    return Located(source, directory, "hub", commit)


@contextmanager
def explained(source: str, revision: str | None, wanted: Wanted) -> Iterator[None]:
    """Turn what huggingface_hub raises into a `QuantkitError` about `source`; bugs pass."""
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
        detail = str(error).strip().partition("\n")[0]
        raise kind(
            f"{source}{at}: {problem} ({detail}); expected a downloadable {wanted.what}. {remedy}"
        ) from error


def _explanation(error: Exception) -> tuple[type[QuantkitError], str, str] | None:
    names = [base.__name__ for base in type(error).__mro__]
    return next((_EXPLANATIONS[name] for name in names if name in _EXPLANATIONS), None)


def _from_hub(repo: str, revision: str | None, headers_only: bool) -> tuple[Path, str | None]:
    """The directory of a repository, and its commit."""
    import huggingface_hub

    def snapshot(weights: tuple[str, ...], local_files_only: bool = False) -> Path:
        return Path(
            huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[*weights, *_SIDE_PATTERNS],
                ignore_patterns=list(_IGNORE_PATTERNS),
                local_files_only=local_files_only,
            )
        )

    info = online_or_cached(
        lambda: huggingface_hub.HfApi().model_info(repo, revision=revision),
        lambda: snapshot(("*.safetensors",), local_files_only=True),
    )
    if isinstance(info, Path):
        return info, info.name
    files = [file.rfilename for file in info.siblings or ()]
    shards = [name for name in files if re.fullmatch(r"(?!consolidated)[^/]+\.safetensors", name)]
    if not shards:
        raise CheckpointError(
            f"{repo}: the repository has no safetensors among its {len(files)} files; expected "
            "model.safetensors or shards. Convert it at "
            "https://huggingface.co/spaces/safetensors/convert or choose another repository."
        )
    if headers_only:
        return _skeleton(repo, info.sha, shards, snapshot(())), info.sha
    return snapshot(("*.safetensors",)), info.sha


def online_or_cached(ask: Callable[[], _T], cached: Callable[[], _C]) -> _T | _C:
    """What `ask` gets from the hub within seconds, or else what is in the local cache.

    Raises what `ask` raised where the cache has nothing, or the hub's answer is final.
    """
    try:
        return _within(_DEADLINE_SECONDS, ask)
    except Exception as error:
        if _explanation(error) is None or type(error).__name__ in _FINAL:
            raise
        try:
            return cached()
        except OSError:
            raise error from None


def _within(seconds: float, call: Callable[[], _T]) -> _T:
    """`call()`, or `TimeoutError` after `seconds`.

    The timeouts of an HTTP client cover one step each and looking up the host's name not at all.
    """
    outcomes: queue.SimpleQueue[Callable[[], _T]] = queue.SimpleQueue()

    def run() -> None:
        try:
            value = call()
            outcomes.put(lambda: value)
        except Exception as error:
            outcomes.put(partial(_raise, error))

    # A daemon, so that one that still waits does not keep the process from ending.
    threading.Thread(target=run, daemon=True).start()
    try:
        outcome = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError(f"no answer within {seconds} seconds") from None
    return outcome()


def _raise(error: Exception) -> NoReturn:
    raise error


def _skeleton(repo: str, revision: str | None, shards: list[str], side_files: Path) -> Path:
    """A copy of `side_files` with the shards as sparse files, of which only the headers are real."""
    directory = Path(tempfile.mkdtemp(prefix="quantkit-headers-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    (directory / HEADERS_ONLY_NAME).touch()
    for path in side_files.iterdir():
        if path.is_file() and path.suffix != ".safetensors":
            shutil.copyfile(path, directory / path.name)
    for name in shards:
        start, file_bytes = _download_header(repo, revision, name)
        with (directory / name).open("wb") as file:
            file.write(start)
            os.truncate(file.fileno(), file_bytes)
    return directory


def _download_header(repo: str, revision: str | None, name: str) -> tuple[bytes, int]:
    """The first bytes of a file in a repository, to the end of its header, and the file's size."""
    import huggingface_hub.utils

    utils: Any = huggingface_hub.utils  # its type stubs leave out what it exports
    last = 8 + MAX_HEADER_BYTES - 1
    headers = {
        **utils.build_hf_headers(),
        "Accept-Encoding": "identity",
        "Range": f"bytes=0-{last}",
    }
    url = huggingface_hub.hf_hub_url(repo, name, revision=revision)
    start, end = bytearray(), 8
    # Most of the range is never sent: the connection is closed at the end of the header.
    with utils.get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
        utils.hf_raise_for_status(response)
        # "bytes 0-99/1234" where the server honoured the range, else it sends the whole file.
        total = response.headers.get("Content-Range", "").rpartition("/")[2]
        file_bytes = int(total or response.headers.get("Content-Length", 0))
        for chunk in response.iter_bytes(2**16):
            start += chunk
            end = 8 + int.from_bytes(start[:8], "little")
            if len(start) >= min(end, last + 1):
                break
    return bytes(start[: min(end, last + 1)]), file_bytes
