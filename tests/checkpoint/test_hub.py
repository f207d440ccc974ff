"""Resolving directories and hub ids, with a replaced hub, a fake hub, and no hub at all."""

import errno
import gzip
import hashlib
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import set_client_factory
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import get_session
from huggingface_hub.utils._http import default_client_factory
from safetensors.torch import save

from quantkit.checkpoint.hub import answers as hub_answers
from quantkit.checkpoint.hub import cache as hub_cache
from quantkit.checkpoint.hub import repository as hub
from quantkit.checkpoint.hub.client import guarded
from quantkit.checkpoint.hub.repository import locate, resolve
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError

from ..support.hub_answers import COMMIT, LISTING, Answer, answering, answers_of, file_path, httpx

CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = save({"a": torch.arange(300_000.0), "b": torch.ones(2)})
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "evil.py": b"raise SystemExit"}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    return tmp_path / "hub"


def test_local_directory_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert resolve(tmp_path) == tmp_path
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"
    with pytest.raises(UsageError, match="revision 'main' was given for the local directory"):
        resolve(tmp_path, revision="main")


PATHS = ["./no", "../no", "/no/such", "~/no", "a/b/c", "a/", "", "a b", "a..b/c", "org/.name", "org/no.gguf"]


@pytest.mark.parametrize("source", [*PATHS, Path("org/name")])
def test_missing_path_is_a_usage_error(source: str | Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(source)
    assert str(caught.value) == (
        f"{str(source)!r} is no directory; expected a checkpoint directory or a hub id such as "
        "org/name, or a .gguf file. Check the path."
    )


def test_downloads_only_what_is_needed(cache: Path) -> None:
    more = {"LICENSE": b"free", "README.md": b"---\nlicense: mit\n---\n", "consolidated.json": b"{}"}
    answers = answers_of({**FILES, **more, "onnx/config.json": b"{}", "consolidated.safetensors": WEIGHTS})
    with answering(answers) as asked:
        found = locate("org/name")
        names = {request.url.path.rpartition("/")[2] for request in asked if "resolve" in request.url.path}
        assert names == {"config.json", "model.safetensors", "LICENSE", "README.md"}
        assert (found.kind, found.commit, found.name) == ("hub", COMMIT, "org/name")
        assert Checkpoint.open(found.directory).read("a", 7, 9).tolist() == [7, 8]
        asked.clear()
        # The second time the cache has all but the news.
        assert locate("org/name", headers_only=True).commit == COMMIT
        assert [request.url.path for request in asked] == [LISTING, file_path("model.safetensors")]
    assert (cache / "models--org--name" / "refs" / "main").read_text() == COMMIT


@pytest.mark.parametrize(
    "files", [[], ["pytorch_model.bin"], ["consolidated.safetensors"], ["unet/model.safetensors"]]
)
def test_refuses_repository_without_safetensors(cache: Path, files: list[str]) -> None:
    with answering(answers_of(dict.fromkeys(files, b""))) as asked, pytest.raises(CheckpointError) as caught:
        resolve("org/name")
    assert str(caught.value) == (
        f"org/name: the repository has no safetensors among its {len(files)} files; expected "
        "model.safetensors or shards. Convert it at "
        "https://huggingface.co/spaces/safetensors/convert or choose another repository."
    )
    assert len(asked) == 1


def test_a_repository_of_nothing_but_weights_lacks_its_config(cache: Path) -> None:
    with answering(answers_of({"model.safetensors": WEIGHTS})):
        for headers_only in (True, False):
            with pytest.raises(CheckpointError, match=r"config\.json"):
                Checkpoint.open(resolve("org/name", headers_only=headers_only))


def http_error(kind: type[HfHubHTTPError], status: int) -> HfHubHTTPError:
    request = httpx.Request("GET", "https://huggingface.co/api/models/org/name")
    return kind("first line\nsecond line", response=httpx.Response(status, request=request))


ERRORS: list[tuple[Exception, type[QuantkitError], str, str]] = [
    (
        http_error(GatedRepoError, 403),
        CheckpointError,
        "access to the repository is gated",
        "Ask for access on its page, then `hf auth login`.",
    ),
    (
        http_error(RepositoryNotFoundError, 401),
        CheckpointError,
        "the hub has no such repository, or it is private; no such local directory either",
        "Check the name or path; for a private repository `hf auth login`.",
    ),
    (
        http_error(RevisionNotFoundError, 404),
        CheckpointError,
        "the repository has no such revision",
        "Check the branch, tag or commit.",
    ),
    (
        http_error(HfHubHTTPError, 503),
        EnvironmentProblem,
        "the hub answered with an error",
        "Try again later, or give a local directory.",
    ),
    (
        OfflineModeIsEnabled("first line"),
        EnvironmentProblem,
        "HF_HUB_OFFLINE is set and the checkpoint is not complete in the local cache",
        "Unset HF_HUB_OFFLINE, or give a local directory.",
    ),
    (
        httpx.ConnectTimeout("first line"),
        EnvironmentProblem,
        "the hub cannot be reached and the checkpoint is not complete in the local cache",
        "Check the network, HF_ENDPOINT and the proxy settings, or give a local directory.",
    ),
]


@pytest.mark.parametrize(("error", "kind", "problem", "remedy"), ERRORS)
def test_explains_hub_errors(
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[QuantkitError],
    problem: str,
    remedy: str,
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(hub_answers, "_ask", fail)
    with pytest.raises(kind) as caught:
        resolve("org/name", revision="v1")
    url = f" for https://huggingface.co{LISTING}" if hasattr(error, "response") else ""
    assert str(caught.value) == (
        f"org/name at revision 'v1': {problem} (first line{url}); expected a downloadable checkpoint. "
        f"{remedy}"
    )


@pytest.mark.parametrize("broken", [Answer(error=OfflineModeIsEnabled("offline")), Answer(b"<html>Log in")])
def test_uses_the_cache_without_a_hub(cache: Path, broken: Answer) -> None:
    answers = answers_of(FILES)
    with answering(answers):
        first = locate("org/name")
        answers[LISTING] = broken
        assert locate("org/name") == first


def test_a_bug_is_not_disguised(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def bug(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("quantkit.checkpoint.hub.answers.parse_json", bug)
    with answering(answers_of(FILES)), pytest.raises(ZeroDivisionError):
        resolve("org/name")


def listing(**changes: Any) -> Answer:
    """A listing with other values."""
    whole = {"sha": COMMIT, "siblings": [{"rfilename": name} for name in FILES]}
    return Answer(json.dumps({**whole, **changes}).encode())


def named(name: object) -> Answer:
    return listing(siblings=[{"rfilename": "model.safetensors"}, {"rfilename": name}])


#: What a server says in place of a listing, and what the error has of it.
LISTINGS = [
    (Answer(b"<!DOCTYPE html><html>Log in to the WLAN"), "'<!DOCTYPE html><html>Log in to the WLAN'"),
    (Answer(b""), "the server answered nothing"),
    (Answer(listing().body[:-3]), "invalid"),
    (Answer(b"[]"), "the answer is []; expected the files"),
    (Answer(b"\xff\xfe"), "invalid"),
    (Answer(b"[" * 100_000), "nested too deeply"),
    (listing(sha=None), "the commit None; expected 40 hex digits as sha"),
    (listing(sha=["x"]), "the commit ['x']"),
    (listing(sha="../../x"), "the commit '../../x'"),
    (listing(siblings=None), "the files None; expected a list"),
    (listing(siblings={"a": 1}), "the files {'a': 1}; expected a list"),
    (listing(siblings=["config.json"]), "the file 'config.json'; expected a name as rfilename"),
    *((named(name), f"the file name {name!r}") for name in ("C:x.json", "..", "a\\b.json", "/etc/x.json")),
    *(
        (named(name), f"the file name {name!r}")
        for name in ("a\0.json", "../x.json", "a//b", "", "\x1b[3m.json")
    ),
    *((named(name), f"the file name {name!r}") for name in ("con.json", "NUL.txt", "aux.x.json")),
    (named(5), "the file {'rfilename': 5}"),
    (listing(siblings=[{"rfilename": "a", "size": -1}]), "the size -1 of 'a'; expected a number of bytes"),
    (listing(siblings=[{"rfilename": "a", "size": 1 << 63}]), f"the size {1 << 63} of 'a'"),
    (listing(siblings=[{"rfilename": "a", "size": True}]), "the size True of 'a'"),
    (Answer(b"x", 204), "status 204"),
    (Answer(b"", 304), "status 304"),
    (Answer(listing().body, 206), "status 206; expected status 200 and the whole file"),
    (Answer(b"no gzip", headers={"Content-Encoding": "gzip"}), "bytes that cannot be decoded"),
    (Answer(b"x", headers={"Content-Encoding": "br"}), "Content-Encoding 'br'; expected bytes as they are"),
    (Answer(b"", 302, {"Location": LISTING}), "redirects without an end"),
    (
        Answer(gzip.compress(bytes(40 << 20)), 302, {"Location": "/x", "Content-Encoding": "gzip"}),
        "more than 33554432 bytes; expected at most 33554432, decoded",
    ),
    (Answer(b"", 302, {"Location": "http://[::1"}), "no HTTP ("),
    (Answer(b" " * ((32 << 20) + 1)), f"more than {32 << 20} bytes"),
    (Answer(error=httpx.RemoteProtocolError("cut")), "no HTTP (RemoteProtocolError: cut)"),
    (Answer(error=httpx.ReadTimeout("slow")), "nothing for 10 s"),
]


@pytest.mark.parametrize(("answer", "found"), LISTINGS)
@pytest.mark.parametrize("headers_only", [True, False])
def test_what_is_no_listing(cache: Path, answer: Answer, found: str, headers_only: bool) -> None:
    with answering({**answers_of(FILES), LISTING: answer}), pytest.raises(EnvironmentProblem) as caught:
        resolve("org/name", headers_only=headers_only)
    text = str(caught.value)
    assert text.startswith(f"https://huggingface.co{LISTING}: ") or "/resolve/" in text.partition(": ")[0]
    assert found.replace("\x1b", "\\x1b") in text
    assert text.endswith("run the command again.")
    assert not list(cache.rglob("*.json")) or "file name" in found


#: What a server says of the weights, and what the error has of it.
STARTS = [
    *(
        (Answer(WEIGHTS[:100], 206, {"Content-Range": text}), f"Content-Range {text!r}")
        for text in (
            *("bytes 0-99/*", "bytes 0-99/-1", "bytes 0-99/1e9", f"bytes 0-99/{1 << 63}", "bytes 0-99/", "x"),
            *("bytes 5-99/1000", f"bytes 0-99/{'9' * 5000}", "bytes 0-99/7", "bytes */100"),
        )
    ),
    (Answer(WEIGHTS[:100], 206), "Content-Range None; expected the size of the file"),
    (Answer(WEIGHTS[:100], 206, {"Content-Range": "bytes 0-99/50"}), "100 bytes of a file of 50"),
    (
        Answer(WEIGHTS, headers={"Content-Range": "-", "Content-Encoding": "gzip"}),
        "Content-Encoding 'gzip'; expected bytes as they are",
    ),
]


@pytest.mark.parametrize(("answer", "found"), STARTS)
def test_what_is_no_start_of_weights(cache: Path, answer: Answer, found: str) -> None:
    changed = {**answers_of(FILES), file_path("model.safetensors"): answer}
    with answering(changed), pytest.raises(EnvironmentProblem) as caught:
        resolve("org/name", headers_only=True)
    text = str(caught.value)
    assert text.startswith(f"https://huggingface.co{file_path('model.safetensors')}: the server answered ")
    assert found[:60] in text


@pytest.mark.parametrize(
    ("name", "body", "found"),
    [
        (
            "config.json",
            b"<html>Log in",
            "'<html>Log in', which is an HTML page; expected the file config.json",
        ),
        ("config.json", CONFIG[:-2], "which is no JSON"),
        ("config.json", b"", "nothing, which is no JSON"),
        ("config.json", b"null", "'null', which is no JSON object; expected the file config.json"),
        ("vocab.txt", b"\n<!DOCTYPE HTML>", "which is an HTML page; expected the file vocab.txt"),
    ],
)
@pytest.mark.parametrize("headers_only", [True, False])
def test_a_page_in_place_of_a_file_never_gets_into_the_cache(
    cache: Path, name: str, body: bytes, found: str, headers_only: bool
) -> None:
    answers = answers_of({**FILES, name: body})
    with answering(answers):
        with pytest.raises(EnvironmentProblem) as caught:
            resolve("org/name", headers_only=headers_only)
        assert str(caught.value).startswith(f"https://huggingface.co{file_path(name)}: the server answered ")
        assert found in str(caught.value)
        answers[file_path(name)] = Answer(CONFIG)
        assert (resolve("org/name", headers_only=headers_only) / name).read_bytes() == CONFIG


def test_what_an_earlier_version_left_in_the_cache_is_downloaded_again(cache: Path) -> None:
    with answering(answers_of(FILES)):
        directory = resolve("org/name")
        (directory / "config.json").write_bytes(b"<html>Log in")
        assert (resolve("org/name") / "config.json").read_bytes() == CONFIG


def test_errors_about_headers_name_the_repository(cache: Path) -> None:
    with answering(answers_of({**FILES, "model.safetensors": b"no header" * 9})):
        directory = resolve("org/name", headers_only=True)
    with pytest.raises(CheckpointError, match=r"/models--org--name/model\.safetensors: the first 8 bytes"):
        Checkpoint.open(directory)


class OneByteAtATime(httpx.SyncByteStream):  # type: ignore[misc]
    """The body of an answer that takes hours."""

    def __iter__(self) -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b" "


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", None])
def test_one_byte_at_a_time_is_too_slow(
    cache: Path, name: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_answers, "FIRST_SECONDS", 0.3)
    monkeypatch.setattr(hub_answers, "FILE_SECONDS", 0.3)
    path = LISTING if name is None else file_path(name)
    slow = Answer(stream=OneByteAtATime(), headers={"Content-Length": "100000"})
    with answering({**answers_of(FILES), path: slow}), pytest.raises(EnvironmentProblem) as caught:
        resolve("org/name", headers_only=True)
    assert re.fullmatch(
        rf"https://huggingface\.co{path}: the server answered \d+ bytes in 0 s; expected an answer within "
        r"0 s, or 16384 bytes a second\. Check the network and the proxy settings, and run the command "
        r"again\.",
        str(caught.value),
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"ETag": '"x"'},
        {"X-Repo-Commit": COMMIT},
        {"ETag": "../../x", "X-Repo-Commit": COMMIT},
        {"ETag": '"x"', "X-Repo-Commit": "../x"},
        {"ETag": '"x"', "X-Repo-Commit": "2" * 40},
        {"ETag": '"x"', "X-Repo-Commit": COMMIT, "X-Linked-Size": "7"},
    ],
)
def test_what_huggingface_hub_makes_of_wrong_answers(cache: Path, headers: dict[str, str]) -> None:
    answer = Answer(WEIGHTS, headers=headers)
    changed = {**answers_of(FILES), file_path("model.safetensors"): answer}
    with answering(changed), pytest.raises(QuantkitError, match="org/name"):
        resolve("org/name")


def test_a_server_that_never_says_how_large_a_file_is(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that sends one header after the other."""
    wait = threading.Event()
    monkeypatch.setattr("quantkit.checkpoint.hub.repository.FILE_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.get_hf_file_metadata", lambda _: wait.wait(20))
    with pytest.raises(TimeoutError, match=r"no answer within 0\.2 seconds"):
        hub.download_large(hub_answers.Repository("org/name"), "model.safetensors", COMMIT)
    wait.set()


def test_weights_of_which_hardly_a_byte_comes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wait = threading.Event()
    monkeypatch.setattr("quantkit.checkpoint.hub.repository._WEIGHTS_SECONDS", 0.1)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: wait.wait(20))
    with answering(answers_of(FILES)), pytest.raises(EnvironmentProblem) as caught:
        resolve("org/name")
    wait.set()
    url = f"https://huggingface.co{file_path('model.safetensors')}"
    assert str(caught.value).startswith(
        f"{url}: the server answered too slowly; expected 16384 bytes a second."
    )


def hashed(content: bytes, digits: int) -> str:
    """The SHA-256, or for 40 digits the SHA-1 of git."""
    git = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
    return hashlib.sha256(content).hexdigest() if digits == 64 else git


@pytest.mark.parametrize("digits", [40, 64])
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_bytes_of_another_hash_are_refused(cache: Path, name: str, digits: int) -> None:
    answers = answers_of(FILES)
    etag = hashed(FILES[name], digits)
    answers[file_path(name)].headers["ETag"] = f'"{etag}"'
    changed = FILES[name].replace(b"a", b"e", 1)
    answers[file_path(name)].body = changed
    with answering(answers):
        for _ in range(2):  # nothing of it is kept
            with pytest.raises(EnvironmentProblem) as caught:
                resolve("org/name")
            assert str(caught.value).startswith(
                f"https://huggingface.co{file_path(name)}: the server answered bytes with the "
                f"{'SHA-256' if digits == 64 else 'SHA-1 of git'} {hashed(changed, digits)}; "
                f"expected {etag}, as its ETag says. Nothing of it was kept. Run the command again; if"
            )
        answers[file_path(name)].body = FILES[name]
        directory = resolve("org/name")
        assert (directory / name).read_bytes() == FILES[name]
        # Compared once: what the cache has is not read again.
        (directory / name).write_bytes(changed)
        assert (resolve("org/name") / name).read_bytes() == changed
    assert not list(cache.rglob("*.unchecked"))


@pytest.mark.parametrize("offline", [False, True])
def test_a_download_that_was_killed_before_its_comparison_is_compared_by_the_next(
    cache: Path, monkeypatch: pytest.MonkeyPatch, offline: bool
) -> None:
    class Killed(BaseException):
        """As SIGKILL: nothing that cleans up runs."""

    def kill(*_: object) -> None:
        raise Killed

    answers = answers_of(FILES)
    weights = answers[file_path("model.safetensors")]
    weights.headers["ETag"] = hashed(WEIGHTS, 64)
    weights.body = WEIGHTS[:-1] + b"x"
    with answering(answers):
        with monkeypatch.context() as patch, pytest.raises(Killed):
            patch.setattr("quantkit.checkpoint.hub.cache.check_content", kill)
            hub.download_large(hub_answers.Repository("org/name"), "model.safetensors", COMMIT)
        if offline:
            answers[LISTING] = Answer(error=OfflineModeIsEnabled("offline"))
            (cache / "models--org--name/refs").mkdir()
            (cache / "models--org--name/refs/main").write_text(COMMIT)
        with pytest.raises(EnvironmentProblem, match="the server answered bytes with the SHA-256"):
            resolve("org/name")


def marked_blob(cache: Path, commit: str = COMMIT) -> tuple[Path, Path]:
    """Put weights with another hash than their name in the cache; their link and their mark."""
    storage = cache / "models--org--name"
    blob, link = storage / "blobs" / hashed(WEIGHTS, 64), storage / "snapshots" / commit / "model.safetensors"
    for path in (blob, link):
        path.parent.mkdir(parents=True)
    blob.write_bytes(WEIGHTS[:-1] + b"x")
    link.symlink_to(blob)
    mark = blob.with_name(f"{blob.name}.unchecked")
    mark.touch()
    return link, mark


def test_offline_files_of_other_commits_are_not_compared(cache: Path) -> None:
    link, mark = marked_blob(cache, "f" * 40)
    other = link.parent.with_name(COMMIT)
    other.mkdir()
    hub_cache.check_snapshot(other, "url")
    assert link.exists() and mark.exists()
    with pytest.raises(EnvironmentProblem, match="url: the server answered bytes with the SHA-256"):
        hub_cache.check_snapshot(link.parent, "url")
    # The mark is there for the next download.
    assert not link.exists() and mark.exists()


@pytest.mark.parametrize("wrong", [False, True])
def test_files_in_a_cache_that_cannot_be_written_are_compared_again(
    cache: Path, monkeypatch: pytest.MonkeyPatch, wrong: bool
) -> None:
    link, mark = marked_blob(cache)
    if not wrong:
        link.write_bytes(WEIGHTS)

    def unlink(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", unlink)
    if wrong:
        with pytest.raises(
            EnvironmentProblem, match=r"cannot be removed \(.*EROFS\)\)\. Remove it, or set HF_HUB"
        ):
            hub_cache.check_snapshot(link.parent, "url")
    else:
        hub_cache.check_snapshot(link.parent, "url")
    assert mark.exists()


def test_a_file_that_another_process_made_anew_is_kept(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link, mark = marked_blob(cache)
    check = hub_cache.check_content

    def replaced(*arguments: Any) -> None:
        new = cache / "new"
        new.write_bytes(WEIGHTS)
        new.replace(link.resolve())
        check(*arguments)

    monkeypatch.setattr(hub_cache, "check_content", replaced)
    with pytest.raises(EnvironmentProblem, match="the server answered bytes with the SHA-256"):
        hub_cache.check_snapshot(link.parent, "url")
    assert link.read_bytes() == WEIGHTS and mark.exists()


def test_weights_of_a_killed_download_are_compared_before_the_deadline_begins(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comparing brings no bytes, which alone put the deadline off."""
    marked_blob(cache)
    monkeypatch.setattr(hub, "Deadline", lambda _: pytest.fail("the deadline began"))
    with pytest.raises(EnvironmentProblem, match="the server answered bytes with the SHA-256"):
        hub._download_weights(hub_answers.Repository("org/name"), COMMIT, ["model.safetensors"])


def test_hf_xet_is_as_before_where_another_client_was_set_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    for _ in range(2):
        with guarded(1.0):
            assert constants.HF_HUB_DISABLE_XET
            set_client_factory(default_client_factory)
        assert not constants.HF_HUB_DISABLE_XET


def test_hashes_are_those_that_the_hub_says_itself(cache: Path) -> None:
    """Large files lie on other hosts, whose ETags are something else."""
    answers = answers_of(FILES)
    elsewhere = Answer(CONFIG, headers={"ETag": "a" * 64})
    answers["/storage/x"] = elsewhere
    answers[file_path("config.json")] = Answer(
        status=302,
        headers={
            "Location": "https://elsewhere.test/storage/x",
            "X-Linked-Etag": f'"{hashed(CONFIG, 64)}"',
            "X-Repo-Commit": COMMIT,
        },
    )
    with answering(answers):
        elsewhere.body = CONFIG.replace(b"a", b"e", 1)
        with pytest.raises(EnvironmentProblem, match="bytes with the SHA-256"):
            resolve("org/name")
        elsewhere.body = CONFIG
        assert (resolve("org/name") / "config.json").read_bytes() == CONFIG


@pytest.mark.parametrize("etag", ["abc", "f" * 32, "F" * 64, hashlib.sha1(CONFIG).hexdigest()])
def test_etags_of_mirrors_that_are_no_hash_of_the_hub(cache: Path, etag: str) -> None:
    answers = answers_of(FILES)
    answers[file_path("config.json")].headers["ETag"] = etag
    with answering(answers):
        assert (resolve("org/name") / "config.json").read_bytes() == CONFIG


def test_weights_come_over_http_where_the_hub_offers_xet(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hf_xet would ask the other host, with the token, without a bound of time or size."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr("huggingface_hub.file_download.is_xet_available", lambda: True)
    answers = answers_of(FILES)
    answers[file_path("model.safetensors")].headers |= {
        "X-Xet-Hash": "a" * 64,
        "X-Xet-Refresh-Route": "https://elsewhere.test/token",
    }
    with answering(answers) as asked:
        assert (resolve("org/name") / "model.safetensors").read_bytes() == WEIGHTS
    assert {request.url.host for request in asked} == {"huggingface.co"}


def test_a_file_that_is_read_piece_by_piece_has_a_deadline_too(cache: Path) -> None:
    slow = Answer(stream=OneByteAtATime(), headers={"Content-Length": "100000"})
    with (
        answering({file_path("x.parquet"): slow}),
        guarded(0.3),
        get_session().stream("GET", f"https://huggingface.co{file_path('x.parquet')}") as response,
        pytest.raises(TimeoutError, match=r"\d+ bytes in 0 s; expected 16384 a second"),
    ):
        [*response.iter_bytes()]


@pytest.fixture
def endpoint(hub_of: Callable[..., str]) -> str:
    return hub_of("org/name", FILES)


# In a process of its own: huggingface_hub reads its settings when it is imported.
SCRIPT = """
import json, sys, time
from pathlib import Path
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.source import Checkpoint
result = {}
for key, arguments in json.loads(sys.argv[1]).items():
    start = time.monotonic()
    try:
        directory = resolve(**arguments)
        checkpoint = Checkpoint.open(directory)
        names = sorted(path.name for path in directory.iterdir())
        result[key] = [names, checkpoint.nbytes, checkpoint.tensors["a"].shape]
        result[key] += [checkpoint.headers_only or checkpoint.read("a", 7, 9).tolist(), str(directory)]
    except Exception as error:
        result[key] = [type(error).__name__, str(error), time.monotonic() - start]
print(json.dumps(result))
"""


def in_process(tmp_path: Path, calls: dict[str, Any], **environment: str) -> dict[str, Any]:
    # A test decides itself whether it is offline, whatever the shell around it says.
    inherited = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    variables = {**inherited, "HF_HOME": str(tmp_path), "HF_HUB_DISABLE_XET": "1", **environment}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(calls)],
        check=False,
        env=variables,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def test_downloads_from_a_hub_then_works_offline(tmp_path: Path, endpoint: str) -> None:
    calls = {
        "headers": {"source": "org/name", "headers_only": True},
        "whole": {"source": "org/name"},
        "missing": {"source": "org/other"},
    }
    result = in_process(tmp_path, calls, HF_ENDPOINT=endpoint)
    nbytes = 300_002 * 4
    names = ["config.json", "model.safetensors"]
    *headers, skeleton = result["headers"]
    assert headers == [[".quantkit-headers-only", *names], nbytes, [300_000], True]
    assert not Path(skeleton).exists()  # removed at exit
    assert result["whole"][:4] == [names, nbytes, [300_000], [7.0, 8.0]]
    assert result["missing"][0] == "CheckpointError"
    assert "the hub has no such repository" in result["missing"][1]

    calls = {"cached": {"source": "org/name"}, "absent": {"source": "org/other"}}
    offline = in_process(tmp_path, calls, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert offline["cached"] == result["whole"]
    assert offline["absent"][0] == "EnvironmentProblem"
    assert "org/other: HF_HUB_OFFLINE is set and" in offline["absent"][1]


@pytest.mark.fault(56)
@pytest.mark.parametrize("listening", [False, True])
def test_unreachable_hub_is_an_error_within_seconds(tmp_path: Path, listening: bool) -> None:  # 56
    with socket.socket() as silent:  # refuses connections, or accepts them and never answers
        silent.bind(("127.0.0.1", 0))
        if listening:
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        result = in_process(tmp_path, {"call": {"source": "org/name"}}, HF_ENDPOINT=endpoint)
    problem = "does not answer" if listening else "cannot be reached"
    kind, text, seconds = result["call"]
    assert kind == "EnvironmentProblem"
    assert text.startswith(f"org/name: the hub {problem} and the checkpoint is not complete")
    assert text.endswith("or give a local directory.")
    assert seconds < 5
