"""`quantkit methods`: what each method is composed of."""

from quantkit.cli import options
from quantkit.cli.console import print_json, print_table, say


def methods(json: options.Json = False) -> None:
    """List the methods and what each is composed of.

    Statistics are those of a linear's inputs on calibration data; methods without any need none.
    """
    from quantkit.calibrate.methods import METHODS

    rows = {name: {"summary": method.summary, **method.in_words()} for name, method in METHODS.items()}
    if json:
        print_json(rows)
        return
    steps = ("transform", "statistics", "grid", "rounding")
    table = [(name, *(row[step] for step in steps)) for name, row in rows.items()]
    headings = ("method", *steps)
    print_table(headings, table, words=headings, folded=steps, narrow=True)
    for name, row in rows.items():
        say(f"{name}: {row['summary']}")
