"""Read and write files safely: each write is whole or absent, and no content read is trusted.

All writing goes through `os.pwrite`, `os.fsync` and `os.replace`, so that tests can fail each call.
"""

import errno
import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, is_dataclass
from io import BufferedReader
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from quantkit.errors import EnvironmentProblem

TEMP_PREFIX = ".tmp-"
#: Deepest nesting of JSON. Parsers recurse, and Python's own limit depends on the caller.
MAX_DEPTH = 100
#: Most objects and lists in JSON: three bytes of text can make one, which takes hundreds of bytes of memory.
#: The longest allowed header has fewer.
MAX_CONTAINERS = 2_000_000
_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
_FILE_MODE = 0o644  # the kernel takes the umask away

T = TypeVar("T")


def disk_error(errors: Iterable[BaseException]) -> OSError | None:
    """Return the first of `errors` that came from the disk; None if none did.

    `OSError`s of libraries have no errno.
    """
    return next((one for one in errors if isinstance(one, OSError) and one.errno is not None), None)


def os_error_text(error: OSError) -> str:
    """Return text such as `No space left on device (ENOSPC)`."""
    if isinstance(error, NoFileError):
        return str(error.strerror)
    code = errno.errorcode.get(error.errno or 0, "no errno")
    return f"{error.strerror or error} ({code})"


@contextmanager
def temporary(what: str) -> Iterator[None]:
    """Context manager: turn an `OSError` of the block into an `EnvironmentProblem`.

    The error says that `what` cannot be written to the temporary directory.
    """
    try:
        yield
    except OSError as error:
        raise EnvironmentProblem(
            f"{what} cannot be written to the temporary directory: {os_error_text(error)}. Make space there, "
            "or name another directory in TMPDIR."
        ) from error


def size_text(nbytes: float) -> str:
    """Return a size in powers of 1000, as disks and hubs show it: `1.50 GB`."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"


def open_regular(path: Path) -> BufferedReader:
    """Open `path`, a regular file, for reading; raise `OSError` for anything else."""
    # Without O_NONBLOCK, opening a named pipe would wait for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file")
    return os.fdopen(descriptor, "rb")


def parse_json(data: bytes, what: str) -> dict[str, Any]:
    """Parse `data` as a JSON object; raise a `ValueError` that calls the data `what`.

    Stricter than `json.loads`: UTF-8 only, and no duplicate keys at any level (`RepeatedKeyError`). More than
    `MAX_DEPTH` levels, or more than `MAX_CONTAINERS` objects and lists, are errors too.
    """
    if data.count(b"{") + data.count(b"[") > MAX_CONTAINERS:
        raise ValueError(f"{what} has more objects and lists than expected; allowed are {MAX_CONTAINERS}")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique_keys)
        if _HALF_CHARACTER.search(data):
            # An unpaired surrogate is no character: other parsers refuse it, and UTF-8 cannot encode it.
            json.dumps(value, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(f"{what} is nested too deeply; expected a few levels of JSON") from None
    except RepeatedKeyError:
        raise
    except ValueError as error:  # Also invalid UTF-8, and integers of thousands of digits.
        found = f"invalid ({shown(str(error))})" if data.strip() else "empty"
        raise ValueError(f"{what} is {found}; expected a JSON object") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what} is {shown(value)}; expected a JSON object")
    if _is_deep(value):
        raise ValueError(f"{what} is nested too deeply; expected a few levels of JSON")
    return value


def _is_deep(value: dict[str, Any]) -> bool:
    """Return True if JSON has more than `MAX_DEPTH` levels."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item
            for node in level
            for item in (node.values() if isinstance(node, dict) else node)
            if isinstance(item, dict | list)
        ]
        if not level:
            return False
    return True


def from_json(kind: type[T], value: Any) -> T:
    """Convert a JSON `value` to the dataclass `kind`, whose fields are numbers, text, tuples and dataclasses.

    The inverse of `asdict`. Fields with a default may be missing; unknown keys are ignored. Raises
    `TypeError` or `ValueError` for anything else, such as an infinite number or NaN.
    """
    if not isinstance(value, dict):
        raise TypeError(f"{shown(value)} is no {kind.__name__}")
    assert is_dataclass(kind)
    hints = get_type_hints(kind)
    names = [field.name for field in fields(kind) if field.name in value]
    return kind(**{name: _typed(hints[name], value[name], name) for name in names})


def _typed(hint: Any, value: Any, name: str) -> Any:
    """Convert JSON `value` to the type `hint` of the field `name`."""
    if get_origin(hint) is UnionType:
        (hint,) = (option for option in get_args(hint) if option is not type(None))
        return None if value is None else _typed(hint, value, name)
    if is_dataclass(hint):
        return from_json(hint, value)  # type: ignore[arg-type]
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple):
            raise TypeError(f"{name} is {shown(value)}")
        kinds = get_args(hint)
        if kinds[-1] is Ellipsis:
            kinds = kinds[:1] * len(value)
        return tuple(_typed(kind, item, name) for kind, item in zip(kinds, value, strict=True))
    if hint is float and type(value) is int and abs(value) < 1 << 1023:
        value = float(value)
    if type(value) is not hint or (hint is float and not math.isfinite(value)):
        raise TypeError(f"{name} is {shown(value)}")
    return value


class RepeatedKeyError(ValueError):
    """A key occurs twice in one object."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RepeatedKeyError(f"key {shown(twice)} occurs twice in one JSON object; expected once")
    return result


def shown(value: object) -> str:
    """Return `repr(value)`, cut to fit a message; safe for values of hostile size or depth."""
    return _SHORT.repr(value)


def _short_repr() -> reprlib.Repr:
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 100
    short.maxlist = short.maxdict = 10
    return short


_SHORT = _short_repr()


def user_cache() -> Path | None:
    """Return quantkit's directory in the user's cache; None without a home directory."""
    # The XDG specification says to ignore relative paths.
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    try:
        return (given if given.is_absolute() else Path.home() / ".cache") / "quantkit"
    except RuntimeError:
        return None


_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)


class NoFileError(OSError):
    """The path of a file to write is a folder, pipe, socket or device. The text has path, kind and remedy."""

    def __init__(self, path: Path, kind: str) -> None:
        text = f"{path} is {kind}; expected a file or nothing there. Move it elsewhere or remove it"
        super().__init__(errno.EEXIST, text)


def kind_of(path: Path) -> str | None:
    """Return the kind, such as `a folder`; None for a regular file, a link or nothing."""
    try:
        mode = path.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    return next((kind for is_kind, kind in _KINDS if is_kind(mode)), None)


def check_places(directory: Path, names: Iterable[str]) -> None:
    """Raise `NoFileError` if one of `names`, or its temporary name, is taken by something that is no file."""
    for name in names:
        for path in (directory / name, directory / f"{TEMP_PREFIX}{name}"):
            if (kind := kind_of(path)) is not None:
                raise NoFileError(path, kind)


def write_all(fd: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at byte `offset`; raise `OSError` if the file takes no more bytes."""
    rest = memoryview(data)
    while rest:
        # One call may write less than asked: Linux stops at 2 GiB, a full disk at its end.
        written = os.pwrite(fd, rest, offset)
        if written <= 0:
            raise OSError(errno.EIO, "short write: the file takes no more bytes")
        rest = rest[written:]
        offset += written


def sync_directory(directory: Path) -> None:
    """Make renames and removals in `directory` survive a power loss."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class TempFile:
    """`.tmp-<name>` beside its final place, open for reading and writing until published."""

    def __init__(self, directory: Path, name: str) -> None:
        """Create the file with mode 0644 less the umask; raise the `OSError` of the disk if it cannot.

        Raises `NoFileError` if a folder, a pipe, a socket or a device has one of the two names.
        """
        check_places(directory, [name])
        self.path = directory / name
        self._temp = directory / f"{TEMP_PREFIX}{name}"
        self._temp.unlink(missing_ok=True)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self.fd = os.open(self._temp, flags, _FILE_MODE)

    def sync(self) -> None:
        """Put the bytes on the disk."""
        os.fsync(self.fd)

    def publish(self, *, durable: bool = True) -> None:
        """Rename the synced file to its final name; if `durable`, sync the directory too.

        Raises `OSError` if another process removed or replaced the temporary file.
        """
        if not self._is_there():
            raise OSError(errno.ESTALE, "another process removed or replaced the temporary file")
        self._temp.replace(self.path)
        self.close()
        if durable:
            sync_directory(self.path.parent)

    def remove(self) -> None:
        """Remove the temporary file; raise `OSError` if that fails."""
        try:
            self._temp.unlink()
        finally:
            self.close()

    def discard(self) -> None:
        """Remove the temporary file. Never raises: the error that led here is the one to show."""
        with suppress(OSError):
            # Where another process writes too, the name may be that of its file.
            if self.fd >= 0 and self._is_there():
                self._temp.unlink(missing_ok=True)
        with suppress(OSError):
            self.close()

    def close(self) -> None:
        """Close the file and leave it under its current name; does nothing if it is closed."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def _is_there(self) -> bool:
        """Return True if the temporary name still belongs to the open file."""
        try:
            return os.path.samestat(os.fstat(self.fd), self._temp.lstat())
        except FileNotFoundError:
            return False


def replace_file(path: Path, data: bytes | memoryview, *, durable: bool = True) -> None:
    """Write `path` in one step; an `OSError` leaves the old content.

    Unless `durable`, a power loss may leave any content: for files that no later process needs.
    """
    file = TempFile(path.parent, path.name)
    try:
        write_all(file.fd, data, 0)
        if durable:
            file.sync()
        file.publish(durable=durable)
    except BaseException:
        file.discard()
        raise
