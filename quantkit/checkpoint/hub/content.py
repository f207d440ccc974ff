"""Compare a downloaded file with the hash that the hub states."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from quantkit.checkpoint.hub.deadline import fail

_REMEDY = (
    "Nothing of it was kept. Run the command again; if that does not help, a proxy or mirror changes files: "
    "check HF_ENDPOINT and the proxy settings."
)
_SHA256_DIGITS, _SHA1_DIGITS = 64, 40


def check_content(url: str, etag: str | None, nbytes: int, pieces: Iterable[bytes]) -> None:
    """Compare the `pieces` of a file of `nbytes` bytes with its `etag`; raise `BadAnswer` if they differ.

    The hub states the SHA-256 of large files, and git's SHA-1 of others. Mirrors state the plain SHA-1. An
    ETag of another length is no known hash, and nothing is compared.
    """
    digits = len(etag or "")
    if etag is None or digits not in (_SHA256_DIGITS, _SHA1_DIGITS) or set(etag) - set("0123456789abcdef"):
        return
    if digits == _SHA256_DIGITS:
        name, hashes = "SHA-256", [hashlib.sha256()]
    else:
        git = hashlib.sha1(b"blob %d\0" % nbytes, usedforsecurity=False)
        name, hashes = "SHA-1 of git", [git, hashlib.sha1(usedforsecurity=False)]
    for piece in pieces:
        for one in hashes:
            one.update(piece)
    found = [one.hexdigest() for one in hashes]
    if etag not in found:
        fail(url, f"bytes with the {name} {found[0]}", f"{etag}, as its ETag says", _REMEDY)


def etag_of(headers: Iterable[Mapping[str, Any]]) -> str | None:
    """Return the ETag of a file from the headers of all answers, redirects included.

    Only answers of the hub name a commit; its storage hosts have ETags of their own. None if no answer has
    both.
    """
    etag = None
    for one in headers:
        if "X-Repo-Commit" in one:
            etag = one.get("X-Linked-Etag") or one.get("ETag") or etag
    return None if etag is None else etag.removeprefix("W/").strip('"')
