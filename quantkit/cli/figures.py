"""The tables of an evaluation on a terminal: the figures that fit 80 columns, and a sentence per model."""

import math
from collections.abc import Sequence
from statistics import median_low
from typing import TYPE_CHECKING

from quantkit.cli.console import note, print_table, say
from quantkit.files import size_text

if TYPE_CHECKING:
    from quantkit.eval.metrics import TextMetrics
    from quantkit.eval.own_text import Written
    from quantkit.eval.results import EvalReport, NoiseFloor


def print_reports(reports: Sequence["EvalReport"]) -> None:
    """A table per text with a row per model, one of the tasks, what each model lost in words, and notes."""
    from quantkit.eval.rating import verdict_line

    for text, metrics in reports[0].texts.items():
        say(f"{text}: {metrics.tokens} tokens", style="bold")
        _print_text(reports, text)
    if any(report.tasks for report in reports):
        _print_tasks(reports)
    for report in reports:
        if report.texts:
            say(verdict_line(report))
        for way, written in report.own_text.items():
            say(_continued(way, report.label, written) + _differing([one.alike for one in written.pairs]))
    for line in dict.fromkeys(line for report in reports for line in report.notes):
        note(line)


def _continued(way: str, label: str, written: "Written") -> str:
    """What a model wrote from the beginnings of texts, beside what the original wrote."""
    pairs = (
        (f"{one.tokens:.0f} tokens", f"{one.ended:.0%} end", f"{one.repeated:.1%} repeated")
        for one in (written.model, written.original)
    )
    mine, theirs = map(", ".join, pairs)
    return f"{way}, {label} goes on for {mine}; the original for {theirs}"


def _differing(alike: Sequence[int | None]) -> str:
    """After how many tokens of a text they first differ; None for texts that are the same."""
    if not alike:
        return ""
    middle = median_low(math.inf if one is None else one for one in alike)
    if middle == math.inf:
        return f"; most of {len(alike)} texts are the same"
    return f"; half of {len(alike)} texts differ within {middle + 1:.0f} token{'' if middle == 0 else 's'}"


def _print_text(reports: Sequence["EvalReport"], text: str) -> None:
    from quantkit.report.eval_plots import labelled

    headings = ["model", "bits in\nlinears", "bits in\nmodel", "size", "perplexity"]
    compared = reports[0].against is not None
    if compared:
        headings += ["excess", "KL mean", "same\ntop-1"]
    table = [(label, *_sizes(one), *_figures(one.texts[text], compared)) for label, one in labelled(reports)]
    print_table(headings, table, words=("model",), folded=("model",))


def _sizes(one: "EvalReport | NoiseFloor") -> tuple[str, str, str]:
    """Those of a model; a noise floor is of the original."""
    from quantkit.eval.results import NoiseFloor

    if isinstance(one, NoiseFloor):
        return "", "", ""
    sizes = one.sizes
    linears = "-" if sizes.linears is None else f"{sizes.linears:.3f}"
    return linears, f"{sizes.model:.3f}", size_text(sizes.nbytes)


def _figures(metrics: "TextMetrics", compared: bool) -> list[str]:
    perplexity = metrics.perplexity
    cells = [f"e^{metrics.nll:.5g}" if perplexity is None else f"{perplexity:.6g}"]
    if compared:
        cells += [
            "-" if metrics.excess is None else f"{metrics.excess:+.5f}",
            "-" if metrics.kl_mean is None else f"{metrics.kl_mean:.3g}",
            "-" if metrics.same_top1 is None else f"{metrics.same_top1:.2%}",
        ]
    return cells


def _print_tasks(reports: Sequence["EvalReport"]) -> None:
    """A row per task and model; change and error in points, p that of McNemar's test."""
    from quantkit.report.eval_plots import labelled

    words, table = ("task", "metric", "model"), []
    for label, one in labelled(reports):
        for metrics in one.tasks:
            paired = metrics.paired
            cells = [
                *(metrics.task, metrics.metric, label),
                *(str(metrics.items), f"{metrics.accuracy:.2%}"),
            ]
            if paired is not None:
                error = "" if paired.delta_se is None else f" ± {100 * paired.delta_se:.2f}"
                cells += [f"{100 * paired.delta:+.2f}{error}", f"{paired.flips:.2%}", f"{paired.p_value:.2g}"]
            table.append(cells)
    print_table((*words, "items", "accuracy", "change", "flips", "p"), table, words=words, folded=words)
