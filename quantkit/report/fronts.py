"""Group plotted points by kind of format, and find the Pareto front of each group."""

from collections.abc import Iterable

from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat, FloatFormat, IntFormat

Point = tuple[float, float]

#: Kinds of number formats, in words of a legend, and their classes.
KINDS: dict[str, tuple[type, ...]] = {
    "integers": (IntFormat,),
    "floats": (FloatFormat,),
    "code books": (CodebookFormat, FittedFormat),
}
#: Several formats in one model; and what another tool stores, or nothing packed.
MIXED, OTHER = "mixed formats", "other"


def kind_of(described: str) -> str:
    """Return the kind of the formats that `Sizes.format` describes, such as "int4 g128 bfloat16"."""
    names = [part.split(" ")[0] for part in described.split(" + ")]
    kinds = {_kind(name) for name in names}
    return kinds.pop() if len(kinds) == 1 else MIXED


def _kind(name: str) -> str:
    found = FORMATS.get(name)
    return next((kind for kind, classes in KINDS.items() if isinstance(found, classes)), OTHER)


def front(points: Iterable[Point]) -> list[Point]:
    """Return the Pareto front of points, sorted by the first value; less is better."""
    kept: list[Point] = []
    for point in sorted(points):
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept
