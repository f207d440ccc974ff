"""Runs of the command line in this process, and a packed checkpoint to run it on."""

import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import quantkit
from quantkit.cli import console
from quantkit.cli.main import main

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = EXAMPLES / "stories260K"
STORIES = EXAMPLES / "stories.txt"


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Done]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Products this small take a hundred times longer where threads wait for a busy core."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """`run("plan", path, ...)`: the `quantkit` command, with its output not on a terminal."""
    monkeypatch.setattr(console.out, "width", console.PIPED_WIDTH)
    monkeypatch.setattr(console.err, "width", console.PIPED_WIDTH)
    monkeypatch.setenv("QUANTKIT_VERBOSE", "0")
    before = signal.getsignal(signal.SIGTERM)

    def command(*arguments: object) -> Done:
        monkeypatch.setattr(sys, "argv", ["quantkit", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        code = ended.value.code
        return Done(code if isinstance(code, int) else 0, captured.out, captured.err)

    yield command
    signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in int4, groups of 128, on which no test may write."""
    directory = tmp_path_factory.mktemp("cli") / "int4"
    quantkit.quantize(SOURCE, directory, format="int4")
    return directory
