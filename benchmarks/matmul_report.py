"""What `gpu_matmul.py` measured: stored as JSON, shown as tables and as a plot. Needs no GPU."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from quantkit.errors import UsageError

#: Whose product a row is, where it is not a peer's.
OURS = "quantkit"
#: Up to so many rows of x, figures are multiples of the floor: what a decoding step is about.
FEW = 16
#: Where a kernel for few rows should be, as a multiple of the floor.
GOAL = 1.25
#: Formats of a plot unless others are asked for, and their colours (Okabe and Ito, 2008).
PLOTTED = {
    "int4": "#000000",
    "int8": "#0072B2",
    "int3": "#56B4E9",
    "int2": "#009E73",
    "ternary": "#F0E442",
    "fp8": "#D55E00",
    "mxfp4": "#CC79A7",
    "nvfp4": "#E69F00",
}
#: Colours of formats that are not among those.
_OTHERS = ("#7F3C8D", "#A5AA99", "#80BA5A", "#6F4E37", "#4B4BFF", "#B22222", "#2F8AC4", "#99C945")
#: Colours of peers, whose lines are dashed.
_PEERS = ("#777777", "#8B4513", "#2E8B57")


@dataclass(frozen=True)
class Row:
    """Microseconds of one product, of reading its bytes, and of the dense one; `library` says whose it is."""

    format: str
    shape: str
    m: int
    us: float
    floor_us: float
    dense_us: float
    bytes: int
    library: str = OURS

    @property
    def name(self) -> str:
        return self.format if self.library == OURS else f"{self.library} {self.format}"

    def __str__(self) -> str:
        multiple = self.us / self.floor_us if self.m <= FEW else self.dense_us / self.us
        return f"{_digits(self.us)}, {multiple:.2f}"


@dataclass
class Run:
    """Where it was measured, [N, K] of its shapes, its rows, what could not be measured, and its command."""

    about: str
    shapes: dict[str, tuple[int, int]]
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    command: str = ""

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "Run":
        """The run that `save` wrote; `UsageError` for anything else."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            shapes = {name: (int(n), int(k)) for name, (n, k) in found["shapes"].items()}
            rows = [Row(**row) for row in found["rows"]]
            return cls(found["about"], shapes, rows, found["notes"], found.get("command", ""))
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path} is no run that --json stored: {error!r}") from error

    def formats(self) -> list[str]:
        return list(dict.fromkeys(row.format for row in self.rows if row.library == OURS))

    def peers(self) -> list[str]:
        return list(dict.fromkeys(row.library for row in self.rows if row.library != OURS))

    def only(
        self,
        formats: Sequence[str] | None = None,
        shapes: Sequence[str] | None = None,
        ms: Sequence[int] | None = None,
        peers: Sequence[str] | None = None,
    ) -> "Run":
        """The same with some formats and shapes, in that order, some M and some peers; None for all.

        `UsageError` names what the run lacks.
        """
        formats = _chosen(formats, self.formats(), "format")
        shapes = _chosen(shapes, list(self.shapes), "shape")
        ms = _chosen(ms, list(dict.fromkeys(row.m for row in self.rows)), "M")
        peers = _chosen(peers, self.peers(), "peer")
        wanted = [(OURS, name) for name in formats] + [(name, None) for name in peers]
        rows = [
            row
            for library, name in wanted
            for row in self.rows
            if row.library == library and name in (None, row.format) and row.shape in shapes and row.m in ms
        ]
        return Run(self.about, {name: self.shapes[name] for name in shapes}, rows, self.notes, self.command)

    def lines(self, shape: str) -> dict[str, dict[int, Row]]:
        """Rows of a shape, by name and then by M: formats as measured, then peers."""
        found: dict[str, dict[int, Row]] = {}
        for row in sorted(self.rows, key=lambda row: row.library != OURS):
            if row.shape == shape:
                found.setdefault(row.name, {})[row.m] = row
        return found


def _chosen(names: Sequence[Any] | None, known: Sequence[Any], what: str) -> Sequence[Any]:
    if names is None:
        return known
    if unknown := [str(name) for name in names if name not in known]:
        raise UsageError(f"the run has no {what} {', '.join(unknown)}; it has {', '.join(map(str, known))}")
    return names


def _digits(us: float) -> str:
    return f"{us:.1f}" if us < 99.95 else f"{us:.0f}"


def table(run: Run, shape: str) -> list[list[str]]:
    """Cells of a shape: microseconds, and the multiple of the floor up to M = 16, of dense speed above."""
    lines = run.lines(shape)
    ms = sorted({m for line in lines.values() for m in line})
    # Of several runs in one file the dense times of the first; each row has those of its own.
    dense = {m: _digits(row.dense_us) for line in [*lines.values()][::-1] for m, row in line.items()}
    cells = [["format", "floor", *(f"M={m}" for m in ms)], ["dense bf16", "", *(dense[m] for m in ms)]]
    for name, line in lines.items():
        floor = next(iter(line.values())).floor_us
        cells.append([name, _digits(floor), *(str(line.get(m, "")) for m in ms)])
    return cells


def markdown(run: Run) -> str:
    """All tables and notes in Markdown."""
    parts = []
    for shape, (n, k) in run.shapes.items():
        head, *body = ("| " + " | ".join(cells) + " |" for cells in table(run, shape))
        # An empty cell is one space.
        rows = [head, "|---" * len(table(run, shape)[0]) + "|", *body]
        parts.append(
            f"N x K = {n} x {k} ({shape}):\n\n" + "\n".join(row.replace("|  |", "| |") for row in rows)
        )
    return "\n\n".join([*parts, *run.notes])


def text(run: Run) -> str:
    """All tables and notes, in columns."""
    parts = [run.about]
    for shape, (n, k) in run.shapes.items():
        cells = table(run, shape)
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = (
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in cells
        )
        title = f"{shape} {n}x{k}: us, multiple of the floor up to M={FEW}, of dense speed above"
        parts.append("\n".join([title, *(line.rstrip() for line in lines)]))
    return "\n\n".join([*parts, *run.notes])


def plotted(run: Run) -> Run:
    """The run with the formats of `PLOTTED` that it has, or with its first eight if it has none of them."""
    known = run.formats()
    return run.only([name for name in PLOTTED if name in known] or known[: len(PLOTTED)])


def draw(path: Path, run: Run) -> None:
    """Write a PNG, a column per shape: speed relative to dense bf16 against M; below, multiples of the floor.

    Raises `ImportError` where matplotlib is missing.
    """
    from matplotlib.figure import Figure

    width = max(8.0, 1.5 + 4.5 * len(run.shapes))
    figure = Figure(figsize=(width, 8.5), dpi=110, layout="constrained")
    panels = figure.subplots(2, len(run.shapes), sharey="row", squeeze=False)
    colours = _colours(run)
    for column, (shape, (n, k)) in enumerate(run.shapes.items()):
        lines = run.lines(shape)
        panels[0][column].set_title(f"{shape} ({n} x {k})")
        _draw_speeds(panels[0][column], lines, colours)
        _draw_floors(panels[1][column], lines, colours)
    # Shared, so only once all bars are known.
    panels[1][0].set_ylim(bottom=0)
    panels[0][0].set_ylabel("speed, dense bf16 = 1")
    panels[1][0].set_ylabel("time, reading the bytes = 1")
    handles: dict[str, Any] = {}
    for axes in panels[0]:
        handles |= {line.get_label(): line for line in axes.get_lines() if line.get_label() in colours}
    shown = [name for name in colours if name in handles]
    figure.legend([handles[name] for name in shown], shown, loc="outside right center", frameon=False)
    figure.suptitle(run.about, fontsize=9, color="0.35")
    figure.savefig(path, metadata={"Software": None})


def _colours(run: Run) -> dict[str, str]:
    """A colour for each line of the run, by name."""
    names = list(dict.fromkeys(name for shape in run.shapes for name in run.lines(shape)))
    peers = {row.name for row in run.rows if row.library != OURS}
    others = iter(_OTHERS * len(names))
    dashed = iter(_PEERS * len(names))
    return {name: next(dashed) if name in peers else PLOTTED.get(name) or next(others) for name in names}


def _draw_speeds(axes: Any, lines: dict[str, dict[int, Row]], colours: dict[str, str]) -> None:
    from matplotlib.ticker import FixedLocator, LogLocator, NullLocator

    ms = sorted({m for line in lines.values() for m in line})
    for name, line in lines.items():
        peer = any(row.library != OURS for row in line.values())
        speeds = [line[m].dense_us / line[m].us for m in sorted(line)]
        axes.plot(
            sorted(line),
            speeds,
            label=name,
            color=colours[name],
            linewidth=3.5 if name == "int4" else 1.6,
            linestyle="--" if peer else "-",
            marker="o",
            markersize=3,
            zorder=4 if name == "int4" else 3,
        )
    axes.axhline(1, color="0.3", linewidth=1, zorder=2)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(ms))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda m, _: f"{m:.0f}")
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=20))
    axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel("M, rows of x")
    axes.grid(alpha=0.25)


def _draw_floors(axes: Any, lines: dict[str, dict[int, Row]], colours: dict[str, str]) -> None:
    ours = {
        name: rows
        for name, line in lines.items()
        if (rows := [line[m] for m in sorted(line) if m <= FEW and line[m].library == OURS])
    }
    for place, (name, rows) in enumerate(ours.items()):
        width = 0.84 / len(rows)
        for i, row in enumerate(rows):
            # One colour per format, paler with M.
            axes.bar(
                place - 0.42 + (i + 0.5) * width,
                row.us / row.floor_us,
                width,
                color=colours[name],
                alpha=1 - 0.7 * i / max(len(rows) - 1, 1),
                zorder=3,
            )
    ms = sorted({row.m for rows in ours.values() for row in rows})
    axes.axhline(1, color="0.3", linewidth=1, zorder=4)
    axes.axhline(GOAL, color="0.3", linewidth=1, linestyle=":", zorder=4)
    axes.annotate(
        f"{GOAL}",
        (0.995, GOAL),
        xycoords=("axes fraction", "data"),
        va="center",
        ha="right",
        size=8,
        bbox={"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"},
        zorder=5,
    )
    axes.set_xticks(range(len(ours)), list(ours), rotation=45, ha="right")
    axes.set_xlabel("M = " + ", ".join(map(str, ms)) + ", from dark to pale" if ms else f"no M up to {FEW}")
    axes.grid(axis="y", alpha=0.25)
