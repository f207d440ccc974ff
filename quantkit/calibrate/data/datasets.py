"""Select the files of a Hugging Face data set and download them one at a time.

Files are read as they are. No loading script is run, and a repository that needs one has no file to read.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from quantkit.calibrate.data.documents import SUFFIXES, kind_of
from quantkit.checkpoint.hub.answers import FILE_SECONDS, Listing, Repository, read_listing
from quantkit.checkpoint.hub.cache import cached_snapshot
from quantkit.checkpoint.hub.deadline import SLOWEST_BYTES_PER_SECOND, Deadline, within
from quantkit.checkpoint.hub.repository import (
    Wanted,
    answered,
    cached_file,
    download_large,
    explained,
    online_or_cached,
)
from quantkit.errors import CheckpointError, EnvironmentProblem, UsageError
from quantkit.files import shown

PREFIX = "hf:"
#: Largest file, in bytes; a file is downloaded whole.
MAX_FILE_BYTES = 2 << 30

_NAME = re.compile(
    r"(?P<repo>[\w.\-]+/[\w.\-]+)(?:/(?P<part>[^@]*[^@/]))?(?:@(?P<revision>[\w.\-/]+))?", re.ASCII
)
_WANTED = Wanted("data set", "data set", "file")
#: File types in order of preference: a repository with several types has the same rows in each.
_PREFERENCE = (".parquet", ".jsonl", ".json", ".txt")
_NO_ROWS = re.compile(r"(^|/)(\.|dataset_infos?\.json|(readme|license|requirements)[^/]*$)", re.IGNORECASE)
_SPLIT = re.compile(r"(?<![a-z])(train|test|validation|valid|val|dev|eval)(?:ing|uation)?(?![a-z])")


@dataclass(frozen=True)
class DataSetName:
    """Parsed `hf:OWNER/NAME[/PART][@REVISION]`; the part is a config, a folder or a file."""

    repo: str
    part: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        at = f"@{self.revision}" if self.revision else ""
        return f"{PREFIX}{self.repo}{f'/{self.part}' if self.part else ''}{at}"


@dataclass(frozen=True, eq=False)
class DataSet:
    """Data set at a commit: its files to read, in order, and a function that downloads one.

    `name` includes the commit; `notes` are for the user.
    """

    name: str
    files: tuple[str, ...]
    download: Callable[[str], Path]
    notes: tuple[str, ...] = ()


def parse_data_set(text: str) -> DataSetName:
    """Parse `hf:...`; raise `UsageError` if it does not name a data set."""
    found = _NAME.fullmatch(text.removeprefix(PREFIX))
    if found is None or ".." in text:
        raise UsageError(
            f"{text!r} names no data set; expected {PREFIX}OWNER/NAME, then /CONFIG, /FOLDER or /FILE if "
            "there are several, and @REVISION if another than the newest."
        )
    return DataSetName(**found.groupdict())


def open_data_set(data_set: DataSetName) -> DataSet:
    """Find the files of a data set without reading them. Without a network the local cache is used.

    Raises `CheckpointError` for a missing, gated or empty data set, `UsageError` for an ambiguous name, and
    `EnvironmentProblem` if the hub cannot be reached.
    """
    with explained(str(data_set), None, _WANTED):
        return _opened(data_set)


def _opened(data_set: DataSetName) -> DataSet:
    repo, revision = data_set.repo, data_set.revision
    repository = Repository(repo, "dataset")
    found = online_or_cached(
        lambda: read_listing(repository, revision, sizes=True),
        lambda: cached_snapshot(repository, revision),
    )
    notes: tuple[str, ...] = ()
    if isinstance(found, Path):
        commit = found.name
        sizes = {
            path.relative_to(found).as_posix(): path.stat().st_size
            for path in found.rglob("*")
            if path.is_file()
        }
        notes = (f"{data_set}: the hub was not reached; only what the local cache has of it was read",)
    else:
        commit = found.commit
        sizes = {name: size or 0 for name, size in found.files.items()}

    def download(name: str) -> Path:
        if sizes[name] > MAX_FILE_BYTES:
            raise UsageError(
                f"{data_set}: {name} has {sizes[name]} bytes, more than the {MAX_FILE_BYTES} that are "
                f"downloaded for calibration. Name a smaller file of it, as {PREFIX}{repo}/FILE."
            )
        with explained(str(data_set), None, _WANTED), answered(repository, revision):
            # By branch or tag, so that the cache finds them without a network.
            if isinstance(found, Path):
                return found / name
            seconds = FILE_SECONDS * 2 + (sizes[name] or MAX_FILE_BYTES) / SLOWEST_BYTES_PER_SECOND
            path = within(Deadline(seconds), lambda: download_large(repository, name, revision))
        if commit not in path.parts:
            raise EnvironmentProblem(f"{data_set}: the data set was changed just now. Run the command again.")
        return path

    card: Mapping[str, Any] = {}
    if "README.md" in sizes:
        listed = isinstance(found, Listing)
        card = _card(cached_file(repository, "README.md", commit) if listed else download("README.md"))
    files = files_to_read(data_set, sorted(sizes, key=_natural), card)
    name = DataSetName(repo, data_set.part, commit)
    return DataSet(str(name), files, download, notes)


def _card(path: Path) -> Mapping[str, Any]:
    """Return the YAML fields of a data set's card; empty if they cannot be parsed."""
    from huggingface_hub.repocard import metadata_load

    try:
        card = metadata_load(path)
    except Exception:  # YAML parsers may raise anything.
        return {}
    return card if isinstance(card, Mapping) else {}


def files_to_read(data_set: DataSetName, files: Sequence[str], card: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the files of the train split in the chosen config, folder or file, in the order given.

    Raises `UsageError` if the choice is ambiguous, and `CheckpointError` if there is no file.
    """
    part = data_set.part
    if part is not None and part in files:
        if kind_of(part) is None:
            raise UsageError(f"{data_set}: {part} is not a {_KINDS} file. Name one.")
        return (part,)
    configs = _configs(card)
    if part is None and len(configs) > 1:
        default = [name for name, config in configs.items() if name == "default" or config.get("default")]
        if not default:
            raise UsageError(
                f"{data_set}: has the configs {shown(list(configs))}. Name one, as {PREFIX}{data_set.repo}/"
                f"{next(iter(configs))}."
            )
        part = default[0]
    config = configs.get(part) if part is not None else next(iter(configs.values()), None)
    if config is not None and "data_files" in config:
        inside = _of_config(data_set, files, config)
    elif part is not None and config is None:
        inside = [name for name in files if name.startswith(f"{part}/")]
        if not inside:
            folders = sorted({name.partition("/")[0] for name in files if "/" in name})
            raise UsageError(
                f"{data_set}: the data set has no config, folder or file {part!r}. It has the configs "
                f"{shown(list(configs))} and the folders {shown(folders)}."
            )
    else:
        inside = list(files)
    inside = _one_kind(name for name in inside if kind_of(name) and not _NO_ROWS.search(name))
    if not inside:
        endings = sorted({"".join(PurePosixPath(name).suffixes[-2:]) for name in files} - {""})
        raise CheckpointError(
            f"{data_set}: has no {_KINDS} file to read, but {shown(endings)} among {len(files)} files. If "
            "the hub shows its rows, it has a copy in parquet: try "
            f"{PREFIX}{data_set.repo}@refs/convert/parquet."
        )
    return tuple(_train(data_set, inside))


_KINDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"


def _configs(card: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    found = card.get("configs")
    return {
        str(config["config_name"]): config
        for config in (found if isinstance(found, list) else ())
        if isinstance(config, Mapping) and "config_name" in config
    }


def _of_config(data_set: DataSetName, files: Sequence[str], config: Mapping[str, Any]) -> list[str]:
    """Return the files of the train split in a card's `data_files`: a glob, a list, or lists by split."""
    data_files = config["data_files"]
    rows = data_files if isinstance(data_files, list) else [data_files]
    splits = {row["split"]: row.get("path") for row in rows if isinstance(row, Mapping) and "split" in row}
    if splits and "train" not in splits:
        raise UsageError(
            f"{data_set}: has no train split, but {shown(list(splits))}. Name a file, as "
            f"{PREFIX}{data_set.repo}/FILE."
        )
    globs = splits["train"] if splits else rows
    patterns = [str(glob) for glob in (globs if isinstance(globs, list) else [globs])]
    return [name for name in files if any(fnmatchcase(name, pattern) for pattern in patterns)]


def _one_kind(names: Iterator[str]) -> list[str]:
    usable = list(names)
    kinds = {kind_of(name) for name in usable}
    best = next((kind for kind in _PREFERENCE if kind in kinds), None)
    return [name for name in usable if kind_of(name) == best]


def _train(data_set: DataSetName, names: Sequence[str]) -> list[str]:
    splits = {name: {found.group(1) for found in _SPLIT.finditer(name.lower())} for name in names}
    train = [name for name in names if "train" in splits[name]] or [n for n in names if not splits[n]]
    if not train:
        raise UsageError(
            f"{data_set}: has no train split, but {shown(list(names))}. Name a file, as "
            f"{PREFIX}{data_set.repo}/{names[0]}."
        )
    return train


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d{1,9})", name)]
