"""Uploads against a stand-in hub: what arrives is what was verified, and what fails says why."""

import gzip
import json
import shutil
import threading
import zlib
from pathlib import Path

import pytest

import quantkit
from quantkit.checkpoint.manifest import MANIFEST_NAME, extend_manifest, read_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError
from quantkit.publish.card import make_card
from quantkit.publish.measurements import Measurements
from quantkit.publish.upload import Upload, prepare, push
from quantkit.verification.verify import verify

from .conftest import SOURCE, TOKEN, HubState


@pytest.fixture
def upload(packed: Path) -> Upload:
    card = make_card(packed, Measurements(), repo="me/tiny").markdown().encode()
    return prepare(packed, {"README.md": card, "bench-memory.png": b"png"})


def test_what_arrives_is_what_was_verified(packed: Path, upload: Upload, upload_hub: HubState) -> None:
    address = push(upload, "me/tiny", private=True)
    assert address == f"{upload_hub.endpoint}/me/tiny/commit/{'1' * 40}"
    assert upload_hub.private == {"me/tiny": True}
    assert upload_hub.commits == ["Upload a model quantized with quantkit"]
    files = upload_hub.branches["main"]
    names = {*read_manifest(packed)["files"], MANIFEST_NAME}
    assert set(files) == names | {"README.md", "bench-memory.png"}
    for name in names:
        assert files[name] == (packed / name).read_bytes()
    assert files["README.md"].startswith(b"---\n")
    assert upload.sizes == {name: len(data) for name, data in files.items()}


def test_paths_of_this_machine_are_not_uploaded(packed: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    extend_manifest(copy, {"relative_paths": {"model": "../home/me/model"}})
    uploaded = prepare(copy, {"bench-memory.png": b"png"}).files[MANIFEST_NAME]
    assert isinstance(uploaded, bytes) and b"home" not in uploaded
    (copy / MANIFEST_NAME).write_bytes(uploaded)
    assert not any(check.problems for check in verify(copy, reload=False))
    assert ModelRecord.from_manifest(read_manifest(copy)).relative_paths == {}


@pytest.mark.parametrize(("name", "change"), [("config.json", "changed"), ("LICENSE", "removed")])
def test_what_changes_after_it_was_verified_is_not_uploaded(
    packed: Path, tmp_path: Path, upload_hub: HubState, name: str, change: str
) -> None:
    copy = Path(shutil.copytree(packed, tmp_path / "copy"))
    upload = prepare(copy, {"README.md": b"a card"})
    if change == "removed":
        (copy / name).unlink()
        with pytest.raises(CheckpointError, match=r"cannot examine .*No such file"):
            _ = upload.sizes
    else:
        (copy / name).write_bytes((copy / name).read_bytes() + b" ")
    said = "is not uploaded: " if change == "removed" else "has changed since it was verified"
    with pytest.raises(CheckpointError, match=f"{name} {said}"):
        push(upload, "me/tiny")
    assert upload_hub.commits == []


def test_a_branch_of_a_repository_that_is_there(upload: Upload, upload_hub: HubState) -> None:
    push(upload, "me/tiny")
    push(upload, "me/tiny", revision="group-32", message="Smaller groups")
    assert upload_hub.branches["group-32"] == upload_hub.branches["main"]
    assert upload_hub.commits[1] == "Smaller groups"


@pytest.mark.parametrize(
    ("ending", "status", "kind", "message"),
    [
        ("/create", 403, UsageError, "the token may not write there"),
        ("/create", 401, EnvironmentProblem, "the hub does not know the token"),
        ("/preupload/main", 404, UsageError, "the hub has no such place for this token"),
        ("/commit/main", 403, UsageError, "the token may not write there"),
        ("/commit/main", 400, EnvironmentProblem, "the hub answered with an error"),
    ],
)
def test_what_the_hub_refuses_is_said_and_nothing_is_committed(
    upload: Upload, upload_hub: HubState, ending: str, status: int, kind: type[QuantkitError], message: str
) -> None:
    upload_hub.refuses[ending] = status
    with pytest.raises(kind, match=rf"me/tiny: {message} \(.*\)\. Nothing was committed\."):
        push(upload, "me/tiny")
    assert upload_hub.commits == []


ELSEWHERE = b'{"url": "https://huggingface.co/you/other"}'


@pytest.mark.parametrize("ending", ["/create", "/preupload/main", "/objects/batch", "/commit/main"])
@pytest.mark.parametrize(
    "answer", [b"<html>Log in", b"", b"[]", b"5", b"null", b'"x"', b"{", b"{}", b"[[]]", b"\xff", ELSEWHERE]
)
def test_answers_that_are_none(upload: Upload, upload_hub: HubState, ending: str, answer: bytes) -> None:
    upload_hub.says[ending] = answer
    with pytest.raises(QuantkitError) as caught:
        push(upload, "me/tiny")
    text = str(caught.value)
    assert text.startswith("me/tiny: ")
    if upload_hub.commits:
        assert f"The commit may have been made: look at {upload_hub.endpoint}/me/tiny/commits." in text
    else:
        assert "Nothing was committed" in text or "The commit may have been made" in text
    assert "Try again" in text or "starts again" in text


@pytest.mark.parametrize(
    "url", ["https://elsewhere.example/x", "me/tiny", "", "a/b/c/d/e/commit/x", "\x1b[31m"]
)
def test_another_form_of_the_address_of_the_commit(upload: Upload, upload_hub: HubState, url: str) -> None:
    upload_hub.says["/commit/main"] = json.dumps({"commitUrl": url, "commitOid": "1" * 40}).encode()
    try:
        address = push(upload, "me/tiny")
    except QuantkitError as error:
        assert "The commit may have been made: look at " in str(error)
    else:
        assert address == (url if url.startswith("http") else f"{upload_hub.endpoint}/me/tiny/commits")
    assert len(upload_hub.commits) == 1


def test_without_a_token_the_remedy_is_said(
    upload: Upload, upload_hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: None)
    with pytest.raises(EnvironmentProblem, match="Log in with `hf auth login`"):
        push(upload, "me/tiny")


def test_an_unreachable_hub_is_said(
    upload: Upload, upload_hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(EnvironmentProblem, match="the hub cannot be reached"):
        push(upload, "me/tiny")


def test_a_hub_that_never_gets_done(
    upload: Upload, upload_hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait = threading.Event()
    monkeypatch.setattr("huggingface_hub.HfApi.create_commit", lambda *_, **__: wait.wait(20))
    monkeypatch.setattr("quantkit.publish.upload.COMMIT_SECONDS", 0.5)
    monkeypatch.setattr("quantkit.publish.upload.SLOWEST_BYTES_PER_SECOND", 1 << 40)
    with pytest.raises(EnvironmentProblem, match=r"no answer within 1 seconds.*may have been made"):
        push(upload, "me/tiny")
    wait.set()


def test_offline_nothing_is_pushed(
    upload: Upload, upload_hub: HubState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: True, raising=False)
    with pytest.raises(EnvironmentProblem, match="HF_HUB_OFFLINE is set"):
        push(upload, "me/tiny")


def test_what_is_no_repository_id_is_refused(upload: Upload, upload_hub: HubState) -> None:
    with pytest.raises(UsageError, match="this is no repository id"):
        push(upload, "a/b/c")


def test_damaged_checkpoints_are_refused(packed: Path, tmp_path: Path) -> None:
    damaged = Path(shutil.copytree(packed, tmp_path / "damaged"))
    data = bytearray((damaged / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (damaged / "model.safetensors").write_bytes(data)
    with pytest.raises(
        CheckpointError, match=r"is not uploaded: .* the manifest says .* `quantkit verify` shows"
    ):
        prepare(damaged, {})
    with pytest.raises(CheckpointError, match="not a finished quantkit checkpoint"):
        prepare(SOURCE, {})


def test_what_save_pretrained_wrote_is_uploaded(packed: Path, tmp_path: Path) -> None:
    saved = Path(shutil.copytree(packed, tmp_path / "saved"))
    (saved / MANIFEST_NAME).unlink()
    (saved / "trainer_state.bin").write_bytes(b"not of the checkpoint")
    found = set(prepare(saved, {"README.md": b"card"}).files)
    assert found == {*prepare(packed, {"README.md": b"card"}).files} - {MANIFEST_NAME}


def test_a_card_does_not_replace_files_of_the_checkpoint(packed: Path) -> None:
    with pytest.raises(UsageError, match=r"config\.json is a file of the card and of the checkpoint"):
        prepare(packed, {"config.json": b""})


def test_a_card_takes_the_place_of_the_copy_of_the_sources(packed: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(SOURCE, tmp_path / "source"))
    (source / "README.md").write_text("---\nlicense: mit\n---\n")
    out = tmp_path / "out"
    quantkit.quantize(source, out)
    card = make_card(out, Measurements())
    assert card.front_matter["license"] == "mit"
    uploaded = tmp_path / "uploaded"
    uploaded.mkdir()
    for name, content in prepare(out, {"README.md": card.markdown().encode()}).files.items():
        (uploaded / name).write_bytes(content if isinstance(content, bytes) else content.read_bytes())
    checks = verify(uploaded, reload=False)
    assert not [problem for check in checks for problem in check.problems]
    assert (uploaded / "README.md").read_text().startswith("---\nlibrary_name")


REQUESTS = ("/create", "/branch/new", "/preupload/new", "/objects/batch", "/lfs/", "/commit/new")
BOMBS = {
    "gzip": gzip.compress(bytes(40 << 20)),
    "deflate": zlib.compress(bytes(40 << 20)),
    "identity": bytes(40 << 20),
}


@pytest.mark.parametrize("part", REQUESTS)
@pytest.mark.parametrize("encoding", [*BOMBS, "redirect", "br", "zstd", "gzip, gzip", "cut", "wait"])
def test_answers_that_would_fill_the_memory(
    upload: Upload, upload_hub: HubState, part: str, encoding: str
) -> None:
    headers = {"Content-Encoding": "gzip" if encoding in ("cut", "redirect") else encoding}
    body = BOMBS.get(encoding, BOMBS["gzip"])
    status, found = 200, "more than 33554432 bytes; expected at most 33554432, decoded"
    if encoding == "redirect":
        status, headers = 302, {**headers, "Location": "/elsewhere"}
    if encoding in ("br", "zstd", "gzip, gzip"):
        found = f"Content-Encoding '{encoding}'; expected bytes as they are"
    if encoding == "cut":
        body, found = gzip.compress(b"{}" * 99)[:-9], "a part of compressed bytes; expected all of them"
    if encoding == "wait":
        status, body, headers = 429, b"", {"Retry-After": "90000"}
        found = "status 429, to try again after 90000 s; expected a wait of at most 60 s"
    upload_hub.raw[part] = (status, headers, body)
    with pytest.raises(EnvironmentProblem) as caught:
        push(upload, "me/tiny", revision="new")
    text = str(caught.value)
    assert text.startswith(f"me/tiny: {upload_hub.endpoint}/")
    assert f"{part}" in text
    assert f": the server answered {found}. " in text
    assert text.endswith(
        f"The commit may have been made: look at {upload_hub.endpoint}/me/tiny/commits."
        if part == "/commit/new"
        else "Nothing was committed."
    )


@pytest.mark.parametrize("part", REQUESTS)
def test_answers_that_do_not_come(
    upload: Upload, upload_hub: HubState, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing, or one byte of a header now and then, after the other: both within the deadline."""
    for name in ("ANSWER_SECONDS", "COMMIT_SECONDS"):
        monkeypatch.setattr(f"quantkit.publish.upload.{name}", 0.3)
    monkeypatch.setattr("quantkit.checkpoint.hub.client.SLOWEST_BYTES_PER_SECOND", 1 << 40)
    upload_hub.slow.add(part)
    said: list[str] = []
    with pytest.raises(
        EnvironmentProblem, match=r"nothing, or too slowly, for 0 s|does not answer"
    ) as caught:
        push(upload, "me/tiny", revision="new", saying=said.append)
    assert "cannot be reached" not in str(caught.value)
    assert said[0] == f"creating me/tiny on {upload_hub.endpoint}, if it is not there"
    assert (said[-1] == "committing") == (part == "/commit/new")


@pytest.mark.parametrize(
    ("location", "found"),
    [
        ("/api/repos/create", "redirects without an end"),
        ("file:///etc/passwd", "a redirect to what is no address of HTTP"),
        ("http://[::1", "no HTTP or was cut"),
    ],
)
def test_redirects_that_lead_nowhere(upload: Upload, upload_hub: HubState, location: str, found: str) -> None:
    upload_hub.raw["/create"] = (307, {"Location": location}, b"")
    with pytest.raises(EnvironmentProblem) as caught:
        push(upload, "me/tiny")
    assert found in str(caught.value)
    assert "cannot be reached" not in str(caught.value)


def test_the_client_of_huggingface_hub_is_as_before(upload: Upload, upload_hub: HubState) -> None:
    from huggingface_hub.utils import _http

    before = _http._GLOBAL_CLIENT_FACTORY
    push(upload, "me/tiny")
    assert _http._GLOBAL_CLIENT_FACTORY is before


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_token_goes_to_the_hub_alone(upload: Upload, upload_hub: HubState, host: str) -> None:
    """huggingface_hub sends it to whatever address the hub names for checking a file."""
    upload_hub.verifier = f"{upload_hub.endpoint.replace('127.0.0.1', host)}/verify"
    push(upload, "me/tiny")
    assert set(upload_hub.tokens) == {f"Bearer {TOKEN}" if host == "127.0.0.1" else None}
