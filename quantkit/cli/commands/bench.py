"""`quantkit bench`: speed, memory, and latency under load."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from quantkit.cli import options
from quantkit.cli.console import note, print_table, progress, say
from quantkit.cli.files import REPORT_FILES, check_writable, is_pipe, make_directory, write_file
from quantkit.errors import UsageError

if TYPE_CHECKING:
    from quantkit.bench.figures import Serving, Speed
    from quantkit.bench.serving import Traffic
    from quantkit.bench.speed import Settings
    from quantkit.progress import Progress
    from quantkit.report.document import Table

    _Figures = TypeVar("_Figures", Speed, Serving)


def bench(
    directory: options.Model,
    against: Annotated[
        str | None, typer.Option("--against", help="The original, which is measured in the same way.")
    ] = None,
    batch: Annotated[
        str | None,
        typer.Option(help="Sequences at a time, comma-separated.", show_default="1,4; on a GPU 1,8,64"),
    ] = None,
    prompt: Annotated[
        str | None,
        typer.Option(
            help="Tokens of a prompt, comma-separated.", show_default="32,128,512; on a GPU 128,1024,4096"
        ),
    ] = None,
    new_tokens: Annotated[
        int | None,
        typer.Option(help="Tokens that are generated.", min=2, show_default="32; on a GPU 128"),
    ] = None,
    mode: Annotated[
        str | None,
        typer.Option(
            help="How it runs, comma-separated: eager, flat (on a CPU), cuda-graph (on a GPU).",
            show_default="those of the device",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(help="Generations that count.", min=1)] = 5,
    text: Annotated[
        Path | None,
        typer.Option("--text", metavar="FILE", help="UTF-8 text for prompts.", show_default="random tokens"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random prompts and arrivals.")] = 0,
    profile: Annotated[
        Path | None,
        typer.Option("--profile", metavar="FILE", help="Also write a trace of DIR by torch's profiler."),
    ] = None,
    serve_like: Annotated[
        bool,
        typer.Option(
            "--serve-like", help="Measure latency under load instead: requests that arrive at --rate."
        ),
    ] = False,
    rate: Annotated[
        str | None,
        typer.Option(help="Requests per second, comma-separated.", show_default="0.5,1,2; on a GPU 1,4,16"),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests at each rate.", min=1, show_default="32")
    ] = None,
    prompt_range: Annotated[
        str | None,
        typer.Option(help="Tokens of their prompts.", show_default="16-256; on a GPU 64-2048"),
    ] = None,
    answer_range: Annotated[
        str | None,
        typer.Option(help="Tokens of their answers.", show_default="8-64; on a GPU 32-512"),
    ] = None,
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", readable=False, help="Write the figures to this file."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="DIR", readable=False, help="Write a report with plots here."),
    ] = None,
) -> None:
    """Measure how fast a model is and what memory it takes.

    Time to first token, time between tokens, tokens per second and memory, for every batch with every prompt
    length; with --serve-like, latencies of requests that arrive at random. Each model runs in a process of
    its own.
    """
    # One option of the wrong kind would be ignored without a word.
    grid = {
        "--batch": batch,
        "--prompt": prompt,
        "--new-tokens": new_tokens,
        "--mode": mode,
        "--text": text,
    }
    load = {
        "--rate": rate,
        "--requests": requests,
        "--prompt-range": prompt_range,
        "--answer-range": answer_range,
    }
    for name, value in ({**grid, "--profile": profile} if serve_like else load).items():
        if value is not None:
            raise UsageError(
                f"{name} does not go with --serve-like." if serve_like else f"{name} needs --serve-like."
            )
    for path in (json, profile):
        if path is not None:
            check_writable(path)
    if report is not None:
        from quantkit.report.plots import figure_class

        figure_class()
        make_directory(report, REPORT_FILES)
    sources = [directory] if against is None else [directory, against]
    if serve_like:
        from quantkit.bench.serving import Traffic

        _serve(
            sources,
            Traffic(
                device,
                dtype,
                None if rate is None else _rates(rate),
                requests or 32,
                None if prompt_range is None else _range(prompt_range, "--prompt-range"),
                None if answer_range is None else _range(answer_range, "--answer-range"),
                seed,
            ),
            json,
            report,
        )
        return
    from quantkit.bench.speed import Settings

    settings = Settings(
        device,
        dtype,
        None if batch is None else _counts(batch, "--batch"),
        None if prompt is None else _counts(prompt, "--prompt"),
        new_tokens,
        repeats,
        None if text is None else str(text),
        seed,
        None if mode is None else tuple(part.strip() for part in mode.split(",")),
    )
    _time(sources, settings, profile, json, report)


def _time(
    sources: list[str], settings: "Settings", profile: Path | None, json: Path | None, report: Path | None
) -> None:
    from quantkit.bench.worker import speed_of
    from quantkit.report.bench_report import models_table, speed_table, write_speed

    def measure(number: int, advance: "Progress") -> "Speed":
        trace = profile if number == 0 else None
        return speed_of(sources[number], settings, profile=trace, progress=advance)

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


def _serve(sources: list[str], traffic: "Traffic", json: Path | None, report: Path | None) -> None:
    from quantkit.bench.worker import serving_of
    from quantkit.report.bench_report import serving_table, write_serving

    def measure(number: int, advance: "Progress") -> "Serving":
        return serving_of(sources[number], traffic, progress=advance)

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
_BRIEF = ("model", "mode", "batch", "prompt", "first token, ms", "token p50", "token p99", "tokens/s")


def _print(table: "Table", wanted: Sequence[str] | None = None) -> None:
    """A table of a report on the terminal, or the columns of it that are wanted."""
    shown = [i for i, heading in enumerate(table.headings) if wanted is None or heading in wanted]
    headings = [table.headings[i] for i in shown]
    rows = ([row[i] for i in shown] for row in table.rows)
    print_table(headings, rows, words=table.words, folded=headings)


def _counts(text: str, option: str) -> tuple[int, ...]:
    names = options.parse_list(text, option)
    if not all(map(_is_count, names)):
        raise UsageError(f"{option} is {text!r}; it is numbers from 1, comma-separated.")
    return tuple(map(int, names))


def _rates(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(name) for name in options.parse_list(text, "--rate"))
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
