"""Compute the logits of a reference model on fixed windows once, and keep them in files.

A quantized model is compared with its original token by token, and both need not fit in memory together: the
original runs first, and its logits go to disk, float32, one file per batch of windows. If not all fit the
budget, the windows are split into blocks and the two models alternate. Batches do not depend on the blocks,
so neither do the figures.
"""

import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from types import TracebackType

import torch

from quantkit.checkpoint.hub.repository import resolve
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError, OutputError, UsageError
from quantkit.eval.eval_model import Batch, Settings, Subject, with_numbers
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.models import dtype_for, dtype_named, versions
from quantkit.eval.result_cache import key_of
from quantkit.eval.runner import open_passes
from quantkit.eval.text import check_tokens
from quantkit.files import open_regular, os_error_text, replace_file, temporary
from quantkit.progress import Advance

_CACHE_VERSION = 2
_ITEM_BYTES = 4


def plan_blocks(
    counts: Sequence[int], batch: int, window_bytes: int, budget_bytes: int
) -> tuple[tuple[Batch, ...], ...]:
    """Split texts with `counts` windows into batches of at most `batch`, in blocks within the budget.

    Raises `UsageError` if the logits of one batch do not fit.
    """
    blocks: list[tuple[Batch, ...]] = []
    block: list[Batch] = []
    used = 0
    for text, count in enumerate(counts):
        for start in range(0, count, batch):
            item = Batch(text, start, min(start + batch, count))
            size = (item.stop - item.start) * window_bytes
            if size > budget_bytes:
                raise UsageError(
                    f"the reference logits of one batch of {batch} windows take {size} bytes, the budget "
                    f"is {budget_bytes}. Use a larger budget, a smaller batch or shorter windows."
                )
            if used + size > budget_bytes:
                blocks.append(tuple(block))
                block, used = [], 0
            block.append(item)
            used += size
    return (*blocks, tuple(block))


class Reference:
    """Logits of a reference model, computed block by block and reused by every model compared with it.

    Open it once for several models and close it at the end (it is a context manager): the files are temporary
    unless `cache_dir` is given. There they stay for later runs, in a subdirectory named after a hash of the
    reference's files, the tokens, dtype, device and versions.
    """

    def __init__(self, source: Path | str, options: EvalOptions) -> None:
        """Read headers, tokenizer and texts of a directory or hub id; `prepare` loads the model.

        Uses the shared settings of `options`, `budget_bytes` and `cache_dir`; the KV cache is never
        quantized. Raises `OutputError` if the disk lacks room for the logits.
        """
        dtype = dtype_for(options.dtype, options.device, source)
        self.settings = Settings.of(replace(options, dtype=dtype, kv_cache=None))
        opened = Subject.open(source, self.settings)
        self.subject = replace(opened, checkpoint=with_numbers(opened.checkpoint))
        self.directory = self.subject.checkpoint.directory
        #: Seconds spent so far on running the reference model, and a note on it.
        self.seconds = 0.0
        self.note: str | None = None
        window_bytes = [text.scored * self.subject.vocabulary * _ITEM_BYTES for text in self.subject.texts]
        self.blocks = plan_blocks(
            [len(text.tokens) for text in self.subject.texts],
            options.batch,
            max(window_bytes, default=0),
            options.budget_bytes,
        )
        self._device = str(pick_device(options.device))
        total = sum(len(t.tokens) * size for t, size in zip(self.subject.texts, window_bytes, strict=True))
        #: Most bytes of logits on disk at a time.
        self.nbytes = min(total, options.budget_bytes)
        #: Key of the logits: a hash of the reference's files, the tokens, dtype, batch, device and versions.
        self.key = self._key()
        self._temporary = None
        with temporary(f"the logits of {self.directory}"):
            folder = tempfile.gettempdir() if options.cache_dir is None else options.cache_dir
        self._files = Path(folder) / self.key
        _check_space(self._files, self.nbytes)
        if options.cache_dir is None:
            with temporary(f"the logits of {self.directory}"):
                self._temporary = tempfile.TemporaryDirectory(
                    prefix="quantkit-reference-", ignore_cleanup_errors=True
                )
            self._files = Path(self._temporary.name)

    def __enter__(self) -> "Reference":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Delete temporary files. Files in a `cache_dir` stay."""
        if self._temporary is not None:
            self._temporary.cleanup()

    def prepare(self, block: int, wanted: Sequence[Batch], advance: Advance) -> None:
        """Compute missing logits of the batches `wanted` of block number `block`, and store them on disk.

        Deletes the logits of other blocks.
        """
        missing = [batch for batch in wanted if not self._is_stored(batch)]
        advance(sum(b.stop - b.start for b in wanted) - sum(b.stop - b.start for b in missing), "reference")
        if not missing:
            return
        started = time.monotonic()
        for other in {*self.blocks} - {self.blocks[block]}:
            for batch in other:
                self._file(batch).unlink(missing_ok=True)
        self._run(missing, advance)
        self.seconds += time.monotonic() - started

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the logits of a prepared batch, float32 [windows, scored, vocabulary], on the CPU."""
        if not self._is_stored(batch):
            raise CheckpointError(_cut_short(self._file(batch)))
        data = torch.empty(self._shape(batch), dtype=torch.float32)
        try:
            with open_regular(self._file(batch)) as file:
                count = file.readinto(data.view(-1).view(torch.uint8).numpy().data)
        except OSError as error:
            raise CheckpointError(
                f"cannot read reference logits {self._file(batch)}: {os_error_text(error)}. Check the disk, "
                "and start again."
            ) from error
        if count != data.nbytes:
            raise CheckpointError(_cut_short(self._file(batch)))
        return data

    def _run(self, batches: Sequence[Batch], advance: Advance) -> None:
        self.subject.checkpoint.check_unchanged()
        passes = open_passes(self.subject.checkpoint, dtype_named(self.settings.dtype), self._device)
        self.note = passes.note
        try:
            for text in self.subject.texts:
                check_tokens(text, passes.embedding_rows, self.directory)
            windows = [self.subject.windows(batch) for batch in batches]
            for batch, logits in zip(batches, passes.logits(windows), strict=True):
                self._store(batch, logits)
                advance(len(logits), f"reference on {self.subject.texts[batch.text].name}")
        finally:
            passes.close()

    def _store(self, batch: Batch, logits: torch.Tensor) -> None:
        if tuple(logits.shape) != self._shape(batch):
            raise CheckpointError(
                f"{self.directory}: the model gives logits {tuple(logits.shape)}; config.json says "
                f"{self._shape(batch)}. Restore the files of one revision."
            )
        try:
            self._files.mkdir(parents=True, exist_ok=True)
            data = logits.float().contiguous().cpu().view(-1).view(torch.uint8).numpy()
            # A later process accepts any file of the right size as whole. Temporary files have no later
            # process.
            replace_file(self._file(batch), data.data, durable=self._temporary is None)
        except OSError as error:
            raise OutputError(
                f"cannot write reference logits to {self._files}: {os_error_text(error)}. Free space there, "
                "use a smaller budget, or name another cache directory."
            ) from error

    def _shape(self, batch: Batch) -> tuple[int, int, int]:
        return batch.stop - batch.start, self.subject.texts[batch.text].scored, self.subject.vocabulary

    def _file(self, batch: Batch) -> Path:
        return self._files / f"{batch.name}.f32"

    def _is_stored(self, batch: Batch) -> bool:
        path = self._file(batch)
        windows, positions, vocabulary = self._shape(batch)
        return path.is_file() and path.stat().st_size == windows * positions * vocabulary * _ITEM_BYTES

    def _key(self) -> str:
        identity = {
            "version": _CACHE_VERSION,
            "fingerprint": self.subject.checkpoint.fingerprint(),
            "texts": [[text.digest, text.scored] for text in self.subject.texts],
            "dtype": self.settings.dtype,
            "batch": self.settings.batch,
            "device": self._device,
            "versions": asdict(versions()),
        }
        return key_of(identity)


def _cut_short(path: Path) -> str:
    return (
        f"reference logits {path} are missing or cut short. Leave the cache alone while quantkit runs, and "
        "start again."
    )


def _check_space(directory: Path, needed: int) -> None:
    """Raise `OutputError` unless `directory` has `needed` bytes, counting its earlier logits as free."""
    place = next(path for path in (directory, *directory.parents) if path.is_dir())
    free = shutil.disk_usage(place).free
    stored = sum(path.stat().st_size for path in directory.glob("*.f32"))
    if needed > free + stored:
        raise OutputError(
            f"the reference logits take {needed} bytes in {place}, where {free} are free. Use a smaller "
            "budget, name another cache directory, or set TMPDIR."
        )


def check_reference(reference: Reference, settings: Settings, against: Path | str | None) -> None:
    """Raise `UsageError` unless `reference` is the model `against`, if given, opened with `settings`."""
    if against is not None and resolve(against).resolve() != reference.directory.resolve():
        raise UsageError(
            f"against is {against}, but the reference given is {reference.directory}. Give one of the two."
        )
    if reference.settings != replace(settings, kv_cache=None):
        raise UsageError(
            f"the reference was opened with {reference.settings}, the evaluation asks for {settings}. "
            "Use the same settings for both."
        )
