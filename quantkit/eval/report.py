"""Reports for people: a table, a verdict per row, and loss against bits per weight."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quantkit.errors import OutputError, UsageError
from quantkit.eval.evaluate import EvalReport
from quantkit.eval.metrics import TextMetrics

if TYPE_CHECKING:
    from rich.table import Table

VERSION = 1
MARKDOWN_NAME = "report.md"
JSON_NAME = "report.json"
PLOT_NAME = "kl.png"

#: A divergence of zero has no place on a logarithmic axis; it is drawn here, in nats.
PLOT_FLOOR = 1e-7


@dataclass(frozen=True)
class Verdict:
    """A word for a loss: it holds if neither figure is larger, nats per token, on the worst text."""

    word: str
    kl_mean: float
    excess: float
    meaning: str


#: From the best to the worst; the first that holds counts. For scale, by llama.cpp's measurements of an
#: 8B model: 8-bit weights have a KL of 0.001, 6-bit 0.006, 4-bit 0.03, and 2-bit pick another top token
#: at three positions in ten.
VERDICTS: tuple[Verdict, ...] = (
    Verdict("indistinguishable", 0.003, 0.003, "users cannot tell it from the original"),
    Verdict("close", 0.05, 0.05, "small losses that benchmarks show and users rarely notice"),
    Verdict("degraded", 0.5, 0.5, "clearly worse; use it only where nothing larger fits"),
    Verdict("unusable", math.inf, math.inf, "another model, in effect; do not use it"),
)

_HEADINGS = (
    "model",
    "format",
    "method",
    "bits/weight linears",
    "bits/weight model",
    "size",
    "text",
    "perplexity",
    "excess",
    "KL mean",
    "KL p99",
    "same top-1",
)

#: Columns of words, aligned to the left.
_TEXT_HEADINGS = {"model", "format", "method", "text", "verdict"}


def verdict(report: EvalReport) -> Verdict | None:
    """The verdict on the worst text of `report`; None if it was not compared with a reference."""
    compared = [(m.kl_mean, m.excess) for m in report.texts.values()]
    kl = max((k for k, _ in compared if k is not None), default=None)
    excess = max((e for _, e in compared if e is not None), default=None)
    if kl is None or excess is None:
        return None
    return next(v for v in VERDICTS if kl <= v.kl_mean and excess <= v.excess)


def verdict_line(report: EvalReport) -> str:
    """One plain sentence on what the model of `report` lost."""
    found = verdict(report)
    if found is None:
        return f"{report.label}: not compared with a reference; perplexity alone says nothing of the loss."
    agreement = min(m.same_top1 for m in report.texts.values() if m.same_top1 is not None)
    excess = max(m.excess for m in report.texts.values() if m.excess is not None)
    # From 99.5 % on, two digits of a percentage would be an exponent.
    change = f"{100 * math.expm1(excess):+.2g} %" if excess < math.log(1.99) else f"x{_power(excess)}"
    return (
        f"{report.label}: {found.word} ({found.meaning}). On its worst text it picks the original's next "
        f"token at {100 * agreement:.1f} % of positions, and perplexity changes by {change}."
    )


def table(reports: Sequence[EvalReport]) -> "Table":
    """The rows of `reports`, one per model and text, for a terminal."""
    from rich.table import Table
    from rich.text import Text

    out = Table(title="Evaluation", caption="excess and KL in nats per token")
    for heading in (*_HEADINGS, "verdict"):
        out.add_column(heading, justify="left" if heading in _TEXT_HEADINGS else "right", overflow="fold")
    for report in reports:
        found = verdict(report)
        for row in _rows(report):
            # Text, not str: a directory name may hold what rich takes for markup.
            out.add_row(*(Text(cell) for cell in (*row, "-" if found is None else found.word)))
    return out


def write_report(directory: Path | str, reports: Sequence[EvalReport]) -> tuple[Path, ...]:
    """Write report.md, report.json and, with matplotlib and a compared report, kl.png; returns the files.

    `UsageError` without reports, `OutputError` if a file cannot be written.
    """
    if not reports:
        raise UsageError("there is nothing to report. Evaluate at least one model.")
    directory = Path(directory)
    content = {"version": VERSION, "reports": [report.to_dict() for report in reports]}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        missing = plot(directory / PLOT_NAME, reports)
        files = {
            MARKDOWN_NAME: markdown(reports, missing),
            JSON_NAME: json.dumps(content, indent=2, allow_nan=False) + "\n",
        }
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8", newline="\n")
    except OSError as error:
        raise OutputError(
            f"cannot write the report to {directory}: {error.strerror or error}. Make it a writable "
            "directory with free space."
        ) from error
    return tuple(directory / name for name in (*files, *([PLOT_NAME] if missing is None else [])))


def markdown(reports: Sequence[EvalReport], missing_plot: str | None = None) -> str:
    """report.md; `missing_plot` is why it has no plot, None if it has."""
    lines = ["# Evaluation", "", *(f"- {_escaped(verdict_line(report))}" for report in reports), ""]
    lines += [_line(_HEADINGS), _line(["---"] * len(_HEADINGS))]
    lines += [_line(row) for report in reports for row in _rows(report)]
    lines += [
        "",
        f"![KL mean against bits per weight]({PLOT_NAME})" if missing_plot is None else missing_plot,
    ]
    lines += ["", "## What the figures are", "", _EXPLANATION, "", "## Verdicts", ""]
    lines += [_line(["verdict", "KL mean up to", "excess up to", "meaning"]), _line(["---"] * 4)]
    lines += [_line([v.word, _limit(v.kl_mean), _limit(v.excess), v.meaning]) for v in VERDICTS]
    lines += ["", "## How it was measured", ""]
    for report in reports:
        against = "no reference" if report.against is None else f"against `{report.against}`"
        count = ", ".join(f"{name} {m.tokens} tokens" for name, m in report.texts.items())
        lines.append(
            _escaped(
                f"- {report.label}: `{report.model}` {against}; {count}; windows of {report.window}; "
                f"{report.dtype} on {report.device}; quantkit {report.versions.quantkit_version}, torch "
                f"{report.versions.torch}, transformers {report.versions.transformers}; "
                f"{report.seconds:.1f} s."
            )
        )
        lines += [f"    - {_escaped(note)}" for note in report.notes]
    return "\n".join(lines) + "\n"


_EXPLANATION = (
    "Perplexity is exp of the mean negative log likelihood of the predicted tokens. Excess is the logarithm "
    "of the perplexity over the reference's. KL is the divergence of the next-token distribution from the "
    "reference's, p99 its 99th percentile over tokens. Both are in nats; ± is one standard error with a "
    "window as one draw. Same top-1 is how often both models find the same token the most likely. Texts are "
    "tokenized as one stream without a BOS token and cut into windows that do not overlap; the first token "
    "of a window is not scored. Bits per weight count all stored bytes: words, padding, scales, zero-points "
    "and shapes."
)


def plot(path: Path, reports: Sequence[EvalReport]) -> str | None:
    """Draw KL mean (logarithmic) against bits per weight; the reason, for the report, if it cannot."""
    points = [
        (name, report, metrics.kl_mean)
        for report in reports
        for name, metrics in report.texts.items()
        if metrics.kl_mean is not None
    ]
    if not points:
        return "There is no plot: no model was compared with a reference."
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return "There is no plot: matplotlib is missing. Install it with `pip install 'quantkit[plots]'`."
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name in dict.fromkeys(text for text, _, _ in points):
        own = sorted((_bits(report), max(kl, PLOT_FLOOR)) for text, report, kl in points if text == name)
        axes.plot([x for x, _ in own], [y for _, y in own], marker="o", label=_plain(name))
    highest: dict[tuple[str, float], float] = {}
    for _, report, kl in points:
        key = (report.label, _bits(report))
        highest[key] = max(highest.get(key, PLOT_FLOOR), kl)
    for (label, x), y in highest.items():
        axes.annotate(_plain(label), (x, y), textcoords="offset points", xytext=(4, 6), fontsize="small")
    axes.set(yscale="log", xlabel="bits per weight of the packed linears", ylabel="KL mean, nats per token")
    axes.margins(0.1)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=150, metadata={"Software": None})
    return None


def _plain(text: str) -> str:
    """Text in which matplotlib finds no formula and no hidden legend entry."""
    return text.replace("$", r"\$").lstrip("_")


def _bits(report: EvalReport) -> float:
    return report.sizes.model if report.sizes.linears is None else report.sizes.linears


def _rows(report: EvalReport) -> list[tuple[str, ...]]:
    sizes = report.sizes
    head = (
        report.label,
        sizes.format,
        sizes.method or "-",
        _number(sizes.linears, ".3f"),
        _number(sizes.model, ".3f"),
        _size(sizes.file_bytes),
    )
    return [(*head, name, *_cells(metrics)) for name, metrics in report.texts.items()]


def _cells(metrics: TextMetrics) -> tuple[str, ...]:
    perplexity = f"e^{metrics.nll:.6g}" if metrics.perplexity is None else _number(metrics.perplexity, ".6g")
    return (
        perplexity,
        _number(metrics.excess, "+.5f") + _error(metrics.excess_se),
        _number(metrics.kl_mean, ".3g") + _error(metrics.kl_mean_se),
        _number(metrics.kl_p99, ".3g"),
        "-" if metrics.same_top1 is None else f"{100 * metrics.same_top1:.2f} %",
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _error(value: float | None) -> str:
    return "" if value is None else f" ± {value:.1g}"


def _power(nats: float) -> str:
    return f"{math.exp(nats):.3g}" if nats < 700 else f"e^{nats:.3g}"


def _limit(value: float) -> str:
    return "any" if math.isinf(value) else f"{value:g}"


def _size(count: int) -> str:
    """Bytes in powers of 1000, as disks and hubs show them."""
    value, unit = float(count), "B"
    for larger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, larger
    return f"{count} B" if unit == "B" else f"{value:.2f} {unit}"


def _escaped(text: str) -> str:
    return " ".join(text.splitlines()).replace("<", "&lt;")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(_escaped(cell).replace("|", r"\|") for cell in cells) + " |"
