"""Draw evaluations: loss against bits per weight, its spread over tokens and blocks, and tasks."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quantkit.eval.metrics import KL_EDGES
from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.report import plots
from quantkit.report.document import Figure
from quantkit.report.fronts import front, kind_of
from quantkit.report.labels import name_points

#: Smallest plotted divergence, in nats: zero has no place on a logarithmic axis.
PLOT_FLOOR = 1e-7


def figures(reports: Sequence[EvalReport]) -> tuple[list[Figure], str | None]:
    """Return the plots that the reports allow, or why there are none."""
    if (missing := plots.why_none()) is not None:
        return [], f"There are no plots: {missing}"
    compared = [report for report in reports if report.against is not None and report.texts]
    drawn = [_kl_plot(compared), _histogram(compared)] if compared else []
    if any(report.per_block for report in reports):
        drawn.append(_block_plot(reports))
    if any(report.tasks for report in reports):
        drawn.append(_task_plot(reports))
    return drawn, None if drawn else "There are no plots: no model was compared with a reference."


def labelled(reports: Sequence[EvalReport]) -> list[tuple[str, EvalReport | NoiseFloor]]:
    """Return (label, report) of each model in order, and last of the noise floor, if measured."""
    found: list[tuple[str, EvalReport | NoiseFloor]] = [(report.label, report) for report in reports]
    against, floor = reports[0].against, reports[0].noise_floor
    if against is not None and floor is not None:
        found.append((floor_label(against, floor.dtype), floor))
    return found


def floor_label(against: str, dtype: str) -> str:
    """Return the label of the noise floor: the directory `against` in `dtype`."""
    return f"noise floor: {Path(against).name} in {dtype}"


def _kl_plot(reports: Sequence[EvalReport]) -> Figure:
    """Plot the KL divergence of each model against bits, on the text with the largest, with Pareto fronts."""
    figure, axes = plots.drawing()
    axes.set(xscale="log", yscale="log", xlabel="bits per weight of the packed linears")
    axes.set_ylabel("KL from the original, nats\n(lower is closer)")
    kinds: dict[str, list[tuple[float, float]]] = {}
    names = []
    for report in reports:
        worst = max(report.texts.values(), key=lambda found: found.kl_mean or 0.0)
        point = (_bits(report), max(worst.kl_mean or 0.0, PLOT_FLOOR))
        kind = kind_of(report.sizes.format)
        number = list(kinds).index(kind) if kind in kinds else len(kinds)
        kinds.setdefault(kind, []).append(point)
        axes.errorbar(*point, worst.kl_mean_se or 0.0, color=plots.color(number), elinewidth=1, capsize=0)
        names.append((plots.plain(report.label), point))
    for number, (kind, points) in enumerate(kinds.items()):
        axes.plot(*zip(*points, strict=True), "o", color=plots.color(number), markersize=6, label=kind)
        axes.plot(*zip(*front(points), strict=True), color=plots.color(number), linewidth=1.2, alpha=0.7)
    caption = (
        "How far predictions moved from the original's, by size, on the text where they moved most, ± one "
        "standard error. A line joins the models of one kind of format that none of the kind beats in both."
    )
    caption += _original(axes, reports[0])
    _widen(axes)
    least, most = axes.get_xlim()
    plots.ticks(axes, [bits for bits in (1, 1.5, 2, 3, 4, 6, 8, 16, 32) if least <= bits <= most])
    plots.legend(axes, 2)
    name_points(figure, axes, names)
    return plots.render(figure, "kl", caption)


def _widen(axes: Any) -> None:
    """Leave room around the data of logarithmic `axes` for marks and names, also around a single point."""
    data = axes.dataLim
    for (low, high), set_limits in (
        ((data.minposx, data.x1), axes.set_xlim),
        ((data.minposy, data.y1), axes.set_ylim),
    ):
        room = max(1.3, (high / low) ** 0.14)
        set_limits(low / room, high * room)


def _original(axes: Any, report: EvalReport) -> str:
    """Mark the original at its bits; return the caption text about the mark.

    A divergence of zero is not on the logarithmic axis: the mark is at the measured noise floor, else a line.
    """
    bits = 16.0 if report.reference_sizes is None else report.reference_sizes.model
    name = f"original, {bits:.3g} bits"
    floor = report.noise_floor
    if floor is None:
        axes.axvline(bits, color=plots.INK, linewidth=1, linestyle="--", label=name)
        return f" The dashed line is the original, of {bits:.3g} bits, whose KL is 0."
    worst = max(PLOT_FLOOR, *(metrics.kl_mean or 0.0 for metrics in floor.texts.values()))
    axes.axhline(worst, color=plots.INK, linewidth=1, linestyle="--")
    axes.plot([bits], [worst], color=plots.INK, marker="*", markersize=11, linestyle="none", label=name)
    return f" The star and the dashed line are the original itself in {floor.dtype}: below it nothing shows."


def _block_plot(reports: Sequence[EvalReport]) -> Figure:
    figure, axes = plots.drawing()
    tokens = 0
    for number, report in enumerate(reports):
        if report.per_block is None:
            continue
        tokens = report.per_block.tokens
        losses = [max(loss, PLOT_FLOOR) for loss in report.per_block.kl_mean.values()]
        axes.plot(losses, "o", color=plots.color(number), markersize=5, label=plots.plain(report.label))
    axes.set(yscale="log", xlabel="block of the model", ylabel="KL from the original, nats")
    axes.xaxis.get_major_locator().set_params(integer=True)
    plots.legend(axes, 3)
    return plots.render(
        figure,
        "kl-blocks",
        f"Where the loss is: KL over {tokens} tokens of the original with one block of the model in place of "
        "its own.",
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
    axes.set(xlabel="KL of one token, nats", ylabel="tokens, %")
    plots.legend(axes, 2)
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
            markersize=5,
            linestyle="none",
            elinewidth=1,
            capsize=0,
            label=plots.plain(label),
        )
    references = {(m.task, m.metric): m.paired.reference for m in reports[0].tasks if m.paired is not None}
    for name, value in references.items():
        at = names.index(name)
        axes.plot([100 * value] * 2, [at + pitch / 2, at + 1 - pitch / 2], color=plots.INK, linewidth=1)
    axes.set_yticks(
        [i + 0.5 for i in range(len(names))], [plots.plain(f"{task} {metric}") for task, metric in names]
    )
    axes.set(ylim=(len(names), 0), xlabel="right answers, %")
    plots.legend(axes, min(2, len(answers)))
    what = "the paired one of the change from the original, the line" if references else "of the accuracy"
    return plots.render(figure, "tasks", f"Accuracy, ± one standard error: {what}.")


def _bits(report: EvalReport) -> float:
    return report.sizes.model if report.sizes.linears is None else report.sizes.linears
