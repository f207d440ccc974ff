"""Draw docs/quality.png: divergence against bits per weight, from benchmarks/results/accuracy.

    python benchmarks/quality_plot.py            # writes docs/quality.png
    python benchmarks/quality_plot.py --check    # exits with 1 where it shows other figures

A line is the Pareto front of a kind of format: its schemes that no other of the kind beats in both. The
figures that were drawn are in the PNG as text, so a check compares them and not pixels.
"""

import argparse
import json
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from accuracy_page import ROOT, TABLES

from quantkit.report.fronts import front
from quantkit.report.labels import name_points
from quantkit.report.plots import COLORS, INK, STYLE

PLOT = ROOT / "docs" / "quality.png"
#: Key of the text in the PNG.
KEY = "Figures"
#: A kind of format, how the stored names of its schemes begin, and the mark.
KINDS = {
    "integers": (("int",), "o"),
    "floats": (("fp", "nvfp", "mxfp"), "s"),
    "code books": (("book", "nf"), "D"),
    "ternary and binary": (("ternary", "binary"), "^"),
}
CALIBRATED = "calibrated on text (`best`)"
#: Schemes whose marks have names.
NAMES = {
    "int8, channel": "int8",
    "fp8 e4m3, channel": "fp8",
    "fp6 e2m3, group 128": "fp6",
    "int6": "int6",
    "int5": "int5",
    "int4, group 128": "int4",
    "nvfp4 (commit 1eb4f23)": "nvfp4",
    "mxfp4": "mxfp4",
    "book4, group 16": "book4",
    "int3, group 32, e4m3 scales": "int3",
    "int2, group 32, e4m3 scales": "int2",
    "ternary": "ternary",
    "binary": "binary",
}
Points = dict[str, tuple[float, float]]


def loss(text: str) -> float:
    """The mean of the KL on both texts, of a cell such as "0.0354 / 0.0520"."""
    values = [float(one) for one in text.split("/")]
    return sum(values) / len(values)


def kinds() -> dict[str, Points]:
    """Bits per weight and KL of each scheme without data, by kind, and of what `best` makes."""
    rows = [row for row in TABLES["schemes"]["rows"] if "`rtn`" not in row[0]]
    rows += [
        row for row in TABLES["tensor-scales"]["rows"] if row[0] in ("int8, channel", "fp8 e4m3, channel")
    ]
    formats = TABLES["formats"]["rows"]
    for books, docs in zip(formats[::2], formats[1::2], strict=True):
        if books[7]:
            rows.append([books[0].replace("(e2m3)", "e2m3"), books[1], f"{books[7]} / {docs[7]}"])
    found: dict[str, Points] = {}
    for kind, (starts, _) in KINDS.items():
        found[kind] = {row[0]: (float(row[1]), loss(row[2])) for row in rows if row[0].startswith(starts)}
    best: Points = {}
    scheme = ""
    for row in TABLES["calibrated"]["rows"]:
        scheme = row[0] or scheme
        if row[1] == "best":
            best[scheme] = (float(row[2]), loss(row[3]))
    found[CALIBRATED] = best
    return found


def draw(path: Path) -> None:
    """Write the plot."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    found = kinds()
    with rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for number, (kind, points) in enumerate(found.items()):
            mark, color = (KINDS[kind][1] if kind in KINDS else "*"), COLORS[number]
            size = 70 if kind == CALIBRATED else 22
            axes.scatter(
                *zip(*points.values(), strict=True),
                s=size,
                marker=mark,
                color=color,
                label=kind.replace("`", ""),
            )
            line = front(points.values())
            axes.plot(*zip(*line, strict=True), color=color, linewidth=1.2, alpha=0.8)
        axes.axvline(16, color=INK, linewidth=1, linestyle="--")
        axes.annotate(
            "original,\n16 bits",
            (16, 1),
            textcoords="offset points",
            xytext=(-4, 0),
            ha="right",
            fontsize="small",
        )
        ticks = (1, 2, 3, 4, 5, 6, 8, 16)
        axes.set(xscale="log", yscale="log", xlabel="bits per weight of the packed linears, scales included")
        axes.set_ylabel("KL from the original, nats per token\n(lower is closer)")
        axes.set_xticks(ticks, map(str, ticks))
        axes.set_xticks([], minor=True)
        axes.legend(loc="upper center", bbox_to_anchor=(0.55, 1.0), fontsize="small", frameon=False)
        named = [
            (NAMES[name], point)
            for kind, points in found.items()
            for name, point in points.items()
            if name in NAMES and kind != CALIBRATED
        ]
        name_points(figure, axes, named)
        figure.savefig(path, dpi=150, metadata={"Software": None, KEY: figures()})


def figures() -> str:
    """What the plot shows, as a text."""
    return json.dumps(kinds())


def drawn(path: Path) -> str:
    """The text of a PNG written by `draw`; empty if there is none."""
    data, at = path.read_bytes(), 8
    while at < len(data):
        size, kind = struct.unpack(">I4s", data[at : at + 8])
        key, _, text = data[at + 8 : at + 8 + size].partition(b"\0")
        if kind == b"tEXt" and key.decode() == KEY:
            return text.decode("latin-1")
        at += size + 12
    return ""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the plot, or say that it shows other figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if figures differ")
    if not parser.parse_args(arguments).check:
        draw(PLOT)
    elif not PLOT.exists() or drawn(PLOT) != figures():
        sys.exit(f"{PLOT.relative_to(ROOT)} is not up to date: run python benchmarks/quality_plot.py")


if __name__ == "__main__":
    main()
