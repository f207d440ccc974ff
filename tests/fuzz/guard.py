"""Bounds of one fuzz case: its time, its memory, the files it opens, and what its error may look like."""

import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

#: What a case may allocate beside what the process has.
MEMORY_BYTES = 512 << 20
MAX_MESSAGE = 10_000
#: How many times its CPU time a case may last.
WAITING = 5

_PYTHON = tuple(
    {
        os.path.realpath(path)
        for path in (sys.prefix, sys.base_prefix, *sys.path)
        if path and Path(path).is_dir()
    }
)
#: What libraries look up about the process and the machine.
#: torch makes a directory for its compiler when that is first imported.
_COMPILER = os.path.realpath(f"{tempfile.gettempdir()}/torchinductor_")
_SYSTEM = (
    _COMPILER,
    "/proc/self/",
    f"/proc/{os.getpid()}/",
    "/proc/sys/kernel/",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/stat",
    "/sys/",
    "/dev/null",
)
_OPENS = {
    *("open", "os.listdir", "os.scandir", "os.remove", "os.rename", "os.mkdir", "os.truncate", "os.chmod"),
    "shutil.rmtree",
}
_NEVER = {
    "socket.connect",
    "socket.getaddrinfo",
    "subprocess.Popen",
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "pickle.find_class",
}


class Hang(BaseException):
    """A case that took too long; no `except Exception` of the product may catch it."""


class Watch:
    """The directory that a case may touch, and what else it did."""

    directory: str | None = None
    seen: list[str]


_watch = Watch()
_watch.seen = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    inside = _watch.directory
    if inside is None:
        return
    if event in _NEVER:
        _watch.seen.append(f"{event} {arguments!r:.300}")
    elif event in _OPENS and arguments and isinstance(arguments[0], str | bytes | os.PathLike):
        path = os.fsdecode(arguments[0])
        if event == "os.remove" and arguments[-1] >= 0:
            # Relative to an open folder, as `shutil.rmtree` does.
            path = str(Path(f"/proc/self/fd/{arguments[-1]}").readlink() / path)
        # What removes or renames a link leaves alone what it leads to.
        follows = event not in ("os.remove", "os.rename", "shutil.rmtree")
        folder, name = os.path.split(path)
        path = os.path.realpath(path) if follows else f"{os.path.realpath(folder)}{os.sep}{name}"
        if path == inside or path.startswith((inside + os.sep, *_SYSTEM)):
            return
        if event in ("open", "os.listdir", "os.scandir") and path.startswith(_PYTHON):
            return
        _watch.seen.append(f"{event} {path}")


_hooked = False


def _install() -> None:
    global _hooked  # noqa: PLW0603 -- an audit hook stays for the life of the process
    if not _hooked:
        _hooked = True
        sys.addaudithook(_hook)


def _expire(*_: object) -> None:
    raise Hang


@contextmanager
def bounded(directory: Path, seconds: float, memory_bytes: int = MEMORY_BYTES) -> Iterator[None]:
    """`Hang` after `seconds` of CPU time or some more of waiting, `MemoryError` beyond the memory,
    `AssertionError` for what is touched outside.
    """
    _install()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    before = {number: signal.signal(number, _expire) for number in (signal.SIGALRM, signal.SIGPROF)}
    _watch.directory, _watch.seen = os.path.realpath(directory), []
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + memory_bytes, hard))
    # Other processes may have the CPU; a case that waits for something uses none.
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WAITING * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        _watch.directory = None
        for number, handler in before.items():
            signal.signal(number, handler)
        # Also where the case was refused afterwards.
        assert not _watch.seen, f"touched outside of the directory: {_watch.seen[:3]}"


def check_message(error: Exception) -> None:
    """A message goes to terminals and logs: printable, not endless, and more than a word."""
    text = str(error)
    text.encode()
    assert len(text) <= MAX_MESSAGE, f"a message of {len(text)} characters"
    odd = sorted({c for c in text if not c.isprintable() and c not in "\n\t"})
    assert not odd, f"a message with {odd!r}: {text[:200]!r}"
    assert len(text) >= 20, f"the message {text!r} says nothing"
