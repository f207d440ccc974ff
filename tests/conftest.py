"""Without a GPU the fused kernels run in Triton's interpreter, chosen before Triton is imported."""

import gc
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import Any

import pytest

# Workers share the cores. With threads on the cores of others they wait for each other most of the time.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    workers = int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // workers)))

# It reads the variable.
import torch

from .interpreter import teach

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
# A shell has what it starts in the background ignore this one, and Python then leaves it at that.
if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Most cases of tests that are `sampled` become slow, without a GPU: of those that nobody asked for."""
    failed = config.getoption("lf", False) and config.cache and config.cache.get("cache/lastfailed", {})
    if torch.cuda.is_available() or config.getoption("keyword", "") or failed:
        return
    asked = tuple(argument for argument in config.args if "::" in argument)
    cases: dict[str, list[Any]] = {}
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        if "sampled" in marks and "slow" not in marks and not item.nodeid.startswith(asked or "::"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        every, *names = of_test[0].get_closest_marker("sampled").args
        kept = sample([case.callspec.params for case in of_test], every, names)
        for number, case in enumerate(of_test):
            if number not in kept:
                case.add_marker(pytest.mark.slow)


def sample(cases: Sequence[Mapping[str, Any]], every: int, names: Sequence[str] = ()) -> list[int]:
    """The numbers of one in `every` of the cases, or more: each value of each of these parameters is in one.

    Without `names` these are the parameters of which cases share values.
    """
    values = [{(name, repr(value)) for name, value in case.items()} for case in cases]
    names = names or [name for name in cases[0] if len({repr(case[name]) for case in cases}) < len(cases)]
    left = {value for of_case in values for value in of_case if value[0] in names}
    kept: list[int] = []
    while left:
        kept.append(max(range(len(cases)), key=lambda number: len(values[number] & left)))
        left -= values[kept[-1]]
    spread = [number for number in range(len(cases)) if (number + number // every) % every == 0]
    more = [number for number in spread if number not in kept]
    return kept + more[: max(0, len(spread) - len(kept))]


def pytest_collection_finish() -> None:
    """Garbage is looked for among what tests make, not in all that was imported and collected before them.

    Those are more than half a million objects: with them each `gc.collect()` takes a third of a second.
    """
    freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Nor among what they import, of which transformers and others have as much again."""
    if len(sys.modules) > FROZEN[-1] + MANY_MODULES:
        freeze()


#: Modules at each freeze, and how many more are worth another one, which collects garbage first.
FROZEN, MANY_MODULES = [0], 100


def freeze() -> None:
    """Leave what there is to no later `gc.collect()`."""
    gc.collect()
    gc.freeze()
    FROZEN.append(len(sys.modules))


@pytest.fixture(autouse=True)
def seeded() -> None:
    """Random numbers are the same in every run, whatever ran before."""
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def auto_is_the_cpu() -> Iterator[None]:
    """Tests say the same with a GPU and without; one that is about a GPU names it.

    They count reads and bytes, and fork, which CUDA does not survive.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quantkit.devices.best_device", lambda: torch.device("cpu"))
        yield


@pytest.fixture(autouse=True)
def unsynced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing waits for the disk, which takes milliseconds a file: what a power cut would leave no test sees.

    That all is synced, and in which order, is tested by what counts the calls. Tests of faults really sync.
    """
    # Whoever gives it what is no open file has the same error.
    monkeypatch.setattr(os, "fsync", lambda file: os.fstat(file) and None)


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether kernels run in Triton's interpreter, as where there is no GPU; it is taught what tests need."""
    runs = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
    if runs:
        teach(monkeypatch)
    return runs


@dataclass(frozen=True)
class Done:
    """How a command ended, and the exception that its exit code is from."""

    code: int
    out: str
    err: str
    error: BaseException | None


Run = Callable[..., Done]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Products this small take a hundred times longer where threads wait for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], one_thread: None
) -> Iterator[Run]:
    """`run("plan", path, ...)`: the `quantkit` command, with its output not on a terminal."""
    from quantkit.cli import console
    from quantkit.cli.main import main
    from quantkit.signals import NUMBERS

    monkeypatch.setattr(console.out, "width", console.PIPED_WIDTH)
    monkeypatch.setattr(console.err, "width", console.PIPED_WIDTH)
    monkeypatch.setenv("QUANTKIT_VERBOSE", "0")
    # Other tests keep the cores busy, and are no business of what a command prints.
    monkeypatch.setattr(console, "FIRST_SECONDS", console.LINE_SECONDS)
    monkeypatch.setattr("quantkit.cli.threads.shortage", lambda *_: None)
    before = {number: signal.getsignal(number) for number in NUMBERS}

    def command(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err, ended.value.__context__)

    yield command
    for number, handler in before.items():
        signal.signal(number, handler)


#: The commit of every repository of a stand-in hub.
HUB_COMMIT = "1" * 40


class StandInHub(BaseHTTPRequestHandler):
    """Serves one repository the way the hub does, and refuses its gated files."""

    def __init__(
        self, repo: str, files: Mapping[str, bytes], kind: str, gated: Sequence[str], *rest: Any
    ) -> None:
        self.repo, self.files, self.gated = repo, files, gated
        self.api = f"/api/{kind}s/{repo}"
        self.resolve = f"/{repo}/resolve/" if kind == "model" else f"/{kind}s/{repo}/resolve/"
        super().__init__(*rest)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith(self.resolve):
            name = path.removeprefix(self.resolve).partition("/")[2]
            if name in self.gated:
                self.answer(b"", status=403, error="GatedRepo")
            elif name in self.files:
                self.answer(self.files[name], name)
            else:
                self.answer(b"", status=404, error="EntryNotFound")
        elif path.startswith(f"{self.api}/tree/"):
            tree = [{"type": "file", "path": n, "size": len(c), "oid": n} for n, c in self.files.items()]
            self.answer(json.dumps(tree).encode())
        elif path in (self.api, f"{self.api}/revision/main"):
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.files.items()]
            info = {"id": self.repo, "sha": HUB_COMMIT, "siblings": siblings}
            self.answer(json.dumps(info).encode())
        elif path.startswith(self.api):
            self.answer(b"{}", status=404, error="RevisionNotFound")
        else:
            self.answer(b"{}", status=404, error="RepoNotFound")

    do_HEAD = do_GET

    def answer(self, body: bytes, name: str = "", status: int = 200, error: str = "") -> None:
        size = len(body)
        requested = self.headers.get("Range", "")
        if requested:
            first, _, last = requested.removeprefix("bytes=").partition("-")
            body, status = body[int(first) : int(last or size) + 1], 206
            self.send_response(status)
            self.send_header("Content-Range", f"bytes {first}-{int(first) + len(body) - 1}/{size}")
        else:
            self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", f'"{name.replace("/", "-")}"')
        self.send_header("X-Repo-Commit", HUB_COMMIT)
        if error:
            self.send_header("X-Error-Code", error)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def hub_of() -> Iterator[Callable[..., str]]:
    """`hub_of(repo, files, kind="model", gated=())`: the endpoint of a hub with one repository."""
    with ExitStack() as stack:

        def serve(
            repo: str, files: Mapping[str, bytes], kind: str = "model", gated: Sequence[str] = ()
        ) -> str:
            server = ThreadingHTTPServer(("127.0.0.1", 0), partial(StandInHub, repo, files, kind, gated))
            threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
            stack.callback(server.server_close)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_address[1]}"

        yield serve
