"""Processes that meet as those of torchrun do."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch

from quantkit.model import distributed as sharing

#: Seconds that ranks have to end.
LIMIT = 120


def ended(function: Callable[[int], Any], directory: Path, count: int = 2) -> list[tuple[int, str, str]]:
    """The exit code, output and errors of processes with the environment of torchrun that call `function`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])

    def run(rank: int) -> None:
        values = (str(rank), str(count), str(rank), str(count), "127.0.0.1", port)
        os.environ.update(zip(sharing.ENVIRONMENT, values, strict=True))
        with (
            (directory / f"{rank}.out").open("w") as out,
            (directory / f"{rank}.err").open("w") as err,
            redirect_stdout(out),
            redirect_stderr(err),
        ):
            try:
                function(rank)
            except Exception:
                # What the interpreter would print.
                traceback.print_exc()
                sys.exit(1)

    # Forked with one thread: OpenMP's threads do not survive a fork.
    context, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
    torch.set_num_threads(1)
    processes = [context.Process(target=run, args=(rank,)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LIMIT)
        process.kill()
        process.join()
    torch.set_num_threads(threads)
    texts = [[(directory / f"{rank}.{name}").read_text() for name in ("out", "err")] for rank in range(count)]
    codes = [-1 if process.exitcode is None else process.exitcode for process in processes]
    return [(code, *text) for code, text in zip(codes, texts, strict=True)]


def assert_one_says_why(
    found: list[tuple[int, str, str]], codes: list[int], rank: int, *, was_killed: bool
) -> None:
    """Check how two ranks ended of which `rank` was killed or raised "planted": it alone says so."""
    assert [code for code, _, _ in found] == codes, found
    said = [error for _, _, error in found]
    if was_killed:
        assert "rank 0 has lost another one" in said[0] and "--resume" in said[0]
    else:
        assert [error.lower().count("error: planted") for error in said] == [int(rank == 0), int(rank == 1)]
