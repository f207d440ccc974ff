"""Find again what a manifest names by a path relative to the directory of its run.

The manifest also has the path to it from the packed directory: a run elsewhere finds it, and so does one
after both have moved together. An absolute path is not recorded twice.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.model_record import ModelRecord


def with_relative_paths(
    record: ModelRecord, texts: Iterable[str], directory: Path, found: Callable[[str], Path] = Path
) -> ModelRecord:
    """Return `record` with the paths from the packed `directory` to its source and to `texts`.

    These are only of relative names. `found` returns where a name is now; what is not there has no path.
    """
    source = None if record.source_kind == "hub" else record.source
    names = [*texts, *(() if source is None else (source,))]
    paths = {name: _path_from(directory, found(name)) for name in names if not Path(name).is_absolute()}
    return replace(record, relative_paths={name: path for name, path in paths.items() if path is not None})


def place_of(name: str, relative_paths: Mapping[str, object], directory: Path) -> Path:
    """Return the path of what the manifest of the packed `directory` calls `name`.

    It is `name` itself if `relative_paths` has no other path, or if nothing is there.
    """
    path = relative_paths.get(name)
    if not isinstance(path, str):
        return Path(name)
    place = Path(os.path.normpath(Path(os.path.realpath(directory), path)))
    return place if _is_there(place) else Path(name)


def _path_from(directory: Path, place: Path) -> str | None:
    """Return the path from `directory` to `place`; None if nothing is there, or on another drive."""
    if not _is_there(place):
        return None
    # A link keeps its name, which says what kind of file it is.
    real = Path(os.path.realpath(place.parent), place.name)
    try:
        return Path(os.path.relpath(real, os.path.realpath(directory))).as_posix()
    except ValueError:
        return None


def _is_there(place: Path) -> bool:
    try:
        return place.exists()
    except OSError:  # For example a name that is too long.
        return False
