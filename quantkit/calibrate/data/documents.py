"""Read documents from text files of the supported types.

A `.txt` file is one document; so is each line of a `.jsonl` file, object of a `.json` file, and row of a
`.parquet` file. The table `COLUMNS` lists the columns of a document. All but `.parquet` may be compressed,
as `.jsonl.gz`.
"""

import gzip
import io
import json
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from quantkit.about import pip_install
from quantkit.errors import EnvironmentProblem, QuantkitError, UsageError
from quantkit.files import MAX_CONTAINERS, shown

#: Text, or the messages of a chat.
Document = str | list[dict[str, Any]]

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")

#: Largest size of a small compressed file, or of a .parquet file, after decompression.
MAX_DECOMPRESSED_BYTES = 1 << 30

#: Longest line: it is in memory several times while it is tokenized. A `.json` file may be one line.
MAX_LINE_BYTES = 64 << 20

#: Largest expansion of a compressed file, beyond `MAX_LINE_BYTES`; texts expand up to ten times.
MAX_GROWTH = 100

#: Bytes of UTF-8 text that are read, many times what samples need; tokenizing them takes seconds. Counted in
#: bytes, because some tokenizers make a token of each byte.
MAX_WORK = 4_000_000

#: Most objects and lists in a row.
MAX_OBJECTS = 200_000

#: Most values in a row, in an array, or in the lists of a group of rows: each takes up to 70 bytes in memory,
#: and less than a bit in a compressed file.
MAX_VALUES = 5_000_000

#: Least cost of a row in bytes, however short its text is.
ROW_WORK = 128

_BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
#: Roles of "conversations", by the names in ShareGPT.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def kind_of(name: str) -> str | None:
    """Return the entry of `SUFFIXES` that a file name ends in, compressed or not; None for other names."""
    suffix = Path(name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES or (name.endswith(".gz") and suffix == ".parquet"):
        return None
    return suffix


def read_documents(path: Path) -> list[Document]:
    """Read the documents of a file, without empty ones.

    Raises `UsageError` with file and line if the file cannot be read, is binary or
    not UTF-8. Also raised if it holds no text, or anything other than documents. Raises `EnvironmentProblem`
    if a package is missing to read it.
    """
    return first_documents(path, sys.maxsize)[0]


def first_documents(path: Path, work: int, characters: int | None = None) -> tuple[list[Document], bool]:
    """Read the first documents of a file up to a cost of `work` bytes; return True if the limit was reached.

    `characters` ends the read at about as many characters.
    A text, and each message of a chat, costs its length in UTF-8, at least `ROW_WORK`. A text that alone
    costs more than `work` is cut. A longer chat raises `UsageError`.
    """
    kind = kind_of(path.name)
    assert kind is not None, path
    found: list[Document] = []
    length, left, number = 0, work, 0
    for number, document in enumerate(_READERS[kind](path, work)):
        size, effort = _characters(document), _effort(document)
        if size:
            fits = effort <= work
            found.append(document if fits else _shortened(document, work, f"{path}: document {number}"))
        length, left = length + size, left - effort
        if left <= 0 or (characters is not None and length >= characters):
            break
    if not found:
        where = "the file has no text" if left > 0 else f"the first {number + 1} rows have no text"
        raise UsageError(f"{path}: {where}. Give a file with some pages of it.")
    return found, left <= 0


def _shortened(document: Document, work: int, where: str) -> Document:
    if isinstance(document, str):
        return _utf8(document)[:work].decode(errors="ignore")
    raise UsageError(
        f"{where} has a chat of {len(document)} messages and {_characters(document)} characters; expected at "
        f"most {work} bytes, of which a message counts as {ROW_WORK} or more. Leave it out."
    )


def _effort(document: Document) -> int:
    """Return the cost of tokenizing a document, in bytes: each text counts at least `ROW_WORK`."""
    texts = [document] if isinstance(document, str) else [str(message["content"]) for message in document]
    return sum(max(ROW_WORK, len(_utf8(text))) for text in texts)


def _utf8(text: str) -> bytes:
    # JSON may hold unpaired surrogates.
    return text.encode(errors="surrogatepass")


def read_text(path: Path) -> str:
    """Read a UTF-8 file without its byte order mark; line ends stay as they are.

    Raises `UsageError` for a file that cannot be read, is binary, is not UTF-8 (with the line), or is blank.
    """
    return _text(path, sys.maxsize)


def _text(path: Path, characters: int) -> str:
    """Read the first lines of a file, about `characters` characters.

    Raises `UsageError` for a file that cannot be read, is binary, is not UTF-8 (with the line), or is blank.
    """
    # StringIO, because a list of short lines takes twenty times the memory of the text.
    whole, length = io.StringIO(), 0
    for _, lines in _blocks(path):
        length += whole.write(lines)
        if length >= characters:
            break
    text = whole.getvalue()
    if not text.strip():
        where = (
            "the file has no text" if length < characters else f"the first {length} characters are no text"
        )
        raise UsageError(f"{path}: {where}. Give a file with at least two tokens.")
    return text


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield numbered lines without their ends; only `\\n` ends a line, as JSON may hold the others."""
    for first, lines in _blocks(path):
        yield from enumerate(lines.removesuffix("\n").split("\n"), first)


def _blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Yield blocks of whole lines, up to `_BLOCK_BYTES` or one line, with the number of the first line."""
    compressed = path.suffix == ".gz"
    longest = sys.maxsize if kind_of(path.name) == ".json" else MAX_LINE_BYTES
    number = 1
    try:
        left = limit = _grown(path) if compressed else sys.maxsize
        with cast(BinaryIO, gzip.open(path)) if compressed else path.open("rb") as file:
            while raw := file.read(min(_BLOCK_BYTES, longest, left + 1)):
                if not raw.endswith(b"\n"):
                    begun = len(raw) - (raw.rfind(b"\n") + 1)
                    raw += file.readline(min(longest - begun, left + 1 - len(raw)))
                if len(raw) - (raw.rfind(b"\n", 0, len(raw) - 1) + 1) >= longest:
                    last = number + raw.count(b"\n", 0, len(raw) - 1)
                    raise UsageError(
                        f"{path}: line {last} has {longest} bytes or more; expected lines of text, or a "
                        "document a line. Break it into lines, or give a part of it."
                    )
                if len(raw) > left:
                    if whole := raw[: raw.rfind(b"\n", 0, left) + 1]:
                        yield number, _decoded(whole, path, number)
                    raise _too_long(path, limit)
                yield number, _decoded(raw, path, number)
                number, left = number + raw.count(b"\n"), left - len(raw)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{path}: is not a whole gzip file ({error}). Download it again.") from error
    except OSError as error:
        raise UsageError(f"{path}: cannot be read ({error.strerror or error}). Check the path.") from error


def _grown(path: Path) -> int:
    """Return the largest accepted size of a compressed file after decompression, in bytes."""
    # An array is parsed as a whole.
    most = MAX_LINE_BYTES if kind_of(path.name) == ".json" else MAX_DECOMPRESSED_BYTES
    return min(most, max(MAX_LINE_BYTES, MAX_GROWTH * path.stat().st_size))


def _too_long(path: Path, limit: int) -> UsageError:
    return UsageError(f"{path}: has more than {limit} bytes when decompressed. Give a part of it.")


def _decoded(raw: bytes, path: Path, number: int) -> str:
    """Decode lines of UTF-8, the first of which has the number `number`."""
    if number == 1 and raw.startswith(_GZIP_MAGIC):
        raise UsageError(f"{path}: is compressed with gzip. Decompress it, or let its name end in .gz.")
    try:
        lines = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # `error.object` lacks the byte order mark, but positions count it.
        at = number + error.object.count(b"\n", 0, error.start)
        raise UsageError(
            f"{path}: line {at} is not UTF-8 (byte 0x{error.object[error.start]:02x}). "
            "Convert the file to UTF-8, or give a text file."
        ) from None
    if "\0" in lines:
        at = number + lines.count("\n", 0, lines.index("\0"))
        raise UsageError(f"{path}: line {at} has a NUL byte; this is a binary file. Give a text file.")
    return lines


def _text_file(path: Path, work: int) -> Iterator[Document]:
    yield _text(path, work)


def _json_lines(path: Path, work: int) -> Iterator[Document]:
    for number, line in read_lines(path):
        if not line.strip():
            yield ""
            continue
        row = parsed_row(line, f"{path}: line {number}", "one object a line", MAX_OBJECTS, MAX_VALUES)
        yield document_of(row, f"{path}: line {number}")


def _json_file(path: Path, work: int) -> Iterator[Document]:
    """Yield the objects of one array, or of lines, which many files called .json have."""
    first = next((lines.lstrip() for _, lines in _blocks(path) if lines.strip()), "")
    if not first.startswith("["):
        yield from _json_lines(path, work)
        return
    # A file that is itself large may take more memory.
    values = max(MAX_VALUES, path.stat().st_size // 8)
    rows = parsed_row(_text(path, sys.maxsize), f"{path}:", "an array of objects", MAX_CONTAINERS, values)
    for number, row in enumerate(rows):
        yield document_of(row, f"{path}: object {number}")


def parsed_row(text: str, where: str, expected: str, most: int, values: int) -> Any:
    if text.count("{") + text.count("[") > most:
        raise UsageError(f"{where} has more than {most} objects and lists. Give a part of it.")
    if text.count(",") > values:
        raise UsageError(f"{where} has more than {values} commas. Give a part of it.")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({error}). Write {expected}.") from None


def import_parquet(name: Path | str) -> Any:
    """Import pyarrow.parquet; raise `EnvironmentProblem` about the file `name` without it."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise EnvironmentProblem(
            f"{name}: reading .parquet takes pyarrow, which cannot be imported ({error}). Install it with "
            f"{pip_install('parquet')}, or give a .jsonl file."
        ) from error
    return parquet


def _parquet(path: Path, work: int = MAX_WORK) -> Iterator[Document]:
    parquet = import_parquet(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            usable = [name for keys, _ in COLUMNS if set(keys) <= set(names) for name in keys]
            if not usable:
                raise UsageError(
                    f"{path} has the columns {shown(names)}; expected {_EXPECTED}. Rename or add one."
                )
            columns = sorted(set(usable))
            _check_sizes(path, file.metadata, columns)
            number, left = 0, MAX_DECOMPRESSED_BYTES
            # One row at a time: a few bytes of the file may expand to a long text in each of many rows.
            for batch in file.iter_batches(batch_size=1, columns=columns):
                left -= batch.nbytes
                if left < 0:
                    raise _too_long(path, MAX_DECOMPRESSED_BYTES)
                if sum(map(_elements, batch.columns)) > MAX_OBJECTS:
                    raise UsageError(
                        f"{path}: row {number} has more than {MAX_OBJECTS} objects. Leave it out."
                    )
                for row in batch.to_pylist():
                    yield document_of(row, f"{path}: row {number}")
                    number += 1
    except (QuantkitError, MemoryError):
        raise
    except Exception as error:  # Values without a Python type: pyarrow and pytz may raise anything.
        raise UsageError(f"{path}: is not a readable parquet file ({error}). Check the file.") from error


def _check_sizes(path: Path, metadata: Any, columns: Sequence[str]) -> None:
    """Raise `UsageError` for columns of a row group that expand too much.

    Pages are decompressed as a whole, and so are the lists of a row.
    """
    for group in map(metadata.row_group, range(metadata.num_row_groups)):
        parts = [group.column(i) for i in range(group.num_columns)]
        parts = [part for part in parts if part.path_in_schema.partition(".")[0] in columns]
        compressed = sum(part.total_compressed_size for part in parts)
        limit = max(MAX_LINE_BYTES, MAX_GROWTH * compressed)
        if sum(part.total_uncompressed_size for part in parts) > limit:
            raise _too_long(path, limit)
        in_lists = sum(part.num_values - group.num_rows for part in parts)
        if in_lists > (values := max(MAX_VALUES, compressed)):
            raise UsageError(
                f"{path}: a group of rows has {in_lists} values in lists; expected at most {values}. Give a "
                "part of it."
            )


def _elements(array: Any) -> int:
    """Return the number of elements of all lists in an arrow array, at all levels."""
    if not array.type.num_fields:
        return 0
    parts = array.flatten()
    # The fields of a struct are a list.
    return sum(map(_elements, parts)) if isinstance(parts, list) else len(parts) + _elements(parts)


def document_of(row: Any, where: str) -> Document:
    """Return the text or chat of a row; `UsageError`, naming `where`, without one of `COLUMNS`."""
    if isinstance(row, Mapping):
        present = [(keys, of) for keys, of in COLUMNS if all(key in row for key in keys)]
        complete = [(keys, of) for keys, of in present if all(row[key] is not None for key in keys)]
        for keys, make in complete:
            document = make(*(row[key] for key in keys))
            if document is not None:
                return document
        if present and not complete:
            return ""  # A row of nulls is left out, like one with an empty text.
        if complete:
            keys, make = complete[0]
            values = ", ".join(f"{key} = {shown(row[key])}" for key in keys)
            raise UsageError(f"{where} has {values}; expected {_VALUES[make]}. Mend it or leave it out.")
    found = f"the keys {shown(sorted(map(str, row)))}" if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(f"{where} has {found}; expected {_EXPECTED}. Rename or add a column.")


def _plain(text: Any) -> Document | None:
    return text if isinstance(text, str) else None


def _chat(messages: Any) -> list[dict[str, Any]] | None:
    """Convert a chat to `[{"role": ..., "content": ...}]`; also from ShareGPT's "from" and "value".

    None if `messages` is no list of such messages, or is empty.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        return None
    found: list[dict[str, Any]] = []
    for message in messages:
        if not isinstance(message, Mapping):
            return None
        if isinstance(message.get("role"), str) and "content" in message:
            found.append({key: value for key, value in message.items() if value is not None})
            found[-1].setdefault("content", "")
        elif (role := _ROLES.get(str(message.get("from")))) and isinstance(message.get("value"), str):
            found.append({"role": role, "content": message["value"]})
        else:
            return None
    return found


def _exchange(*parts: Any) -> Document | None:
    """Join texts, one per line unless a part brings its own space; or join the parts of a chat.

    None if a part is neither a text nor a chat.
    """
    if all(isinstance(part, str) for part in parts):
        text = ""
        for part in filter(None, parts):
            spaced = not text or text[-1].isspace() or part[0].isspace()
            text += part if spaced else "\n" + part
        return text
    chats = [_chat(part) for part in parts]
    if any(chat is None for chat in chats):
        return None
    return [message for chat in chats for message in chat or ()]


#: Columns of a document, and the function that joins them; the first row whose columns exist and fit is used.
COLUMNS: tuple[tuple[tuple[str, ...], Callable[..., Document | None]], ...] = (
    (("text",), _plain),
    (("content",), _plain),
    (("messages",), _chat),
    (("conversations",), _chat),
    (("prompt", "completion"), _exchange),
    (("prompt", "response"), _exchange),
    (("instruction", "input", "output"), _exchange),
    (("instruction", "output"), _exchange),
    (("question", "answer"), _exchange),
)


_CHAT = '[{"role": ..., "content": ...}, ...]'
#: Expected type of the values, for errors.
_VALUES: Mapping[Callable[..., Document | None], str] = {
    _plain: "a string",
    _chat: _CHAT,
    _exchange: f"strings, or each {_CHAT}",
}


def _column_names(rows: Iterable[tuple[tuple[str, ...], Any]]) -> str:
    *names, last = ("+".join(keys) for keys, _ in rows)
    return f"{', '.join(names)} or {last}"


_EXPECTED = f"{_column_names(COLUMNS)}, where messages and conversations are {_CHAT}, the others text"


def _characters(document: Document) -> int:
    """Return the length of the text; 0 for whitespace only."""
    if isinstance(document, str):
        return len(document) if document.strip() else 0
    return max(1, sum(len(str(message["content"])) for message in document))


#: Reader by file type, called with how much to read; yields empty documents for rows without text.
_READERS: dict[str, Callable[[Path, int], Iterator[Document]]] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
}
