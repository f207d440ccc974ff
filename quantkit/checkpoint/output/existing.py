"""Inspect the output directory of a starting run, and remove or resume earlier files by mode."""

import errno
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest, verify_files, verify_manifest
from quantkit.checkpoint.output.atomic_write import FileRecord, hash_file, is_inside
from quantkit.checkpoint.output.journal import (
    JOURNAL_NAME,
    Entry,
    Journal,
    JournalState,
    json_hash,
    read_journal,
    run_differences,
)
from quantkit.checkpoint.output.preflight import check_space, name_list, occupants, temp_files
from quantkit.errors import CheckpointError, OutputError
from quantkit.files import TEMP_PREFIX, NoFileError, check_places, kind_of, sync_directory

CONFIG_NAME = "config.json"
INDEX_NAME = "model.safetensors.index.json"
TEMP_CONFIG_NAME = f"{TEMP_PREFIX}{CONFIG_NAME}"

#: errno values of `read_inside` for links out of the directory, and for anything but regular files.
_NO_FILE = (errno.ELOOP, errno.EINVAL)


@dataclass(frozen=True)
class Start:
    """State from which a run continues; `journal` is None if all files are written.

    `entries` are the finished files, by name. `claimed` are the names that runs before may have written.
    """

    journal: Journal | None
    entries: Mapping[str, Entry] = field(default_factory=dict)
    claimed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class _Contents:
    """Locked directory: `others` are its entries except the lock and temporary files."""

    path: Path
    journal: JournalState | None
    manifest: dict[str, Any] | None
    others: list[Path]
    temps: list[Path]

    @property
    def complete(self) -> bool:
        return self.manifest is not None and (self.path / CONFIG_NAME).is_file()

    @property
    def unnamed(self) -> bool:
        """Return True if only config.json lacks its name: the writer was killed before the last rename."""
        if self.manifest is None or self.journal is not None or self.complete:
            return False
        entry = self.manifest["files"].get(CONFIG_NAME)
        if entry is None:
            return False
        return _is_intact(
            FileRecord(CONFIG_NAME, entry["sha256"], entry["size"]), self.path / TEMP_CONFIG_NAME
        )

    @property
    def owned(self) -> frozenset[str]:
        """Return the names of files that quantkit wrote, by journal or manifest."""
        names = {JOURNAL_NAME, MANIFEST_NAME}
        if self.journal is not None:
            names |= {*self.journal.claimed, INDEX_NAME, CONFIG_NAME}
        if self.manifest is not None:
            names |= {*self.manifest["files"], INDEX_NAME, CONFIG_NAME}
        return frozenset(names)

    @property
    def foreign(self) -> list[Path]:
        return [path for path in self.others if path.name not in self.owned or kind_of(path)]


def is_resumable(path: Path) -> bool:
    """Return True if the directory `path` now holds an unfinished run."""
    last = path / TEMP_CONFIG_NAME
    return (path / JOURNAL_NAME).is_file() or (last.is_file() and not (path / CONFIG_NAME).exists())


def start_new(path: Path, run: Mapping[str, Any], expected_bytes: int) -> Start:
    """Begin `run` in the locked directory `path`.

    Raises `OutputError` if it is not empty, or the disk has less room than `expected_bytes`.
    """
    check_empty(path)
    return _begin(_look(path), run, expected_bytes)


def check_empty(path: Path) -> None:
    """Raise `OutputError` if the locked directory `path` is not empty."""
    if (contents := _look(path)).others:
        raise OutputError(_occupied_text(contents))


def check_free(path: Path, names: Iterable[str]) -> None:
    """Check that nothing obstructs a resumed run in the locked directory `path`.

    `names` are the files it writes. Raises `OutputError` for a file that no run wrote, and `NoFileError` for
    anything but a file.
    """
    contents = _look(path)
    check_places(path, names)
    if contents.journal is None:
        return
    for name in names:
        if name not in contents.journal.claimed and os.path.lexists(path / name):
            raise OutputError(in_the_way(path / name))


def in_the_way(path: Path) -> str:
    """Return the error text for a file that quantkit did not write."""
    return (
        f"{path} was not written by quantkit and is in the way. Move it elsewhere, then run the same command "
        "with --resume."
    )


def check_own(path: Path) -> None:
    """Raise `OutputError` if the locked directory `path` holds anything that quantkit did not write."""
    if foreign := _look(path).foreign:
        raise OutputError(
            f"cannot overwrite {path}: quantkit did not write {name_list(foreign)}. Move them elsewhere or "
            "choose another directory."
        )


def start_over(path: Path, run: Mapping[str, Any], expected_bytes: int) -> Start:
    """Remove everything that quantkit wrote to the locked directory `path`, and begin `run`.

    Raises `OutputError`, without removing anything, for files of others or a full disk.
    """
    check_own(path)
    contents = _look(path)
    doomed = [*contents.others, *contents.temps]
    check_space(path, expected_bytes, _size(doomed))
    # If interrupted, the directory must not pass for a checkpoint, so config.json is removed first. It must
    # still tell which files are quantkit's, so the journal and manifest are removed last.
    last = [path / JOURNAL_NAME, path / MANIFEST_NAME]
    _remove(path, [path / CONFIG_NAME, path / TEMP_CONFIG_NAME])
    _remove(path, [file for file in doomed if file not in last])
    _remove(path, last)
    return Start(Journal.create(path, run))


def start_again(
    path: Path,
    run: Mapping[str, Any],
    expected_bytes: int,
    progress: Callable[[int], None] | None = None,
) -> Start:
    """Resume `run` in the locked directory `path`, or begin it if the directory is empty.

    Hashes finished files; `progress` is called with the bytes since its last call. Raises `OutputError` if
    another run wrote there, if the files are not known to be quantkit's, or if the disk is too small.
    """
    contents = _look(path)
    if not contents.others:
        return _begin(contents, run, expected_bytes)
    if contents.complete or contents.unnamed:
        return _complete(contents, run, progress)
    return _resume(contents, run, expected_bytes, progress)


def _look(path: Path) -> _Contents:
    check_places(path, [JOURNAL_NAME, MANIFEST_NAME])
    manifest = None
    try:
        manifest = read_manifest(path)
    except CheckpointError as error:
        # A broken manifest proves nothing, but is quantkit's by its name. One that the disk fails to read may
        # prove everything.
        if isinstance(error.__cause__, OSError) and error.__cause__.errno not in _NO_FILE:
            raise OutputError(str(error)) from error
    # A finished directory may still have a journal from a version that removed it last.
    journal = None if manifest is not None and (path / CONFIG_NAME).is_file() else read_journal(path)
    known = journal is not None or manifest is not None
    others = occupants(path, known=known)
    for other in others:
        if known and other.name.startswith(TEMP_PREFIX) and (kind := kind_of(other)):
            raise NoFileError(other, kind)
    return _Contents(path, journal, manifest, others, temp_files(path, known=known))


def _occupied_text(contents: _Contents) -> str:
    path = contents.path
    if contents.complete:
        return (
            f"output {path} already holds a finished quantkit checkpoint. Replace it with "
            "--overwrite or choose another directory."
        )
    if contents.journal is not None or contents.unnamed:
        return (
            f"output {path} holds an unfinished run. Continue it with --resume, start over with "
            "--overwrite, or choose another directory."
        )
    return (
        f"output {path} is not empty: it holds {name_list(contents.others)}. Choose an empty or "
        "new directory; --resume and --overwrite are for directories that quantkit wrote."
    )


def _begin(contents: _Contents, run: Mapping[str, Any], expected_bytes: int) -> Start:
    check_space(contents.path, expected_bytes, _size(contents.temps))
    _remove(contents.path, contents.temps)
    return Start(Journal.create(contents.path, run))


def _complete(contents: _Contents, run: Mapping[str, Any], progress: Callable[[int], None] | None) -> Start:
    path, manifest = contents.path, contents.manifest
    assert manifest is not None
    if manifest.get("run_sha256") != json_hash(run):
        known = manifest.get("run")
        _refuse_other_run(path, "finished", known if isinstance(known, dict) else {}, run)
    problems = verify_files(path, manifest, progress) + verify_manifest(path)
    if contents.unnamed:
        problems = [problem for problem in problems if problem.file != CONFIG_NAME]
    if problems:
        raise OutputError(
            f"output {path} was finished, but {'; '.join(map(str, problems))}. Restore the files "
            "or write the checkpoint again with --overwrite."
        )
    if contents.unnamed:
        (path / TEMP_CONFIG_NAME).replace(path / CONFIG_NAME)
    _remove(path, [path / JOURNAL_NAME, *contents.temps])
    entries = {
        name: Entry(FileRecord(name, file["sha256"], file["size"]), {})
        for name, file in manifest["files"].items()
    }
    return Start(None, entries)


def _resume(
    contents: _Contents,
    run: Mapping[str, Any],
    expected_bytes: int,
    progress: Callable[[int], None] | None,
) -> Start:
    path, journal = contents.path, contents.journal
    if journal is None:
        raise OutputError(
            f"cannot resume in {path}: it has no journal of an unfinished run, but holds "
            f"{name_list(contents.others)}. Use --overwrite if quantkit wrote them, or choose "
            "another directory."
        )
    if json_hash(journal.run) != json_hash(run):
        _refuse_other_run(path, "started", journal.run, run)
    if strangers := [file for file in contents.foreign if file.suffix == ".safetensors"]:
        raise OutputError(
            f"cannot resume in {path}: quantkit did not write {name_list(strangers)}, which would "
            "be taken for a part of the checkpoint. Move them elsewhere."
        )
    entries = {
        name: entry
        for name, entry in journal.entries.items()
        if _is_intact(entry.record, path / name, progress)
    }
    done = sum(entry.record.size for entry in entries.values())
    # Claimed files that may be incomplete are written again.
    doomed = [path / name for name in sorted(journal.claimed - entries.keys())] + contents.temps
    check_space(path, expected_bytes - done, _size(doomed))
    _remove(path, doomed)
    return Start(Journal(path, journal.length), entries, journal.claimed)


def _refuse_other_run(path: Path, what: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    lines = "".join(f"\n  {line}" for line in run_differences(old, new))
    raise OutputError(
        f"output {path} was {what} by a run that differs from this one (old -> new):{lines}\n"
        "Run with the old values, start over with --overwrite, or choose another directory."
    )


def _is_intact(record: FileRecord, file: Path, progress: Callable[[int], None] | None = None) -> bool:
    if not file.is_file() or not is_inside(file) or file.stat().st_size != record.size:
        return False
    try:
        return hash_file(file, progress) == record.sha256
    except CheckpointError:
        # An unreadable file counts as missing.
        return False


def _size(files: list[Path]) -> int:
    return sum(file.lstat().st_size for file in files if file.is_symlink() or file.is_file())


def _remove(directory: Path, files: list[Path]) -> None:
    for file in files:
        file.unlink(missing_ok=True)
    sync_directory(directory)
