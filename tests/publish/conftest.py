"""A packed model to publish, and a hub that takes uploads."""

import base64
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import quantkit

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
TOKEN = "hf_standin"


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in int4, groups of 32, on which no test may write."""
    directory = tmp_path_factory.mktemp("publish") / "tiny-int4"
    quantkit.quantize(SOURCE, directory, format="int4", group_size=32, rules=("*down_proj=keep",))
    return directory


@dataclass
class HubState:
    """What a stand-in hub has: files by branch, and what was asked of it."""

    endpoint: str = ""
    #: The status of every answer from the request on whose path ends so.
    refuses: dict[str, int] = field(default_factory=dict)
    private: dict[str, bool] = field(default_factory=dict)
    branches: dict[str, dict[str, bytes]] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    #: What is answered to a request whose path ends so, after it was done.
    says: dict[str, bytes] = field(default_factory=dict)
    #: Status, headers and body of the answer to a request whose path has this in it.
    raw: dict[str, tuple[int, dict[str, str], bytes]] = field(default_factory=dict)
    #: What requests have in their paths whose answers come a byte at a time.
    slow: set[str] = field(default_factory=set)
    #: Where to say that a large file was sent, and the tokens that came with it.
    verifier: str = ""
    tokens: list[str | None] = field(default_factory=list)


class UploadHub(BaseHTTPRequestHandler):
    """Takes uploads the way the hub does: create, preupload, LFS batch and PUT, commit."""

    def __init__(self, state: HubState, *rest: Any) -> None:
        self.state = state
        super().__init__(*rest)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        path = self.path.partition("?")[0]
        state = self.state
        if self.odd():
            return None
        if path == "/verify":
            state.tokens.append(self.headers.get("Authorization"))
            return self.answer({})
        for ending, status in state.refuses.items():
            if path.endswith(ending):
                return self.answer({"error": "refused"}, status)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            return self.answer({"error": "no token"}, 401)
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked.get('organization', 'me')}/{asked['name']}"
            if repo in state.private:
                return self.answer({"url": f"{state.endpoint}/{repo}"}, 409)
            state.private[repo] = bool(asked.get("private")) or asked.get("visibility") == "private"
            state.branches["main"] = {}
            return self.answer({"url": f"{state.endpoint}/{repo}"})
        if path == "/api/validate-yaml":
            return self.answer({"errors": [], "warnings": []})
        part, _, rest = path.partition("/api/models/")[2].removeprefix("me/tiny/").partition("/")
        if part == "branch":
            state.branches.setdefault(rest, {})
            return self.answer({})
        if part == "preupload":
            files = [
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if one["path"].endswith(".safetensors") else "regular",
                    "shouldIgnore": False,
                }
                for one in json.loads(body)["files"]
            ]
            return self.answer({"files": files})
        if path.endswith("/info/lfs/objects/batch"):
            verify = {"verify": {"href": state.verifier}} if state.verifier else {}
            objects = [
                {**one, "actions": {"upload": {"href": f"{state.endpoint}/lfs/{one['oid']}"}, **verify}}
                for one in json.loads(body)["objects"]
            ]
            return self.answer({"transfer": "basic", "objects": objects})
        if part == "commit":
            self.commit(rest, body)
            address = f"{state.endpoint}/me/tiny/commit/{'1' * 40}"
            return self.answer({"success": True, "commitUrl": address, "commitOid": "1" * 40})
        return self.answer({"error": f"unknown {path}"}, 404)

    def commit(self, branch: str, body: bytes) -> None:
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                self.state.commits.append(value["summary"])
            elif entry["key"] == "file":
                self.state.branches[branch][value["path"]] = base64.b64decode(value["content"])
            else:
                self.state.branches[branch][value["path"]] = self.state.stored[value["oid"]]

    def do_PUT(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.odd():
            return
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        self.state.stored[oid] = body
        self.answer({})

    def odd(self) -> bool:
        """Give the answer of `raw` or `slow` to this request, if there is one."""
        if any(part in self.path for part in self.state.slow):
            with suppress(OSError):
                self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
                for _ in range(60):
                    self.wfile.write(b"a")
                    time.sleep(0.05)
            return True
        for part, (status, headers, body) in self.state.raw.items():
            if part in self.path:
                with suppress(OSError):
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(body)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(body)
                return True
        return False

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        path = self.path.partition("?")[0]
        body = next((said for ending, said in self.state.says.items() if path.endswith(ending)), body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def upload_hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    """A hub that takes uploads with `TOKEN`; huggingface_hub talks to it alone."""
    with standing_in(monkeypatch) as state:
        yield state


def is_xet_enabled() -> bool:
    """What huggingface_hub takes for true where hf_xet is installed."""
    from huggingface_hub import constants

    return not constants.HF_HUB_DISABLE_XET


@contextmanager
def standing_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubState]:
    """`upload_hub` for a block."""
    from huggingface_hub import constants, hf_api

    state = HubState()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(UploadHub, state))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    state.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setattr(constants, "ENDPOINT", state.endpoint)
    monkeypatch.setattr(hf_api.constants, "ENDPOINT", state.endpoint)
    # As it is for users: quantkit itself has files go over HTTP.
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr("huggingface_hub._commit_api.is_xet_available", is_xet_enabled)
    yield state
    server.shutdown()
    server.server_close()
