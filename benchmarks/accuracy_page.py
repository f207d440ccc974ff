"""Write the tables of docs/accuracy.md from benchmarks/results/accuracy.

    python benchmarks/accuracy_page.py            # writes the page
    python benchmarks/accuracy_page.py --check    # exits with 1 where it is not up to date

The figures are what `quantkit eval` and `benchmarks/accuracy.py` printed, with the digits of the page. Each
table names its commands, machine and commits. To measure anew, put what they print into its rows.
"""

import json
import re
from collections.abc import Sequence

from performance_page import ROOT, grid
from written_pages import write_or_check

STORED = ROOT / "benchmarks" / "results" / "accuracy" / "books-28m.json"
PAGE = ROOT / "docs" / "accuracy.md"
TABLES = {table["name"]: table for table in json.loads(STORED.read_text(encoding="utf-8"))["tables"]}
#: A mark, and the table from its next line on.
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(\|.*\n)*")


def table(name: str) -> str:
    """A stored table in Markdown."""
    return grid([TABLES[name]["columns"], *TABLES[name]["rows"]]) + "\n"


def page(text: str) -> str:
    """The text of docs/accuracy.md with every stored table below its mark."""
    return MARKED.sub(lambda found: found[1] + table(found[2]), text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or say that it is not up to date."""
    wanted = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    write_or_check(arguments, __doc__, "accuracy_page.py", wanted, ROOT)


if __name__ == "__main__":
    main()
