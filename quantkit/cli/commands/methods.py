"""`quantkit methods`: what each method is composed of."""

from rich.table import Table

from quantkit.cli import options
from quantkit.cli.console import out, print_json, say


def methods(json: options.Json = False) -> None:
    """List the methods and what each is composed of.

    Statistics are those of a linear's inputs on calibration data; methods without any need none.
    """
    from quantkit.calibrate.methods import METHODS

    rows = {name: {"summary": method.summary, **method.in_words()} for name, method in METHODS.items()}
    if json:
        print_json(rows)
        return
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("method", no_wrap=True)
    for step in ("transform", "statistics", "grid", "rounding"):
        table.add_column(step, overflow="fold")
    for name, row in rows.items():
        table.add_row(name, *(row[step] for step in ("transform", "statistics", "grid", "rounding")))
    out.print(table)
    for name, row in rows.items():
        say(f"{name}: {row['summary']}")
