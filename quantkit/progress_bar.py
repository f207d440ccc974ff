"""A bar for long work, as the commands and functions of Python show it: in terminals and notebooks."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    ProgressColumn,
    Task,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bar
from rich.table import Column
from rich.text import Text

from quantkit.escaping import one_line
from quantkit.files import size_text
from quantkit.progress import Progress, time_left


class _MemoryColumn(ProgressColumn):
    """Resident memory of this process."""

    def __init__(self) -> None:
        super().__init__(Column(no_wrap=True))
        import psutil

        self._process = psutil.Process()

    def render(self, task: Task) -> Text:
        return Text(f"{size_text(self._process.memory_info().rss)} RAM", style="dim", no_wrap=True)


class _LeftColumn(TimeRemainingColumn):
    """Time left: what the label says, for work that knows it, else by the speed so far."""

    def render(self, task: Task) -> Text:
        left = task.fields["left"]
        return Text(left, style="progress.remaining") if left else super().render(task)


class _LabelColumn(ProgressColumn):
    """Name of the current tensor or step, shortened to the free width."""

    def render(self, task: Task) -> Text:
        return Text(one_line(task.fields["label"]), style="dim", no_wrap=True, overflow="ellipsis")


@contextmanager
def progress_bar(console: Console, what: str, shown: bool = True) -> Iterator[Progress]:
    """Yield a function that shows on `console` the part done, the time left, memory, and what is at work.

    The bar appears with the first report, and goes when the block ends. In 80 columns there is room for the
    step and the loss of a training.
    """
    columns = (
        TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True)),
        BarColumn(bar_width=10, table_column=Column(no_wrap=True)),
        TaskProgressColumn(),
        _LeftColumn(),
        _MemoryColumn(),
        _LabelColumn(),
    )
    with ExitStack() as stack:
        bar = Bar(*columns, console=console, transient=True, disable=not shown)
        task = bar.add_task(what, total=None, label="", left="")

        def report(done: int, total: int, label: str) -> None:
            if not bar.live.is_started:
                stack.enter_context(bar)
            label, left = time_left(label)
            bar.update(task, completed=done, total=total, label=label, left=left)

        yield report


@contextmanager
def reporting(progress: Progress | bool | None, what: str) -> Iterator[Progress | None]:
    """Yield the function that work reports to: `progress` itself, a bar's, or None.

    None and True stand for a bar on stderr in a terminal or a notebook, and False for none.
    """
    if not isinstance(progress, bool) and progress is not None:
        yield progress
        return
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    if progress is False or not (console.is_terminal or console.is_jupyter):
        yield None
        return
    with progress_bar(console, what) as report:
        yield report
