"""What every command shares: where output goes, progress with time and memory, sizes as text."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

#: Columns where there is no terminal to ask: a pipe or a file should not break lines.
PIPED_WIDTH = 180

#: Results go to stdout, which a program may read; progress, notes and errors to stderr.
out = Console(highlight=False, markup=False, emoji=False)
err = Console(stderr=True, highlight=False, markup=False, emoji=False)
for _console in (out, err):
    if not _console.is_terminal:
        _console.width = PIPED_WIDTH

Report = Callable[[int, int, str], None]


def note(text: str) -> None:
    """Something the user should know and may want to change."""
    err.print(f"note: {text}", style="yellow")


def print_json(value: Any) -> None:
    """`value` as JSON on stdout, plain whatever the terminal."""
    print(json.dumps(value, indent=2, allow_nan=False))


class _MemoryColumn(ProgressColumn):
    """Resident memory of this process."""

    def __init__(self) -> None:
        super().__init__()
        import psutil

        self._process = psutil.Process()

    def render(self, task: Task) -> Text:
        return Text(f"{size(self._process.memory_info().rss)} in memory", style="dim")


@contextmanager
def progress(what: str) -> Iterator[Report]:
    """A progress line on stderr while the block runs: part done, time left, memory, what is at work.

    The block gets `report(done, total, label)`. Nothing is drawn where stderr is not a terminal.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        _MemoryColumn(),
        TextColumn("{task.fields[label]}", style="dim"),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task(what, total=None, label="")

        def report(done: int, total: int, label: str) -> None:
            bar.update(task, completed=done, total=total, label=label)

        yield report


def size(nbytes: float) -> str:
    """Bytes as people read them, in powers of 1000: 1.50 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
