"""Make the n-th call fail that touches files below given directories, or that takes much memory.

The seam is what Python code gets to files through: functions of `os`, `io.open` with the reads and writes
of its files, `mmap`, `fcntl.flock`, the entry points of safetensors and tokenizers, and functions of torch
that make new tensors. All are replaced while an `Injection` is active. What libraries in other languages do
inside one call is one call here.
"""

import builtins
import errno
import fcntl
import io
import mmap
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any
from unittest.mock import patch

import safetensors.torch
import tokenizers
import torch

import quantkit

PACKAGE = Path(quantkit.__file__).parent
#: Smaller tensors do not count: those of a tiny model stand for large ones.
LARGE_BYTES = 4096


class Fault(Enum):
    """What a failing call does, and whether the calls after it fail too."""

    EIO = "one call fails with EIO"
    DEAD = "this and all later calls fail with EIO: the disk is gone"
    FULL = "this and all later calls that take space fail with ENOSPC: the disk is full"
    SHORT = "a write takes half of its bytes, then the disk is full"
    MEMORY = "an allocation fails"
    KILL = "the process is killed before a call that changes the disk"


@dataclass(frozen=True)
class Point:
    """Where a call comes from: its kind, the line of quantkit (or the library) and how often it came by."""

    kind: str
    site: str
    ordinal: int

    def __str__(self) -> str:
        return f"{self.kind} at {self.site} #{self.ordinal}"


@dataclass(frozen=True)
class Call:
    """A counted call; `path` is what it was about, empty for memory."""

    point: Point
    path: str


#: Kinds of calls that a full disk refuses.
_TAKES_SPACE = frozenset({"write", "create", "mkdir", "rename"})
_CHANGES_DISK = _TAKES_SPACE | {"fsync", "unlink", "truncate"}
#: Functions of `os` by the kind that they count as; the first argument is a path or a descriptor.
_OS: dict[str, str] = {
    **dict.fromkeys(("read", "pread", "preadv", "readv"), "read"),
    **dict.fromkeys(("write", "pwrite", "pwritev", "writev"), "write"),
    **dict.fromkeys(("fsync", "fdatasync"), "fsync"),
    **dict.fromkeys(("replace", "rename", "link", "symlink"), "rename"),
    **dict.fromkeys(("unlink", "remove", "rmdir"), "unlink"),
    **dict.fromkeys(("truncate", "ftruncate", "posix_fallocate"), "truncate"),
    **dict.fromkeys(("stat", "lstat", "fstat", "statvfs", "readlink"), "stat"),
    **dict.fromkeys(("listdir", "scandir"), "list"),
    "mkdir": "mkdir",
}
_TORCH = ("empty", "zeros", "full", "cat", "stack", "empty_like", "zeros_like", "from_numpy")
_TENSOR = ("to", "float", "clone", "contiguous", "cpu")


class Injection:
    """Counts the calls below `roots` while active; the call number `n` (from 1, none for 0) gets `fault`."""

    def __init__(self, roots: Sequence[Path], n: int = 0, fault: Fault = Fault.EIO) -> None:
        self.roots = tuple(os.path.realpath(root) for root in roots)
        self.n = n
        self.fault = fault
        self.calls: list[Call] = []
        self.failed: list[Call] = []
        self._ordinals: Counter[tuple[str, str]] = Counter()
        self._lock = threading.Lock()
        self._originals: dict[str, Callable[..., Any]] = {name: getattr(os, name) for name in (*_OS, "open")}
        self._open = io.open

    @property
    def hit(self) -> Call | None:
        """The call that failed, if the run came so far."""
        return self.calls[self.n - 1] if 0 < self.n <= len(self.calls) else None

    @contextmanager
    def active(self) -> Iterator["Injection"]:
        """Have the calls counted in the block."""
        with ExitStack() as stack:

            def put(owner: Any, name: str, value: Any) -> None:
                stack.enter_context(patch.object(owner, name, value))

            for name, kind in _OS.items():
                put(os, name, self._of_os(name, kind))
            put(os, "open", self._os_open)
            put(io, "open", self._io_open)
            put(builtins, "open", self._io_open)
            put(fcntl, "flock", self._of_descriptor("lock", fcntl.flock))
            put(mmap, "mmap", self._of_descriptor("mmap", mmap.mmap))
            put(tokenizers.Tokenizer, "from_file", self._of_path("open", tokenizers.Tokenizer.from_file))
            # Functions that modules have under names of their own.
            for original, kind, at in (
                (safetensors.safe_open, "open", 0),
                (safetensors.torch.save_file, "create", 1),
            ):
                counted = self._of_path(kind, original, at)
                for module in list(sys.modules.values()):
                    for name in ("safe_open", "save_file", "safe_save_file"):
                        if getattr(module, "__dict__", {}).get(name) is original:
                            put(module, name, counted)
            if self.fault is Fault.MEMORY:
                for owner, names in ((torch, _TORCH), (torch.Tensor, _TENSOR)):
                    for name in names:
                        put(owner, name, self._of_memory(getattr(owner, name)))
            yield self

    def _below(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The real path of what a call is about, None if that is outside of the directories."""
        try:
            if isinstance(path, int):
                found = self._originals["readlink"](f"/proc/self/fd/{path}")
            else:
                parent = "" if dir_fd is None else self._originals["readlink"](f"/proc/self/fd/{dir_fd}")
                found = str(Path(parent, os.fsdecode(path)).absolute())
        except (OSError, TypeError, ValueError):
            return None
        inside = any(found == root or found.startswith(f"{root}{os.sep}") for root in self.roots)
        return found if inside else None

    def _count(self, kind: str, path: str) -> bool:
        """Count a call; whether it is to fail."""
        site = _site()
        if not self._counts(kind, site):
            return False
        with self._lock:
            self._ordinals[kind, site] += 1
            call = Call(Point(kind, site, self._ordinals[kind, site]), path)
            self.calls.append(call)
            lasting = self.fault in (Fault.DEAD, Fault.FULL, Fault.SHORT)
            fails = self.n > 0 and (len(self.calls) == self.n or (lasting and len(self.calls) > self.n))
            if fails:
                self.failed.append(call)
        if fails and self.fault is Fault.KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        return fails

    def _counts(self, kind: str, site: str) -> bool:
        """Whether a call is one that the fault may befall."""
        match self.fault:
            case Fault.MEMORY:
                return kind == "memory"
            case Fault.FULL | Fault.SHORT:
                return kind in _TAKES_SPACE
            case Fault.KILL:
                return kind in _CHANGES_DISK
            case _:
                # Libraries ask os.path, which tells no error from an absent file, and of which later versions
                # of Python do not ask os.stat.
                return kind != "memory" and not (kind == "stat" and " in " in site)

    def _fail(self, path: str) -> OSError:
        code = errno.ENOSPC if self.fault in (Fault.FULL, Fault.SHORT) else errno.EIO
        return OSError(code, os.strerror(code), path)

    def _of_os(self, name: str, kind: str) -> Callable[..., Any]:
        original = self._originals[name]

        def call(*args: Any, **kwargs: Any) -> Any:
            dir_fd = kwargs.get("dir_fd", kwargs.get("src_dir_fd"))
            # A link is made where its second argument says.
            path = self._below(args[name == "symlink"] if args else kwargs.get("path", "."), dir_fd)
            if path is None or not self._count(kind, path):
                return original(*args, **kwargs)
            if kind == "write" and self.fault is Fault.SHORT and len(self.failed) == 1:
                data = memoryview(args[1]).cast("B")
                if len(data) > 1:
                    return original(args[0], data[: len(data) // 2], *args[2:])
            raise self._fail(path)

        return call

    def _os_open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        found = self._below(path, dir_fd)
        if found is not None and self._count("create" if flags & os.O_CREAT else "open", found):
            raise self._fail(found)
        return self._originals["open"](path, flags, mode, dir_fd=dir_fd)

    def _io_open(
        self,
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        path = self._below(file)
        if path is None or opener is not None:
            return self._open(file, mode, buffering, encoding, errors, newline, closefd, opener)
        if not isinstance(file, int) and self._count("open" if "r" in mode else "create", path):
            raise self._fail(path)
        raw = _File(file, mode.replace("b", "").replace("t", ""), closefd=closefd)
        raw.injection, raw.below = self, path
        if buffering == 0:
            return raw
        size = io.DEFAULT_BUFFER_SIZE if buffering < 2 else buffering
        kind = io.BufferedRandom if "+" in mode else io.BufferedReader if "r" in mode else io.BufferedWriter
        buffer = kind(raw, size)
        return buffer if "b" in mode else io.TextIOWrapper(buffer, encoding, errors, newline)

    def _of_descriptor(self, kind: str, original: Any) -> Callable[..., Any]:
        def call(fd: Any, *args: Any, **kwargs: Any) -> Any:
            number = fd if isinstance(fd, int) else fd.fileno()
            path = self._below(number) if number >= 0 else None
            if path is not None and self._count(kind, path):
                raise self._fail(path)
            return original(fd, *args, **kwargs)

        return call

    def _of_path(self, kind: str, original: Any, at: int = 0) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            found = self._below(args[at])
            if found is not None and self._count(kind, found):
                raise self._fail(found)
            return original(*args, **kwargs)

        return call

    def _of_memory(self, original: Any) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            made = original(*args, **kwargs)
            # Made first: only then is it known how large it is, and where.
            if (
                made.nbytes >= LARGE_BYTES
                and made.device.type == "cpu"
                and sys._getframe(1).f_code.co_filename.startswith(f"{PACKAGE}{os.sep}")
                and self._count("memory", "")
            ):
                raise out_of_memory(made.nbytes)
            return made

        return call


class _File(io.FileIO):
    """A file whose reads and writes count."""

    injection: Injection
    below: str

    def _check(self, kind: str) -> None:
        if self.injection._count(kind, self.below):
            raise self.injection._fail(self.below)

    def readinto(self, buffer: Any) -> int | None:
        self._check("read")
        return super().readinto(buffer)

    def read(self, size: int = -1, /) -> bytes | None:
        self._check("read")
        return super().read(size)

    def readall(self) -> bytes | None:
        self._check("read")
        return super().readall()

    def write(self, data: Any, /) -> int | None:
        self._check("write")
        return super().write(data)


def out_of_memory(nbytes: int) -> RuntimeError:
    """What torch raises where the host has no memory for so many bytes."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried "
        f"to allocate {nbytes} bytes. Error code 12 (Cannot allocate memory)"
    )


def _site() -> str:
    """The innermost line of quantkit, with the library in between that makes the call for it."""
    frame = sys._getframe(2)
    library = ""
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(f"{PACKAGE}{os.sep}"):
            where = f"{Path(name).relative_to(PACKAGE)}:{frame.f_lineno}"
            return f"{where} ({frame.f_code.co_qualname}){library and f' in {library}'}"
        for part in ("transformers", "huggingface_hub", "accelerate", "safetensors", "torch", "typer"):
            if not library and f"{os.sep}{part}{os.sep}" in name:
                library = f"{part}:{frame.f_code.co_qualname}:{frame.f_lineno}"
        frame = frame.f_back
    return f"outside{library and f' in {library}'}"
