"""A hub in place of the network: answers by path, which tests and the fuzzer change."""

import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import huggingface_hub
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils._http import default_client_factory

# httpx or httpx2, whichever this huggingface_hub is built on.
_HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
httpx: Any = importlib.import_module(_HTTP_ERROR.__module__.partition(".")[0])
COMMIT = "1" * 40


@dataclass
class Answer:
    """What a server answers: status, headers, body; `error` is raised instead."""

    body: bytes = b""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    error: Exception | None = None
    stream: Any = None


Answers = dict[str, Answer]
Change = Callable[[Answers], object]

LISTING = "/api/models/org/name"


def file_path(name: str) -> str:
    """Where a file is asked for."""
    return f"/org/name/resolve/{COMMIT}/{name}"


def answers_of(files: Mapping[str, bytes]) -> Answers:
    """What a hub answers that has these files in `org/name`."""
    listing = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in files]}
    found = {LISTING: Answer(json.dumps(listing).encode())}
    for name, content in files.items():
        found[file_path(name)] = Answer(content, headers={"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
    return found


@contextmanager
def answering(answers: Answers) -> Iterator[list[Any]]:
    """Have huggingface_hub ask `answers`, whatever the host; gives the requests."""
    asked: list[Any] = []

    def handle(request: Any) -> Any:
        asked.append(request)
        answer = answers.get(request.url.path, Answer(b"{}", 404, {"X-Error-Code": "RepoNotFound"}))
        if answer.error is not None:
            raise answer.error
        body, status, headers = answer.body, answer.status, dict(answer.headers)
        wanted = request.headers.get("Range")
        if wanted and status == 200 and "Content-Range" not in headers and not answer.stream:
            last = int(wanted.partition("-")[2])
            headers["Content-Range"] = f"bytes 0-{min(last, len(body) - 1)}/{len(body)}"
            body, status = body[: last + 1], 206
        if request.method == "HEAD":
            headers, body = {"Content-Length": str(len(body)), **headers}, b""
        if answer.stream is not None:
            return httpx.Response(status, headers=headers, stream=answer.stream)
        raw = [(name.encode(), value.encode("utf-8", "replace")) for name, value in headers.items()]
        # As a stream, which is decoded as it is read.
        return httpx.Response(status, headers=raw, stream=httpx.ByteStream(body))

    # `set_client_factory` closes the client that was there.
    huggingface_hub.set_client_factory(
        lambda: httpx.Client(transport=httpx.MockTransport(handle), follow_redirects=True)
    )
    try:
        yield asked
    finally:
        huggingface_hub.set_client_factory(default_client_factory)
