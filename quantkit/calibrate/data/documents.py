"""Documents of text files: what is one in a file of each kind, and what is refused.

A `.txt` file is one document; a line of a `.jsonl` file, an object of a `.json` file and a row of a
`.parquet` file are one each. Which of their columns make the document is a row of the table `COLUMNS`. All
but `.parquet` may be compressed, as `.jsonl.gz`.
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

#: A document: its text, or the messages of a chat.
Document = str | list[dict[str, Any]]

SUFFIXES = (".txt", ".jsonl", ".json", ".parquet")

#: Bounds what a small compressed file, or one of .parquet, may grow to.
MAX_DECOMPRESSED_BYTES = 1 << 30

#: A line is held in memory several times while it becomes tokens. `.json` files may have but one.
MAX_LINE_BYTES = 64 << 20

#: How many times its size a compressed file may grow, beyond `MAX_LINE_BYTES`; texts grow up to ten times.
MAX_GROWTH = 100

#: Bytes of text in UTF-8 that are read, many times what samples take; they become tokens within seconds. Not
#: characters, as some tokenizers make a token of each byte.
MAX_WORK = 4_000_000

#: Objects and lists that a row may have.
MAX_OBJECTS = 200_000

#: Values that a row, an array, or the lists in a group of rows may have: each takes up to 70 bytes in memory,
#: and less than a bit of a compressed file.
MAX_VALUES = 5_000_000

#: A row takes as long as so many bytes, however short its text is.
ROW_WORK = 128

_BLOCK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
#: Who speaks in "conversations", by the names of ShareGPT.
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def kind_of(name: str) -> str | None:
    """The one of `SUFFIXES` that a file name has, compressed or not; None for any other name."""
    suffix = Path(name.removesuffix(".gz")).suffix
    if suffix not in SUFFIXES or (name.endswith(".gz") and suffix == ".parquet"):
        return None
    return suffix


def read_documents(path: Path, characters: int | None = None) -> list[Document]:
    """Return the documents of a file, those without text left out; with `characters` only the first, of about
    that length.

    Raises `UsageError`, which names the file and the line, if it cannot be read, is not UTF-8, binary or
    compressed. Raises it too for a file with something else than documents in it or no text at all. Raises
    `EnvironmentProblem` if reading it takes a package that is not installed.
    """
    return first_documents(path, sys.maxsize, characters)[0]


def first_documents(path: Path, work: int, characters: int | None = None) -> tuple[list[Document], bool]:
    """Return the first documents of a file until they cost `work` bytes, and True if that limit was reached.

    A text, and each message of a chat, costs its length in UTF-8, at least `ROW_WORK`. A text that alone
    costs more than `work` is cut. A chat that does raises `UsageError`.
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
    """Return the cost of making tokens of a document, in bytes: each text counts at least `ROW_WORK`."""
    texts = [document] if isinstance(document, str) else [str(message["content"]) for message in document]
    return sum(max(ROW_WORK, len(_utf8(text))) for text in texts)


def _utf8(text: str) -> bytes:
    # JSON may have half characters.
    return text.encode(errors="surrogatepass")


def read_text(path: Path) -> str:
    """The text of a UTF-8 file, without a byte order mark; line ends stay as they are in the file.

    `UsageError` for a file that cannot be read, is not UTF-8 (names the line), is binary or has
    nothing but whitespace.
    """
    return _text(path, sys.maxsize)


def _text(path: Path, characters: int) -> str:
    """Return `read_text` of the first lines, of about `characters` characters."""
    # Not joined: a list of lines takes twenty times what a text of short ones does.
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
    """Lines without their ends, numbered from 1; only `\\n` ends one, as JSON strings may hold the others."""
    for first, lines in _blocks(path):
        yield from enumerate(lines.removesuffix("\n").split("\n"), first)


def _blocks(path: Path) -> Iterator[tuple[int, str]]:
    """Whole lines, as many as `_BLOCK_BYTES` have or one, and the number of the first."""
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
    """Bytes that a compressed file may have when it is not."""
    # An array becomes objects as a whole.
    most = MAX_LINE_BYTES if kind_of(path.name) == ".json" else MAX_DECOMPRESSED_BYTES
    return min(most, max(MAX_LINE_BYTES, MAX_GROWTH * path.stat().st_size))


def _too_long(path: Path, limit: int) -> UsageError:
    return UsageError(f"{path}: has more than {limit} bytes when decompressed. Give a part of it.")


def _decoded(raw: bytes, path: Path, number: int) -> str:
    """The text of lines, of which the first has the number `number`."""
    if number == 1 and raw.startswith(_GZIP_MAGIC):
        raise UsageError(f"{path}: is compressed with gzip. Decompress it, or let its name end in .gz.")
    try:
        lines = raw.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        # `error.object` lacks the byte order mark, so positions count in it.
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
        yield _document(row, f"{path}: line {number}")


def _json_file(path: Path, work: int) -> Iterator[Document]:
    """One array of objects, or lines of them, which many call .json as well."""
    first = next((lines.lstrip() for _, lines in _blocks(path) if lines.strip()), "")
    if not first.startswith("["):
        yield from _json_lines(path, work)
        return
    # A file that is large itself may take memory.
    values = max(MAX_VALUES, path.stat().st_size // 8)
    rows = parsed_row(_text(path, sys.maxsize), f"{path}:", "an array of objects", MAX_CONTAINERS, values)
    for number, row in enumerate(rows):
        yield _document(row, f"{path}: object {number}")


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
    """pyarrow's parquet; `EnvironmentProblem` with the name of a file to read where there is none."""
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
            # One row at a time: a few bytes of the file may stand for a long text in each of many.
            for batch in file.iter_batches(batch_size=1, columns=columns):
                left -= batch.nbytes
                if left < 0:
                    raise _too_long(path, MAX_DECOMPRESSED_BYTES)
                if sum(map(_elements, batch.columns)) > MAX_OBJECTS:
                    raise UsageError(
                        f"{path}: row {number} has more than {MAX_OBJECTS} objects. Leave it out."
                    )
                for row in batch.to_pylist():
                    yield _document(row, f"{path}: row {number}")
                    number += 1
    except (QuantkitError, MemoryError):
        raise
    except Exception as error:  # Values that Python has no type for: pyarrow and pytz raise what they like.
        raise UsageError(f"{path}: is not a readable parquet file ({error}). Check the file.") from error


def _check_sizes(path: Path, metadata: Any, columns: Sequence[str]) -> None:
    """`UsageError` for columns of a group of rows that grow too much: a page is decompressed as a whole, and
    the lists of a row are read as a whole.
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
    """Return the number of elements that lists in an arrow array have, all levels together."""
    if not array.type.num_fields:
        return 0
    parts = array.flatten()
    # Of a struct it is a list of its fields.
    return sum(map(_elements, parts)) if isinstance(parts, list) else len(parts) + _elements(parts)


def _document(row: Any, where: str) -> Document:
    if isinstance(row, Mapping):
        present = [(keys, of) for keys, of in COLUMNS if all(key in row for key in keys)]
        given = [(keys, of) for keys, of in present if all(row[key] is not None for key in keys)]
        for keys, document_of in given:
            document = document_of(*(row[key] for key in keys))
            if document is not None:
                return document
        if present and not given:
            return ""  # A row of nulls is left out, like one with an empty text.
        if given:
            keys, document_of = given[0]
            values = ", ".join(f"{key} = {shown(row[key])}" for key in keys)
            raise UsageError(
                f"{where} has {values}; expected {_VALUES[document_of]}. Mend it or leave it out."
            )
    found = f"the keys {shown(sorted(map(str, row)))}" if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(f"{where} has {found}; expected {_EXPECTED}. Rename or add a column.")


def _plain(text: Any) -> Document | None:
    return text if isinstance(text, str) else None


def _chat(messages: Any) -> list[dict[str, Any]] | None:
    """`[{"role": ..., "content": ...}]`, or with the keys "from" and "value" and the roles of ShareGPT."""
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
    """Texts as one, a line each unless a part brings the space between them; or the parts of a chat."""
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


#: Which columns make a document, and how; of those that are there the first whose values fit.
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
#: What the values of columns must be.
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
    """Return the length of the text; 0 for nothing but whitespace."""
    if isinstance(document, str):
        return len(document) if document.strip() else 0
    return max(1, sum(len(str(message["content"])) for message in document))


#: How a file is read, given how much of it is used; rows without a text are documents without one.
_READERS: dict[str, Callable[[Path, int], Iterator[Document]]] = {
    ".txt": _text_file,
    ".jsonl": _json_lines,
    ".json": _json_file,
    ".parquet": _parquet,
}
