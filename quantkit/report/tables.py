"""Format cells and tables for the report of `eval` and the model card."""

import math
from collections.abc import Sequence

from quantkit.eval.tasks import TaskMetrics
from quantkit.report.document import Table

TASK_EXPLANATION = (
    "Each model answers the same items. The change is that of accuracy in points, ± one paired standard "
    "error. Gained are items that only the model gets right, lost those that only the reference does, and "
    "in brackets the part of all items that flipped either way. p is that of McNemar's exact test: how "
    "likely flips split as unevenly by chance. The noise floor is the reference itself in another dtype: a "
    "difference as small is none."
)


def number_text(value: float | None, form: str) -> str:
    """Format `value` by a format specification; a dash for None."""
    return "-" if value is None else format(value, form)


def rounded_text(value: float, digits: int = 3) -> str:
    """Format `value` with `digits` digits that count, and thousands in groups: 1,940 for 1.94e+03."""
    short = f"{value:.{digits}g}"
    return f"{float(short):,.0f}" if "e+" in short or abs(value) >= 1000 else short


def percent_text(value: float | None) -> str:
    """Format a share in percent."""
    return "-" if value is None else f"{100 * value:.2f} %"


def ratio_text(value: float, reference: float) -> str:
    """Format a multiple of a reference; a dash if that is 0."""
    return f"{value / reference:.3g}x" if reference else "-"


def change_text(excess: float) -> str:
    """Format exp(`excess`), the multiple of a perplexity; as a power of e if it is too large to read."""
    return f"{math.exp(excess):.4g}x" if excess < 20 else f"e^{excess:.4g}"


def error_text(value: float | None) -> str:
    """Format a standard error as a suffix of the figure; empty for None."""
    return "" if value is None else f" ± {value:.1g}"


def points_text(value: float | None) -> str:
    """Format a standard error of a share, in percentage points; empty for None."""
    return "" if value is None else f" ± {100 * value:.2f}"


def task_table(answers: Sequence[tuple[str, Sequence[TaskMetrics]]]) -> Table:
    """Return a table with a row per task, metric and model; `answers` are the metrics by model label."""
    headings = ("task", "metric", "model", "items", "accuracy", "reference", "change", "gained, lost", "p")
    rows: list[tuple[str, ...]] = []
    for label, tasks in answers:
        for metrics in tasks:
            paired = metrics.paired
            row = (
                metrics.task,
                metrics.metric,
                label,
                str(metrics.items),
                percent_text(metrics.accuracy) + points_text(metrics.accuracy_se),
            )
            if paired is None:
                rows.append((*row, "-", "-", "-", "-"))
                continue
            rows.append(
                (
                    *row,
                    percent_text(paired.reference),
                    f"{100 * paired.delta:+.2f}" + points_text(paired.delta_se),
                    f"{paired.gained}, {paired.lost} ({percent_text(paired.flips)})",
                    f"{paired.p_value:.2g}",
                )
            )
    return Table(headings, sorted(rows, key=lambda cells: (cells[0], cells[1])), frozenset(headings[:3]))
