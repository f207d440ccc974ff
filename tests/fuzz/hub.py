"""Answers of a hub as a fuzz target: bodies, headers, status and types of JSON, for a model and its weights.

A case is a JSON object: the path of each request, and the status, headers and body of the answer to it. No
socket is opened: huggingface_hub asks a client that answers from the case.
"""

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from huggingface_hub.utils import disable_progress_bars
from safetensors.torch import save

from quantkit.checkpoint.hub import repository
from quantkit.checkpoint.safetensors_header import read_header
from quantkit.errors import CheckpointError, QuantkitError

from ..support.hub_answers import LISTING, Answer, Answers, answering, answers_of, file_path
from .mutate import Pairs, dump, mutate_bytes, mutate_json, mutate_safetensors, parse

_WEIGHTS = "model.safetensors"
_FILES = {
    "config.json": b'{"model_type": "llama", "hidden_size": 4}',
    "generation_config.json": b'{"eos_token_id": 2}',
    "vocab.txt": b"a\nb\n",
    "README.md": b"---\nlicense: mit\n---\n",
}
_PAGES = (
    b"<!DOCTYPE html><html>Log in",
    b"<html></html>",
    b"",
    b"null",
    b"[]",
    b"5",
    b"version https://git-lfs",
)
_NAMES = (
    *(
        "C:x.json",
        "..",
        "../x.json",
        "/etc/x.json",
        "a\\b.json",
        "a\0.json",
        "con.json",
        "nul.txt",
        "x.json.",
    ),
    *("a//b.json", ".json", "", " .json", "model-*.safetensors", "[a].safetensors", "\ud800.json", "x" * 300),
    *("é.json", "\x1b[31m.json", "aux", "config.json/", "./config.json", "CONFIG.json", "a.json\n"),
)
_RANGES = (
    *(
        "bytes 0-99/*",
        "bytes 0-99/-1",
        "bytes 0-99/9223372036854775808",
        "bytes 0-99/1e3",
        "bytes 5-9/99",
        "",
    ),
    *(
        "bytes */9",
        "items 0-1/2",
        "bytes 0-99/99999999999999999999",
        "bytes 0-99/8796093022208",
        "bytes 0-9/100",
    ),
)
_HEADERS: dict[str, tuple[str, ...]] = {
    "Content-Range": _RANGES,
    "Content-Length": ("-1", "0", "x", "9223372036854775808", "1e9", "8", "99999999999999999999", " 7"),
    "Content-Encoding": ("gzip", "br", "zstd", "deflate", "identity", "x", "gzip, gzip", "GZIP"),
    "Location": ("/x", "http://[::1", "//other/x", LISTING, "", "\x7f", "http://a:99999/", "http://\u2028/"),
    "ETag": ("", '"', "../../x", "W/x", '"a/b"', "x" * 300, "\0"),
    "X-Repo-Commit": ("", "main", "../../../x", "2" * 40, "x" * 300),
    "X-Linked-Size": ("-1", "x", "9223372036854775808", "", "0"),
    "X-Xet-Hash": ("a" * 64, "x", ""),
    "X-Error-Code": ("GatedRepo", "RepoNotFound", "RevisionNotFound", "EntryNotFound", "x"),
    "X-Error-Message": ("\x1b[31m", "x" * 20_000, "Access to this resource is disabled."),
    "Content-Type": ("text/html; charset=nonsense", "application/json; charset=utf-16", "\x7f"),
}
_STATUS = (
    100,
    199,
    200,
    201,
    204,
    206,
    301,
    302,
    304,
    307,
    400,
    401,
    403,
    404,
    408,
    416,
    418,
    429,
    500,
    503,
    599,
    999,
)


@cache
def hub_cases() -> tuple[bytes, ...]:
    """A repository with one file of weights, asked for headers only and whole."""
    weights = save({"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2, dtype=torch.bfloat16)})
    answers = answers_of({**_FILES, _WEIGHTS: weights})
    disable_progress_bars()
    return tuple(_pack(answers, whole) for whole in (False, False, False, True))


def _pack(answers: Answers, whole: bool) -> bytes:
    rows = [
        [path, one.status, [list(item) for item in one.headers.items()], one.body.decode("latin-1")]
        for path, one in answers.items()
    ]
    return dump(Pairs([("whole", whole), ("answers", rows)]))


def _unpack(case: bytes) -> tuple[Answers, bool]:
    found = dict(parse(case))
    return {
        path: Answer(body.encode("latin-1"), status, dict(headers))
        for path, status, headers, body in found["answers"]
    }, found["whole"]


def mutate_hub(case: bytes, random: Random) -> bytes:
    """One or two answers changed: in status, headers, or body."""
    answers, whole = _unpack(case)
    for _ in range(random.choice((1, 1, 2))):
        path = random.choice((LISTING, LISTING, file_path(_WEIGHTS), *answers))
        one = answers[path]
        kind = random.randrange(10)
        if kind == 0:
            one.status = random.choice(_STATUS)
        elif kind in (1, 2):
            name = random.choice(list(_HEADERS))
            one.headers[name] = random.choice(_HEADERS[name])
            if name == "Content-Range" and random.randrange(2):
                one.status, one.body = 206, one.body[:100]
            if name == "X-Xet-Hash":
                one.headers["X-Xet-Refresh-Route"] = "https://other/token"
            if name == "Location":
                one.status = random.choice((301, 302, 303, 307, 308, 300, 200))
        elif kind == 3:
            one.body = random.choice(_PAGES)
        elif kind == 4 and path == LISTING:
            one.body = _with_name(one.body, random.choice(_NAMES), random)
        elif kind == 5 and len(answers) > 1:
            other = random.choice(list(answers))
            answers[path], answers[other] = answers[other], one
        elif path.endswith(".safetensors"):
            one.body = mutate_safetensors(one.body, random)
        elif kind == 6:
            one.body = mutate_bytes(one.body, random)
        else:
            one.body = mutate_json(one.body, random)
    return _pack(answers, whole)


def _with_name(body: bytes, name: str, random: Random) -> bytes:
    """A listing in which a file has another name."""
    try:
        found: Any = json.loads(body)
        random.choice(found["siblings"])["rfilename"] = name
    except (ValueError, LookupError, TypeError, RecursionError):
        return body
    return json.dumps(found).encode()


def check_hub(case: bytes, directory: Path) -> None:
    """What `locate` makes of the answers: a directory of files as they were sent, or words."""
    answers, whole = _unpack(case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "hub"))
        # What huggingface_hub notes of itself.
        patch.setattr(constants, "AGENT_HARNESSES_PATH", str(directory / "harnesses.json"), raising=False)
        # With it the file would come by other ways than HTTP.
        patch.setattr("huggingface_hub.file_download.is_xet_available", lambda: True)
        patch.setattr(tempfile, "tempdir", str(directory))
        # That is tried out in a directory which is then removed.
        patch.setattr("huggingface_hub.file_download.are_symlinks_supported", lambda *_: True)
        # Between what is tried again.
        patch.setattr("time.sleep", lambda _: None)
        # So that nobody looks for one in the user's home.
        patch.setenv("HF_TOKEN", "hf_fuzz")
        _check(answers, whole, directory)


def _check(answers: Answers, whole: bool, directory: Path) -> None:
    try:
        with answering(answers) as asked:
            found = repository.locate("org/name", headers_only=not whole)
            strangers = [request for request in asked if request.url.host != "huggingface.co"]
            assert all("authorization" not in request.headers for request in strangers), "a token was sent"
    except QuantkitError as error:
        assert "org/name" in str(error) or "huggingface.co" in str(error), "which repository?"
        raise
    assert found.commit is not None and len(found.commit) == 40
    for path in found.directory.iterdir():
        assert os.path.realpath(path).startswith(os.path.realpath(directory) + os.sep), path
        sent = answers.get(f"/org/name/resolve/{found.commit}/{path.name}")
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        as_sent = (
            sent is not None
            and sent.status == 200
            and not {"Content-Encoding", "X-Linked-Size"} & {*sent.headers}
        )
        if sent is not None and as_sent and (path.suffix != ".safetensors" or whole):
            assert path.read_bytes() == sent.body, path.name
    header = found.directory / _WEIGHTS
    if not header.is_file():
        raise CheckpointError(f"{found.directory}: the repository has weights of another name.")
    read_header(header)
