"""Evaluate checkpoints: perplexity, and with a reference what every token lost to quantization."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quantkit.checkpoint.hub import resolve
from quantkit.errors import UsageError
from quantkit.eval.metrics import TextMetrics, TokenScores, merge, score, summarize
from quantkit.eval.models import (
    Versions,
    dtype_named,
    embedding_rows,
    logits_of,
    open_model,
    release,
    resolve_device,
    versions,
)
from quantkit.eval.reference import DEFAULT_BUDGET_BYTES, Batch, Progress, Reference, plan_blocks
from quantkit.eval.sizes import Sizes, measure
from quantkit.eval.subject import Settings, Subject, check_comparable
from quantkit.eval.text import DEFAULT_WINDOW, check_tokens

VERSION = 1


@dataclass(frozen=True)
class EvalReport:
    """What an evaluation found; `to_json` is the content of eval.json.

    `window` is the one used, after any cut to the model's positions; `seconds` are those of this model,
    `reference_seconds` those spent on the reference so far, which other models may share. `notes` are
    for people: anything that was not done as asked.
    """

    model: str
    against: str | None
    texts: Mapping[str, TextMetrics]
    sizes: Sizes
    reference_sizes: Sizes | None
    dtype: str
    window: int
    max_windows: int | None
    device: str
    versions: Versions
    seconds: float
    reference_seconds: float | None
    notes: tuple[str, ...] = ()
    label: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-able form, free of NaN and infinities."""
        reference = self.reference_sizes
        return {
            "version": VERSION,
            "model": self.model,
            "label": self.label,
            "format": self.sizes.format,
            "method": self.sizes.method,
            "against": self.against,
            "texts": {name: metrics.to_dict() for name, metrics in self.texts.items()},
            "bits_per_weight": {"linears": self.sizes.linears, "model": self.sizes.model},
            "bytes": {
                "model": self.sizes.file_bytes,
                "reference": None if reference is None else reference.file_bytes,
            },
            "dtype": self.dtype,
            "window": self.window,
            "max_windows": self.max_windows,
            "device": self.device,
            "quantkit_version": self.versions.quantkit_version,
            "torch": self.versions.torch,
            "transformers": self.versions.transformers,
            "seconds": self.seconds,
            "reference_seconds": self.reference_seconds,
            "notes": list(self.notes),
        }

    def to_json(self) -> str:
        """`to_dict` as JSON text. A null perplexity is one beyond a float64; `nll` is its logarithm."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False) + "\n"


def evaluate(
    model: Path | str,
    *,
    against: Path | str | None = None,
    texts: Sequence[Path | str],
    window: int = DEFAULT_WINDOW,
    max_windows: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 1,
    reference: Reference | None = None,
    progress: Progress | None = None,
) -> EvalReport:
    """`evaluate_many` for one checkpoint."""
    return evaluate_many(
        [model],
        against=against,
        texts=texts,
        window=window,
        max_windows=max_windows,
        dtype=dtype,
        device=device,
        batch=batch,
        reference=reference,
        progress=progress,
    )[0]


def evaluate_many(
    models: Sequence[Path | str],
    *,
    against: Path | str | None = None,
    texts: Sequence[Path | str],
    window: int = DEFAULT_WINDOW,
    max_windows: int | None = None,
    dtype: str = "float32",
    device: str = "auto",
    batch: int = 1,
    reference: Reference | None = None,
    budget_bytes: int = DEFAULT_BUDGET_BYTES,
    cache_dir: Path | str | None = None,
    progress: Progress | None = None,
) -> tuple[EvalReport, ...]:
    """Score checkpoints (directories or hub ids, packed or dense) on text files; a report each, in order.

    Without `against` or `reference` there is only perplexity. `against` is the checkpoint to compare
    with, whose logits are kept in at most `budget_bytes` of temporary files, or in `cache_dir` for the
    next run. `reference` is one that the caller opened, of the same settings, to be reused by later
    calls. Only one model is in memory at a time.

    Raises `UsageError` for options and texts, `CheckpointError` for checkpoints that are broken or
    cannot be compared, `OutputError` where the reference's logits cannot be written.
    """
    settings = Settings(tuple(map(Path, texts)), window, max_windows, dtype, device, batch)
    if reference is not None:
        _check_reference(reference, settings, against)
        return _evaluate(models, settings, reference, progress)
    if against is None:
        return _evaluate(models, settings, None, progress)
    with Reference(
        against,
        texts=settings.texts,
        window=window,
        max_windows=max_windows,
        dtype=dtype,
        device=device,
        batch=batch,
        budget_bytes=budget_bytes,
        cache_dir=cache_dir,
    ) as opened:
        return _evaluate(models, settings, opened, progress)


def _check_reference(reference: Reference, settings: Settings, against: Path | str | None) -> None:
    if against is not None and resolve(against).resolve() != reference.directory.resolve():
        raise UsageError(
            f"against is {against}, but the reference given is {reference.directory}. Give one of the two."
        )
    if reference.settings != settings:
        raise UsageError(
            f"the reference was opened with {reference.settings}, the evaluation asks for {settings}. "
            "Use the same settings for both."
        )


@dataclass
class _Run:
    """What has been found for one model while its blocks go by."""

    subject: Subject
    sizes: Sizes
    scores: list[list[TokenScores]]
    seconds: float = field(default=0.0)


def _evaluate(
    models: Sequence[Path | str], settings: Settings, reference: Reference | None, progress: Progress | None
) -> tuple[EvalReport, ...]:
    # Headers, tokenizers and vocabularies of all models are checked before any model runs.
    runs = []
    for model in models:
        subject = Subject.open(model, settings)
        if reference is not None:
            check_comparable(subject, reference.subject)
        runs.append(_Run(subject, measure(subject.checkpoint), [[] for _ in subject.texts]))
    if reference is None:
        for run in runs:
            counts = [len(text.tokens) for text in run.subject.texts]
            (block,) = plan_blocks(counts, settings.batch, 0, 0)
            _score_block(run, block, settings, None, progress)
    else:
        # Blocks outside, models inside: the reference runs once however many models there are.
        for number, block in enumerate(reference.blocks):
            reference.prepare(number, progress)
            for run in runs:
                _score_block(run, block, settings, reference, progress)
    reference_sizes = None if reference is None else measure(reference.subject.checkpoint)
    return tuple(_report(run, settings, reference, reference_sizes) for run in runs)


def _score_block(
    run: _Run,
    block: Sequence[Batch],
    settings: Settings,
    reference: Reference | None,
    progress: Progress | None,
) -> None:
    """Score the batches of `block` with the model of `run`, which is loaded for it, and keep the scores."""
    started = time.monotonic()
    _score_batches(run, block, settings, reference, progress)
    release(resolve_device(settings.device))
    run.seconds += time.monotonic() - started


def _score_batches(
    run: _Run,
    block: Sequence[Batch],
    settings: Settings,
    reference: Reference | None,
    progress: Progress | None,
) -> None:
    device = resolve_device(settings.device)
    subject = run.subject
    directory = subject.checkpoint.directory
    model = open_model(directory, dtype_named(settings.dtype), device)
    for text in subject.texts:
        check_tokens(text, embedding_rows(model), directory)
    total = sum(batch.stop - batch.start for batch in block)
    done = 0
    for batch in block:
        text = subject.texts[batch.text]
        tokens = text.tokens[batch.start : batch.stop]
        expected = None if reference is None else reference.logits(batch).to(device)
        logits = logits_of(model, tokens, device, directory)
        run.scores[batch.text].append(score(logits, tokens[:, 1:].to(device), expected))
        done += len(tokens)
        if progress is not None:
            progress(done, total, f"{directory.name} on {text.name}")


def _report(
    run: _Run, settings: Settings, reference: Reference | None, reference_sizes: Sizes | None
) -> EvalReport:
    subject = run.subject
    return EvalReport(
        model=str(subject.checkpoint.directory),
        against=None if reference is None else str(reference.subject.checkpoint.directory),
        texts={
            text.name: summarize(merge(scores))
            for text, scores in zip(subject.texts, run.scores, strict=True)
        },
        sizes=run.sizes,
        reference_sizes=reference_sizes,
        dtype=settings.dtype,
        window=subject.window,
        max_windows=settings.max_windows,
        device=resolve_device(settings.device),
        versions=versions(),
        seconds=run.seconds,
        reference_seconds=None if reference is None else reference.seconds,
        notes=subject.notes,
        label=subject.checkpoint.directory.name,
    )
