"""Plots as PNG files. matplotlib is an extra, imported where one is drawn."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.cli.console import note
from quantkit.cli.files import write_file
from quantkit.errors import UsageError
from quantkit.report.plots import figure_class, plain, why_none

if TYPE_CHECKING:
    from quantkit.checkpoint.model_record import LayerRecord

#: Marks of the kinds of linears: nine, so that ten colors with them are ninety that differ.
_MARKS = "osD^vP*X<"


def check_png(path: Path) -> None:
    """Everything that can be refused about `--plot path` before any work."""
    if path.suffix != ".png":
        raise UsageError(f"--plot {path} does not end in .png, the one kind of file it writes.")
    figure_class()


def note_without_plots() -> None:
    """Says before the work that a report will have no plots, and what to install."""
    if (missing := why_none()) is not None:
        note(f"the report will have no plots: {missing}")


def save(figure: Any, path: Path) -> None:
    """Write a figure, the same bytes each time; `OutputError` if that cannot be."""
    png = io.BytesIO()
    figure.savefig(png, format="png", metadata={"Software": None})
    write_file(path, png.getvalue())


def draw_errors(path: Path, title: str, layers: Mapping[str, "LayerRecord"]) -> list[str]:
    """Write a PNG with the error of every linear (logarithmic) by its block, a line for each kind of linear.

    The error is that of the outputs if calibration data measured any, else that of the weights. A line goes
    through the means where a block has several of a kind, such as experts. Returns the linears that were
    measured but are not in the plot: those without any error, and those without calibration data where others
    had some. `UsageError` if nothing was measured.
    """
    outputs = {name: layer.output_error for name, layer in layers.items() if layer.output_error is not None}
    weights = {
        name: layer.relative_error for name, layer in layers.items() if layer.relative_error is not None
    }
    if not weights:
        raise UsageError(f"{title}: no linear has a measured error, so there is nothing to plot.")
    measured = {name: error for name, error in (outputs or weights).items() if error > 0}
    if not measured:
        raise UsageError(f"{title}: every linear is exact, so a logarithmic axis has nothing to show.")
    kinds: dict[str, dict[int, list[float]]] = {}
    last = max((_block(name) or 0) for name in measured)
    outside: list[str] = []
    for name, error in measured.items():
        block = _block(name)
        if block is None and name not in outside:
            outside.append(name)
        at = last + 1 + outside.index(name) if block is None else block
        kinds.setdefault(_kind(name), {}).setdefault(at, []).append(error)
    figure = figure_class()(figsize=(11, 5.5), dpi=110, layout="constrained")
    axes = figure.subplots()
    for i, (kind, points) in enumerate(kinds.items()):
        color, mark = f"C{i % 10}", _MARKS[i % len(_MARKS)]
        blocks = sorted(points)
        means = [sum(points[at]) / len(points[at]) for at in blocks]
        axes.plot(blocks, means, color=color, marker=mark, markersize=5, linewidth=1.2, label=plain(kind))
        several = [(at, error) for at in blocks for error in points[at] if len(points[at]) > 1]
        if several:
            axes.scatter(*zip(*several, strict=True), color=color, marker=mark, s=8, alpha=0.4)
    what = "outputs on the calibration data" if outputs else "weights"
    axes.set(yscale="log", xlabel="block", ylabel=f"relative squared error of {what}", title=plain(title))
    axes.xaxis.get_major_locator().set_params(integer=True)
    if outside:
        # None so near the end that its number would be under a name.
        inside = [t for t in axes.get_xticks() if 0 <= t <= last * 0.93 and t == int(t)]
        axes.set_xticks(
            [*inside, *range(last + 1, last + 1 + len(outside))],
            [*(str(int(tick)) for tick in inside), *map(plain, outside)],
        )
    axes.grid(which="both", alpha=0.25)
    figure.legend(loc="outside right upper", fontsize=9)
    save(figure, path)
    return [name for name in weights if name not in measured]


def _block(name: str) -> int | None:
    found = re.search(r"\.(\d{1,6})\.", name)
    return int(found.group(1)) if found else None


def _kind(name: str) -> str:
    """What a linear is in its block, experts of a block alike: `self_attn.q_proj`."""
    inside = re.sub(r"^.*?\.\d+\.", "", name, count=1)
    return re.sub(r"\.\d+(?=\.)", ".*", inside)
