"""Draw plots with matplotlib, an optional extra, as PNG, and as SVG in the page's colors."""

import io
import re
from collections.abc import Sequence
from typing import Any

from quantkit import escaping
from quantkit.about import pip_install
from quantkit.errors import EnvironmentProblem
from quantkit.report.document import Figure

#: Color of everything but data; in the SVG it becomes the color of the surrounding text.
INK = "#1c1e21"

STYLE = {
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": INK,
    "grid.alpha": 0.15,
    "axes.grid": True,
    "axes.axisbelow": True,
    "font.size": 11,
    # Make ids depend on the drawing only, and draw text alike on every machine.
    "svg.hashsalt": "quantkit",
    "svg.fonttype": "path",
}

#: Escape for every label and title from outside.
plain = escaping.plot

#: Colors that stand out on white and on near-black.
COLORS = ("#2f7fd1", "#d9731a", "#3b9a58", "#b0549f", "#c0504d", "#7a7f2a", "#2a9aa0", "#8a6bd1")


def color(number: int) -> str:
    """Return the color of line `number`; colors repeat."""
    return COLORS[number % len(COLORS)]


def figure_class() -> Any:
    """Return matplotlib's `Figure`; raise `EnvironmentProblem` with the extra's name without matplotlib."""
    try:
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise EnvironmentProblem(
            f"plots need matplotlib, the extra 'plots', which cannot be imported ({error}). Install it with "
            f"{pip_install('plots')}."
        ) from error
    return Canvas


def why_none() -> str | None:
    """Return why no plots can be drawn, and the remedy; None if they can."""
    try:
        figure_class()
    except EnvironmentProblem as error:
        return f"{error}"
    return None


def drawing(*, rows: int = 1, height: float = 3.9) -> tuple[Any, Any]:
    """Create an empty matplotlib figure and its axes (an array for several `rows`).

    It is 5.4 inches wide, so that its text can be read on a page of 400 pixels.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        figure = figure_class()(figsize=(5.4, height), layout="constrained")
        axes = figure.subplots(rows, 1)
    return figure, axes


def legend(axes: Any, columns: int = 4) -> None:
    """Add a legend for the lines of `axes` above the plot."""
    handles, labels = axes.get_legend_handles_labels()
    axes.figure.legend(handles, labels, loc="outside upper center", ncols=columns)


def ticks(axes: Any, values: Sequence[float]) -> None:
    """Set ticks of x at `values`, as plain numbers; logarithmic axes would write powers."""
    axes.set_xticks(values, [f"{value:g}" for value in values])
    axes.set_xticks([], minor=True)


def render(figure: Any, name: str, caption: str) -> Figure:
    """Render a matplotlib `figure` for a document: PNG on white, SVG transparent in the text's color."""
    from matplotlib import rc_context
    from matplotlib.legend import Legend
    from matplotlib.text import Text

    # Override elements outside the style: legends have no white background, and text is not black.
    for legend in figure.findobj(Legend):
        legend.set_frame_on(False)
    for text in figure.findobj(Text):
        if text.get_color() == "black":
            text.set_color(INK)
    png, svg = io.BytesIO(), io.StringIO()
    with rc_context(STYLE):
        figure.savefig(png, format="png", dpi=150, metadata={"Software": None})
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(svg, format="svg", transparent=True, metadata=nothing)
    return Figure(name, caption, png.getvalue(), _embedded(svg.getvalue(), name))


def _embedded(svg: str, name: str) -> str:
    """Convert an SVG file to an element of an HTML page, without prolog and with unique ids."""
    element = svg[svg.index("<svg") :]
    element = re.sub(
        r' xmlns(:xlink)?="[^"]*"| version="[^"]*"|<metadata>.*?</metadata>', "", element, flags=re.S
    )
    element = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{name}-", element)
    return element.replace(INK, "currentColor").strip()
