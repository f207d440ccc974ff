"""Compile kernels in other processes, into Triton's cache on disk.

Much of Triton's compiler is Python, so threads of one process would take turns. These processes import
neither torch nor the main program, which `multiprocessing` would import.
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

#: Seconds from the last kernel until idle processes are ended.
IDLE_SECONDS = 20.0


@dataclass(frozen=True)
class Request:
    """Kernel to compile in another process.

    module, name                       module and name of the kernel's function
    source                             Triton's class of the kernel's source: `ASTSource` or `GluonASTSource`
    signature, constants, attributes   arguments of that class after the kernel
    target, options                    arguments of `triton.compile`
    cache                              directory of Triton's cache
    """

    module: str
    name: str
    source: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    target: Any
    options: dict[str, Any]
    cache: str


def compile_elsewhere(request: Request) -> bool:
    """Compile a kernel in another process; return True if Triton's cache on disk then has the kernel.

    Returns False on any failure; a warning then says that compiling in this process takes longer.
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
        # No process could be started, or the request could not be pickled.
        _warn(f"{type(error).__name__}: {error}")
    if worker is not None:
        worker.end()
    return False


@lru_cache
def _warn(reason: str) -> None:
    """Log once per reason that kernels are compiled in this process."""
    logger.warning("kernels are compiled in this process, which takes longer: %s", reason)


class _Worker:
    """Another process, which compiles one kernel at a time and is reused for further kernels."""

    def __init__(self) -> None:
        self._connection, child_end = Pipe()
        number = child_end.fileno()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__, str(number)],
                env=_environment(),
                pass_fds=(number,),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                # A terminal's interrupt is meant for the main process.
                start_new_session=True,
            )
        finally:
            child_end.close()

    def is_there(self) -> bool:
        """Return True if the process still runs."""
        return self._process.poll() is None

    def compile(self, request: Request) -> bool:
        """Compile a kernel; return True on success. Raises EOFError or OSError if the process ended."""
        self._connection.send(request)
        is_done: bool = self._connection.recv()
        return is_done

    def end(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.kill()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Return the environment variables of a compiling process: it must find the same quantkit and Triton."""
    import triton

    found = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    package_paths = [str(Path(str(package.__file__)).parents[1]) for package in (quantkit, triton)]
    # Without the default paths: before the standard library they could shadow its modules.
    usual = {*site.getsitepackages(), site.getusersitepackages()}
    paths = [path for path in package_paths if path not in usual] + [found.get("PYTHONPATH", "")]
    return found | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


_LOCK = threading.Lock()
#: Idle processes, and the timer that will end them.
_IDLE: list[_Worker] = []
_ENDING: list[threading.Timer] = []


def _idle() -> _Worker | None:
    """Remove a live worker from the idle ones and return it; None if no worker is idle."""
    with _LOCK:
        while _IDLE:
            worker = _IDLE.pop()
            if worker.is_there():
                return worker
            worker.end()
    return None


def _keep(worker: _Worker) -> None:
    """Add `worker` to the idle processes; all idle ones end `IDLE_SECONDS` after the last such call."""
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
    """End all idle processes."""
    with _LOCK:
        while _IDLE:
            _IDLE.pop().end()


def _work(connection: Connection) -> None:
    """Run in a compiling process: compile each `Request` from `connection` until it closes.

    Each request is answered by True, or by False if the kernel does not compile.
    """
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
            # The caller compiles it itself, and gets the error.
            is_done = False
        try:
            connection.send(is_done)
        except OSError:
            return


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
