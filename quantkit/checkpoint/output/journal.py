"""Journal of an unfinished output directory: which run writes it, and which files are done.

One JSON object per line, each with its own hash: `line_sha256` hashes the canonical JSON of the other keys.
The first line is `{"run": ...}`, everything that determines the bytes. `{"claim": [names]}` comes before
files of these names may appear, so that a later run recognizes them. `{"file", "sha256", "size", "detail"}`
comes after a file is on the disk.
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
#: Longest journal that is read; the rest is ignored, like a truncated line.
MAX_JOURNAL_BYTES = 1 << 30
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SHOWN_DIFFERENCES = 20
_SHOWN_CHARACTERS = 200


@dataclass(frozen=True)
class Entry:
    """Finished file, and details that its writer needs after a resume."""

    record: FileRecord
    detail: dict[str, Any]


@dataclass(frozen=True)
class JournalState:
    """Parsed lines of a journal. `length` is the number of bytes in whole lines.

    `run` is what determines the bytes of the run, as JSON values. `entries` are the finished files, by name,
    `claimed` the names that the run may write.
    """

    run: dict[str, Any]
    entries: dict[str, Entry] = field(default_factory=dict)
    claimed: frozenset[str] = frozenset()
    length: int = 0


def canonical_json(value: object) -> bytes:
    """Return the canonical JSON of `value`: sorted keys, no spaces, ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def json_hash(value: Mapping[str, Any]) -> str:
    """Return the hex sha256 of the canonical JSON of `value`."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def run_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return one line per key in which two run records differ, such as `options.group_size: 128 -> 64`."""
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
    # A nested empty object or list is a value; an empty run record has no keys.
    if isinstance(value, dict) and (value or not path):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for position, item in enumerate(value):
            yield from _leaves(item, f"{path}[{position}]")
    else:
        text = json.dumps(value)
        if len(text) > _SHOWN_CHARACTERS:
            # The hash distinguishes long values with the same beginning.
            digest = hashlib.sha256(text.encode()).hexdigest()[:12]
            text = f"{text[:_SHOWN_CHARACTERS]}... (sha256 {digest})"
        yield path, text


def read_journal(directory: Path) -> JournalState | None:
    """Read the journal of `directory`; None if there is none.

    An incomplete last line is ignored: its writer was interrupted, and its file is written again. Raises
    `OutputError` if the journal cannot be read, or a line was modified.
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
    """Return a line with its hash and its end."""
    # Parsed once: numeric keys are sorted as the texts they become.
    plain = json.loads(canonical_json(content))
    digest = json_hash(plain)
    return canonical_json({**plain, LINE_HASH: digest}) + b"\n"


def _content(raw: bytes) -> dict[str, Any]:
    """Return a line without its hash; raise `ValueError` if any byte was modified."""
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
        # Check the names, because OVERWRITE deletes what a journal lists.
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
    """Journal of a locked output directory, open to append; each line is on the disk on return."""

    def __init__(self, directory: Path, length: int) -> None:
        """Continue the journal after its first `length` bytes; raise `OutputError` on failure."""
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
        """Record that files of these names will be quantkit's, before they appear."""
        # Twice, so that if a damaged line is removed, its files still count as quantkit's.
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
        """Close the file; does nothing the second time."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _append(self, lines: bytes) -> None:
        with writing(self.path):
            write_all(self._fd, lines, self._end)
            os.fsync(self._fd)
        self._end += len(lines)
