"""Evaluated model: a checkpoint directory, its tokens, and settings that must agree."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

from quantkit.calibrate.data.documents import read_text
from quantkit.calibrate.data.samples import described_names
from quantkit.checkpoint.compressed_tensors import FORMATS_OF_COMPRESSED_TENSORS
from quantkit.checkpoint.gguf.open_gguf import gguf_file, open_gguf
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.manifest import MERGE
from quantkit.checkpoint.relative_paths import place_of
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.models import dtype_named, language_limits
from quantkit.eval.own_text import OwnText
from quantkit.eval.runner import Windows
from quantkit.eval.sizes import manifest_of
from quantkit.eval.text import (
    TextWindows,
    check_tokens,
    cut,
    text_names,
    usable_window,
)
from quantkit.model.tokenizer import tokenize, tokenizer


@dataclass(frozen=True)
class Settings:
    """Settings that must be equal for evaluations to compare: texts, windows, dtype, device, batch.

    `kv_cache` is the format of the model's KV cache; a reference has none. `written` is text of the
    reference's own.
    """

    texts: tuple[Path, ...]
    window: int
    max_windows: int | None
    dtype: str
    device: str
    batch: int
    stride: int | None
    kv_cache: str | None
    written: OwnText | None = None

    @classmethod
    def of(cls, options: EvalOptions) -> "Settings":
        """Return the settings of options whose dtype is resolved, not "auto"."""
        return cls(
            texts=tuple(map(Path, options.texts)),
            window=options.window,
            max_windows=options.max_windows,
            dtype=options.dtype,
            device=options.device,
            batch=options.batch,
            stride=options.stride,
            kv_cache=options.kv_cache,
            written=options.written,
        )

    def __post_init__(self) -> None:
        dtype_named(self.dtype)
        if self.kv_cache is not None:
            from quantkit.runtime.cache.kv_cache import kv_scheme

            kv_scheme(self.kv_cache)
        if self.batch < 1:
            raise UsageError(f"batch is {self.batch}; use at least 1 window.")


@dataclass(frozen=True, order=True)
class Batch:
    """Windows `start:stop` of text number `text`, which run through a model together."""

    text: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Return the stem of its file names."""
        return f"text{self.text}-windows{self.start}-{self.stop}"


@dataclass(frozen=True)
class Subject:
    """Checkpoint to evaluate, with windows of tokens from its own tokenizer."""

    checkpoint: Checkpoint
    vocabulary: int
    tokenizer_size: int
    texts: tuple[TextWindows, ...]
    window: int
    stride: int
    notes: tuple[str, ...]

    @classmethod
    def open(cls, source: Path | str, settings: Settings) -> "Subject":
        """Read headers, tokenizer and texts of a directory or hub id, but no weights.

        Raises `UsageError` for a text or option, `CheckpointError` for an unusable checkpoint.
        """
        checkpoint = open_evaluated(resolve(source))
        directory = checkpoint.directory
        words = tokenizer(directory)
        vocabulary, limit = language_limits(directory)
        window, note = usable_window(settings.window, limit)
        # If the window was shortened, a stride up to the requested window must not exceed the actual one.
        stride = window if settings.stride is None else settings.stride
        if window < stride <= settings.window:
            stride, note = window, f"{note}; so was the stride of {stride}"
        texts = tuple(
            cut(name, tokenize(words, read_text(path)), window, settings.max_windows, stride)
            for name, path in zip(text_names(settings.texts), settings.texts, strict=True)
        ) + (() if settings.written is None else (settings.written.windows,))
        for text in texts:
            check_tokens(text, vocabulary, directory)
        notes = [note for text in texts for note in text.notes]
        notes += _notes_on_calibration(checkpoint, settings.texts)
        notes += [] if (rounded := _note_on_inputs(checkpoint)) is None else [rounded]
        return cls(
            checkpoint,
            vocabulary,
            len(words),
            texts,
            window,
            stride,
            tuple(([note] if note else []) + notes),
        )

    def windows(self, batch: Batch) -> Windows:
        """Return the tokens of a batch, and how many of the last tokens of each window are predicted."""
        text = self.texts[batch.text]
        return text.tokens[batch.start : batch.stop], text.scored


def check_comparable(model: Subject, reference: Subject) -> None:
    """Raise `CheckpointError` unless both share vocabulary, tokenizer and windows."""
    where = f"{model.checkpoint.directory} and its reference {reference.checkpoint.directory}"
    remedy = "Compare a model with the checkpoint that it was made from."
    for what, mine, theirs in (
        ("the vocabulary", model.vocabulary, reference.vocabulary),
        ("the tokenizer", model.tokenizer_size, reference.tokenizer_size),
    ):
        if mine != theirs:
            raise CheckpointError(f"{where}: {what} has {mine} and {theirs} entries. {remedy}")
    for mine_text, their_text in zip(model.texts, reference.texts, strict=True):
        if mine_text.digest != their_text.digest:
            raise CheckpointError(
                f"{where}: their tokenizers, both of {model.tokenizer_size} entries, give different "
                f"tokens or windows for {mine_text.name}. {remedy}"
            )


def open_evaluated(path: Path) -> Checkpoint:
    """Open a directory or a GGUF file to evaluate it.

    Low-bit formats of other tools are dequantized exactly when read, without packages of these tools or a
    GPU. transformers loads formats without a reader, and those of compressed-tensors that it runs in every
    dtype. Raises `CheckpointError` for a damaged checkpoint.
    """
    file = gguf_file(path)
    if file is not None:
        return open_gguf(file)
    checkpoint = Checkpoint.open(path)
    section = checkpoint.config.get("quantization_config")
    asked = section if isinstance(section, dict) else {}
    if asked.get("quant_method") != "compressed-tensors" or find_spec("compressed_tensors") is None:
        return with_numbers(checkpoint)
    groups = asked.get("config_groups")
    of_groups = groups.values() if isinstance(groups, dict) else ()
    formats = {str(one.get("format")) for one in (asked, *of_groups) if isinstance(one, dict)}
    bfloat16_only = {row.stored.name for row in FORMATS_OF_COMPRESSED_TENSORS if row.bfloat16}
    return with_numbers(checkpoint) if formats & bfloat16_only else checkpoint


def with_numbers(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` as `quantize` reads it, with low-bit weights dequantized.

    Formats without a reader are returned unchanged: packed directories, and formats that transformers may
    load.
    """
    try:
        return dequantized(checkpoint)
    except CheckpointError:
        return checkpoint


def _notes_on_calibration(checkpoint: Checkpoint, texts: Sequence[Path]) -> Iterator[str]:
    """Yield a note for each of `texts` from which calibration samples came, by the manifest.

    A file of the same name counts where that of the manifest is not there, as on another machine.
    """
    manifest, name = manifest_of(checkpoint.directory), checkpoint.place.name
    how = "calibrated" if manifest.get("distillation") is None else "trained"
    merge = manifest.get(MERGE)
    described = manifest.get("calibration"), merge.get("calibration") if isinstance(merge, dict) else None
    paths = manifest.get("relative_paths")
    paths = paths if isinstance(paths, dict) else {}
    for given in dict.fromkeys(chain.from_iterable(map(described_names, described))):
        known = place_of(given, paths, checkpoint.directory)
        for text in texts:
            try:
                is_this, is_elsewhere = known.resolve() == text.resolve(), not known.is_file()
            except (OSError, ValueError):  # No file can have such a name.
                continue
            if is_this:
                yield f"{name} was {how} on this text: {text.name}"
            elif known.name == text.name and is_elsewhere:
                yield f"{name} was {how} on a text of this name: {text.name}"


def _note_on_inputs(checkpoint: Checkpoint) -> str | None:
    """Return a note if the tool that packed `checkpoint` rounds inputs, which is not done here; else None."""
    if not any(text.startswith("by ") and "round their inputs" in text for text in checkpoint.notes):
        return None
    return f"{checkpoint.place.name}: its linears round their inputs in engines, and did not here"
