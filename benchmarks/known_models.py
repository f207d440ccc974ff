"""A page for any model: what widths from 8 bits to 1 cost it, their size and speed, beside installed peers.

    python benchmarks/known_models.py MODEL... --text wiki.txt [--out known-models] [--peers]

MODEL is a directory or a hub id. known.md, known.html and known.json are written to OUT/NAME. Every row of
`WIDTHS` is quantized and evaluated against MODEL; `--row` takes some, `--without best` leaves out a method,
and the page says which. With `--peers` so is each row of `PEERS` whose package is here, and the page says
which are not; `--peers HQQ auto-round` takes some. `--made OUT` has what `peers.py` wrote to OUT in an
environment with other versions. Peers that only round weights are evaluated as dense models of the rounded
weights, with the bits of their format. Decoding is timed for quantkit's rows and MODEL, unless there is
`--no-speed`. docs/guide/known-models.md shows what is in benchmarks/results/known-models.
"""

import argparse
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from machine import cpu_machine, machine
from peers import LENGTH, RECORD, SAMPLES, Data, Finished, Made, finished, installed, wanted

from quantkit.bench.bench_options import BenchOptions
from quantkit.bench.worker import speed_of
from quantkit.calibrate.methods import METHODS
from quantkit.calibrate.summaries import DEFAULT_METHOD
from quantkit.checkpoint.hub.repository import resolve
from quantkit.errors import QuantkitError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.evaluate import evaluate_many
from quantkit.eval.results import EvalReport
from quantkit.eval.sizes import Sizes
from quantkit.files import size_text
from quantkit.quantizing import quantize
from quantkit.report.document import Bullets, Command, Document, Section, Table, Text, write
from quantkit.report.eval_plots import figures
from quantkit.report.tables import change_text, error_text, percent_text, ratio_text
from quantkit.runtime.load import load

#: Groups for few bits: small, with scales of one byte.
_SMALL = {"group_size": 32, "scale_dtype": "e4m3"}
_CALIBRATED = ("awq", "gptq", "best")
#: What `quantize` is given, by row, from 8 bits to 1.
WIDTHS: dict[str, dict[str, Any]] = {
    "int8": {"format": "int8"},
    "fp8": {"format": "fp8"},
    "fp6": {"format": "fp6"},
    "int5": {"format": "int5"},
    "int4": {"format": "int4"},
    "int4 hqq": {"format": "int4", "method": "hqq"},
    **{f"int4 {method}": {"format": "int4", "method": method} for method in _CALIBRATED},
    "nvfp4": {"format": "nvfp4"},
    "int3": {"format": "int3", **_SMALL},
    **{f"int3 {method}": {"format": "int3", **_SMALL, "method": method} for method in _CALIBRATED},
    "int2": {"format": "int2", **_SMALL},
    **{f"int2 {method}": {"format": "int2", **_SMALL, "method": method} for method in _CALIBRATED},
    # As many bits as groups of 128 have in other tools, with a 16-bit scale and a zero-point.
    **{
        f"{name} best, groups of 64": {"format": name, **_SMALL, "group_size": 64, "method": "best"}
        for name in ("int3", "int2")
    },
    "ternary": {"format": "ternary", **_SMALL, "packing": "radix"},
    "binary": {"format": "binary"},
}
#: How `decoding` times.
_DECODING = "Decoding is of one sequence, 32 tokens after 32, in the fastest mode. "
#: Figures of a text that are stored.
_KEPT = (
    *("perplexity", "reference_perplexity", "excess", "excess_se", "kl_mean", "kl_mean_se", "kl_p99"),
    *("same_top1", "tokens", "windows"),
)


@dataclass(frozen=True)
class Row:
    """A model in one format: its evaluation, seconds to make it, bytes of its weights, and tokens per second.

    A peer's rounded weights are stored in 16 bits, so bytes may be unknown; speed is if it was not timed.
    """

    label: str
    report: EvalReport
    seconds: float
    nbytes: int | None
    speed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """What is stored of the row."""
        sizes = self.report.sizes
        return {
            "label": self.label,
            "stored_as": sizes.format,
            "bits_per_weight": sizes.linears,
            "bytes": self.nbytes,
            "texts": {
                name: {key: getattr(found, key) for key in _KEPT} for name, found in self.report.texts.items()
            },
            "seconds": self.seconds,
            "tokens_per_second": self.speed,
        }


def of_weights(sizes: Sizes, bits: float, label: str) -> Sizes:
    """The sizes of a dense model of rounded weights, as if its linears were stored in `bits`."""
    return replace(sizes, linears=bits, format=label, method=None)


def measure(model: str, options: argparse.Namespace, work: Path) -> tuple[list[Row], list[str], float | None]:
    """Return the rows of a model, notes on peers that are not in it, and the speed of the original."""
    source = resolve(model)
    made: dict[str, tuple[Path, Made | None]] = {}
    notes: list[str] = []
    seconds: dict[str, float] = {}
    for name, given in WIDTHS.items():
        left_out = given.get("method") in options.without
        if left_out or (options.row and name not in options.row):
            notes.append(f"{name}: not run" + (f" (`--without {given['method']}`)" if left_out else ""))
            continue
        place = work / name.replace(" ", "-")
        data = METHODS[given.get("method", DEFAULT_METHOD)].needs_data
        begin = time.perf_counter()
        try:
            quantize(source, place, **given, **(calibration(options) if data else {}))
            made[name] = (place, None)
        except QuantkitError as error:
            notes.append(f"{name}: {error}")
        seconds[name] = time.perf_counter() - begin
        print(f"quantized to {name} in {seconds[name]:.0f} s", file=sys.stderr, flush=True)
    ours = list(made)
    others, absent = of_peers(source, options, work)
    made |= {one.label: (one.directory, one.made) for one in others}
    seconds |= {one.label: one.seconds for one in others}
    notes += absent
    asked = EvalOptions(
        texts=tuple(options.text), against=source, window=options.window, max_windows=options.max_windows,
        noise_floor=True,
    )  # fmt: skip
    rows = []
    reports = evaluate_many([place for place, _ in made.values()], asked)
    for (name, (_, stands_for)), report in zip(made.items(), reports, strict=True):
        if all(found.kl_mean == 0 for found in report.texts.values()):
            notes.append(f"{name}: left out, as its predictions are the original's: nothing was quantized")
            continue
        labelled = replace(report, label=name)
        nbytes: int | None = report.sizes.nbytes
        if stands_for is not None:
            labelled = replace(labelled, sizes=of_weights(report.sizes, stands_for.bits, name))
            nbytes = stands_for.nbytes
        rows.append(Row(name, labelled, seconds[name], nbytes))
    dense = None
    if options.no_speed:
        notes.append("decoding: not timed (`--no-speed`)")
    else:
        timed = BenchOptions(batches=(1,), prompts=(32,), new_tokens=32, repeats=3)
        dense = decoding(str(source), timed)
        rows = [
            replace(row, speed=decoding(str(made[row.label][0]), timed)) if row.label in ours else row
            for row in rows
        ]
    return rows, notes, dense


def of_peers(source: Path, options: argparse.Namespace, work: Path) -> tuple[list[Finished], list[str]]:
    """Return what peers made of a model, here or before, and notes on all of them."""
    found: list[Finished] = []
    notes: list[str] = []
    for peer in () if options.peers is None else wanted(options.peers):
        version = installed(peer.package)
        if version is None:
            notes.append(f"{peer.label}: {peer.package} is not installed (pip install {peer.package})")
            continue
        try:
            one = finished(peer, source, work, Data.of(options.calibration, options.samples))
            load(one.directory, device="cpu")
        except Exception as error:  # whatever another tool raises is a line of the page
            notes.append(
                f"{peer.label} ({peer.package} {version}): {type(error).__name__}: {str(error)[:200]}"
            )
            continue
        found.append(one)
        notes.append(one.note)
        print(f"quantized by {peer.label}", file=sys.stderr, flush=True)
    if options.made is not None:
        before = [Finished.stored(record) for record in sorted(options.made.rglob(RECORD))]
        found += before
        notes += [one.note for one in before]
    return found, notes


def calibration(options: argparse.Namespace) -> dict[str, Any]:
    """Keywords of `quantize` for methods with data: by default quantkit's own text and samples."""
    given = {"calibration": options.calibration, "calibration_samples": options.samples}
    return {name: value for name, value in given.items() if value is not None}


def decoding(model: str, options: BenchOptions) -> float:
    """Tokens per second of one sequence, in the fastest mode."""
    return max(cell.decode.median for cell in speed_of(model, options).cells)


def table(rows: Sequence[Row], name: str, dense: float | None) -> Table:
    """One row per format, and last the original."""
    texts = list(rows[0].report.texts)
    headings = ["format", "bits, linears", "size", "of original"]
    for text in texts:
        headings += [f"perplexity, {text}", "of original", f"KL mean, {text}", f"same top-1, {text}"]
    headings += [] if dense is None else ["tokens/s", "of original"]
    cells = []
    original = rows[0].report.reference_sizes
    assert original is not None
    for row in rows:
        sizes = row.report.sizes
        size = ("-", "-") if row.nbytes is None else (
            size_text(row.nbytes), ratio_text(row.nbytes, original.nbytes)
        )  # fmt: skip
        line = [row.label, "-" if sizes.linears is None else f"{sizes.linears:.3f}", *size]
        for found in row.report.texts.values():
            line += [
                "-" if found.perplexity is None else f"{found.perplexity:.5g}",
                "-" if found.excess is None else change_text(found.excess),
                f"{found.kl_mean:.3g}{error_text(found.kl_mean_se)}",
                percent_text(found.same_top1),
            ]
        if dense is not None:
            line += ["-", "-"] if row.speed is None else [f"{row.speed:.3g}", ratio_text(row.speed, dense)]
        cells.append(line)
    last = [name, f"{original.model:g}", size_text(original.nbytes), "1x"]
    for found in rows[0].report.texts.values():
        last += [f"{found.reference_perplexity:.5g}", "1x", "0", "100.00 %"]
    cells.append([*last, *([] if dense is None else [f"{dense:.3g}", "1x"])])
    return Table(headings, cells, frozenset({"format"}))


def page(model: str, options: argparse.Namespace, command: str, about: str, work: Path) -> Path:
    """Measure a model, write its page, and return the Markdown file."""
    name = Path(model).name
    rows, notes, dense = measure(model, options, work)
    drawn, missing = figures([row.report for row in rows])
    first = rows[0].report
    how = (
        f"Windows of {first.window} tokens, at most {first.max_windows} of each text, activations in "
        f"{first.dtype}; ± is one standard error. {_DECODING if dense else ''}Data of methods that need it: "
        f"{options.calibration or 'the text of quantkit'}, {options.samples or SAMPLES} samples of {LENGTH} "
        "tokens."
    )
    original = first.reference_sizes
    assert original is not None
    document = Document(
        f"{name} from 8 bits to 1",
        [
            Section(
                "Accuracy, size and speed", [table(rows, name, dense), *([Text(missing)] if missing else [])]
            ),
            Section("Plots", drawn),
            Section("Peers, and what is missing", [Bullets(notes or ["none"])]),
            Section(
                "How it was measured",
                [Command(command), Text(how), *([Text(options.about)] if options.about else []), Text(about)],
            ),
        ],
        f"{date.today():%d %B %Y}, {about.partition(', torch')[0]}",
    )
    stored = {
        "command": command,
        "machine": about,
        "model": name,
        "about": options.about,
        "how": how,
        "date": f"{date.today()}",
        "original": {"bytes": original.nbytes, "bits": original.model, "tokens_per_second": dense},
        "rows": [row.to_dict() for row in rows],
        "notes": notes,
    }
    return write(options.out / name, "known", document, {"known.json": json.dumps(stored, indent=1) + "\n"})[
        0
    ]


def shown(arguments: Sequence[str]) -> list[str]:
    """The command line without `--out` and `--about`, which change no figure."""
    kept = list(arguments)
    for option in ("--out", "--about"):
        if option in kept:
            place = kept.index(option)
            del kept[place : place + 2]
    return kept


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--text", type=Path, action="append", required=True)
    parser.add_argument("--out", type=Path, default=Path("known-models"))
    parser.add_argument("--window", type=int, default=1024)
    parser.add_argument("--max-windows", type=int, default=4)
    parser.add_argument("--row", action="append", choices=WIDTHS, help="only these rows of WIDTHS")
    parser.add_argument(
        "--without", action="append", default=[], choices=METHODS, help="no rows of these methods"
    )
    parser.add_argument("--calibration", help="texts of methods with data, as of `quantize`")
    parser.add_argument("--samples", type=int, help=f"calibration samples, by default {SAMPLES}")
    parser.add_argument("--about", default="", help="a sentence about the model for the page")
    parser.add_argument("--no-speed", action="store_true")
    parser.add_argument(
        "--peers", nargs="*", help="also what other tools make: all, or those with these names"
    )
    parser.add_argument("--made", type=Path, help="also what peers.py wrote there, perhaps elsewhere")
    options = parser.parse_args(arguments)
    command = shlex.join(["python", "benchmarks/known_models.py", *shown(arguments or sys.argv[1:])])
    about = machine() if torch.cuda.is_available() else cpu_machine()
    for model in options.models:
        with tempfile.TemporaryDirectory() as work:
            print(page(model, options, command, about, Path(work)))


if __name__ == "__main__":
    main()
