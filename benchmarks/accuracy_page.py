"""Write the tables of docs/accuracy.md, and that of README.md, from benchmarks/results/accuracy.

    python benchmarks/accuracy_page.py            # writes both
    python benchmarks/accuracy_page.py --check    # exits with 1 where a file is not up to date

The figures are what `quantkit eval` and `benchmarks/accuracy.py` printed, with the digits of the page. Each
table names its commands, machine and commits. To measure anew, put what they print into its rows.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence

from performance_page import README, ROOT, grid

STORED = ROOT / "benchmarks" / "results" / "accuracy" / "books-28m.json"
PAGE = ROOT / "docs" / "accuracy.md"
TABLES = {table["name"]: table for table in json.loads(STORED.read_text(encoding="utf-8"))["tables"]}
#: A mark, and the table from its next line on.
MARKED = re.compile(r"(<!-- generated: ([\w-]+) -->\n)(\|.*\n)*")
#: What README.md calls the formats that it shows.
README_NAMES = {
    "original": "original, bf16",
    "int8, channel": "int8, per channel",
    "fp6 (e2m3), group 128": "fp6 (e2m3), group 128",
    "int4, group 128": "int4, group 128",
}


def table(name: str) -> str:
    """A stored table in Markdown."""
    return grid([TABLES[name]["columns"], *TABLES[name]["rows"]]) + "\n"


def readme_table() -> str:
    """Some formats of the first table, each in one row for both texts."""
    cells = [["format", "bits per weight, linears", "size", "perplexity", "KL mean, nats", "same top-1"]]
    rows = TABLES["formats"]["rows"]
    for books, docs in zip(rows[::2], rows[1::2], strict=True):
        name, bits, _, size, _, *figures = books
        if name not in README_NAMES:
            continue
        perplexity, _, kl, same = zip(figures, docs[5:], strict=True)
        kls = [f"{float(one):.{4 if float(books[7]) > 1e-3 else 5}f}" for one in kl if one]
        sames = [f"{float(one.removesuffix(' %')):.1f}" for one in same if one]
        cells.append(
            [
                README_NAMES[name],
                bits,
                size,
                " / ".join(f"{float(one):.2f}" for one in perplexity),
                " / ".join(kls) or "0",
                (" / ".join(sames) or "100") + " %",
            ]
        )
    return grid(cells) + "\n"


def page(text: str) -> str:
    """The text of docs/accuracy.md with every stored table below its mark."""
    return MARKED.sub(lambda found: found[1] + table(found[2]), text)


def readme(text: str) -> str:
    """The text of README.md with the table of this script below its mark."""
    return MARKED.sub(lambda found: found[1] + readme_table() if found[2] == "accuracy" else found[0], text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both files, or say which is not up to date."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 where a file differs"
    )
    options = parser.parse_args(arguments)
    for path, write in ((PAGE, page), (README, readme)):
        text = path.read_text(encoding="utf-8")
        if not options.check:
            path.write_text(write(text), encoding="utf-8")
        elif write(text) != text:
            sys.exit(f"{path.relative_to(ROOT)} is not up to date: run python benchmarks/accuracy_page.py")


if __name__ == "__main__":
    main()
