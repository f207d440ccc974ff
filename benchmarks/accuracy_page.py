"""Write the tables of docs/accuracy.md, and what is read off them, from benchmarks/results/accuracy.

    python benchmarks/accuracy_page.py            # writes the page
    python benchmarks/accuracy_page.py --check    # exits with 1 where it is not up to date

The page has lines `<!-- generated: NAME -->`. What follows up to an empty line is the stored table of that
name, or a paragraph of `PARAGRAPHS`. The figures are what `quantkit eval` and `benchmarks/accuracy.py`
printed, with the digits of the page. Each table names its commands, machine and commits. To measure anew, put
what they print into its rows.
"""

import json
import re
from collections.abc import Callable, Sequence

from performance_page import ROOT, grid, paragraph
from written_pages import write_or_check

STORED = ROOT / "benchmarks" / "results" / "accuracy" / "books-28m.json"
PAGE = ROOT / "docs" / "accuracy.md"
TABLES = {table["name"]: table for table in json.loads(STORED.read_text(encoding="utf-8"))["tables"]}
#: A mark, and what it stands for: the lines up to an empty one.
MARKED = re.compile(r"^(<!-- generated: ([\w-]+) -->\n)((?:.+\n)*)", re.MULTILINE)


def table(name: str) -> str:
    """A stored table in Markdown."""
    return grid([TABLES[name]["columns"], *TABLES[name]["rows"]]) + "\n"


def divergences(name: str, *cells: str, column: str = "KL mean, books / docs") -> tuple[float, float]:
    """KL mean on books and docs of the row of a table that begins with `cells`.

    An empty first cell stands for that of the row before.
    """
    first = ""
    for row in TABLES[name]["rows"]:
        first = row[0] or first
        if (first, *row[1:])[: len(cells)] == cells:
            books, docs = row[TABLES[name]["columns"].index(column)].split(" / ")[:2]
            return float(books), float(docs)
    raise KeyError((name, cells))


def changes(one: tuple[float, float], other: tuple[float, float]) -> tuple[int, int]:
    """By how many percent `other` is larger than `one`, on books and docs."""
    books, docs = (round(100 * (b / a - 1)) for a, b in zip(one, other, strict=True))
    return books, docs


def cost_of_head() -> str:
    """What a packed head costs."""
    dense = divergences("lm-head", "dense, tied")
    four = changes(dense, divergences("lm-head", "int4, group 128"))
    eight = max(changes(dense, divergences("lm-head", "int8, channel")))
    return paragraph(
        f"An int8 head adds less than {eight + 1} % to the divergence. An int4 head adds {four[0]} % on "
        f"books and {four[1]} % on docs."
    )


def learned_rounding() -> str:
    """What `signround` gains over `best`."""

    def gain(scheme: str) -> tuple[int, int]:
        best, learned = (divergences("calibrated", scheme, method) for method in ("best", "signround"))
        books, docs = changes(best, learned)
        return books, docs

    two, four = gain("int2, group 32, e4m3 scales"), gain("int4, group 128")
    return paragraph(
        "**Learned rounding** (`signround`) after `best` changes the divergence of int2 by "
        f"{two[0]:+} / {two[1]:+} % (books / docs), that of int4 by {four[0]:+} / {four[1]:+} %: use it "
        "below 4 bits."
    )


def own_domain() -> str:
    """What text of one's own domain is worth."""
    mixed, bundled, web = (
        divergences("texts", text, "gptq", column="KL mean, books / docs / wikitext-2")
        for text in ("`mixed.jsonl`", "the bundled text", "`c4.txt`")
    )
    return paragraph(
        "Text of one's own domain is worth having: on docs, whose first windows are C++ documentation like "
        f"that in `mixed.jsonl`, `gptq` diverges by {-changes(bundled, mixed)[1]} % less with it than with "
        f"the bundled text, and with that by {-changes(web, bundled)[1]} % less than with web pages."
    )


def gain_of_rotation() -> str:
    """What rotation changes."""

    def most(methods: Sequence[str]) -> int:
        found, scheme = list[int](), ""
        for first, method, *_ in TABLES["rotation"]["rows"]:
            scheme = first or scheme
            if method in methods and scheme != "int8, channel":
                one, other = (
                    divergences("rotation", scheme, method, column=column)
                    for column in ("as it is", "rotated")
                )
                found += changes(one, other)
        return max(map(abs, found))

    return paragraph(
        f"Below 8 bits rotation gains hardly anything here: `mse` loses up to {most(['mse'])} %, `gptq` and "
        f"`best` change by at most {most(['gptq', 'best'])} %. Inputs in int8 gain, see "
        "[below](#rounded-inputs)."
    )


def cost_of_inputs() -> str:
    """What rounded inputs cost, and what smoothing and rotation change."""

    def of(*cells: str) -> tuple[float, float]:
        return divergences("activations", *cells)

    plain = of("W8A8", "mse (no data)")
    smooth, rotated, both = (
        -changes(plain, of("W8A8", method))[0]
        for method in ("smoothquant", "mse, rotated", "smoothquant, rotated")
    )
    floating = changes(of("FP8_DYNAMIC", "mse (no data)"), of("FP8_DYNAMIC", "mse, rotated"))[0]
    four = changes(of("W4A16", "best"), of("W4A8", "best"))
    return paragraph(
        f"Nearly all divergence of W8A8 comes from the inputs: on books smoothing takes off {smooth} %, "
        f"rotation {rotated} %, both {both} %. Steps of fp8 grow with the input: there rotation costs "
        f"{floating} %. Inputs in int8 cost int4 with `best` {four[0]} and {four[1]} %."
    )


PARAGRAPHS: dict[str, Callable[[], str]] = {
    "cost-of-head": cost_of_head,
    "learned-rounding": learned_rounding,
    "own-domain": own_domain,
    "gain-of-rotation": gain_of_rotation,
    "cost-of-inputs": cost_of_inputs,
}


def part(name: str) -> str:
    """What stands below a mark."""
    return PARAGRAPHS[name]() + "\n" if name in PARAGRAPHS else table(name)


def page(text: str) -> str:
    """The text of docs/accuracy.md with what is stored below its marks."""
    return MARKED.sub(lambda found: found[1] + part(found[2]), text)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page, or say that it is not up to date."""
    wanted = {PAGE: page(PAGE.read_text(encoding="utf-8"))}
    write_or_check(arguments, __doc__, "accuracy_page.py", wanted, ROOT)


if __name__ == "__main__":
    main()
