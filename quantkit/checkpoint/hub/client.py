"""Wrap the HTTP client of huggingface_hub while quantkit uses it: bounded answers, with deadlines.

huggingface_hub reads answers whole, decompresses them, and waits without limit, also after a redirect. A
server could fill the memory with a megabyte of gzip, or block a command forever.
"""

import contextvars
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from huggingface_hub import constants, get_token
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import _http

from quantkit.checkpoint.hub.deadline import (
    MAX_ANSWER_BYTES,
    SLOWEST_BYTES_PER_SECOND,
    Deadline,
    fail,
    within,
)
from quantkit.files import shown

#: httpx or httpx2, depending on the version of huggingface_hub.
_HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
httpx: Any = sys.modules[_HTTP_ERROR.__module__.partition(".")[0]]

#: Seconds to connect; after that, the server counts as unreachable.
_CONNECT_SECONDS = 10.0
#: Longest wait before a retry that a server may request; beyond it the user gets an error.
_MAX_WAIT_SECONDS = 60.0
_PIECE_BYTES = 1 << 20
#: zlib's flag to detect gzip or zlib from the first bytes.
_GZIP_OR_ZLIB = 47
_ENCODINGS = ("gzip", "x-gzip", "deflate")
#: With this header, huggingface_hub leaves a download to hf_xet, which contacts any host that the server
#: names, with the token and without bounds. Without it the file comes over HTTP. Uploads use hf_xet too,
#: unless it is disabled, as `guarded` does.
_XET = "X-Xet-Hash"
#: Description of a bad answer, by the name of the exception. Others are connection errors.
_WRONG = {
    "TooManyRedirects": "redirects without an end",
    "UnsupportedProtocol": "a redirect to what is no address of HTTP",
    "InvalidURL": "a redirect to what is no address",
    "DecodingError": "bytes that cannot be decoded",
    "LocalProtocolError": "what cannot be followed",
    "CookieConflict": "cookies that contradict each other",
}

#: Most bytes of a streamed answer, such as a file being downloaded.
_stream_bytes: contextvars.ContextVar[int | None] = contextvars.ContextVar("_stream_bytes", default=None)
_mutex = threading.Lock()
#: Deadlines of the open `guarded` blocks, in all threads.
_blocks: list[float] = []
#: Whether hf_xet was disabled before the first of them.
_xet_disabled = False


class _Sent(httpx.SyncByteStream):  # type: ignore[misc]
    """Body of a request; each chunk sent extends the deadline."""

    def __init__(self, stream: Any, deadline: Deadline) -> None:
        self._stream = stream
        self._deadline = deadline

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._stream:
            # The chunk before was sent.
            yield chunk
            self._deadline.end += len(chunk) / SLOWEST_BYTES_PER_SECOND

    def close(self) -> None:
        close = getattr(self._stream, "close", None)
        if close is not None:
            close()


class _Received(httpx.SyncByteStream):  # type: ignore[misc]
    """Body of an answer, decompressed in pieces, limited to `allowed` bytes."""

    def __init__(self, stream: Any, url: str, encoded: bool) -> None:
        self._stream = stream
        self._url = url
        self._encoded = encoded
        self.allowed: int | None = None
        self.deadline: Deadline | None = None

    def __iter__(self) -> Iterator[bytes]:
        count = 0
        for piece in self._decoded() if self._encoded else self._stream:
            count += len(piece)
            if self.allowed is not None and count > self.allowed:
                fail(self._url, f"more than {self.allowed} bytes", f"at most {self.allowed}, decoded")
            if self.deadline is not None:
                self.deadline.add(len(piece))
            yield piece

    def _decoded(self) -> Iterator[bytes]:
        decoder = zlib.decompressobj(_GZIP_OR_ZLIB)
        came = False
        try:
            for chunk in self._stream:
                came = came or bool(chunk)
                rest = chunk
                while rest and not decoder.eof:
                    if piece := decoder.decompress(rest, _PIECE_BYTES):
                        yield piece
                    rest = decoder.unconsumed_tail
        except zlib.error as error:
            fail(self._url, f"bytes that cannot be decoded ({error})", "gzip, as its Content-Encoding says")
        if came and not decoder.eof:
            fail(self._url, "a part of compressed bytes", "all of them")

    def close(self) -> None:
        self._stream.close()


class _Guarded:
    """Client factory that wraps another one, with bounded answers."""

    def __init__(self, before: Callable[[], Any], seconds: float) -> None:
        self.before = before
        self.seconds = seconds

    def __call__(self) -> Any:
        client = self.before()
        hooks = client.event_hooks
        client.event_hooks = {**hooks, "response": [*hooks.get("response", ()), _check]}
        if client.timeout == httpx.Timeout(None):
            # Lets a thread end after its deadline has passed.
            client.timeout = httpx.Timeout(self.seconds * 2, connect=_CONNECT_SECONDS)
        send = client.send

        def guarded_send(request: Any, *, stream: bool = False, **rest: Any) -> Any:
            return _send(send, request, stream, Deadline(self.seconds), rest)

        client.send = guarded_send
        return client


def _send(send: Callable[..., Any], request: Any, stream: bool, deadline: Deadline, rest: Any) -> Any:
    """Send a request and return its answer within a deadline; whole and bounded unless `stream`."""
    url = str(request.url)
    # Some servers compress anyway.
    request.headers["Accept-Encoding"] = "identity"
    token, hub = get_token(), httpx.URL(constants.ENDPOINT)
    # The hub may name upload URLs on any host, and huggingface_hub adds the token.
    elsewhere = (request.url.scheme, request.url.netloc) != (hub.scheme, hub.netloc)
    if elsewhere and token and token in request.headers.get("Authorization", ""):
        del request.headers["Authorization"]
    if isinstance(request.stream, httpx.SyncByteStream):
        request.stream = _Sent(request.stream, deadline)

    def ask() -> Any:
        response = send(request, stream=True, **rest)
        if stream:
            # A stream is read piece by piece, so a server could send one byte a second.
            response.stream.deadline = Deadline(deadline.seconds)
        else:
            try:
                response.stream.allowed = MAX_ANSWER_BYTES
                response.stream.deadline = deadline
                response.read()
            finally:
                response.close()
        return response

    try:
        return within(deadline, partial(contextvars.copy_context().run, ask))
    except TimeoutError:
        fail(url, f"nothing, or too slowly, for {deadline.seconds:.0f} s", "an answer of the hub")
    except Exception as error:
        said = next((_WRONG[base.__name__] for base in type(error).__mro__ if base.__name__ in _WRONG), None)
        if said is None:
            raise
        fail(url, f"{said} ({type(error).__name__}: {shown(str(error))})", "an answer of the hub")


def _check(response: Any) -> None:
    """Bound the body of an answer before it is read, redirects included."""
    url = str(response.request.url)
    encoding = response.headers.get("Content-Encoding", "identity").strip().lower()
    encoded = encoding not in ("identity", "")
    if encoded and (encoding not in _ENCODINGS or "Range" in response.request.headers):
        fail(url, f"Content-Encoding {shown(encoding)}", "bytes as they are")
    if response.status_code in (429, 503) and (seconds := _asks_to_wait(response)) > _MAX_WAIT_SECONDS:
        fail(
            url,
            f"status {response.status_code}, to try again after {seconds:.0f} s",
            f"a wait of at most {_MAX_WAIT_SECONDS:.0f} s",
            "Run the command again then.",
        )
    if _XET in response.headers:
        del response.headers[_XET]
    body = _Received(response.stream, url, encoded)
    body.allowed = MAX_ANSWER_BYTES if response.has_redirect_location else _stream_bytes.get()
    if encoded and response.request.method != "HEAD":
        # Decompressed here, so the stated length no longer holds.
        for name in ("Content-Encoding", "Content-Length"):
            if name in response.headers:
                del response.headers[name]
    response.stream = body


def _asks_to_wait(response: Any) -> float:
    """Return the seconds that a server asks to wait."""
    after = response.headers.get("Retry-After", "").strip()
    limit = _http.parse_ratelimit_headers(response.headers)
    wait = float(after[:18]) if after.isdecimal() else 0.0
    return max(wait, float(limit.reset_in_seconds) if limit is not None else 0.0)


@contextmanager
def streams_of(nbytes: int | None) -> Iterator[None]:
    """Context manager: let this thread stream at most `nbytes` bytes of an answer."""
    token = _stream_bytes.set(nbytes)
    try:
        yield
    finally:
        _stream_bytes.reset(token)


@contextmanager
def guarded(seconds: float) -> Iterator[None]:
    """Context manager: bound huggingface_hub's answers, with `seconds` for each.

    Files come over HTTP, as hf_xet has no deadlines. A nested block changes nothing. Bytes sent and received
    extend a deadline.
    """
    global _xet_disabled
    with _mutex:
        if not _blocks:
            _xet_disabled, constants.HF_HUB_DISABLE_XET = constants.HF_HUB_DISABLE_XET, True
        _blocks.append(seconds)
        if not isinstance(_http._GLOBAL_CLIENT_FACTORY, _Guarded):
            _http.set_client_factory(_Guarded(_http._GLOBAL_CLIENT_FACTORY, seconds))
    try:
        yield
    finally:
        with _mutex:
            _blocks.remove(seconds)
            now: Any = _http._GLOBAL_CLIENT_FACTORY
            if not _blocks:
                constants.HF_HUB_DISABLE_XET = _xet_disabled
                # Another factory may have been set meanwhile.
                if isinstance(now, _Guarded):
                    _http.set_client_factory(now.before)
