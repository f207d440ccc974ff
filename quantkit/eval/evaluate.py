"""Evaluate checkpoints: perplexity, tasks, and losses per token and item against a reference."""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quantkit.devices import pick_device
from quantkit.errors import BlocksError, UsageError
from quantkit.eval.eval_model import Batch, Settings, Subject, check_comparable
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.failures import Guard, OnFailure
from quantkit.eval.metrics import TextMetrics, TokenScores, merge, score, summarize
from quantkit.eval.models import dtype_for, dtype_named, release, versions
from quantkit.eval.own_text import compared
from quantkit.eval.per_block import WINDOWS, BlockLosses, block_losses, window_passes
from quantkit.eval.reference import Reference, check_reference, plan_blocks
from quantkit.eval.reference_text import continuations, reference_text
from quantkit.eval.result_cache import Partial, key_of
from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.eval.runner import open_passes
from quantkit.eval.sizes import Sizes, measure
from quantkit.eval.tasks import TaskMetrics, TaskRun, Tasks, run_tasks, task_manager, task_metrics
from quantkit.eval.text import check_tokens
from quantkit.kernels.registry import forced_kernel
from quantkit.progress import Advance, Progress, counting, part_of
from quantkit.progress_bar import reporting

#: Dtype by dtype for the noise floor: the difference between both counts as none.
CONTROL_DTYPES = {"float32": "bfloat16", "bfloat16": "float32", "float16": "float32"}


def evaluate(
    model: Path | str,
    *,
    against: Path | str | None = EvalOptions.against,
    texts: Sequence[Path | str] = EvalOptions.texts,
    tasks: Tasks | None = EvalOptions.tasks,
    window: int = EvalOptions.window,
    stride: int | None = EvalOptions.stride,
    max_windows: int | None = EvalOptions.max_windows,
    dtype: str = EvalOptions.dtype,
    kv_cache: str | None = EvalOptions.kv_cache,
    device: str = EvalOptions.device,
    batch: int = EvalOptions.batch,
    noise_floor: bool = EvalOptions.noise_floor,
    per_block: bool = EvalOptions.per_block,
    own_text: int = EvalOptions.own_text,
    reference: Reference | None = None,
    progress: Progress | bool | None = None,
) -> EvalReport:
    """Measure `model`, a directory, hub id or GGUF file, on texts and tasks; return an `EvalReport`.

        report = quantkit.evaluate("int4", against="Qwen/Qwen3-0.6B", texts=["wiki.txt"])
        report.texts["wiki.txt"].kl_mean, report.sizes.linears  # nats per token, bits per weight

    `texts` are UTF-8 files, cut into at most `max_windows` windows of `window` tokens, which start `stride`
    tokens apart. `tasks` are `quantkit.eval.tasks.Tasks` of lm-eval. `against`, the original, adds the excess
    of the log perplexity and the KL divergence, in nats per token. `noise_floor`, `per_block` and `own_text`
    (a number of texts) are comparisons with it: see `EvalOptions`. `reference` is an opened original.
    `dtype` is a name, or "auto": float32 on a CPU, on a GPU the original's. `kv_cache` is "int8", "fp8",
    "int4" or None. `batch` counts windows or requests, `device` "auto" is a GPU if there is one.
    `progress(done, all, label)` is called meanwhile; by default a bar is shown, and with False none.

    Raises `UsageError` for options, texts and tasks, `CheckpointError` for models that are broken or do not
    compare. Raises `OutputError` without disk for logits, `EnvironmentProblem` without lm-eval.
    """
    options = EvalOptions(
        texts=tuple(texts),
        tasks=tasks,
        against=against,
        window=window,
        stride=stride,
        max_windows=max_windows,
        dtype=dtype,
        kv_cache=kv_cache,
        device=device,
        batch=batch,
        noise_floor=noise_floor,
        per_block=per_block,
        own_text=own_text,
    )
    with reporting(progress, "evaluating") as report:
        return evaluate_many([model], options, reference=reference, progress=report)[0]


def evaluate_many(
    models: Sequence[Path | str],
    options: EvalOptions,
    *,
    reference: Reference | None = None,
    partial: Partial | None = None,
    progress: Progress | None = None,
    on_failure: OnFailure | None = None,
) -> tuple[EvalReport, ...]:
    """Score checkpoints (directories or hub ids, packed or dense) on texts and tasks; one report each.

    With `on_failure`, a model that fails is left out of the result, after a call with it and its error; the
    others are scored. Without, its error is raised.

    `reference` is the opened `options.against`, with the same settings, for reuse by later calls. Only one
    model is in memory at a time. Finished parts are stored in `partial`; a later call with the same arguments
    resumes from them and gives the same figures.

    Raises `UsageError` for options, texts and tasks, and `CheckpointError` for checkpoints that are broken or
    not comparable. Raises `OutputError` if logits or partial results cannot be written.
    """
    if not options.texts and options.tasks is None and not options.own_text:
        raise UsageError("there is nothing to evaluate on. Give at least one text or task.")
    if options.kv_cache is not None and options.tasks is not None:
        raise UsageError("a KV cache is for texts, and tasks run without. Evaluate tasks on their own.")
    against = options.against
    if options.dtype == "auto" and reference is not None:
        options = replace(options, dtype=reference.settings.dtype)
    elif models:
        first = models[0] if against is None else against
        options = replace(options, dtype=dtype_for(options.dtype, options.device, first))
    if options.own_text:
        options = replace(options, written=reference_text(options, reference))
    settings, guard = Settings.of(options), Guard(on_failure)
    if (options.noise_floor or options.per_block) and against is None and reference is None:
        raise UsageError(
            "the noise floor and the losses of blocks are those against a reference. Give the original to "
            "compare with."
        )
    if reference is not None:
        check_reference(reference, settings, against)
        return _evaluate(models, settings, options, reference, partial, progress, guard)
    if against is None:
        return _evaluate(models, settings, options, None, partial, progress, guard)
    if options.cache_dir is None and partial is not None:
        options = replace(options, cache_dir=partial.logits)
    with Reference(against, options) as opened:
        return _evaluate(models, settings, options, opened, partial, progress, guard)


@dataclass
class _Run:
    """Collects the scores of one model, by the user's name for it, in one dtype, block by block."""

    model: str
    subject: Subject
    dtype: str
    kv_cache: str | None
    key: str
    blocks: Sequence[Sequence[Batch]]
    scores: dict[Batch, TokenScores] = field(default_factory=dict)
    seconds: float = 0.0
    continued: int = 0
    per_block: BlockLosses | None = None
    notes: list[str] = field(default_factory=list)

    def missing(self, block: int) -> list[Batch]:
        """Return the batches of a block without scores."""
        return [batch for batch in self.blocks[block] if batch not in self.scores]

    def metrics(self) -> dict[str, TextMetrics]:
        """Return the metrics of each text, once all batches are scored."""
        return {
            text.name: summarize(merge([self.scores[b] for b in sorted(self.scores) if b.text == number]))
            for number, text in enumerate(self.subject.texts)
        }


def _start(
    model: str,
    subject: Subject,
    dtype: str,
    settings: Settings,
    reference: Reference | None,
    partial: Partial | None,
) -> _Run:
    """Start a run of `subject` with the scores that an interrupted run left in `partial`."""
    if reference is None:
        blocks = plan_blocks([len(text.tokens) for text in subject.texts], settings.batch, 0, 0)
    else:
        blocks = reference.blocks
    identity = {
        "reference": None if reference is None else reference.key,
        "model": subject.checkpoint.fingerprint(),
        "texts": [[text.digest, text.scored] for text in subject.texts],
        "dtype": dtype,
        "batch": settings.batch,
        "kv_cache": settings.kv_cache,
        **_conditions(settings),
    }
    run = _Run(model, subject, dtype, settings.kv_cache, key_of(identity), blocks)
    if partial is not None:
        for batch in (batch for block in blocks for batch in block):
            shape = (batch.stop - batch.start, subject.texts[batch.text].scored)
            scores = partial.scores(run.key, batch.name, shape)
            if scores is not None:
                run.scores[batch] = scores
    run.continued = len(run.scores)
    return run


def _conditions(settings: Settings) -> dict[str, Any]:
    """Return the device, versions and forced kernel as JSON values: figures depend on them."""
    return {
        "device": str(pick_device(settings.device)),
        "versions": asdict(versions()),
        "kernel": forced_kernel(),
    }


def _evaluate(
    models: Sequence[Path | str],
    settings: Settings,
    options: EvalOptions,
    reference: Reference | None,
    partial: Partial | None,
    progress: Progress | None,
    guard: Guard,
) -> tuple[EvalReport, ...]:
    tasks = options.tasks
    # Check headers, tokenizers, vocabularies and tasks before any model runs.
    runs: list[_Run] = []
    sizes: dict[str, Sizes] = {}
    for model in dict.fromkeys(map(str, models)):
        with guard.of(model):
            subject = Subject.open(model, settings)
            sizes[model] = measure(subject.checkpoint)
            if reference is not None:
                check_comparable(subject, reference.subject)
            runs.append(_start(model, subject, settings.dtype, settings, reference, partial))
    if not runs:
        return ()
    manager = None if tasks is None else task_manager(tasks)
    control = None
    if reference is not None and options.noise_floor:
        plain = replace(settings, kv_cache=None)
        dtype, original = CONTROL_DTYPES[settings.dtype], reference.subject
        control = _start(str(original.checkpoint.place), original, dtype, plain, reference, partial)
    every = [*runs, *([] if control is None else [control])]
    blocks_of = reference.subject if reference is not None and options.per_block and settings.texts else None
    # The time left has what follows the texts in it.
    later = [0 if blocks_of is None else window_passes(run.subject.checkpoint, blocks_of) for run in runs]
    done, total = _score(every, settings, reference, partial, progress, guard, sum(later))
    for run, windows in zip(runs, later, strict=True):
        if blocks_of is not None and run.model not in guard.failed:
            with guard.of(run.model):
                _measure_blocks(run, blocks_of, settings, partial, part_of(progress, done, windows, total))
        done += windows

    def ask(subject: Subject, dtype: str) -> TaskRun | None:
        if tasks is None:
            return None
        return _ask(subject, tasks, manager, replace(settings, dtype=dtype), partial, progress)

    reference_answers = None if reference is None else ask(reference.subject, settings.dtype)
    floor = None
    if control is not None and control.model not in guard.failed:
        again = ask(control.subject, control.dtype)
        floor = NoiseFloor(control.dtype, control.metrics(), _compared(again, reference_answers))
    reports = []
    for run in (run for run in runs if run.model not in guard.failed):
        with guard.of(run.model):
            answers = ask(run.subject, settings.dtype)
            report = _report(run, sizes[run.model], settings, reference, floor, answers, reference_answers)
            if (written := settings.written) is not None:
                own = continuations(run.subject.checkpoint, written, settings.dtype, settings.device)
                words = (reference or run).subject.checkpoint.directory
                report = replace(report, own_text=compared(words, written, own))
            reports.append(report)
    return tuple(reports)


def _measure_blocks(
    run: _Run, reference: Subject, settings: Settings, partial: Partial | None, progress: Progress | None
) -> None:
    """Measure the cost of each block of the model of `run`; add a note if that is impossible."""
    if not run.subject.checkpoint.is_quantized:
        name = run.subject.checkpoint.place.name
        run.notes.append(f"the KL of its blocks was not measured: {name} is not quantized")
        return
    text = reference.texts[0]
    tokens = text.tokens[:WINDOWS]
    key = key_of({"run": run.key, "windows": len(tokens)})
    found = None if partial is None else partial.json(key, "blocks")
    if found is not None:
        run.per_block = BlockLosses(**found)
        return
    try:
        run.per_block = block_losses(
            run.subject.checkpoint,
            reference.checkpoint,
            tokens,
            text.scored,
            dtype_named(run.dtype),
            settings.device,
            progress,
        )
    except BlocksError as error:
        run.notes.append(f"the KL of its blocks was not measured: {error}")
        return
    finally:
        release(str(pick_device(settings.device)))
    if partial is not None:
        partial.store_json(key, "blocks", run.per_block.to_dict())


def _ask(
    subject: Subject,
    tasks: Tasks,
    manager: Any,
    settings: Settings,
    partial: Partial | None,
    progress: Progress | None,
) -> TaskRun:
    """Run `tasks` on `subject`, without those already answered in `partial`, and free its memory."""
    identity = {
        "model": subject.checkpoint.fingerprint(),
        "limit": tasks.limit,
        "files": tasks.stamps(),
        "batch": tasks.batch,
        "dtype": settings.dtype,
        "lm_eval": version("lm_eval"),
        **_conditions(settings),
    }
    answers = run_tasks(
        subject.checkpoint.directory,
        tasks,
        manager,
        dtype=settings.dtype,
        device=settings.device,
        partial=partial,
        key=key_of(identity),
        progress=progress,
    )
    release(str(pick_device(settings.device)))
    return answers


def _compared(answers: TaskRun | None, reference: TaskRun | None) -> tuple[TaskMetrics, ...]:
    return () if answers is None else task_metrics(answers, reference)


def _score(
    runs: Sequence[_Run],
    settings: Settings,
    reference: Reference | None,
    partial: Partial | None,
    progress: Progress | None,
    guard: Guard,
    later: int,
) -> tuple[int, int]:
    """Score the missing batches of all `runs`, and of the reference, and store them in `partial`.

    The outer loop is over blocks of batches, so that the reference runs once. Returns the number of windows,
    and the total that `progress` hears of: `later` more.
    """
    blocks = range(max(len(run.blocks) for run in runs))
    wanted = [sorted({batch for run in runs for batch in run.missing(block)}) for block in blocks]
    total = sum(_windows(run.missing(block)) for run in runs for block in blocks)
    if reference is not None:
        total += sum(map(_windows, wanted))
    advance = counting(total + later, progress)
    for block in blocks:
        if reference is not None and wanted[block]:
            reference.prepare(block, wanted[block], advance)
        for run in runs:
            if run.missing(block) and run.model not in guard.failed:
                started = time.monotonic()
                with guard.of(run.model):
                    _score_block(run, block, settings, reference, partial, advance)
                run.seconds += time.monotonic() - started
    return total, total + later


def _windows(batches: Sequence[Batch]) -> int:
    return sum(batch.stop - batch.start for batch in batches)


def _score_block(
    run: _Run,
    block: int,
    settings: Settings,
    reference: Reference | None,
    partial: Partial | None,
    advance: Advance,
) -> None:
    """Score the missing batches of a block with the model of `run`, loaded for it."""
    device = str(pick_device(settings.device))
    subject = run.subject
    name = subject.checkpoint.place.name
    passes = open_passes(subject.checkpoint, dtype_named(run.dtype), device, run.kv_cache)
    try:
        for text in subject.texts:
            check_tokens(text, passes.embedding_rows, subject.checkpoint.directory)
        missing = run.missing(block)
        windows = [subject.windows(batch) for batch in missing]
        for batch, logits in zip(missing, passes.logits(windows), strict=True):
            tokens, scored = subject.windows(batch)
            expected = None if reference is None else reference.logits(batch).to(device)
            run.scores[batch] = score(logits, tokens[:, -scored:].to(device), expected)
            if partial is not None:
                partial.store_scores(run.key, batch.name, run.scores[batch])
            advance(len(tokens), f"{name} on {subject.texts[batch.text].name}")
        if passes.note is not None and passes.note not in run.notes:
            run.notes.append(passes.note)
    finally:
        passes.close()


def _report(
    run: _Run,
    sizes: Sizes,
    settings: Settings,
    reference: Reference | None,
    noise_floor: NoiseFloor | None,
    answers: TaskRun | None,
    reference_answers: TaskRun | None,
) -> EvalReport:
    subject = run.subject
    notes = (*subject.notes, *run.notes)
    if reference is not None and reference.note is not None:
        notes += (reference.note,)
    if run.continued:
        count = sum(map(len, run.blocks))
        notes += (
            f"{subject.checkpoint.place.name}: {run.continued} of {count} batches of windows come from a "
            "run that was interrupted",
        )
    return EvalReport(
        model=str(subject.checkpoint.place),
        against=None if reference is None else str(reference.subject.checkpoint.place),
        texts=run.metrics(),
        sizes=sizes,
        reference_sizes=None if reference is None else measure(reference.subject.checkpoint),
        dtype=settings.dtype,
        kv_cache=settings.kv_cache,
        window=subject.window,
        stride=subject.stride,
        max_windows=settings.max_windows,
        batch=settings.batch,
        device=str(pick_device(settings.device)),
        versions=versions(),
        seconds=run.seconds,
        reference_seconds=None if reference is None else reference.seconds,
        reference_logits=None if reference is None else reference.nbytes,
        noise_floor=noise_floor,
        per_block=run.per_block,
        tasks=_compared(answers, reference_answers),
        task_results={} if answers is None else answers.results,
        notes=notes,
        label=subject.checkpoint.place.name,
    )
