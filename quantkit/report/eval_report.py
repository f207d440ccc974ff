"""Present evaluations: tables, a verdict per model, and loss against bits per weight."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quantkit.checkpoint.output.atomic_write import hash_file
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import EnvironmentProblem, UsageError
from quantkit.escaping import Code, Prose
from quantkit.eval.metrics import KL_EDGES, TextMetrics
from quantkit.eval.rating import VERDICTS, verdict, verdict_line
from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.files import size_text
from quantkit.report import plots
from quantkit.report.document import Bullets, Command, Document, Figure, Section, Table, Text, write
from quantkit.report.tables import TASK_EXPLANATION, error_text, number_text, percent_text, task_table

VERSION = 1

#: Name of the report's files, without suffix.
STEM = "report"

#: Smallest plotted divergence, in nats: zero has no place on a logarithmic axis.
PLOT_FLOOR = 1e-7

#: Below this, in nats, the axis of the excess is linear.
_LINEAR_EXCESS = 0.001


def write_report(
    directory: Path | str, reports: Sequence[EvalReport], command: str | None = None
) -> tuple[Path, ...]:
    """Write report.md, report.html, report.json and, with matplotlib, the plots; return the files.

    `command` is the command typed. report.json includes the hashes of the models' files. Raises `UsageError`
    without reports, `OutputError` if a file cannot be written.
    """
    if not reports:
        raise UsageError("there is nothing to report. Evaluate at least one model.")
    content = {
        "version": VERSION,
        "command": command,
        "reports": [report.to_dict() for report in reports],
        "sha256": {str(model): hashes(model) for model in _models(reports)},
    }
    return write(
        Path(directory),
        STEM,
        document(reports, command),
        {f"{STEM}.json": json.dumps(content, indent=2, allow_nan=False) + "\n"},
    )


def hashes(directory: Path) -> dict[str, str]:
    """Return the hex SHA-256 of a model's configuration and weights, on which its figures depend."""
    if directory.is_file():
        return {directory.name: hash_file(directory)}
    return {path.name: hash_file(path) for path in Checkpoint.open(directory).stamps}


def document(reports: Sequence[EvalReport], command: str | None = None) -> Document:
    """Return the report: the losses in words, tables, plots, and how they were measured."""
    texts = list(reports[0].texts)
    drawn, missing = figures_of(reports)
    words = [verdict_line(report) for report in reports if report.texts]
    sections = [
        *([Section("In words", [Bullets(words)])] if words else []),
        Section("Models", [_model_table(reports)]),
        *(Section(f"Text: {name}", [_text_table(reports, name)]) for name in texts),
    ]
    if any(report.tasks for report in reports):
        sections.append(
            Section(
                "Tasks",
                [
                    task_table([(label, one.tasks) for label, one in labelled(reports)]),
                    Text(TASK_EXPLANATION),
                ],
            )
        )
    sections.append(Section("Plots", [*drawn, *([] if missing is None else [Text(missing)])]))
    if texts:
        sections.append(Section("What the figures are", [Text(_EXPLANATION), _verdict_table()]))
    sections.append(Section("How it was measured", _provenance(reports, command)))
    return Document("Evaluation", sections)


_EXPLANATION = (
    "Perplexity is exp of the mean negative log likelihood of the predicted tokens. Excess is the "
    "logarithm of the perplexity over the reference's. KL is the divergence of the next-token "
    "distribution from the reference's, over tokens: mean, median, 95th and 99th percentile, and the "
    "largest. Both are in nats. RMS Δp is the root mean square of the difference in probability of the "
    "text's tokens. ± is one standard error with a window as one draw, paired with the reference. Same "
    "top-1 is how often both models find the same token the most likely. The noise floor is the reference "
    "against itself in another dtype: a difference as small is none. Texts are tokenized as one stream "
    "without a BOS token and cut into windows that start a stride apart; the last stride tokens of a "
    "window are scored, never its first. Bits per weight count all stored bytes: words, padding, scales, "
    "zero-points and shapes."
)


def _models(reports: Sequence[EvalReport]) -> list[Path]:
    """Return the directories of all models, the references last."""
    found = [report.model for report in reports]
    found += [report.against for report in reports if report.against is not None]
    return [Path(model) for model in dict.fromkeys(found)]


def _model_table(reports: Sequence[EvalReport]) -> Table:
    headings = ("model", "verdict", "format", "method", "bits/weight linears", "bits/weight model", "size")
    rows = []
    for report in reports:
        found, sizes = verdict(report), report.sizes
        rows.append(
            (
                report.label,
                "-" if found is None else found.word,
                sizes.format,
                sizes.method or "-",
                number_text(sizes.linears, ".3f"),
                number_text(sizes.model, ".3f"),
                size_text(sizes.file_bytes),
            )
        )
    return Table(headings, rows, frozenset(headings[:4]))


@dataclass(frozen=True)
class _Column:
    """Figure of a text: its heading, its format, and True if it needs a reference."""

    heading: str
    cell: Callable[[TextMetrics], str]
    compared: bool = True


_COLUMNS = (
    _Column(
        "perplexity",
        lambda m: f"e^{m.nll:.6g}" if m.perplexity is None else f"{m.perplexity:.6g}",
        compared=False,
    ),
    _Column("excess", lambda m: number_text(m.excess, "+.5f") + error_text(m.excess_se)),
    _Column("KL mean", lambda m: number_text(m.kl_mean, ".3g") + error_text(m.kl_mean_se)),
    _Column("KL median", lambda m: number_text(m.kl_median, ".3g") + error_text(m.kl_median_se)),
    _Column("KL p95", lambda m: number_text(m.kl_p95, ".3g") + error_text(m.kl_p95_se)),
    _Column("KL p99", lambda m: number_text(m.kl_p99, ".3g") + error_text(m.kl_p99_se)),
    _Column("KL max", lambda m: number_text(m.kl_max, ".3g")),
    _Column("same top-1", lambda m: percent_text(m.same_top1)),
    _Column("RMS Δp", lambda m: percent_text(m.rms_dp)),
)


def _text_table(reports: Sequence[EvalReport], text: str) -> Table:
    """Return a table with a row per model, the reference, and its noise floor."""
    first = reports[0]
    columns = [column for column in _COLUMNS if first.against is not None or not column.compared]
    rows = [
        (label, *(column.cell(one.texts[text]) for column in columns)) for label, one in labelled(reports)
    ]
    reference = first.texts[text].reference_perplexity
    if reference is not None:
        rows.append((Path(first.against or "").name, f"{reference:.6g}", *["-"] * (len(columns) - 1)))
    return Table(("model", *(column.heading for column in columns)), rows, frozenset({"model"}))


def labelled(reports: Sequence[EvalReport]) -> list[tuple[str, EvalReport | NoiseFloor]]:
    """Return the labelled rows of tables: the models, and last the noise floor."""
    found: list[tuple[str, EvalReport | NoiseFloor]] = [(report.label, report) for report in reports]
    against, floor = reports[0].against, reports[0].noise_floor
    if against is not None and floor is not None:
        found.append((floor_label(against, floor.dtype), floor))
    return found


def _verdict_table() -> Table:
    return Table(
        ("verdict", "KL mean up to", "excess up to", "meaning"),
        [(v.word, _limit(v.kl_mean), _limit(v.excess), v.meaning) for v in VERDICTS],
        frozenset({"verdict", "meaning"}),
    )


def _provenance(reports: Sequence[EvalReport], command: str | None) -> list[Command | Bullets]:
    lines: list[Prose] = []
    for report in reports:
        against = ("no reference",) if report.against is None else ("against ", Code(report.against))
        count = "".join(f"; {name} {m.tokens} tokens" for name, m in report.texts.items())
        windows = f"; windows of {report.window}, {report.stride} apart" if report.texts else ""
        how = (
            f"{count}{windows}; {report.batch} at a time; {report.dtype} on {report.device}; "
            f"quantkit {report.versions.quantkit_version}, torch {report.versions.torch}, "
            f"transformers {report.versions.transformers}; {report.seconds:.1f} s."
        )
        lines.append((f"{report.label}: ", Code(report.model), " ", *against, how))
    size = reports[0].reference_logits
    if size:
        lines.append(
            f"The reference's logits, all of them in float32, took {size_text(size)} on disk at a time and "
            f"{reports[0].reference_seconds:.1f} s."
        )
    lines += dict.fromkeys(note for report in reports for note in report.notes)
    return [*([] if command is None else [Command(command)]), Bullets(lines)]


def figures_of(reports: Sequence[EvalReport]) -> tuple[list[Figure], str | None]:
    """Return the plots that the figures allow, or why there are none."""
    try:
        plots.figure_class()
    except EnvironmentProblem as error:
        return [], f"There are no plots: {error}"
    compared = [report for report in reports if report.against is not None and report.texts]
    drawn = [_excess_plot(compared), _kl_plot(compared), _histogram(compared)] if compared else []
    if any(report.per_block for report in reports):
        drawn.append(_block_plot(reports))
    if any(report.tasks for report in reports):
        drawn.append(_task_plot(reports))
    return drawn, None if drawn else "There are no plots: no model was compared with a reference."


def _excess_plot(reports: Sequence[EvalReport]) -> Figure:
    figure, axes = plots.drawing()
    axes.set_yscale("symlog", linthresh=_LINEAR_EXCESS)
    _against_bits(
        axes,
        reports,
        {name: [(m.excess, m.excess_se) for m in _text(reports, name)] for name in reports[0].texts},
    )
    axes.axhline(0.0, color=plots.INK, linewidth=1)
    axes.set(xlabel="bits per weight of the packed linears", ylabel="excess, nats per token")
    return plots.render(
        figure,
        "excess",
        "Perplexity excess against bits per weight, ± one standard error. The line is the reference; the "
        f"axis is linear up to {_LINEAR_EXCESS:g}.",
    )


def _kl_plot(reports: Sequence[EvalReport]) -> Figure:
    figure, axes = plots.drawing()
    axes.set_yscale("log")
    _against_bits(
        axes,
        reports,
        {
            name: [(max(m.kl_mean or 0.0, PLOT_FLOOR), m.kl_mean_se) for m in _text(reports, name)]
            for name in reports[0].texts
        },
    )
    floor = reports[0].noise_floor
    caption = "KL mean against bits per weight, ± one standard error."
    if floor is not None:
        worst = max(metrics.kl_mean or 0.0 for metrics in floor.texts.values())
        axes.axhline(max(worst, PLOT_FLOOR), color=plots.INK, linewidth=1, linestyle="--")
        caption += f" The dashed line is the noise floor: the reference in {floor.dtype}."
    axes.set(xlabel="bits per weight of the packed linears", ylabel="KL mean, nats per token")
    return plots.render(figure, "kl", caption)


def _text(reports: Sequence[EvalReport], name: str) -> list[TextMetrics]:
    return [report.texts[name] for report in reports]


def _against_bits(
    axes: Any, reports: Sequence[EvalReport], lines: Mapping[str, Sequence[tuple[float | None, float | None]]]
) -> None:
    """Plot a line per text through the models by their bits; each model's name is at its highest point."""
    highest: dict[tuple[str, float], float] = {}
    for number, (name, values) in enumerate(lines.items()):
        points = sorted(
            (_bits(report), value, error or 0.0, report.label)
            for report, (value, error) in zip(reports, values, strict=True)
            if value is not None
        )
        axes.errorbar(
            [x for x, *_ in points],
            [y for _, y, *_ in points],
            yerr=[error for _, _, error, _ in points],
            color=plots.color(number),
            marker="o",
            markersize=4,
            linewidth=1.2,
            capsize=3,
            label=plots.plain(name),
        )
        for x, y, _, label in points:
            highest[label, x] = max(y, highest.get((label, x), y))
    for (label, x), y in highest.items():
        axes.annotate(plots.plain(label), (x, y), textcoords="offset points", xytext=(5, 6), fontsize="small")
    axes.margins(x=0.12, y=0.12)
    plots.legend(axes)


def _block_plot(reports: Sequence[EvalReport]) -> Figure:
    figure, axes = plots.drawing()
    tokens = 0
    for number, report in enumerate(reports):
        if report.per_block is None:
            continue
        tokens = report.per_block.tokens
        losses = [max(loss, PLOT_FLOOR) for loss in report.per_block.kl_mean.values()]
        color = plots.color(number)
        axes.plot(
            losses, color=color, marker="o", markersize=4, linewidth=1.2, label=plots.plain(report.label)
        )
    axes.set(yscale="log", xlabel="block", ylabel="KL mean, nats per token")
    axes.xaxis.get_major_locator().set_params(integer=True)
    plots.legend(axes, 3)
    return plots.render(
        figure,
        "kl-blocks",
        f"Where the loss is: KL mean over {tokens} tokens of the original with one block of the model in "
        "place of its own.",
    )


def _histogram(reports: Sequence[EvalReport]) -> Figure:
    figure, axes = plots.drawing()
    # The outer bins are unbounded; they are drawn as wide as their neighbours.
    edges = [KL_EDGES[0] ** 2 / KL_EDGES[1], *KL_EDGES, KL_EDGES[-1] ** 2 / KL_EDGES[-2]]
    for number, (label, one) in enumerate(labelled(reports)):
        counts = [sum(bins) for bins in zip(*(m.kl_histogram or () for m in one.texts.values()), strict=True)]
        parts = [100 * count / sum(counts) for count in counts]
        is_floor = isinstance(one, NoiseFloor)
        color = plots.INK if is_floor else plots.color(number)
        style = "--" if is_floor else "-"
        axes.stairs(parts, edges, color=color, linestyle=style, linewidth=1.4, label=plots.plain(label))
    axes.set_xscale("log")
    axes.set(xlabel="KL of a token, nats", ylabel="tokens, %")
    plots.legend(axes, 3)
    return plots.render(
        figure,
        "kl-histogram",
        "How the divergence spreads over the tokens of all texts, four bins to a decade; the first and the "
        "last bin also hold what lies beyond them.",
    )


def _task_plot(reports: Sequence[EvalReport]) -> Figure:
    answers = [(label, one.tasks) for label, one in labelled(reports)]
    names = list(dict.fromkeys((m.task, m.metric) for _, tasks in answers for m in tasks))
    figure, axes = plots.drawing(height=1.5 + 0.3 * len(names) * (1 + len(answers)))
    pitch = 1 / (1 + len(answers))
    for number, (label, tasks) in enumerate(answers):
        found = {(m.task, m.metric): m for m in tasks}
        errors = [m.accuracy_se if m.paired is None else m.paired.delta_se for m in found.values()]
        axes.errorbar(
            [100 * m.accuracy for m in found.values()],
            [names.index(name) + pitch * (number + 1) for name in found],
            xerr=[100 * (error or 0.0) for error in errors],
            color=plots.INK if number == len(reports) else plots.color(number),
            marker="o",
            markersize=4,
            linestyle="none",
            capsize=3,
            label=plots.plain(label),
        )
    references = {(m.task, m.metric): m.paired.reference for m in reports[0].tasks if m.paired is not None}
    for name, value in references.items():
        at = names.index(name)
        axes.plot([100 * value] * 2, [at + pitch / 2, at + 1 - pitch / 2], color=plots.INK, linewidth=1)
    axes.set_yticks(
        [i + 0.5 for i in range(len(names))], [plots.plain(f"{task} {metric}") for task, metric in names]
    )
    axes.set(ylim=(len(names), 0), xlabel="accuracy, %")
    plots.legend(axes, min(3, len(answers)))
    what = "the paired one of the change from the reference, the line" if references else "of the accuracy"
    return plots.render(figure, "tasks", f"Accuracy, ± one standard error: {what}.")


def _bits(report: EvalReport) -> float:
    return report.sizes.model if report.sizes.linears is None else report.sizes.linears


def floor_label(against: str, dtype: str) -> str:
    """Return the label of the noise floor: the directory `against` in `dtype`."""
    return f"noise floor: {Path(against).name} in {dtype}"


def _limit(value: float) -> str:
    return "any" if math.isinf(value) else f"{value:g}"
