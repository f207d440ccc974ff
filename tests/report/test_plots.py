"""Every mark and name of a plot lies inside it, and names cover neither marks nor each other."""

from dataclasses import replace
from typing import Any

import pytest

from quantkit.eval.results import EvalReport, NoiseFloor
from quantkit.report import eval_plots, plots
from quantkit.report.labels import name_points

from .test_eval_report import report, text, with_tasks

pytest.importorskip("matplotlib")


def extents(figure: Any) -> list[tuple[str, Any]]:
    """What a figure shows as text, and where, in pixels."""
    from matplotlib.text import Text

    figure.draw_without_rendering()
    texts = [one for one in figure.findobj(Text) if one.get_visible() and one.get_text().strip()]
    return [(one.get_text(), Text.get_window_extent(one)) for one in texts]


def marks(figure: Any) -> list[Any]:
    """Marks of a figure in pixels, error bars not."""
    return [
        point
        for axes in figure.axes
        for line in axes.lines
        if line.get_marker() != "None"
        for point in axes.transData.transform(line.get_xydata())
    ]


def measured(label: str, bits: float, kl: float, *, floor: bool) -> EvalReport:
    found = report(label, bits, **{"a.txt": text(kl)})
    return replace(found, noise_floor=NoiseFloor("bfloat16", {"a.txt": text(4e-7)}, ())) if floor else found


MODELS = {"smollm2-int8": (8.03, 1e-3), "smollm2-int4": (4.125, 0.05), "smollm2-int4-gptq": (4.125, 0.03)}
MODELS |= {"smollm2-awq": (4.2, 0.031), "smollm2-fp4": (4.25, 0.06), "binary-" + 30 * "x": (1.125, 5.0)}


@pytest.mark.parametrize("floor", [False, True], ids=["line", "star"])
@pytest.mark.parametrize("names", [["smollm2-int4"], ["smollm2-int8"], [*MODELS]], ids=["1", "exact", "6"])
def test_marks_and_names_of_models_are_inside(
    names: list[str], floor: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    render = plots.render
    monkeypatch.setattr(plots, "render", lambda figure, *text: drawn.append(figure) or render(figure, *text))
    reports = [measured(name, *MODELS[name], floor=floor) for name in names]
    eval_plots.figures([with_tasks(reports[0], [True] * 4), *reports[1:]] if floor else reports)
    assert len(drawn) >= 2
    for figure in drawn:
        shown, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(shown.x0, shown.y0) >= 0 and shown.x1 <= width and shown.y1 <= height
    axes = drawn[0].axes[0]
    frame = axes.get_window_extent().padded(-6)
    assert all(frame.contains(*point) for point in marks(drawn[0]))
    assert len(marks(drawn[0])) == len(names) + floor
    labels = [extent for name, extent in extents(drawn[0]) if name in names]
    assert len(labels) == len(names)
    assert all(one.count_overlaps(labels) == 1 for one in labels)
    assert not any(one.count_contains(marks(drawn[0])) for one in labels)


def test_names_without_a_free_place_are_inside_too() -> None:
    figure, axes = plots.drawing()
    points = [(1 + 0.001 * number, 1.0) for number in range(20)]
    axes.plot(*zip(*points, strict=True), "o")
    name_points(figure, axes, [("a long name of a model", point) for point in points])
    frame = axes.get_window_extent().padded(2)
    found = [extent for name, extent in extents(figure) if name.startswith("a long")]
    assert len(found) == 20
    assert all(frame.contains(one.x0, one.y0) and frame.contains(one.x1, one.y1) for one in found)
