"""Place names beside the points of a plot, where they cover no mark, line or other name."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise, product
from typing import Any, NamedTuple

#: Angles of a name from its mark, in degrees, best first: below a Pareto front is nothing to cover.
_BELOW, _ABOVE = tuple(range(180, 271, 10)), (*range(0, 91, 10), *range(350, 299, -10))
_ANGLES = {True: _BELOW + _ABOVE, False: _ABOVE + _BELOW}
#: Distances of a name from its mark, in points, nearest first.
_DISTANCES = (10, 16, 24, 34, 46, 60, 76, 94, 114, 136, 160)


class _Point(NamedTuple):
    x: float
    y: float


def name_points(
    figure: Any, axes: Any, names: Iterable[tuple[str, Sequence[float]]], fontsize: float = 9
) -> None:
    """Write names beside points, in their order, each with a line to its point.

    A name takes the first place inside the frame that covers no mark, line or earlier name of `axes`. If all
    places do, it takes the one that covers least. The layout of `figure` is final afterwards.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

    # Places of marks are known once the axes have theirs.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    renderer, frame = FigureCanvasAgg(figure).get_renderer(), axes.get_window_extent()
    pixels_per_point = figure.dpi / 72
    corners, covered = _drawn(axes)
    labels: list[Any] = []
    for name, point in names:
        mark = _Point(*axes.transData.transform(point))
        text = axes.annotate(
            name,
            point,
            xytext=(0, 0),
            textcoords="figure points",
            fontsize=fontsize,
            arrowprops={"arrowstyle": "-", "color": "0.5", "lw": 0.7, "shrinkA": 0, "shrinkB": 3},
        )
        size = Text.get_window_extent(text, renderer)
        on_line = any(math.dist(mark, corner) < 1 for corner in corners)
        least = math.inf
        for distance, angle in product(_DISTANCES, _ANGLES[on_line]):
            turn, reach = math.radians(angle), distance * pixels_per_point
            near = _Point(mark.x + reach * math.cos(turn), mark.y + reach * math.sin(turn))
            left = near.x if near.x > mark.x + 1 else near.x - size.width
            inside = min(max(left, frame.x0), frame.x1 - size.width)
            extent = Bbox.from_bounds(inside, near.y - size.height / 2, size.width, size.height)
            line = _between(mark, near)[2:-1]
            faults = extent.padded(4).count_contains(covered) + 100 * extent.count_overlaps(labels)
            faults += sum(label.count_contains(line) for label in labels if line)
            faults += 10 * (left != inside) + 1000 * (extent.y0 < frame.y0 or extent.y1 > frame.y1)
            if faults < least:
                least, chosen, leader = faults, extent, line
            if not faults:
                break
        text.set_position((chosen.x0 / pixels_per_point, chosen.y0 / pixels_per_point))
        labels.append(chosen.padded(1.5))
        covered += leader


def _drawn(axes: Any) -> tuple[list[_Point], list[_Point]]:
    """Return the corners of the lines of `axes`, in pixels; and what marks, lines and error bars cover."""
    from matplotlib.collections import LineCollection

    corners: list[_Point] = []
    covered: list[_Point] = []
    for line in axes.lines:
        points = _pixels(line.get_transform(), line.get_xydata())
        covered += points
        if line.get_linestyle() != "None" and len(points) > 1:
            corners += points
            covered += _along(points)
    for marks in axes.collections:
        if isinstance(marks, LineCollection):
            for segment in marks.get_segments():
                covered += _along(_pixels(marks.get_transform(), segment))
        else:
            covered += _pixels(marks.get_offset_transform(), marks.get_offsets())
    return corners, covered


def _pixels(transform: Any, points: Any) -> list[_Point]:
    places = (_Point(*one) for one in transform.transform(points))
    return [one for one in places if math.isfinite(one.x) and math.isfinite(one.y)]


def _along(corners: Sequence[_Point]) -> list[_Point]:
    return [point for start, end in pairwise(corners) for point in _between(start, end)]


def _between(start: _Point, end: _Point) -> list[_Point]:
    """Return points of a line, in pixels, near enough to each other that no name fits between them."""
    count = max(1, round(math.dist(start, end) / 4))
    x, y = (end.x - start.x) / count, (end.y - start.y) / count
    return [_Point(start.x + i * x, start.y + i * y) for i in range(count + 1)]
