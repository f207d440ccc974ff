"""`quantkit bench`: speed, memory, and latency under load."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

import typer

from quantkit.bench.bench_options import (
    MORE_ON_CPU,
    SERVE_DEFAULTS,
    SPEED_DEFAULTS,
    BenchOptions,
    ServeOptions,
)
from quantkit.cli import completion, options, parsing
from quantkit.cli.choices import MODES
from quantkit.cli.console import note, print_table, progress, say
from quantkit.cli.files import (
    REPORT_FILES,
    FiguresFile,
    ReportDirectory,
    check_writable,
    is_pipe,
    make_directory,
    write_file,
)
from quantkit.cli.records import Documents, with_fields
from quantkit.errors import UsageError
from quantkit.progress import duration_text

if TYPE_CHECKING:
    from quantkit.bench.figures import Serving, Speed
    from quantkit.progress import Progress
    from quantkit.report.document import Table

    _Figures = TypeVar("_Figures", Speed, Serving)


def _listed(values: Iterable[float]) -> str:
    return ",".join(f"{value:g}" for value in values)


def _span(ends: tuple[int, int]) -> str:
    return f"{ends[0]}-{ends[1]}"


_ON_GPU = "{}; on a GPU {}"
_SPEED, _SERVE = SPEED_DEFAULTS.values(), SERVE_DEFAULTS.values()
_BATCHES = _ON_GPU.format(*(_listed(row.batches) for row in _SPEED))
_PROMPTS = _ON_GPU.format(*(_listed(row.prompts) for row in _SPEED))
_NEW_TOKENS = _ON_GPU.format(*(row.new_tokens for row in _SPEED))
_REPEATS = _ON_GPU.format(*(row.repeats for row in _SPEED))
_RATES = _ON_GPU.format(*(_listed(row.rates) for row in _SERVE))
_PROMPT_RANGE = _ON_GPU.format(*(_span(row.prompt_tokens) for row in _SERVE))
_ANSWER_RANGE = _ON_GPU.format(*(_span(row.new_tokens) for row in _SERVE))


@dataclass(frozen=True)
class BenchArguments:
    """The command line of `bench`, an option per field; `BenchOptions` and `ServeOptions` document the rest.

    against      the original, which is measured in the same way
    profile      also write a trace of DIR by torch's profiler
    serve_like   measure latency under load instead: requests that arrive at --rate
    """

    library: ClassVar[tuple[type, ...]] = (BenchOptions, ServeOptions)

    against: Annotated[str | None, typer.Option()] = None
    batch: Annotated[
        str | None, typer.Option(metavar="N,...", show_default=_BATCHES), Documents("batches")
    ] = None
    prompt: Annotated[
        str | None, typer.Option(metavar="N,...", show_default=_PROMPTS), Documents("prompts")
    ] = None
    new_tokens: Annotated[int | None, typer.Option(min=2, show_default=_NEW_TOKENS)] = None
    mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE,...", show_default="those of the device", autocompletion=completion.lists(*MODES)
        ),
        Documents("modes"),
    ] = None
    repeats: Annotated[int | None, typer.Option(min=1, show_default=_REPEATS)] = None
    text: Annotated[Path | None, typer.Option(metavar="FILE", show_default="random tokens")] = None
    seed: Annotated[int, typer.Option()] = BenchOptions.seed
    profile: Annotated[Path | None, typer.Option(metavar="FILE")] = None
    serve_like: Annotated[bool, typer.Option("--serve-like")] = False
    rate: Annotated[str | None, typer.Option(metavar="N,...", show_default=_RATES), Documents("rates")] = None
    requests: Annotated[int | None, typer.Option(min=1, show_default=str(ServeOptions.requests))] = None
    prompt_range: Annotated[
        str | None, typer.Option(metavar="N-N", show_default=_PROMPT_RANGE), Documents("prompt_tokens")
    ] = None
    answer_range: Annotated[
        str | None,
        typer.Option(metavar="N-N", show_default=_ANSWER_RANGE),
        Documents("new_tokens", ServeOptions),
    ] = None
    device: options.Device = BenchOptions.device
    dtype: options.Dtype = BenchOptions.dtype
    json: FiguresFile = None
    report: ReportDirectory = None

    def check(self) -> None:
        """Refuse options of the kind of measurement that was not asked for: they would be ignored."""
        grid = {
            "--batch": self.batch,
            "--prompt": self.prompt,
            "--new-tokens": self.new_tokens,
            "--mode": self.mode,
            "--repeats": self.repeats,
            "--text": self.text,
            "--profile": self.profile,
        }
        load = {
            "--rate": self.rate,
            "--requests": self.requests,
            "--prompt-range": self.prompt_range,
            "--answer-range": self.answer_range,
        }
        for name, value in (grid if self.serve_like else load).items():
            if value is not None:
                raise UsageError(
                    f"{name} does not go with --serve-like."
                    if self.serve_like
                    else f"{name} needs --serve-like."
                )

    def to_bench(self) -> BenchOptions:
        """The options of a measurement without --serve-like."""
        return BenchOptions(
            self.device,
            self.dtype,
            None if self.batch is None else _counts(self.batch, "--batch"),
            None if self.prompt is None else _counts(self.prompt, "--prompt"),
            self.new_tokens,
            self.repeats,
            None if self.text is None else str(self.text),
            self.seed,
            None if self.mode is None else tuple(part.strip() for part in self.mode.split(",")),
        )

    def to_serve(self) -> ServeOptions:
        """The options of one with --serve-like."""
        return ServeOptions(
            self.device,
            self.dtype,
            None if self.rate is None else _rates(self.rate),
            self.requests or ServeOptions.requests,
            None if self.prompt_range is None else _range(self.prompt_range, "--prompt-range"),
            None if self.answer_range is None else _range(self.answer_range, "--answer-range"),
            self.seed,
        )


@with_fields
def bench(directory: options.Model, given: BenchArguments) -> None:
    """Measure how fast a model is and what memory it takes.

    Time to first token, time between tokens, tokens per second and memory, for every batch with every prompt
    length; with --serve-like, latencies of requests that arrive at random. Each model runs in a process of
    its own.
    """
    given.check()
    for path in (given.json, given.profile):
        if path is not None:
            check_writable(path)
    if given.report is not None:
        from quantkit.report.plots import figure_class

        figure_class()
        make_directory(given.report, REPORT_FILES)
    sources = [directory] if given.against is None else [directory, given.against]
    if given.serve_like:
        _serve(sources, given.to_serve(), given.json, given.report)
    else:
        _time(sources, given.to_bench(), given.profile, given.json, given.report)


def _time(
    sources: list[str], asked: BenchOptions, profile: Path | None, json: Path | None, report: Path | None
) -> None:
    from quantkit.bench.worker import speed_of
    from quantkit.report.bench_report import models_table, speed_table, write_speed

    if (less := _less_on_cpu(asked)) is not None:
        note(less)

    def measure(number: int, advance: "Progress") -> "Speed":
        trace = profile if number == 0 else None
        return speed_of(
            sources[number],
            asked,
            profile=trace,
            progress=advance,
            estimated=lambda seconds: note(_how_long(sources, number, seconds)),
        )

    def show(found: "Sequence[Speed]") -> None:
        _print(models_table(found))
        _print(speed_table(found), _BRIEF)
        for one in found:
            for line in one.notes:
                note(f"{one.label}: {line}")

    found = _each(len(sources), measure, show, json, "measuring")
    if report is not None:
        write_speed(report, found, ["quantkit", *sys.argv[1:]])
        say(f"wrote {report / 'bench.md'}")
    if profile is not None:
        say(f"wrote {profile}")


def _less_on_cpu(asked: BenchOptions) -> str | None:
    """What of a CPU is measured by default, and how to ask for more; None on a GPU, or if all was given."""
    from quantkit.devices import pick_device

    if pick_device(asked.device).type != "cpu":
        return None
    given = {"batch": asked.batches, "prompt": asked.prompts, "repeats": asked.repeats}
    less, more = (
        {"batch": _listed(row.batches), "prompt": _listed(row.prompts), "repeats": str(row.repeats)}
        for row in (SPEED_DEFAULTS["cpu"], MORE_ON_CPU)
    )
    missing = [name for name, value in given.items() if value is None and less[name] != more[name]]
    if not missing:
        return None
    default, wider = (" ".join(f"--{name} {row[name]}" for name in missing) for row in (less, more))
    return f"on a CPU the default is {default}; {wider} measures more, and takes longer."


def _how_long(sources: Sequence[str], number: int, seconds: float) -> str:
    """How long the measurement of a model takes, as its first generation tells."""
    from quantkit.bench.figures import label_of

    names = [label_of(source) for source in sources]
    after = f", then {names[number + 1]} follows" if number + 1 < len(names) else ""
    how_long = f"about {duration_text(seconds)}" if seconds >= 1 else "less than a second"
    return (
        f"{names[number]}: {how_long} of generating on this machine, by its first generation{after}. "
        "Fewer --batch, --prompt, --mode or --repeats take less."
    )


def _serve(sources: list[str], asked: ServeOptions, json: Path | None, report: Path | None) -> None:
    from quantkit.bench.worker import serving_of
    from quantkit.report.bench_report import serving_table, write_serving

    def measure(number: int, advance: "Progress") -> "Serving":
        return serving_of(sources[number], asked, progress=advance)

    found = _each(len(sources), measure, lambda found: _print(serving_table(found)), json, "replaying")
    if report is not None:
        write_serving(report, found, ["quantkit", *sys.argv[1:]])
        say(f"wrote {report / 'serve.md'}")


def _each(
    count: int,
    measure: "Callable[[int, Progress], _Figures]",
    show: "Callable[[Sequence[_Figures]], None]",
    json: Path | None,
    doing: str,
) -> "list[_Figures]":
    """The figures of `count` models, stored before another is measured, and shown at the end.

    Where a later model fails, or is interrupted, those before it are shown all the same.
    """
    from quantkit.bench.figures import to_json

    found: list[_Figures] = []
    try:
        for number in range(count):
            # A pipe has them once, at the end.
            if found and json is not None and not is_pipe(json):
                write_file(json, to_json(found))
            with progress(doing) as advance:
                found.append(measure(number, advance))
    finally:
        if found:
            show(found)
            if json is not None:
                write_file(json, to_json(found))
                say(f"wrote {json}")
    return found


#: What of the table of speeds fits a terminal.
_BRIEF = (
    *("model", "mode", "batch", "prompt", "first token, ms", "token p50", "token p99", "tokens/s"),
    "of original",
)


def _print(table: "Table", wanted: Sequence[str] | None = None) -> None:
    """A table of a report on the terminal, or the columns of it that are wanted."""
    shown = [i for i, heading in enumerate(table.headings) if wanted is None or heading in wanted]
    headings = [table.headings[i] for i in shown]
    rows = ([row[i] for i in shown] for row in table.rows)
    print_table(headings, rows, words=table.words, folded=headings)


def _counts(text: str, option: str) -> tuple[int, ...]:
    names = parsing.parse_list(text, option)
    if not all(map(_is_count, names)):
        raise UsageError(f"{option} is {text!r}; it is numbers from 1, comma-separated.")
    return tuple(map(int, names))


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(name) for name in parsing.parse_list(text, "--rate"))
    except ValueError:
        raise UsageError(f"--rate is {text!r}; it is requests per second, comma-separated.") from None


def _range(text: str, option: str) -> tuple[int, int]:
    ends = text.split("-")
    if len(ends) > 2 or not all(map(_is_count, ends)):
        raise UsageError(
            f"{option} is {text!r}; it is a number of tokens, or two with a hyphen, such as 16-256."
        )
    return int(ends[0]), int(ends[-1])


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0
