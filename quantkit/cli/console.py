"""What every command shares: where output goes, and progress with time and memory."""

import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from quantkit.escaping import one_line, printable
from quantkit.files import size_text
from quantkit.progress import Progress, duration_text, time_left
from quantkit.progress_bar import progress_bar

#: Columns where there is no terminal: lines in a pipe or a file are not broken, whatever their length.
PIPED_WIDTH = 10_000

#: Seconds between lines of progress where there is no terminal, and until the first one with a time left.
LINE_SECONDS = 60.0
FIRST_SECONDS = 10.0
#: Part of the work from which its speed tells the time left in the first line.
LEAST_DONE = 0.05

#: Results go to stdout, which a program may read; progress, notes and errors to stderr.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = PIPED_WIDTH


def say(text: str, *, style: str | None = None) -> None:
    """A line of the result."""
    out.print(printable(text), style=style)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    words: Collection[str] = (),
    folded: Collection[str] = (),
    narrow: bool = False,
) -> None:
    """Rows of cells under headings, each cell in one line unless its column is `folded`.

    Columns of `words` are aligned to the left, numbers to the right. `narrow` is for 80 columns.
    """
    padding = (0, 1, 0, 0) if narrow else (0, 1)
    table = Table(box=None, pad_edge=False, padding=padding, header_style="bold")
    for heading in headings:
        side: Literal["left", "right"] = "left" if heading in words else "right"
        is_folded = heading in folded
        table.add_column(
            heading, justify=side, overflow="fold" if is_folded else "ellipsis", no_wrap=not is_folded
        )
    cells = [[one_line(cell) for cell in row] for row in rows]
    if len(folded) == 1:
        # Names break after their dots; rich would break them anywhere.
        at = [heading in folded for heading in headings].index(True)
        columns = [
            max(len(line) for text in (heading, *(row[i] for row in cells)) for line in text.split("\n"))
            for i, heading in enumerate(headings)
        ]
        room = out.width - sum(columns) + columns[at] - len(columns) * sum(padding)
        for row in cells:
            row[at] = _folded(row[at], room)
    for row in cells:
        table.add_row(*row)
    out.print(table)


def _folded(name: str, width: int) -> str:
    """`name` in lines of at most `width` characters, broken after its dots where it can be."""
    if len(name) <= width:
        return name
    lines = [""]
    for part in re.findall(r"[^.]*\.?", name):
        if lines[-1] and len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def note(text: str) -> None:
    """Something the user should know and may want to change."""
    err.print(f"note: {printable(text)}", style="yellow")


def note_unchecked(reason: str | None) -> None:
    """Say that the result of a run was not tried on a prompt, and why; nothing without a reason."""
    if reason is not None:
        note(f"the result was not run: {reason}. 'verify' will have no logits to compare with.")


def warn(text: str) -> None:
    """Something that makes the result less than the user expects."""
    err.print(f"warning: {printable(text)}", style="yellow")


def fail(text: str) -> None:
    """Why the command did not do what it was asked."""
    err.print(f"error: {printable(text)}", style="red")


def stream(text: str) -> None:
    """A piece of a model's text: as it is into a pipe, without control characters onto a terminal."""
    print(printable(text) if sys.stdout.isatty() else text, end="", flush=True)


def print_json(value: Any) -> None:
    """`value` as JSON on stdout, plain whatever the terminal."""
    print(json.dumps(value, indent=2, allow_nan=False))


def _plain_lines(what: str, clock: Callable[[], float] | None = None) -> Progress:
    """Prints how far work is when `LINE_SECONDS` have passed since the last line.

    The first line comes after `FIRST_SECONDS` if it can say the time left. Another total is that of other
    work, whose speed is measured anew.
    """
    import psutil

    clock = clock or time.monotonic
    process = psutil.Process()
    start = began = seen = last = clock()
    first, of = 0, 0
    printed = False
    mutex = threading.Lock()

    def report(done: int, total: int, label: str) -> None:
        nonlocal last, first, of, began, seen, printed
        with mutex:
            now = clock()
            # What was done before, by a run that is resumed, took none of this run's time.
            if total != of:
                first, of, began = done, total, seen
            seen = now
            label, known = time_left(label)
            told = known or done - first >= LEAST_DONE * total
            early = not printed and told and now - last >= FIRST_SECONDS
            if not total or not (early or now - last >= LINE_SECONDS):
                return
            last, printed = now, True
        speed = (done - first) / (now - began) if done > first else 0.0
        measured = duration_text((total - done) / speed) if speed > 0 else ""
        left = f", {known or measured} left" if known or measured else ""
        rest = f"{one_line(label)}, {size_text(process.memory_info().rss)} RAM"
        err.print(f"{what}: {100 * done / total:.0f} % after {duration_text(now - start)}{left}, {rest}")

    return report


@contextmanager
def progress(what: str, shown: bool = True) -> Iterator[Progress]:
    """A progress line on stderr while the block runs: part done, time left, memory, what is at work.

    The block gets `report(done, total, label)`. Where stderr is not a terminal that is a plain line a minute,
    the first after 10 s if it can say the time left. Nothing is written if it is not to be `shown`.
    """
    if not err.is_terminal:
        yield _plain_lines(what) if shown else lambda done, total, label: None
        return
    with progress_bar(err, what, shown) as report:
        yield report
