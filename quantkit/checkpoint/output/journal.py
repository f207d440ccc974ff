"""The journal of an unfinished output directory: which run writes it and what is done.

One JSON object per line, each with its own hash: `line_sha256` is that of the canonical JSON of the
other keys. The first is `{"run": ...}`, the record of everything that determines the bytes.
`{"claim": [names]}` comes before files of these names may appear, so that a later run knows them as
quantkit's own; `{"file", "sha256", "size", "detail"}` comes after a file is on the disk.
"""

import hashlib
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.output.atomic_write import (
    FileRecord,
    is_plain_name,
    read_inside,
    write_file,
    writing,
)
from quantkit.errors import OutputError
from quantkit.files import os_error_text, parse_json, shown, sync_directory, write_all

JOURNAL_NAME = ".quantkit-journal.jsonl"
LINE_HASH = "line_sha256"
#: Of a longer one the rest is left out, like a line that is cut off.
MAX_JOURNAL_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN_DIFFERENCES = 20
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Entry:
    """A finished file, and what its writer wanted to know about it after a resume."""

    record: FileRecord
    detail: dict[str, Any]


@dataclass(frozen=True)
class JournalState:
    """The lines of a journal, read. `length` is the number of its bytes that are whole lines."""

    run: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    claimed: frozenset[str] = frozenset()
    length: int = 0


def canonical_json(value: object) -> bytes:
    """The one JSON text of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def run_hash(run: Mapping[str, Any]) -> str:
    """sha256 in hex of the canonical JSON of a run record."""
    return hashlib.sha256(canonical_json(run)).hexdigest()


def run_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """One line per key in which two run records differ, such as `options.group_size: 128 -> 64`."""
    before, after = (dict(_leaves(json.loads(canonical_json(run)))) for run in (old, new))
    lines = [
        f"{key}: {before.get(key, '(absent)')} -> {after.get(key, '(absent)')}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if len(lines) > _SHOWN_DIFFERENCES:
        more = len(lines) - _SHOWN_DIFFERENCES
        lines[_SHOWN_DIFFERENCES:] = [f"and {more} more"]
    return lines


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    # An empty object or list inside is a value of its own, an empty run record has none.
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _leaves(item, f"{path}[{position}]")
    else:
        text = json.dumps(value)
        if len(text) > _SHOWN_CHARACTERS:
            # The hash keeps two long values with the same beginning apart.
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            text = f"{text[:_SHOWN_CHARACTERS]}... (sha256 {digest})"
        yield path, text


def read_journal(directory: Path) -> JournalState | None:
    """The journal of `directory`, or None if it has none.

    A last line without its end is left out: its writer was interrupted, and what it said is done is done
    again. `OutputError` if the journal cannot be read, or a line of it has changed since it was written.
    """
    path = directory / JOURNAL_NAME
    try:
        data = read_inside(path, MAX_JOURNAL_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OutputError(
            f"cannot read {path}: {os_error_text(error)}. Make it readable or remove the directory."
        ) from error
    *raws, _ = data.split(b"\n")
    if not raws:
        raise _damaged(path, 1, "it is not whole")
    run: dict[str, Any] = {}
    entries: dict[str, Entry] = {}
    claimed: set[str] = set()
    for number, raw in enumerate(raws, 1):
        try:
            line = _content(raw)
            if not _is_line(line, first=number == 1):
                raise ValueError("it has other keys or values than a line has")
        except ValueError as error:
            raise _damaged(path, number, str(error)) from None
        if number == 1:
            run = line["run"]
        elif "claim" in line:
            claimed.update(line["claim"])
        else:
            entry = Entry(FileRecord(line["file"], line["sha256"], line["size"]), line["detail"])
            entries[entry.record.file] = entry
    length = sum(len(raw) + 1 for raw in raws)
    return JournalState(run, entries, frozenset(claimed | entries.keys()), length)


def _line(content: Mapping[str, Any]) -> bytes:
    """A line with its hash and its end."""
    # Parsed once: keys that are numbers are sorted as the texts that they become.
    plain = json.loads(canonical_json(content))
    digest = hashlib.sha256(canonical_json(plain)).hexdigest()
    return canonical_json({**plain, LINE_HASH: digest}) + b"\n"


def _content(raw: bytes) -> dict[str, Any]:
    """Return a line without its hash; `ValueError` if a byte of it is another than was written."""
    line = parse_json(raw, "it")
    content = {key: value for key, value in line.items() if key != LINE_HASH}
    if LINE_HASH not in line:
        raise ValueError(f"it has no hash {LINE_HASH!r}")
    if raw + b"\n" != _line(content):
        raise ValueError(f"its hash {LINE_HASH!r} is {shown(line[LINE_HASH])}, not that of its content")
    return content


def _damaged(path: Path, number: int, problem: str) -> OutputError:
    at = f"{path} is damaged in line {number}"
    if number == 1:
        return OutputError(
            f"{at}, which does not hold the run record: {problem}. Remove {path.parent} and start anew."
        )
    return OutputError(
        f"{at}: {problem}. Remove that line, such as with sed -i {number}d {shlex.quote(str(path))}, and run "
        "the same command with --resume, which writes its file again; or remove "
        f"{path.parent} and start anew."
    )


def _is_line(content: Mapping[str, Any], *, first: bool) -> bool:
    if first:
        return content.keys() == {"run"} and isinstance(content["run"], dict)
    if content.keys() == {"claim"}:
        # Names are checked because OVERWRITE deletes what a journal lists.
        return isinstance(content["claim"], list) and all(map(is_plain_name, content["claim"]))
    return (
        content.keys() == {"file", "sha256", "size", "detail"}
        and is_plain_name(content["file"])
        and isinstance(content["sha256"], str)
        and bool(_SHA256.fullmatch(content["sha256"]))
        and type(content["size"]) is int
        and isinstance(content["detail"], dict)
    )


class Journal:
    """Appends to the journal of a locked output directory; each line is on the disk on return."""

    def __init__(self, directory: Path, length: int) -> None:
        """Continue the journal after its first `length` bytes; `OutputError` if it fails."""
        self.path = directory / JOURNAL_NAME
        self._end = length
        with writing(self.path):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            os.ftruncate(self._fd, length)

    @classmethod
    def create(cls, directory: Path, run: Mapping[str, Any]) -> "Journal":
        """Start the journal of `run`; it appears with its first line or not at all."""
        return cls(directory, write_file(directory, JOURNAL_NAME, [_line({"run": run})]).size)

    def claim(self, names: Sequence[str]) -> None:
        """Record that files of these names are quantkit's, before they appear."""
        # Twice: who removes a damaged line must not make strangers of the files that it named.
        self._append(2 * _line({"claim": list(names)}))

    def append(self, entry: Entry) -> None:
        """Record a file as done."""
        record = entry.record
        self._append(
            _line(
                {
                    "file": record.file,
                    "sha256": record.sha256,
                    "size": record.size,
                    "detail": entry.detail,
                }
            )
        )

    def remove(self) -> None:
        """Delete the journal of a directory that is finished."""
        self.close()
        with writing(self.path):
            self.path.unlink(missing_ok=True)
            sync_directory(self.path.parent)

    def close(self) -> None:
        """Let go of the file; does nothing the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, lines: bytes) -> None:
        with writing(self.path):
            write_all(self._fd, lines, self._end)
            os.fsync(self._fd)
        self._end += len(lines)
