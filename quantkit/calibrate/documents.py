"""Calibration texts: which files, which of their documents, and how many samples of each.

A source is a file, optionally with how many samples it gives: `a.jsonl:256,wiki.txt:128`. A `.txt` file is
one document, a line of a `.jsonl` file and a row of a `.parquet` file are one each, either `text` or chat
`messages`.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.errors import EnvironmentProblem, UsageError

#: A document: its text, or the messages of a chat.
Document = str | list[dict[str, Any]]

SUFFIXES = (".txt", ".jsonl", ".parquet")


@dataclass(frozen=True)
class Source:
    """A file of calibration texts, and its share of the samples: None for an equal one."""

    path: Path
    share: int | None = None


def parse_sources(text: str) -> tuple[Source, ...]:
    """The sources of `FILE[:SAMPLES],...`; `UsageError` for what is none, or mixes both forms."""
    sources = []
    for part in text.split(","):
        name, separator, count = part.strip().rpartition(":")
        if not separator or not count.isascii() or not count.isdigit():
            name, count = part.strip(), ""
        if count and (len(count) > 9 or int(count) < 1):
            raise UsageError(f"calibration {part!r} asks for {count} samples; use at least 1.")
        _check_source(name, text)
        sources.append(Source(Path(name), int(count) if count else None))
    shares = {source.share is None for source in sources}
    if len(shares) > 1:
        raise UsageError(
            f"calibration {text!r} says how many samples for some of its files only; say it for all or for "
            "none."
        )
    paths = [source.path for source in sources]
    if twice := next((path for path in paths if paths.count(path) > 1), None):
        raise UsageError(f"calibration {text!r} names {twice} twice; name each file once.")
    return tuple(sources)


def _check_source(name: str, text: str) -> None:
    if not name:
        raise UsageError(f"calibration {text!r} names no file; give FILE[:SAMPLES], separated by commas.")
    path = Path(name)
    if path.is_file() and path.suffix in SUFFIXES:
        return
    if path.suffix not in SUFFIXES:
        raise UsageError(
            f"calibration source {name!r} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file. Data "
            "sets of the hub are not read yet: download one of its files and name that."
        )
    raise UsageError(f"calibration file {name} is not there. Check the path.")


def shares(sources: Sequence[Source], samples: int | None, default: int) -> tuple[int, ...]:
    """How many samples each source gives: `samples` in proportion to their shares, which alone are counts.

    `default` is the number where neither says one.
    """
    weights = [source.share or 1 for source in sources]
    total = samples
    if total is None:
        total = sum(weights) if sources[0].share is not None else max(default, len(sources))
    if total < len(sources):
        raise UsageError(f"{total} calibration samples are fewer than the {len(sources)} files; use more.")
    # Largest remainders; each at least one.
    exact = [max(1.0, total * weight / sum(weights)) for weight in weights]
    counts = [int(count) for count in exact]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    for at in sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def read_documents(path: Path) -> list[Document]:
    """The documents of a file, those without text left out.

    `UsageError` naming the file, and the line where there is one, if it cannot be read, is not UTF-8, is
    binary, has something else than documents in it or no text at all; `EnvironmentProblem` if reading it
    takes a package that is not installed.
    """
    documents = list(_READERS[path.suffix](path))
    found = [document for document in documents if not isinstance(document, str) or document.strip()]
    if not found:
        raise UsageError(f"{path}: the file has no text. Give a file with some pages of it.")
    return found


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; line ends stay as they are in the file.

    `UsageError` for a file that cannot be read, is not UTF-8 (names the line), is binary or has
    nothing but whitespace.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}). Check the path.") from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        # `error.object` lacks the byte order mark, so positions count in it.
        line = bytes(error.object)[: error.start].count(b"\n") + 1
        raise UsageError(
            f"{path}: line {line} is not UTF-8 (byte 0x{error.object[error.start]:02x}). "
            "Convert the file to UTF-8, or give a text file."
        ) from None
    if "\0" in text:
        line = text[: text.index("\0")].count("\n") + 1
        raise UsageError(f"{path}: line {line} has a NUL byte; this is a binary file. Give a text file.")
    if not text.strip():
        raise UsageError(f"{path}: the file has no text. Give a file with at least two tokens.")
    return text


def _text_file(path: Path) -> Iterator[Document]:
    yield read_text(path)


def _json_lines(path: Path) -> Iterator[Document]:
    # Not splitlines, which also breaks at characters that JSON strings may hold.
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{path}: line {number} is not JSON ({error}). Write one object a line."
            ) from None
        yield _document(row, f"{path}: line {number}")


def _parquet(path: Path) -> Iterator[Document]:
    try:
        from pyarrow import parquet  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise EnvironmentProblem(
            f"{path}: reading .parquet takes pyarrow, which cannot be imported ({error}). Install it with "
            "`pip install pyarrow`, or convert the file to .jsonl."
        ) from error
    try:
        file = parquet.ParquetFile(path)
        columns = [name for name in ("text", "messages") if name in file.schema_arrow.names]
        rows = file.read(columns=columns).to_pylist()
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: is not a readable parquet file ({error}). Check the file.") from error
    for number, row in enumerate(rows):
        yield _document(row, f"{path}: row {number}")


def _document(row: Any, where: str) -> Document:
    text = row.get("text") if isinstance(row, Mapping) else None
    if isinstance(text, str):
        return text
    messages = row.get("messages") if isinstance(row, Mapping) else None
    chat = isinstance(messages, list) and all(
        isinstance(message, Mapping) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    )
    if chat and messages:
        return [dict(message) for message in messages]
    found = f"the keys {sorted(map(str, row))}" if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(
        f'{where} has {found}; expected {{"text": "..."}} or {{"messages": [{{"role": ..., "content": '
        f"...}}]}}."
    )


_READERS: dict[str, Callable[[Path], Iterator[Document]]] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
