"""Calibration texts by name: files, data sets of the hub, and the text that comes with quantkit.

A source is a file or `hf:OWNER/NAME[/PART][@REVISION]`, optionally with how many samples it gives:
`a.jsonl:256,hf:allenai/c4/en:128`. A file of that name is meant before a data set, and before two sources.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from quantkit.calibrate.data.datasets import PREFIX, DataSetName, open_data_set, parse_data_set
from quantkit.calibrate.data.documents import (
    MAX_WORK,
    SUFFIXES,
    Document,
    first_documents,
    import_parquet,
    kind_of,
    read_documents,
)
from quantkit.errors import QuantkitError, UsageError

#: The text for those who give none. `SOURCES.md` beside it says what it is and why it may be given away.
BUNDLED = Path(__file__).parent / "text" / "default.jsonl.gz"
BUNDLED_NAME = "the text that comes with quantkit"

#: A token is seldom more characters. A data set is read until it has this many for each token of the samples,
#: and as much again seven times, so that there is something to draw from.
_CHARACTERS_PER_TOKEN = 6
_ABUNDANCE = 8


@dataclass(frozen=True)
class Source:
    """A source of calibration texts, and its share of the samples: None for an equal one."""

    where: Path | DataSetName
    share: int | None = None


@dataclass(frozen=True, eq=False)
class Texts:
    """The documents of a source, what the source is called, and what the reader should know of it."""

    documents: Sequence[Document]
    name: str
    notes: tuple[str, ...] = ()


def parse_sources(text: str | None) -> tuple[Source, ...]:
    """The sources of `NAME[:SAMPLES],...`, the bundled text for None.

    `UsageError` for what is neither a file nor the name of a data set, and where only some have SAMPLES.
    """
    if text is None:
        return (Source(BUNDLED),)
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
    """Yield the texts between commas, except for commas in names of files that exist."""
    pieces = text.split(",")
    while pieces:
        joined = (",".join(pieces[:size]) for size in range(len(pieces), 1, -1))
        part = next((part for part in joined if _is_file(_name_and_count(part)[0])), pieces[0])
        yield part
        del pieces[: part.count(",") + 1]


def _name_and_count(part: str) -> tuple[str, str]:
    """NAME and SAMPLES of `NAME[:SAMPLES]`, of which the latter are digits or nothing."""
    name, separator, count = part.strip().rpartition(":")
    return (name, count) if separator and count.isascii() and count.isdigit() else (part.strip(), "")


def _is_file(name: str) -> bool:
    try:
        return Path(name).is_file()
    except OSError:  # such as one longer than names may be
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
        raise UsageError(f"calibration file {name} is not there. Check the path.")
    raise UsageError(
        f"calibration source {name!r} is not a {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]} file. Give one, "
        f"or a data set of the hub as {PREFIX}OWNER/NAME."
    )


def shares(sources: Sequence[Source], samples: int | None, default: int) -> tuple[int, ...]:
    """Return the samples of each source: `samples` in proportion to their shares, which alone are counts.

    `default` is the number where neither says one.
    """
    weights = [source.share or 1 for source in sources]
    total = samples
    if total is None:
        total = sum(weights) if sources[0].share is not None else max(default, len(sources))
    if total < len(sources):
        raise UsageError(f"{total} calibration samples are fewer than the {len(sources)} sources; use more.")
    # Largest remainders; each at least one.
    exact = [max(1.0, total * weight / sum(weights)) for weight in weights]
    counts = [int(count) for count in exact]
    while sum(counts) > total:
        counts[counts.index(max(counts))] -= 1
    for at in sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])[: total - sum(counts)]:
        counts[at] += 1
    return tuple(counts)


def read_source(source: Source, tokens: int) -> Texts:
    """The documents of a source: of a file all within `MAX_WORK`, of a data set the first; enough to draw
    `tokens` tokens from.

    `QuantkitError` naming the source if there is nothing to read.
    """
    if source.where == BUNDLED:
        note = f"calibrated on {BUNDLED_NAME}; give --calibration for text like yours"
        return Texts(read_documents(BUNDLED), BUNDLED_NAME, (note,))
    wanted = tokens * _CHARACTERS_PER_TOKEN * _ABUNDANCE
    if isinstance(source.where, Path):
        return _of_file(source.where, max(wanted, MAX_WORK))
    data_set = open_data_set(source.where)
    if kind_of(data_set.files[0]) == ".parquet":
        import_parquet(f"{data_set.name}: {data_set.files[0]}")
    documents: list[Document] = []
    length = 0
    for name in data_set.files:
        path = data_set.download(name)
        try:
            found, _ = first_documents(path, max(wanted, MAX_WORK), wanted - length)
        except QuantkitError as error:
            raise type(error)(f"{data_set.name}: {error}") from error
        documents += found
        length += sum(len(str(document)) for document in found)
        if length >= wanted:
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
