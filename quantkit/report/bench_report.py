"""Present benchmarks: tables and plots of speed, memory and latency under load."""

import shlex
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path

from quantkit.bench.figures import Cell, Load, Machine, Percentiles, Serving, Speed, Spread, to_json
from quantkit.files import size_text
from quantkit.report.document import Block, Bullets, Command, Document, Figure, Section, Table, Text, write
from quantkit.report.made import Made
from quantkit.report.plots import color, drawing, legend, plain, render, ticks
from quantkit.report.tables import ratio_text, rounded_text

#: Names of the report files, without suffix.
SPEED, SERVING = "bench", "serve"

#: Headings of multiples of the original's speed, and of energy.
RATIO, JOULES = "of original", "J/token"

SPEED_HEADINGS = (
    *("model", "mode", "batch", "prompt", "first token, ms", "prefill, tokens/s", "token p50", "token p99"),
    *("tokens/s", RATIO, "weights read", "of the limit", JOULES),
)
_MODEL_HEADINGS = ("model", "format", "size", "load", "memory before", "steady", "peak", "weights per step")
_SERVING_HEADINGS = (
    *("model", "requests/s", "first token p50", "p90", "p99", "per token p50", "p99"),
    *("end to end p50", "p90", "p99", "served/s", "tokens/s"),
)
_WORDS = frozenset({"model", "mode", "format"})

_SPEED_RULES = (
    "Greedy decoding with transformers' own forward and static cache, which is made long enough for the "
    "prompt and the new tokens; the host gets every token, as one that streams text does, while a GPU runs "
    "the next step.",
    "First token: from the prompt on the host to its first token on the host, prefill included. Between "
    "tokens: p50 and p99 over all tokens of all repetitions. Tokens/s: of all sequences of the batch "
    "together, the first token not counted.",
    "One generation does not count, then as many as are stated do; a figure is their median, and the range "
    "in brackets the smallest and the largest.",
    "Weights per step: the stored bytes of all weights that a step, one token of each sequence, multiplies "
    "by. Weights read: those over the median time of a step. The limit is what the device was measured to "
    "read per second in the same process. A kernel may read more than what is stored: on a CPU some work on "
    "layouts of their own.",
    "Memory of a CPU is the resident memory of the process, libraries and mapped files included; of a GPU "
    "what torch allocated there. Each model is measured in a process of its own.",
    "Loading reads files that may be in the page cache, and includes the layouts that kernels want.",
)
SERVING_RULES = (
    "Requests arrive as a Poisson process, whether earlier ones are done or not; lengths of prompts and "
    "answers are drawn log-uniformly from their ranges. Every rate has the same requests, only closer "
    "together.",
    "transformers' continuous batching answers them, greedily and without sharing prefixes. Two requests "
    "that do not count come first.",
    "First token and end to end count from the arrival, waiting included. Per token is the mean of a request "
    "after its first token.",
)


def speed_document(found: Sequence[Speed], command: Sequence[str]) -> Document:
    """Return the document on the speed of at least one model; `command` is the command typed."""
    blocks: list[Block] = [models_table(found), speed_table(found)]
    figures = (_throughput_figure(found), _first_token_figure(found), _memory_figure(found))
    notes = [f"{one.label}: {note}" for one in found for note in one.notes]
    first = found[0]
    settings = (
        f"{first.repeats} repetitions of {first.new_tokens} new tokens; prompts: {first.prompts}; "
        f"activations in {', '.join(dict.fromkeys(one.dtype for one in found))}."
    )
    return Document(
        _title("Speed and memory", found),
        (
            Section("Speed and memory", (*blocks, *([Bullets(notes)] if notes else []))),
            Section("Plots", figures),
            Section("How it was measured", (*_how(first.machine, settings, command), Bullets(_SPEED_RULES))),
        ),
        Made(date.today(), first.machine.name).text,
    )


def _title(what: str, found: Sequence[Speed] | Sequence[Serving]) -> str:
    return f"{what} of {' beside '.join(one.label for one in found)}"


def _original(found: Sequence[Speed]) -> Speed | None:
    """Return the dense reference model, which is the last one; None without."""
    return found[-1] if len(found) > 1 and found[-1].format == "dense" else None


def serving_document(found: Sequence[Serving], command: Sequence[str]) -> Document:
    """Return the document on latencies of at least one model; `command` is the command typed."""
    how = (*_how(found[0].machine, serving_settings(found), command), Bullets(SERVING_RULES))
    return Document(
        _title("Latency under load", found),
        (
            Section("Latency", (serving_table(found), _serving_figure(found))),
            Section("How it was measured", how),
        ),
        Made(date.today(), found[0].machine.name).text,
    )


def write_speed(directory: Path, found: Sequence[Speed], command: Sequence[str]) -> tuple[Path, ...]:
    """Write bench.md, bench.html, bench.json and the plots; raise `OutputError` on failure."""
    return write(directory, SPEED, speed_document(found, command), {f"{SPEED}.json": to_json(found)})


def write_serving(directory: Path, found: Sequence[Serving], command: Sequence[str]) -> tuple[Path, ...]:
    """Write serve.md, serve.html, serve.json and the plot; raise `OutputError` on failure."""
    return write(directory, SERVING, serving_document(found, command), {f"{SERVING}.json": to_json(found)})


def models_table(found: Sequence[Speed]) -> Table:
    """Return a table with a row per model: format, size, loading, memory."""
    original = _original(found)
    rows = []
    for one in found:
        memory = (one.memory.before, one.memory.steady, one.memory.peak)
        weights = "-" if one.weight_bytes is None else size_text(one.weight_bytes)
        size, load = size_text(one.file_bytes), _seconds(one.load_seconds)
        ratio = [] if original is None else [ratio_text(one.file_bytes, original.file_bytes)]
        rows.append([one.label, one.format, size, load, *map(size_text, memory), weights, *ratio])
    headings = _MODEL_HEADINGS if original is None else (*_MODEL_HEADINGS, f"size {RATIO}")
    return Table(headings, rows, _WORDS)


def speed_table(found: Sequence[Speed]) -> Table:
    """Return a table with a row per model, batch, prompt length and mode.

    Beside an original, a column has the multiple of its tokens per second in the same mode. Without an energy
    counter there is no column for energy.
    """
    original = _original(found)
    known = {} if original is None else {_conditions(cell): cell.decode.median for cell in original.cells}
    rows = []
    for one in found:
        for cell in one.cells:
            speed = ratio_text(cell.decode.median, known.get(_conditions(cell), 0.0))
            rows.append((one.label, *_speed_cells(cell, speed, one.machine.read_bandwidth)))
    left_out = {RATIO} if original is None else set[str]()
    if all(cell.joules is None for one in found for cell in one.cells):
        left_out.add(JOULES)
    kept = [number for number, heading in enumerate(SPEED_HEADINGS) if heading not in left_out]
    headings = [SPEED_HEADINGS[number] for number in kept]
    return Table(headings, [[row[number] for number in kept] for row in rows], _WORDS)


def _conditions(cell: Cell) -> tuple[int, int, str]:
    return cell.batch, cell.prompt, cell.mode


def _speed_cells(cell: Cell, ratio: str, limit: float) -> tuple[str, ...]:
    read = cell.read_bandwidth
    return (
        cell.mode,
        str(cell.batch),
        str(cell.prompt),
        _spread(cell.first_token, 1e3),
        rounded_text(cell.prefill.median, 4),
        _seconds(cell.token_p50),
        _seconds(cell.token_p99),
        _spread(cell.decode),
        ratio,
        "-" if read is None else f"{size_text(read)}/s",
        "-" if read is None else f"{read / limit:.0%}",
        "-" if cell.joules is None else f"{cell.joules:.3g}",
    )


def serving_table(found: Sequence[Serving]) -> Table:
    """Return a table with a row per model and rate."""
    return Table(
        _SERVING_HEADINGS,
        [(one.label, *_load_cells(load)) for one in found for load in one.loads],
        _WORDS,
    )


def serving_settings(found: Sequence[Serving]) -> str:
    """Return a sentence on the requests, and how the models ran."""
    first = found[0]
    return (
        f"{first.requests} requests per rate, seed {first.seed}; prompts of {first.prompt_tokens[0]} to "
        f"{first.prompt_tokens[1]} tokens, answers of {first.new_tokens[0]} to {first.new_tokens[1]}; "
        f"attention {first.attention}; activations in "
        f"{', '.join(dict.fromkeys(one.dtype for one in found))}."
    )


def _load_cells(load: Load) -> tuple[str, ...]:
    def three(found: Percentiles) -> Iterable[str]:
        return map(_seconds, (found.p50, found.p90, found.p99))

    return (
        f"{load.rate:g}",
        *three(load.first_token),
        # No answer had a second token.
        *(map(_seconds, (load.token.p50, load.token.p99)) if load.token.p99 > 0 else "--"),
        *three(load.end_to_end),
        rounded_text(load.served),
        rounded_text(load.decode, 4),
    )


def _how(machine: Machine, settings: str, command: Sequence[str]) -> tuple[Block, ...]:
    return Text(machine_text(machine)), Text(settings), Command(shlex.join(command))


def machine_text(machine: Machine) -> str:
    """Return one sentence that describes the machine of the measurements."""
    threads = f", {machine.threads} threads" if machine.device == "cpu" else ""
    return (
        f"{machine.name} ({machine.device}{threads}), which reads {size_text(machine.read_bandwidth)}/s; "
        f"quantkit {machine.quantkit}, torch {machine.torch}, transformers {machine.transformers}."
    )


def _throughput_figure(found: Sequence[Speed]) -> Figure:
    shortest = min(cell.prompt for one in found for cell in one.cells)
    lines = [
        (label, [(cell.batch, cell.decode.median) for cell in cells if cell.prompt == shortest])
        for label, cells in _series(found)
    ]
    caption = f"Tokens per second of all sequences together, prompts of {shortest} tokens."
    return _line_figure("throughput", lines, "sequences at a time", "tokens per second", caption)


def _first_token_figure(found: Sequence[Speed]) -> Figure:
    smallest = min(cell.batch for one in found for cell in one.cells)
    lines = [
        (label, [(cell.prompt, 1e3 * cell.first_token.median) for cell in cells if cell.batch == smallest])
        for label, cells in _series(found)
    ]
    caption = f"Time to the first token, sequences at a time: {smallest}."
    return _line_figure("first-token", lines, "tokens of the prompt", "milliseconds", caption)


def _line_figure(
    name: str, lines: Sequence[tuple[str, Sequence[tuple[int, float]]]], x: str, y: str, caption: str
) -> Figure:
    """Plot a line for each model, by its label, over counts on a logarithmic axis; bars for one count."""
    counts = sorted({count for _, points in lines for count, _ in points})
    if len(counts) == 1:
        return _bar_figure(name, [(label, points[0][1]) for label, points in lines], y, caption)
    figure, axes = drawing()
    for number, (label, points) in enumerate(lines):
        axes.plot(*zip(*points, strict=True), marker="o", color=color(number), label=label)
    axes.set(xlabel=x, ylabel=y, xscale="log")
    axes.set_ylim(bottom=0)
    ticks(axes, counts)
    legend(axes, 2)
    return render(figure, name, caption)


def _bar_figure(name: str, bars: Sequence[tuple[str, float]], unit: str, caption: str) -> Figure:
    """Plot a bar for each model by label, with the number beside the bar."""
    figure, axes = drawing(height=1.1 + 0.45 * len(bars))
    for row, (_, value) in enumerate(bars):
        axes.barh(row, value, height=0.6, color=color(row))
        axes.annotate(f"{value:.3g}", (value, row), textcoords="offset points", xytext=(4, 0), va="center")
    axes.set(xlabel=unit, yticks=range(len(bars)), yticklabels=[label for label, _ in bars])
    axes.margins(x=0.15)
    axes.invert_yaxis()
    return render(figure, name, caption)


#: Fields of `Memory`, in words of a legend.
_MEMORY = {"before": "before loading", "steady": "after generating", "peak": "at most"}


def _memory_figure(found: Sequence[Speed]) -> Figure:
    figure, axes = drawing(height=1.4 + 0.8 * len(found))
    for row, one in enumerate(found):
        for number, (kind, words) in enumerate(_MEMORY.items()):
            size = getattr(one.memory, kind)
            place = row + 0.27 * (number - 1)
            axes.barh(place, size / 1e6, height=0.25, color=color(number), label=words if row == 0 else None)
    axes.set(xlabel="MB", yticks=range(len(found)), yticklabels=[plain(one.label) for one in found])
    axes.invert_yaxis()
    legend(axes, 3)
    return render(figure, "memory", "Memory of the process, or of the GPU, for each model.")


#: Percentiles that are drawn, in words of a legend, and their lines.
_PERCENTILES = {"p50": ("half of the requests", "-"), "p99": ("the slowest 1 %", ":")}


def _serving_figure(found: Sequence[Serving]) -> Figure:
    figure, (top, bottom) = drawing(rows=2, height=6)
    for axes, kind, title in ((top, "first_token", "first token"), (bottom, "end_to_end", "whole answer")):
        for number, one in enumerate(found):
            for percent, (words, line) in _PERCENTILES.items():
                points = [(load.rate, getattr(getattr(load, kind), percent)) for load in one.loads]
                label = f"{plain(one.label)}, {words}"
                axes.plot(*zip(*points, strict=True), line, marker="o", color=color(number), label=label)
        axes.set(xlabel="requests per second", ylabel="seconds", title=title, xscale="log")
        ticks(axes, sorted({load.rate for one in found for load in one.loads}))
        axes.set_ylim(bottom=0)
    legend(top, 2)
    return render(figure, "load", "How long half of the requests wait, and the slowest hundredth, by load.")


def _series(found: Sequence[Speed]) -> Iterable[tuple[str, list[Cell]]]:
    """Yield the cells of each model and mode, with the label of their line."""
    for one in found:
        modes = dict.fromkeys(cell.mode for cell in one.cells)
        for mode in modes:
            label = plain(one.label) + (f", {mode}" if len(modes) > 1 else "")
            yield label, [cell for cell in one.cells if cell.mode == mode]


def _spread(found: Spread, unit: float = 1.0) -> str:
    middle, low, high = (rounded_text(unit * one) for one in (found.median, found.low, found.high))
    return f"{middle} ({low} to {high})"


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
