"""Processes that compile kernels for this one, into Triton's cache.

Much of Triton's compiler is Python, of which one process runs one thread at a time. These are Pythons of
their own that import neither torch nor, as `multiprocessing` would, the program that this one runs.
"""

import atexit
import os
import queue
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

#: Seconds after which a process that nobody asks for a kernel ends.
IDLE_SECONDS = 20


@dataclass(frozen=True)
class Order:
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


def compile_elsewhere(order: Order) -> bool:
    """Have another process compile a kernel; whether Triton's cache on the disk has it now."""
    try:
        worker = _idle() or _Worker()
    except OSError:
        return False
    is_done = worker.compile(order)
    if is_done:
        _IDLE.put(worker)
    else:
        worker.end()
    return is_done


def _idle() -> "_Worker | None":
    """A process that is idle, and has not ended."""
    while True:
        try:
            worker = _IDLE.get_nowait()
        except queue.Empty:
            return None
        if worker.is_there():
            return worker


class _Worker:
    """One such process, which compiles one kernel at a time."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        number = theirs.fileno()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, str(number)],
            env=environment,
            pass_fds=(number,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Interrupts of a terminal are for who asks.
            start_new_session=True,
        )
        theirs.close()

    def is_there(self) -> bool:
        return self._process.poll() is None

    def compile(self, order: Order) -> bool:
        try:
            self._connection.send(order)
            is_done: bool = self._connection.recv()
        except (EOFError, OSError):
            return False
        return is_done

    def end(self) -> None:
        self._connection.close()
        self._process.kill()
        self._process.wait()


#: Processes that compile nothing now.
_IDLE: queue.SimpleQueue[_Worker] = queue.SimpleQueue()


@atexit.register
def _end_all() -> None:
    while not _IDLE.empty():
        _IDLE.get().end()


def _work(connection: Connection) -> None:
    """Compile what comes through `connection`, until it closes or nothing comes."""
    import triton

    while connection.poll(IDLE_SECONDS):
        try:
            order: Order = connection.recv()
        except EOFError:
            return
        try:
            triton.knobs.cache.dir = order.cache
            kernel = getattr(import_module(order.module), order.name)
            source = order.source(kernel, order.signature, order.constants, order.attributes)
            triton.compile(source, target=order.target, options=order.options)
            is_done = True
        except Exception:
            # Who asked compiles it, and gets the error.
            is_done = False
        connection.send(is_done)


if __name__ == "__main__":
    _work(Connection(int(sys.argv[1])))
