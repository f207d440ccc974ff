"""Upload a verified checkpoint with its card to the hub, in one commit."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from quantkit.checkpoint.hub.answers import CONNECTION_PROBLEMS
from quantkit.checkpoint.hub.deadline import SLOWEST_BYTES_PER_SECOND, BadAnswer, Deadline, within
from quantkit.checkpoint.manifest import MANIFEST_NAME, manifest_bytes, read_manifest
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError
from quantkit.files import os_error_text, shown, size_text
from quantkit.progress import Progress
from quantkit.publish.carried import CARD_NAME
from quantkit.runtime.saved_model import file_names, is_saved
from quantkit.verification.verify import verify


@dataclass(frozen=True)
class Upload:
    """Files to upload by their name in the repository: paths, or bytes made for it.

    `verified` are the hex hashes that were compared with the manifest.
    """

    files: Mapping[str, Path | bytes]
    verified: Mapping[str, str] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file; raise `CheckpointError` for a missing one."""
        try:
            return {
                name: len(content) if isinstance(content, bytes) else content.stat().st_size
                for name, content in self.files.items()
            }
        except OSError as error:
            raise CheckpointError(
                f"cannot examine {error.filename}: {os_error_text(error)}. {_LEAVE_ALONE}"
            ) from error


def prepare(directory: Path, card: Mapping[str, bytes], progress: Progress | None = None) -> Upload:
    """Prepare the upload: files of the checkpoint, its manifest, and the `card` with its plots by name.

    The card replaces a README.md of the checkpoint, a copy of the source's. The uploaded manifest does not
    list it, so that `verify` passes on a download of the repository, and has no paths from the directory.
    Every file is compared with its hash first, if there is a manifest. Raises `CheckpointError` if a check of
    `verify` fails.
    """
    checks = verify(directory, reload=False, progress=progress)
    problems = [problem for check in checks for problem in check.problems]
    if problems:
        raise CheckpointError(
            f"{directory} is not uploaded: {problems[0]} ({len(problems)} problems). `quantkit verify` "
            "shows all; quantize the model again."
        )
    files: dict[str, Path | bytes] = {name: directory / name for name in file_names(directory)}
    if taken := files.keys() & card.keys() - {CARD_NAME}:
        raise UsageError(
            f"{sorted(taken)[0]} is a file of the card and of the checkpoint. Rename it in the card."
        )
    if MANIFEST_NAME in files:
        manifest = read_manifest(directory)
        kept = {name: entry for name, entry in manifest["files"].items() if name not in card}
        # Paths on this machine tell others nothing but the names of its folders.
        public = {**manifest, "files": kept, "relative_paths": {}}
        if public != {"relative_paths": {}, **manifest}:
            files[MANIFEST_NAME] = manifest_bytes(public)
    return Upload({**files, **card}, _hashes(directory))


def _hashes(directory: Path) -> dict[str, str]:
    if is_saved(directory):
        return {}
    return {name: entry["sha256"] for name, entry in read_manifest(directory)["files"].items()}


def push(
    upload: Upload,
    repo: str,
    *,
    private: bool = False,
    revision: str | None = None,
    message: str | None = None,
    saying: Callable[[str], None] = lambda _: None,
) -> str:
    """Create the repository if needed, and commit all files at once; return the URL of the commit.

    `revision` is a branch, created if needed. `saying` is called with the next step before the hub is waited
    for. Raises `UsageError` without write access to the repository, and `EnvironmentProblem` without a token
    or a network. Raises `CheckpointError` for a file that changed since it was verified.

    Each answer has a deadline, extended by the bytes sent: `ANSWER_SECONDS`, and for the commit
    `COMMIT_SECONDS`.
    """
    from huggingface_hub import HfApi

    from quantkit.checkpoint.hub.client import guarded

    operations = [
        _operation(name, content, upload.verified.get(name)) for name, content in upload.files.items()
    ]
    api = HfApi()
    size = sum(upload.sizes.values())
    seconds = 2 * COMMIT_SECONDS + size / SLOWEST_BYTES_PER_SECOND
    with _explained(repo, _NOTHING), guarded(ANSWER_SECONDS):
        saying(f"creating {repo} on {api.endpoint}, if it is not there")
        created = str(_soon(lambda: api.create_repo(repo, private=private or None, exist_ok=True).repo_id))
        if created != repo and created.partition("/")[2] != repo:
            raise EnvironmentProblem(
                f"{repo}: the hub answered that {shown(created)} was created; expected {repo}. {_NOTHING} "
                f"{_CHECK}"
            )
        if revision is not None:
            _soon(lambda: api.create_branch(created, branch=revision, exist_ok=True))
        saying(f"uploading {len(operations)} files, {size_text(size)}")
        # Large files only; the commit contains the others.
        within(Deadline(seconds), partial(api.preupload_lfs_files, created, operations, revision=revision))
    commit = partial(
        api.create_commit,
        created,
        operations,
        commit_message=message or "Upload a model quantized with quantkit",
        revision=revision,
    )
    made = f"The commit may have been made: look at {api.endpoint}/{created}/commits."
    with _explained(repo, made), guarded(COMMIT_SECONDS):
        saying("committing")
        done = within(Deadline(seconds), commit)
    address = str(done.commit_url)
    return address if _ADDRESS.fullmatch(address) else f"{api.endpoint}/{created}/commits"


def _operation(name: str, content: Path | bytes, verified: str | None) -> Any:
    """Return the operation that adds a file `name` with this `content`, or that of a path, to a commit.

    Raises `CheckpointError` if its hash is not `verified`, unless that is None.
    """
    from huggingface_hub import CommitOperationAdd

    try:
        added = CommitOperationAdd(name, content)
        # Some versions of huggingface_hub compute the hash on access.
        found = added.upload_info.sha256.hex()
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{name} is not uploaded: {error}. {_LEAVE_ALONE}") from error
    if isinstance(content, Path) and verified not in (None, found):
        raise CheckpointError(f"{content} has changed since it was verified. {_LEAVE_ALONE}")
    return added


_LEAVE_ALONE = "Leave the checkpoint alone while it is uploaded, and start again."
#: Seconds for an answer, and for the answer to a commit, before which the hub checks every file.
ANSWER_SECONDS = 20.0
COMMIT_SECONDS = 60.0
_ADDRESS = re.compile(r"https?://[!-~]{1,500}")
_NOTHING = "Nothing was committed."
_CHECK = "Check HF_ENDPOINT and the proxy settings; the same command starts again."
_T = TypeVar("_T")


def _soon(call: Callable[[], _T]) -> _T:
    # One second more than the client waits for a request, because the client's error says more.
    return within(Deadline(ANSWER_SECONDS + 1), call)


_NETWORK = "Check the network, HF_ENDPOINT and the proxy settings; the same command starts again."
#: By the name of the exception class or of a base class: error to raise, description, remedy.
_EXPLANATIONS: dict[str, tuple[type[QuantkitError], str, str]] = {
    "HFValidationError": (UsageError, "this is no repository id", "Give one such as org/name."),
    "OfflineModeIsEnabled": (EnvironmentProblem, "HF_HUB_OFFLINE is set", "Unset it."),
    "LocalTokenNotFoundError": (EnvironmentProblem, "there is no token", "Log in with `hf auth login`."),
    **{name: (EnvironmentProblem, problem, _NETWORK) for name, problem in CONNECTION_PROBLEMS.items()},
    "OSError": (CheckpointError, "a file cannot be read", "Check the disk; the same command starts again."),
}
#: Exceptions for a missing answer, after which the request may have been executed.
_CONNECTED = ("TimeoutException", "TimeoutError", "NetworkError", "RemoteProtocolError")
#: Any other exception, after which a commit may exist.
_UNUSABLE = (EnvironmentProblem, "the hub's answer cannot be used", _CHECK, False)
#: By the status of an answer.
_STATUS: dict[int, tuple[type[QuantkitError], str, str]] = {
    401: (EnvironmentProblem, "the hub does not know the token", "Log in with `hf auth login`."),
    403: (UsageError, "the token may not write there", "Use a token with write access to it."),
    404: (UsageError, "the hub has no such place for this token", "Check the name and the token."),
}


@contextmanager
def _explained(repo: str, state: str) -> Iterator[None]:
    """Context manager: raise errors of huggingface_hub as a `QuantkitError` about `repo`.

    `state` is the text on the state of the commit, unless the error proves that there is no commit.
    """
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        # An error while sending a file is the cause of a plain RuntimeError, which names the file.
        chain = [error] if error.__cause__ is None or _explanation(error) else [error, error.__cause__]
        if isinstance(chain[-1], BadAnswer):
            raise EnvironmentProblem(f"{repo}: {chain[-1]} {state}") from error
        if isinstance(error, QuantkitError):
            raise
        kind, problem, remedy, refused = _explanation(chain[-1]) or _UNUSABLE
        detail = "; ".join(f"{type(one).__name__}: {' '.join(str(one).split())[:300]}" for one in chain)
        raise kind(f"{repo}: {problem} ({detail}). {_NOTHING if refused else state} {remedy}") from error


def _explanation(error: BaseException) -> tuple[type[QuantkitError], str, str, bool] | None:
    """Return the error to raise, its description, the remedy, and True if nothing can have been committed.

    None for an `error` that is no answer of the hub and no failure of the connection.
    """
    response: Any = getattr(error, "response", None)
    status = getattr(response, "status_code", None)
    if status in _STATUS:
        return *_STATUS[status], True
    if status is not None and status >= 400:
        return EnvironmentProblem, "the hub answered with an error", "Try again later.", status < 500
    names = [base.__name__ for base in type(error).__mro__]
    for name in names:
        if name in _EXPLANATIONS:
            return *_EXPLANATIONS[name], name not in _CONNECTED
    return None
