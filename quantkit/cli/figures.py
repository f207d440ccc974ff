"""The table of an evaluation on a terminal: the figures that fit 80 columns, and a sentence per model."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from quantkit.cli.console import note, out, printable, say, size

if TYPE_CHECKING:
    from quantkit.eval.evaluate import EvalReport
    from quantkit.eval.metrics import TextMetrics


def print_reports(reports: Sequence["EvalReport"]) -> None:
    """A table per text with a row per model, what each model lost in words, and the notes."""
    from quantkit.eval.report import verdict_line

    for text in reports[0].texts:
        say(f"{text}: {reports[0].texts[text].tokens} tokens", style="bold")
        out.print(_table([(report, report.texts[text]) for report in reports]))
    for report in reports:
        say(verdict_line(report))
    for line in dict.fromkeys(line for report in reports for line in report.notes):
        note(line)


def _table(rows: Sequence[tuple["EvalReport", "TextMetrics"]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("model", overflow="fold")
    headings = ["bits in\nlinears", "bits in\nmodel", "size", "perplexity"]
    compared = rows[0][0].against is not None
    if compared:
        headings += ["excess", "KL mean", "same\ntop-1"]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for report, metrics in rows:
        sizes = report.sizes
        perplexity = metrics.perplexity
        cells = [
            report.label,
            "-" if sizes.linears is None else f"{sizes.linears:.3f}",
            f"{sizes.model:.3f}",
            size(sizes.file_bytes),
            f"e^{metrics.nll:.5g}" if perplexity is None else f"{perplexity:.6g}",
        ]
        if compared:
            cells += [
                "-" if metrics.excess is None else f"{metrics.excess:+.5f}",
                "-" if metrics.kl_mean is None else f"{metrics.kl_mean:.3g}",
                "-" if metrics.same_top1 is None else f"{metrics.same_top1:.2%}",
            ]
        table.add_row(*map(printable, cells))
    return table
