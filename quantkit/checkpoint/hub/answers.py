"""Query the hub over HTTP and check every answer before it is used.

A server may be a login page, a broken mirror or hostile. It may send HTML with status 200, truncated JSON,
wrong types, invalid sizes, names that lead elsewhere, or one byte a second. `BadAnswer` names the URL, the
answer, and the remedy.
"""

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from quantkit.checkpoint.hub.content import check_content, etag_of
from quantkit.checkpoint.hub.deadline import SLOWEST_BYTES_PER_SECOND, Deadline, fail, within
from quantkit.checkpoint.safetensors_header import MAX_HEADER_BYTES
from quantkit.errors import QuantkitError
from quantkit.files import parse_json, shown

MAX_LISTING_BYTES = 32 << 20
MAX_SMALL_FILE_BYTES = 256 << 20
#: Largest believable file, beyond the limit of any file system.
MAX_FILE_BYTES = 1 << 43
_MAX_FILES = 1_000_000
_MAX_NAME_CHARS = 1024

#: Seconds for the first answer, tried once; and for each later file, plus the time for its bytes.
FIRST_SECONDS = 4.0
FILE_SECONDS = 20.0
#: Seconds for one step of a connection.
_STEP_SECONDS = 10.0

#: A commit, as the hub names it.
COMMIT = re.compile(r"[0-9a-f]{40}")
_SIZE = re.compile(r"[0-9]{1,19}")
_RANGE = re.compile(r"bytes\s+0-[0-9]{1,19}/([0-9]{1,19})", re.IGNORECASE)
#: Invalid file names: absolute, with a drive, or with folder separators of other systems.
_BAD_NAME = re.compile(r"/|[A-Za-z]:|.*[\\\x00-\x1f\x7f\ud800-\udfff]", re.DOTALL)
#: Device names on Windows, with any suffix.
_RESERVED = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)
#: Exceptions whose class or status is explained by the caller.
_EXPLAINED = ("HfHubHTTPError", "OfflineModeIsEnabled", "ConnectError", "ConnectTimeout", "ProxyError")
#: Description by the name of an HTTP library's exception or of a base class, closest first.
CONNECTION_PROBLEMS = {
    "ConnectError": "the hub cannot be reached",
    "ConnectTimeout": "the hub cannot be reached",
    "ProxyError": "the proxy does not lead to the hub",
    "TimeoutException": "the hub does not answer",
    "TimeoutError": "the hub does not answer",
    "NetworkError": "the connection to the hub broke",
    "RemoteProtocolError": "the hub's answer is no HTTP or was cut",
}


def _quoted(text: str) -> str:
    return "".join(c if re.fullmatch(r"[\w.~-]", c, re.ASCII) else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    return "".join(f"%{byte:02X}" for byte in character.encode())


@dataclass(frozen=True)
class Repository:
    """Repository of the hub, called `name`, OWNER/NAME; `kind` is "model" or "dataset"."""

    name: str
    kind: str = "model"

    def api_url(self, revision: str | None) -> str:
        """Return the URL of the repository's metadata."""
        from huggingface_hub import constants

        # Quoted, as branch names may contain a slash.
        at = "" if revision is None else f"/revision/{_quoted(revision)}"
        return f"{constants.ENDPOINT}/api/{self.kind}s/{self.name}{at}"

    def file_url(self, name: str, revision: str | None) -> str:
        """Return the URL of a file."""
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.name, name, repo_type=self.kind, revision=revision)


@dataclass(frozen=True)
class Listing:
    """Files of a repository at a commit, with their sizes where the hub gives them."""

    commit: str
    files: Mapping[str, int | None]


def read_listing(repository: Repository, revision: str | None, *, sizes: bool = False) -> Listing:
    """List the files of a repository, within `FIRST_SECONDS`; with `sizes`, also their sizes.

    Raises `BadAnswer` for an invalid listing, and `TimeoutError` without an answer. Errors of huggingface_hub
    are raised for repositories that are missing or not public.
    """
    url = repository.api_url(revision)
    asked = f"{url}?blobs=true" if sizes else url
    data = _read(asked, MAX_LISTING_BYTES, Deadline(FIRST_SECONDS))
    try:
        answer = parse_json(data, "the answer")
    except ValueError as error:
        fail(
            url,
            f"{_excerpt(data)}, and {str(error).partition('; expected')[0]}",
            "the files of a repository as JSON",
        )
    commit, files = answer.get("sha"), answer.get("siblings")
    if not isinstance(commit, str) or not COMMIT.fullmatch(commit):
        fail(url, f"the commit {shown(commit)}", "40 hex digits as sha")
    if not isinstance(files, list) or len(files) > _MAX_FILES:
        fail(url, f"the files {shown(files)}", f"a list of at most {_MAX_FILES} as siblings")
    return Listing(commit, dict(_file(url, one) for one in files))


def _file(url: str, entry: object) -> tuple[str, int | None]:
    """Return the name and size of a file in a listing."""
    name, size = (entry.get("rfilename"), entry.get("size")) if isinstance(entry, dict) else (None, None)
    if not isinstance(name, str):
        fail(url, f"the file {shown(entry)}", "a name as rfilename")
    parts = name.split("/")
    if _BAD_NAME.match(name) or not 0 < len(name) <= _MAX_NAME_CHARS or {"", ".", ".."} & set(parts):
        fail(url, f"the file name {shown(name)}", "names of files in the repository")
    if size is not None and (type(size) is not int or not 0 <= size < 1 << 63):
        fail(url, f"the size {shown(size)} of {shown(name)}", "a number of bytes")
    return name, size


def check_local_name(url: str, name: str) -> None:
    """Raise `BadAnswer` for a name that a file of a directory cannot have on every system."""
    if _RESERVED.fullmatch(name) or name.endswith((".", " ")) or len(name.encode()) > 200:
        fail(url, f"the file name {shown(name)}", "one that files have on all systems")


def read_file(repository: Repository, name: str, commit: str) -> bytes:
    """Read a small file of a repository; raise `BadAnswer` if it is slow, truncated, or a proxy's page.

    Also raised if its hash is not the one that the hub states.
    """
    url = repository.file_url(name, commit)
    etags: list[str | None] = []

    def check(response: Any) -> None:
        etags.append(etag_of(one.headers for one in (*response.history, response)))

    data = _read(url, MAX_SMALL_FILE_BYTES, Deadline(FILE_SECONDS), check=check)
    if why := why_not(name, data):
        fail(url, f"{_excerpt(data)}, which is {why}", f"the file {name}")
    check_content(url, etags[-1], len(data), (data,))
    return data


def why_not(name: str, data: bytes) -> str | None:
    """Return why `data` cannot be a file called `name`; None if it may be."""
    start = data[:64].removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if start.startswith((b"<!doctype html", b"<html")) and not name.endswith(".md"):
        return "an HTML page"
    if name.endswith(".json"):
        try:
            found = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            return f"no JSON ({' '.join(str(error).split())[:100]})"
        if not isinstance(found, dict | list):
            return "no JSON object"
    return None


def read_start(repository: Repository, name: str, commit: str) -> tuple[bytes, int]:
    """Read the first bytes of a safetensors file up to the end of its header, and return the file size."""
    url = repository.file_url(name, commit)
    last = 8 + MAX_HEADER_BYTES - 1
    found: list[int] = []

    def enough(data: bytearray) -> bool:
        return len(data) >= max(8, min(8 + int.from_bytes(data[:8], "little"), last + 1))

    def check(response: Any) -> None:
        found.append(_file_size(url, response))

    headers = {"Range": f"bytes=0-{last}"}
    # Most of the range is never sent: the connection is closed at the end of the header.
    data = _read(url, last + 1, Deadline(FILE_SECONDS), headers, check, enough)
    end = min(8 + int.from_bytes(data[:8], "little"), last + 1)
    if len(data) > found[0]:
        fail(url, f"{len(data)} bytes of a file of {found[0]}", "a part of the file")
    return data[:end], found[0]


def _file_size(url: str, response: Any) -> int:
    """Return the size of a file from the headers of an answer with its first bytes."""
    if response.headers.get("Content-Encoding", "identity").lower() != "identity":
        fail(url, f"Content-Encoding {shown(response.headers['Content-Encoding'])}", "bytes as they are")
    if response.status_code == 206:
        text = response.headers.get("Content-Range")
        size = _RANGE.fullmatch(text or "")
        what, number = f"Content-Range {shown(text)}", None if size is None else size[1]
    else:
        text = response.headers.get("Content-Length")
        what, number = f"Content-Length {shown(text)}", text if _SIZE.fullmatch(text or "") else None
    if number is None or not 8 <= int(number) <= MAX_FILE_BYTES:
        fail(
            url,
            what,
            f"the size of the file, at most {MAX_FILE_BYTES} bytes",
            "Download the checkpoint with `hf download` and give its directory.",
        )
    return int(number)


def _excerpt(data: bytes) -> str:
    return shown(data[:60].decode("utf-8", "replace")) if data else "nothing"


def _read(
    url: str,
    allowed: int,
    deadline: Deadline,
    headers: Mapping[str, str] | None = None,
    check: Callable[[Any], None] | None = None,
    enough: Callable[[bytearray], bool] | None = None,
) -> bytes:
    """Read the body of the answer of `url`, at most `allowed` bytes, or until its start is `enough`.

    `headers` are sent, and `check` is called with the answer before its body is read.
    """
    try:
        call = partial(_ask, url, allowed, deadline, headers or {}, check, enough)
        return within(deadline, call)
    except TimeoutError:
        if not deadline.received and deadline.end - deadline.began <= FIRST_SECONDS:
            raise
        seconds = time.monotonic() - deadline.began
        fail(
            url,
            f"{deadline.received} bytes in {seconds:.0f} s",
            f"an answer within {FILE_SECONDS:.0f} s, or {SLOWEST_BYTES_PER_SECOND} bytes a second",
            "Check the network and the proxy settings, and run the command again.",
        )


def _ask(
    url: str,
    allowed: int,
    deadline: Deadline,
    headers: Mapping[str, str],
    check: Callable[[Any], None] | None,
    enough: Callable[[bytearray], bool] | None,
) -> bytes:
    import huggingface_hub.utils

    from quantkit.checkpoint.hub.client import guarded

    utils: Any = huggingface_hub.utils  # Its type stubs omit what it exports.
    asked = {**utils.build_hf_headers(), "Accept-Encoding": "identity", **headers}
    data = bytearray()
    with (
        guarded(FILE_SECONDS),
        _answering(url),
        utils.get_session().stream("GET", url, headers=asked, timeout=_STEP_SECONDS) as response,
    ):
        utils.hf_raise_for_status(response)
        if response.status_code not in ((200, 206) if "Range" in headers else (200,)):
            fail(url, f"status {response.status_code}", "status 200 and the whole file")
        if response.headers.get("Content-Encoding", "identity").lower() not in (
            "identity",
            "gzip",
            "deflate",
        ):
            fail(url, f"Content-Encoding {shown(response.headers['Content-Encoding'])}", "bytes as they are")
        if check is not None:
            check(response)
        for chunk in response.iter_bytes():
            data += chunk
            deadline.add(len(chunk))
            if enough is not None and enough(data):
                return bytes(data)
            if len(data) > allowed:
                fail(url, f"more than {allowed} bytes", "less")
    return bytes(data)


@contextmanager
def _answering(url: str) -> Iterator[None]:
    """Context manager: raise HTTP errors about malformed answers as `BadAnswer`."""
    try:
        yield
    except (QuantkitError, TimeoutError):
        raise
    except Exception as error:
        if {base.__name__ for base in type(error).__mro__} & set(_EXPLAINED):
            raise
        if "TimeoutException" in {base.__name__ for base in type(error).__mro__}:
            fail(url, f"nothing for {_STEP_SECONDS:.0f} s", "an answer of the hub")
        text = " ".join(str(error).split())
        fail(url, f"what is no HTTP ({type(error).__name__}: {text[:200]})", "an answer of the hub")
