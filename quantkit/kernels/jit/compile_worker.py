"""Processes that compile kernels for this one, into Triton's cache.

Much of Triton's compiler is Python, of which one process runs one thread at a time. These are Pythons of
their own that import neither torch nor, as `multiprocessing` would, the program that this one runs.
"""

import atexit
import logging
import os
import site
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import quantkit

logger = logging.getLogger("quantkit.kernels")

#: Seconds after the last kernel until these processes are ended.
IDLE_SECONDS = 20.0


@dataclass(frozen=True)
class Request:
    """A kernel to compile: where its source is, and all that Triton knows of it."""

    module: str
    name: str
    #: `ASTSource` or `GluonASTSource` of Triton, and what it is made of beside the kernel.
    source: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    #: Directory of Triton's cache.
    cache: str


def compile_elsewhere(request: Request) -> bool:
    """Have another process compile a kernel; whether Triton's cache on the disk has it now.

    Whatever goes wrong there, the caller still can, and a warning says that it is slower.
    """
    if not sys.executable or getattr(sys, "frozen", False):
        _warn("sys.executable is no Python")
        return False
    worker = _idle()
    try:
        worker = worker or _Worker()
        if worker.compile(request):
            _keep(worker)
            return True
    except (EOFError, ConnectionError):
        _warn("the process that compiled ended")
    except Exception as error:
        # There is no process, or it cannot be told what to compile.
        _warn(f"{type(error).__name__}: {error}")
    if worker is not None:
        worker.end()
    return False


@lru_cache
def _warn(reason: str) -> None:
    """Say once for each reason why kernels are not compiled elsewhere."""
    logger.warning("kernels are compiled in this process, which takes longer: %s", reason)


class _Worker:
    """One such process, which compiles one kernel at a time."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(number)],
                env=_environment(),
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # Interrupts of a terminal are for who asks.
                start_new_session=True,
            )
        finally:
            theirs.close()

    def is_there(self) -> bool:
        return self._process.poll() is None

    def compile(self, request: Request) -> bool:
        """Whether it is compiled; EOFError or OSError if the process has ended."""
        self._connection.send(request)
        is_done: bool = self._connection.recv()
        return is_done

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """That of this process, in which Python finds quantkit and Triton where this one did."""
    import triton

    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    places = [str(Path(str(package.__file__)).parents[1]) for package in (quantkit, triton)]
    # Not where it looks anyhow: before its own library, what is there might be taken for parts of that.
    usual = {*site.getsitepackages(), site.getusersitepackages()}
    paths = [place for place in places if place not in usual] + [found.get("PYTHONPATH", "")]
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


_LOCK = threading.Lock()
#: Processes that compile nothing now, and what is going to end them.
_IDLE: list[_Worker] = []
_ENDING: list[threading.Timer] = []


def _idle() -> _Worker | None:
    """A process that is idle, and has not ended."""
    with _LOCK:
        while _IDLE:
            worker = _IDLE.pop()
            if worker.is_there():
                return worker
            worker.end()
    return None


def _keep(worker: _Worker) -> None:
    """Let `worker` wait for another kernel, as all that are idle do from now on."""
    ending = threading.Timer(IDLE_SECONDS, _end_idle)
    ending.daemon = True
    with _LOCK:
        _IDLE.append(worker)
        while _ENDING:
            _ENDING.pop().cancel()
        _ENDING.append(ending)
        ending.start()


@atexit.register
def _end_idle() -> None:
    with _LOCK:
        while _IDLE:
            _IDLE.pop().end()


def _work(connection: Connection) -> None:
    """Compile what comes through `connection`, until nobody is there."""
    import triton

    while True:
        try:
            request: Request = connection.recv()
        except (EOFError, OSError):
            return
        try:
            triton.knobs.cache.dir = request.cache
            kernel = getattr(import_module(request.module), request.name)
            source = request.source(kernel, request.signature, request.constants, request.attributes)
            triton.compile(source, target=request.target, options=request.options)
            is_done = True
        except Exception:
            # Who asked compiles it, and gets the error.
            is_done = False
        try:
            connection.send(is_done)
        except OSError:
            return


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
