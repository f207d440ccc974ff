"""Manage an output directory that is finished or resumable whenever its writer is interrupted.

A directory is empty, unfinished (it has a journal of finished files) or complete (it has a manifest and
`config.json`). `config.json` comes last, when only the lock is left to remove: an unfinished directory never
passes for a checkpoint. Just before, the journal is removed; the manifest and `.tmp-config.json` then hold
everything that a resume needs.
"""

import hashlib
import json
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from quantkit.checkpoint.manifest import MANIFEST_NAME, OWN_HASH, manifest_bytes, pretty_json
from quantkit.checkpoint.output.atomic_write import (
    FileRecord,
    is_plain_name,
    prepare_file,
    read_blocks,
    write_file,
    writing,
)
from quantkit.checkpoint.output.existing import (
    CONFIG_NAME,
    INDEX_NAME,
    Start,
    check_empty,
    check_free,
    check_own,
    in_the_way,
    start_again,
    start_new,
    start_over,
)
from quantkit.checkpoint.output.journal import JOURNAL_NAME, Entry, Journal, json_hash
from quantkit.checkpoint.output.lock import LOCK_NAME, DirectoryLock
from quantkit.checkpoint.output.preflight import make_directory, resolve_output
from quantkit.checkpoint.output.shard_file import OtherHeader, ShardFile
from quantkit.checkpoint.tensors import TensorSpec
from quantkit.errors import OutputError
from quantkit.files import TEMP_PREFIX, sync_directory

SINGLE_FILE_NAME = "model.safetensors"
GGUF_FILE_NAME = "model.gguf"
_SHARD_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*\.(safetensors|gguf)")
_MANIFEST_KEYS = frozenset({"files", "run", "run_sha256", OWN_HASH})
_OWN_NAMES = frozenset({LOCK_NAME, JOURNAL_NAME, MANIFEST_NAME, INDEX_NAME, CONFIG_NAME})


class Mode(Enum):
    """Allowed contents of the output directory: nothing, this run unfinished, or any quantkit output."""

    NEW = "new"
    RESUME = "resume"
    OVERWRITE = "overwrite"

    @classmethod
    def of(cls, resume: bool, overwrite: bool) -> "Mode":
        """Return the mode of these options of a command."""
        return cls.RESUME if resume else cls.OVERWRITE if overwrite else cls.NEW


def late_names(side_files: Iterable[Path]) -> list[str]:
    """Return the names of the files written after the shards; an index may be among them."""
    return [*(path.name for path in side_files), INDEX_NAME, MANIFEST_NAME, CONFIG_NAME]


class OutputDirectory:
    """The single writer of an output directory. Create it by `open` and use it in a `with` block.

    Leaving the block releases the lock and keeps finished files. Nothing is written once the lock is lost,
    which `lock.check` reports. `complete` is True if the directory holds the finished checkpoint of this run.
    """

    def __init__(self, path: Path, lock: DirectoryLock, run: Mapping[str, Any], start: Start) -> None:
        self.path = path
        self.complete = start.journal is None
        self.lock = lock
        self._run = run
        self._journal = start.journal
        self._entries = dict(start.entries)
        self._claimed = set(start.claimed)
        self._mutex = threading.Lock()

    @classmethod
    def open(
        cls,
        out: Path,
        source: Path,
        mode: Mode,
        run: Mapping[str, Any],
        expected_bytes: int,
        *,
        names: Collection[str] = (),
        progress: Callable[[int], None] | None = None,
    ) -> Self:
        """Lock `out`, creating it if needed, and determine the unfinished files.

        run              JSON values that determine the bytes of the output; a resume needs an equal `run`
        expected_bytes   approximate size of all files
        names            all files that will be written; anything that occupies one of these names is refused
        progress         called with the bytes hashed since its last call, when a resume hashes finished files

        Raises `OutputError` for every refusal, and then has changed nothing.
        """
        path = resolve_output(out, source)
        created = make_directory(path)
        lock: DirectoryLock | None = None
        try:
            lock = DirectoryLock.acquire(path)
            with writing(path):
                match mode:
                    case Mode.NEW:
                        start = start_new(path, run, expected_bytes)
                    case Mode.RESUME:
                        check_free(path, names)
                        start = start_again(path, run, expected_bytes, progress)
                    case Mode.OVERWRITE:
                        start = start_over(path, run, expected_bytes)
            return cls(path, lock, run, start)
        except BaseException:
            if lock is not None:
                lock.release()
            if created:
                with suppress(OSError):
                    path.rmdir()
            raise

    @staticmethod
    def check(out: Path, source: Path, mode: Mode, names: Collection[str] = ()) -> None:
        """Raise `OutputError` for everything that `open` refuses for any run, before other work starts.

        Changes nothing.
        """
        path = resolve_output(out, source)
        created = make_directory(path)
        try:
            lock = DirectoryLock.acquire(path)
            try:
                with writing(path):
                    match mode:
                        case Mode.NEW:
                            check_empty(path)
                        case Mode.OVERWRITE:
                            check_own(path)
                        case Mode.RESUME:
                            # A journal tells later which run it belongs to.
                            check_free(path, names)
            finally:
                lock.release()
        finally:
            if created:
                with suppress(OSError):
                    path.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._journal is not None:
            self._journal.close()
        self.lock.release()

    def is_done(self, filename: str) -> bool:
        """Return True if the shard is on the disk and need not be written."""
        return filename in self._entries

    def details(self, filename: str) -> dict[str, Any]:
        """Return the `detail` of a finished shard, also if an earlier process wrote it.

        It is empty once the directory is complete, because the journal that held it is gone.
        """
        return self._entries[filename].detail

    @contextmanager
    def shard(
        self,
        filename: str,
        specs: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        header: OtherHeader | None = None,
    ) -> Iterator[ShardFile]:
        """Context manager: a safetensors file with `specs` in this order, to be filled in the block.

        With a `header` of another kind of file, for the same tensors, write such a file. If the block ends
        normally and every byte was written, the file is on the disk under its name and in the journal.
        Otherwise it is removed. Raises `OutputError` for missing bytes and disk failures; errors of the block
        pass.
        """
        if not _SHARD_NAME.fullmatch(filename):
            raise OutputError(
                f"{filename!r} is not a shard name. Use letters, digits, '.', '_' and '-', ending "
                "in .safetensors or .gguf."
            )
        if self.is_done(filename):
            raise OutputError(f"{self.path / filename} is done already. Ask is_done() first.")
        journal = self._claim([filename])
        file = ShardFile(self.path, filename, specs, metadata, header)
        try:
            yield file
            # Before the rename, so that an invalid detail leaves no file behind.
            detail = json.loads(json.dumps(file.detail))
            self.lock.check()
            entry = Entry(file.commit(), detail)
        except BaseException:
            file.discard()
            raise
        with self._mutex:
            self.lock.check()
            journal.append(entry)
            self._entries[filename] = entry

    def discard(self, filename: str) -> None:
        """Delete a finished file that is no part of the checkpoint; raise `OutputError` if the disk fails.

        Its name stays claimed by quantkit, and a later run sees the file as missing.
        """
        with self._mutex:
            self.lock.check()
            del self._entries[filename]
        with writing(self.path / filename):
            (self.path / filename).unlink(missing_ok=True)

    def finish(
        self,
        index_weight_map: Mapping[str, str],
        total_size: int,
        config: Mapping[str, Any],
        side_files: Sequence[Path],
        manifest: Mapping[str, Any],
        check: Callable[[], Mapping[str, Any]] | None = None,
    ) -> None:
        """Write all files after the shards, `config.json` last; does nothing once complete.

        index_weight_map   tensor name to shard; a lone `model.safetensors` or `model.gguf` gets no index
        total_size         bytes of all tensor data
        side_files         copied byte for byte
        manifest           gets the keys `run`, `run_sha256`, `files` (sha256 and size by name), own hash
        check              called when only manifest and config are missing; returns more manifest keys;
                           if it raises, the directory stays unfinished

        Raises `OutputError` if shards are missing, names collide, the lock is lost or the disk fails, and
        `CheckpointError` if a side file cannot be read.
        """
        if self.complete:
            return
        if clash := _MANIFEST_KEYS & manifest.keys():
            raise ValueError(f"manifest keys {sorted(clash)} are set by OutputDirectory.finish")
        shards = self._check_shards(index_weight_map)
        self._check_side_files(side_files)
        index_names = [] if shards in ([SINGLE_FILE_NAME], [GGUF_FILE_NAME]) else [INDEX_NAME]
        side_names = [path.name for path in side_files]
        journal = self._claim([*side_names, *index_names, MANIFEST_NAME, CONFIG_NAME])

        config_bytes = pretty_json(config)
        records = [self._entries[name].record for name in shards]
        records += [self._write(path.name, read_blocks(path)) for path in side_files]
        for name in index_names:
            index = {"metadata": {"total_size": total_size}, "weight_map": dict(index_weight_map)}
            records.append(self._write(name, [pretty_json(index)]))
        digest = hashlib.sha256(config_bytes).hexdigest()
        records.append(FileRecord(CONFIG_NAME, digest, len(config_bytes)))
        files = {record.file: {"sha256": record.sha256, "size": record.size} for record in records}
        found = {} if check is None else check()
        own = {"run": dict(self._run), "run_sha256": json_hash(self._run), "files": files}
        self._write(MANIFEST_NAME, [manifest_bytes({**manifest, **found, **own})])
        self.lock.check()
        file, _ = prepare_file(self.path, CONFIG_NAME, [config_bytes])
        try:
            with writing(file.path):
                sync_directory(self.path)
            journal.remove()
            self.lock.check()
            with writing(file.path):
                file.publish()
        finally:
            # Not discarded: without a journal, a resume finishes the directory from this file.
            file.close()
        self.complete = True

    def _write(self, name: str, chunks: Iterable[bytes | memoryview]) -> FileRecord:
        """Write a whole file under the lock."""
        self.lock.check()
        return write_file(self.path, name, chunks)

    def _claim(self, names: Sequence[str]) -> Journal:
        """Claim `names` for quantkit in the journal; files of these names may be written afterwards."""
        assert self._journal is not None, "a complete directory is not written to"
        with self._mutex:
            self.lock.check()
            for name in names:
                path = self.path / name
                if name not in self._claimed and _is_there(path):
                    raise OutputError(in_the_way(path))
            fresh = [name for name in names if name not in self._claimed]
            if fresh:
                self._journal.claim(fresh)
                self._claimed.update(fresh)
        return self._journal

    def _check_shards(self, weight_map: Mapping[str, str]) -> list[str]:
        expected = sorted(set(weight_map.values()))
        if expected != sorted(self._entries):
            unwritten = sorted(set(expected) - self._entries.keys())
            unnamed = sorted(self._entries.keys() - set(expected))
            raise OutputError(
                f"{self.path} cannot be finished: shards not written: {unwritten}, shards not in "
                f"the index: {unnamed}. Write every shard of the index and no other."
            )
        return expected

    def _check_side_files(self, side_files: Sequence[Path]) -> None:
        # Ignore case, because some file systems do.
        taken = {name.lower() for name in _OWN_NAMES | self._entries.keys()}
        for path in side_files:
            name = path.name
            temp = name.startswith(TEMP_PREFIX)
            if not is_plain_name(name) or temp or name.lower() in taken:
                raise OutputError(
                    f"cannot copy {path} into {self.path}: the name {name!r} is taken by another "
                    "file of the output. Rename the file."
                )
            taken.add(name.lower())


def _is_there(path: Path) -> bool:
    """Return True if anything has this name; raise `OutputError` if that cannot be determined."""
    with writing(path):
        try:
            path.lstat()
        except FileNotFoundError:
            return False
    return True
