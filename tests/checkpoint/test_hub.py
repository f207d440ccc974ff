"""Resolving directories and hub ids, with a replaced hub, a fake hub, and no hub at all."""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors.torch import save

from quantkit.checkpoint.hub import resolve
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, UsageError

# httpx or httpx2, whichever this huggingface_hub is built on.
_HTTP_ERROR = next(base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError")
httpx = importlib.import_module(_HTTP_ERROR.__module__.partition(".")[0])


class Hub:
    """Stands for huggingface_hub: has the given files, or raises the given error."""

    def __init__(self, files: list[str], error: Exception | None = None) -> None:
        self.files = files
        self.error = error
        self.cached: Path | None = None
        self.downloads: list[dict[str, Any]] = []

    def model_info(self, repo: str, **options: Any) -> Any:
        if self.error:
            raise self.error
        siblings = [SimpleNamespace(rfilename=name) for name in self.files]
        return SimpleNamespace(sha="0" * 40, siblings=siblings)

    def snapshot_download(self, repo: str, **options: Any) -> str:
        self.downloads.append({"repo": repo, **options})
        if options["local_files_only"] and self.cached is None:
            raise LocalEntryNotFoundError("not in the cache")
        return str(self.cached or "/downloaded")


def install(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> Hub:
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def test_local_directory_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    assert resolve(tmp_path) == tmp_path
    assert resolve("org/name") == Path("org/name")
    assert resolve("~/org") == tmp_path / "org"
    with pytest.raises(UsageError, match="revision 'main' was given for the local directory"):
        resolve(tmp_path, revision="main")


PATHS = ["./no", "../no", "/no/such", "~/no", "a/b/c", "a/", "", "a b", "a..b/c", "org/.name"]


@pytest.mark.parametrize("source", [*PATHS, Path("org/name")])
def test_missing_path_is_a_usage_error(source: str | Path) -> None:
    with pytest.raises(UsageError) as caught:
        resolve(source)
    assert str(caught.value) == (
        f"{str(source)!r} is no directory; expected a checkpoint directory or a hub id such as "
        "org/name. Check the path."
    )


def test_downloads_only_what_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = install(monkeypatch, Hub(["model.safetensors", "config.json", "modeling.py"]))
    assert resolve("org/name", revision="v1") == Path("/downloaded")
    (download,) = hub.downloads
    assert download["repo"] == "org/name"
    assert download["revision"] == "v1"
    assert download["allow_patterns"] == ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    assert download["ignore_patterns"] == ["*/*", "consolidated*"]


@pytest.mark.parametrize(
    "files", [[], ["pytorch_model.bin"], ["consolidated.safetensors"], ["unet/model.safetensors"]]
)
def test_refuses_repository_without_safetensors(monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    hub = install(monkeypatch, Hub(files))
    with pytest.raises(CheckpointError) as caught:
        resolve("gpt2")
    assert str(caught.value) == (
        f"gpt2: the repository has no safetensors among its {len(files)} files; expected "
        "model.safetensors or shards. Convert it at "
        "https://huggingface.co/spaces/safetensors/convert or choose another repository."
    )
    assert hub.downloads == []


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
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[QuantkitError],
    problem: str,
    remedy: str,
) -> None:
    install(monkeypatch, Hub([], error))
    with pytest.raises(kind) as caught:
        resolve("org/name", revision="v1")
    assert str(caught.value) == (
        f"org/name at revision 'v1': {problem} (first line); expected a downloadable checkpoint. {remedy}"
    )


def test_uses_the_cache_without_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = install(monkeypatch, Hub([], OfflineModeIsEnabled("offline")))
    hub.cached = tmp_path
    assert resolve("org/name") == tmp_path
    assert [download["local_files_only"] for download in hub.downloads] == [True]


def test_a_bug_is_not_disguised(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Hub([], ZeroDivisionError("bug")))
    with pytest.raises(ZeroDivisionError):
        resolve("org/name")


CONFIG = json.dumps({"model_type": "llama"}).encode()
WEIGHTS = save({"a": torch.arange(300_000.0), "b": torch.ones(2)})
FILES = {"config.json": CONFIG, "model.safetensors": WEIGHTS, "evil.py": b"raise SystemExit"}


@pytest.fixture
def endpoint(hub_of: Callable[..., str]) -> str:
    return hub_of("org/name", FILES)


# In a process of its own: huggingface_hub reads its settings when it is imported.
SCRIPT = """
import json, sys, time
from pathlib import Path
from quantkit.checkpoint.hub import resolve
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
    kind, text, seconds = result["call"]
    assert kind == "EnvironmentProblem"
    assert text.startswith("org/name: the hub cannot be reached and the checkpoint is not complete")
    assert text.endswith("or give a local directory.")
    assert seconds < 5
