"""Find calibration texts by name: files, data sets of the hub, and the bundled text.

A source is a file or `hf:OWNER/NAME[/PART][@REVISION]`, optionally with a number of samples:
`a.jsonl:256,hf:allenai/c4/en:128`. An existing file of that name takes precedence over a data set and over a
list of sources.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.calibrate.data.datasets import PREFIX, DataSetName, open_data_set, parse_data_set
from quantkit.calibrate.data.documents import (
    MAX_WORK,
    SUFFIXES,
    Document,
    document_of,
    first_documents,
    import_parquet,
    kind_of,
    read_documents,
)
from quantkit.errors import QuantkitError, UsageError, closest_name

#: Default text. `SOURCES.md` beside it gives its origin and license.
BUNDLED = Path(__file__).parent / "text" / "default.jsonl.gz"
BUNDLED_NAME = "the text that comes with quantkit"
#: Name of texts in memory.
GIVEN_NAME = re.compile(r"(\d+ texts given in Python), sha256 [0-9a-f]{64}")

#: What other tools call by a name of their own, as data sets of the hub.
DATA_SETS = {
    "c4": "hf:allenai/c4/en",
    "wikitext": "hf:Salesforce/wikitext/wikitext-2-raw-v1",
    "wikitext2": "hf:Salesforce/wikitext/wikitext-2-raw-v1",
    "ultrachat": "hf:HuggingFaceH4/ultrachat_200k",
    "ultrachat200k": "hf:HuggingFaceH4/ultrachat_200k",
}

#: Characters read per token of the samples: tokens are seldom longer. Data sets are read to eight times that,
#: so that there is something to draw from.
_CHARACTERS_PER_TOKEN = 6
_ABUNDANCE = 8


@dataclass(frozen=True, eq=False)
class Texts:
    """Documents of a source, its name, and notes for the user."""

    documents: Sequence[Document]
    name: str
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class Source:
    """Source of calibration texts, `where`, and its number of samples, `share`; None for an equal one."""

    where: Path | DataSetName | Texts
    share: int | None = None


def given_texts(given: str | Path | Iterable[Any] | None) -> str | Texts | None:
    """Convert calibration data of a Python call to `CalibrationOptions.sources`.

    A name or path is returned as text, None as it is. Items are texts, chats, or rows with the columns of
    files, read up to `MAX_WORK` characters. Raises `UsageError` for other items, and for a list of file
    names.
    """
    if given is None or isinstance(given, str):
        return given
    if isinstance(given, Path):
        return str(given)
    documents: list[Document] = []
    notes: tuple[str, ...] = ()
    length = 0
    for number, item in enumerate(given):
        documents.append(_item(item, f"item {number} of the calibration data"))
        length += len(str(documents[-1]))
        if length >= MAX_WORK:
            notes = (f"only the first {number + 1} items of the calibration data were read",)
            break
    digest = hashlib.sha256(json.dumps(documents).encode()).hexdigest()
    return Texts(documents, f"{len(documents)} texts given in Python, sha256 {digest}", notes)


def _item(item: Any, where: str) -> Document:
    if isinstance(item, Path) or (isinstance(item, str) and kind_of(item) and _is_file(item)):
        raise UsageError(
            f"{where} is the file {item}; expected a text. Give files as one str of paths, with commas "
            "between."
        )
    if isinstance(item, str):
        return item
    return document_of(item if isinstance(item, Mapping) else {"messages": item}, where)


def parse_sources(text: "str | Texts | None") -> tuple[Source, ...]:
    """Parse `NAME[:SAMPLES],...` to sources; None gives the bundled text, and texts are a source.

    Raises `UsageError` for a name that is neither a file nor a data set, and if only some have SAMPLES.
    """
    if text is None or isinstance(text, Texts):
        return (Source(BUNDLED if text is None else text),)
    sources = []
    for part in _parts(text):
        name, count = _name_and_count(part)
        if count and (len(count) > 9 or int(count) < 1):
            raise UsageError(f"calibration {part!r} asks for {count} samples; use at least 1.")
        try:
            where = _where(name, text)
        except OSError as error:
            raise UsageError(
                f"calibration file {name} cannot be read ({error.strerror or error}). Check the path."
            ) from error
        sources.append(Source(where, int(count) if count else None))
    shares = {source.share is None for source in sources}
    if len(shares) > 1:
        raise UsageError(
            f"calibration {text!r} says how many samples for some of its sources only; say it for all or for "
            "none."
        )
    places = [source.where for source in sources]
    if twice := next((place for place in places if places.count(place) > 1), None):
        raise UsageError(f"calibration {text!r} names {twice} twice; name each source once.")
    return tuple(sources)


def _parts(text: str) -> Iterator[str]:
    """Split `text` at its commas, but not at commas in the name of an existing file."""
    pieces = text.split(",")
    while pieces:
        joined = (",".join(pieces[:size]) for size in range(len(pieces), 1, -1))
        part = next((part for part in joined if _is_file(_name_and_count(part)[0])), pieces[0])
        yield part
        del pieces[: part.count(",") + 1]


def _name_and_count(part: str) -> tuple[str, str]:
    """Split `NAME[:SAMPLES]`; SAMPLES are digits or empty."""
    name, separator, count = part.strip().rpartition(":")
    return (name, count) if separator and count.isascii() and count.isdigit() else (part.strip(), "")


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # For example a name that is too long.
        return False


def _where(name: str, text: str) -> Path | DataSetName:
    if not name:
        raise UsageError(f"calibration {text!r} names no file; give FILE[:SAMPLES], separated by commas.")
    path = Path(name)
    if path.is_file() and kind_of(path.name):
        return path
    if name.startswith(PREFIX) and not path.exists():
        return parse_data_set(name)
    if kind_of(path.name) and not path.is_dir():
        beside = sorted(path.parent.iterdir()) if path.parent.is_dir() else []
        meant = closest_name(path.name, (one.name for one in beside if kind_of(one.name)))
        remedy = "Check the path." if meant is None else f"Did you mean {path.with_name(meant)}?"
        raise UsageError(f"calibration file {name} is not there. {remedy}")
    hub_name = DATA_SETS.get(name.lower().replace("-", "").replace("_", ""))
    raise UsageError(
        f"calibration source {name!r} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file. Give one, "
        f"or a data set of the hub as {hub_name or f'{PREFIX}OWNER/NAME'}."
    )


def shares(sources: Sequence[Source], samples: int | None, default: int) -> tuple[int, ...]:
    """Return the number of samples of each source: `samples`, divided in proportion to the sources' numbers.

    Without `samples`, the sources' numbers are returned; if they have none, `default` is divided equally.
    """
    weights = [source.share or 1 for source in sources]
    total = samples
    if total is None:
        total = sum(weights) if sources[0].share is not None else max(default, len(sources))
    if total < len(sources):
        raise UsageError(f"{total} calibration samples are fewer than the {len(sources)} sources; use more.")
    # Largest remainder method; at least one sample each.
    exact = [max(1.0, total * weight / sum(weights)) for weight in weights]
    counts = [int(count) for count in exact]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    for at in sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def read_source(source: Source, tokens: int) -> Texts:
    """Read the documents of a source: all of a file within `MAX_WORK`, or the first of a data set.

    Reads enough text to draw `tokens` tokens, if the source has it. Raises `QuantkitError` naming
    the source if there is nothing to read.
    """
    if isinstance(source.where, Texts):
        return source.where
    if source.where == BUNDLED:
        note = f"calibrated on {BUNDLED_NAME}; give --calibration for text like yours"
        return Texts(read_documents(BUNDLED), BUNDLED_NAME, (note,))
    characters = tokens * _CHARACTERS_PER_TOKEN * _ABUNDANCE
    if isinstance(source.where, Path):
        return _of_file(source.where, max(characters, MAX_WORK))
    data_set = open_data_set(source.where)
    if kind_of(data_set.files[0]) == ".parquet":
        import_parquet(f"{data_set.name}: {data_set.files[0]}")
    documents: list[Document] = []
    length = 0
    for name in data_set.files:
        path = data_set.download(name)
        try:
            found, _ = first_documents(path, max(characters, MAX_WORK), characters - length)
        except QuantkitError as error:
            raise type(error)(f"{data_set.name}: {error}") from error
        documents += found
        length += sum(len(str(document)) for document in found)
        if length >= characters:
            break
    return Texts(documents, data_set.name, data_set.notes)


def _of_file(path: Path, work: int) -> Texts:
    documents, is_part = first_documents(path, work)
    if not is_part:
        return Texts(documents, str(path))
    characters = sum(len(str(document)) for document in documents)
    note = (
        f"{path}: only its first {characters} characters were read; mix its rows if later ones are of "
        "another kind"
    )
    return Texts(documents, str(path), (note,))
