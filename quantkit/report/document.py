"""Report as a document: sections of text, tables and figures, rendered as Markdown and as one HTML file.

All text is escaped; only pieces of type `Code` look different. The HTML is self-contained, without network or
scripts. Figures are inline drawings in the page's colors, so they are readable on light, dark and paper.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from quantkit import escaping
from quantkit.checkpoint.output.beside import beside
from quantkit.errors import OutputError
from quantkit.escaping import Prose
from quantkit.files import replace_file


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: Prose

    def markdown(self) -> str:
        return escaping.markdown_block(self.text)

    def html(self) -> str:
        return f"<p>{escaping.html(self.text)}</p>"


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: Sequence[Prose]

    def markdown(self) -> str:
        return "\n".join(f"- {escaping.markdown_block(item)}" for item in self.items)

    def html(self) -> str:
        return "<ul>" + "".join(f"<li>{escaping.html(item)}</li>" for item in self.items) + "</ul>"


@dataclass(frozen=True)
class Command:
    """Command that reproduces the figures, as typed."""

    text: str

    def markdown(self) -> str:
        return escaping.markdown_fence(self.text)

    def html(self) -> str:
        return f"<pre>{escaping.html_lines(self.text)}</pre>"


@dataclass(frozen=True)
class Table:
    """Rows of cells under headings; columns `words` are aligned left, numbers right."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[str] = frozenset()

    def markdown(self) -> str:
        rules = (":--" if heading in self.words else "--:" for heading in self.headings)
        head, *rows = map(_row, (self.headings, *self.rows))
        return "\n".join((head, f"| {' | '.join(rules)} |", *rows))

    def html(self) -> str:
        head = "".join(
            f"<th{self._side(i)}>{escaping.html(cell)}</th>" for i, cell in enumerate(self.headings)
        )
        body = "".join(
            "<tr>" + "".join(f"<td{self._side(i)}>{_cell(cell)}</td>" for i, cell in enumerate(row)) + "</tr>"
            for row in self.rows
        )
        return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'

    def _side(self, column: int) -> str:
        return ' class="word"' if self.headings[column] in self.words else ""


@dataclass(frozen=True)
class Passages:
    """Rows of long texts under headings, below each other on a narrow page; to be opened by its title.

    The last two texts of row i begin with `alike[i]` characters that are the same, and faint.
    """

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    alike: Sequence[int]

    def markdown(self) -> str:
        table = Table(self.headings, self.rows, frozenset(self.headings)).markdown()
        return f"{escaping.markdown(self.title)}:\n\n{table}"

    def html(self) -> str:
        head = "".join(f"<th>{escaping.html(cell)}</th>" for cell in self.headings)
        body = "".join(
            f"<tr>{self._cells(row, count)}</tr>" for row, count in zip(self.rows, self.alike, strict=True)
        )
        table = f'<table class="texts"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        return f"<details><summary>{escaping.html(self.title)}</summary>{table}</details>"

    def _cells(self, row: Sequence[str], alike: int) -> str:
        shared = [0] * (len(row) - 2) + [alike] * 2
        return "".join(
            f'<td data-of="{escaping.html(heading)}">'
            + (f'<span class="alike">{escaping.html_lines(text[:count])}</span>' if count else "")
            + f"{escaping.html_lines(text[count:])}</td>"
            for heading, text, count in zip(self.headings, row, shared, strict=True)
        )


@dataclass(frozen=True)
class Figure:
    """Plot with a caption: the file `name`.png, `png`, beside the Markdown, and `svg` in the HTML."""

    name: str
    caption: str
    png: bytes
    svg: str

    @property
    def file(self) -> str:
        """Return the name of the PNG."""
        return f"{self.name}.png"

    def markdown(self) -> str:
        label = escaping.markdown(self.caption.translate(_NO_BRACKETS))
        return f"![{label}]({self.file})\n\n{escaping.markdown_block(self.caption)}"

    def html(self) -> str:
        label = escaping.html(self.caption)
        drawing = self.svg.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)
        return f"<figure>{drawing}<figcaption>{label}</figcaption></figure>"


Block = Text | Bullets | Command | Table | Passages | Figure


@dataclass(frozen=True)
class Section:
    """Blocks under a heading."""

    title: str
    blocks: Sequence[Block]


@dataclass(frozen=True)
class Document:
    """Sections under a title; `about` is the line below it, if any."""

    title: str
    sections: Sequence[Section]
    about: str = ""

    @property
    def figures(self) -> tuple[Figure, ...]:
        """Return all figures, in order."""
        return tuple(b for section in self.sections for b in section.blocks if isinstance(b, Figure))

    def markdown(self) -> str:
        """Render as GitHub's Markdown, with figures as separate files."""
        parts = [f"# {escaping.markdown(self.title)}"]
        if self.about:
            parts.append(escaping.markdown_block(self.about))
        for section in self.sections:
            parts += [
                f"## {escaping.markdown(section.title)}",
                *(block.markdown() for block in section.blocks),
            ]
        return "\n\n".join(parts) + "\n"

    def html(self) -> str:
        """Render as one HTML page."""
        title = escaping.html(self.title)
        about = f'<p class="about">{escaping.html(self.about)}</p>\n' if self.about else ""
        body = "".join(
            f"<section><h2>{escaping.html(section.title)}</h2>{_blocks(section.blocks)}</section>\n"
            for section in self.sections
        )
        return (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{title}</title>\n<style>{_STYLE}</style>\n</head>\n"
            f"<body>\n<h1>{title}</h1>\n{about}{body}</body>\n</html>\n"
        )


def _blocks(blocks: Sequence[Block]) -> str:
    """Return blocks as HTML; figures that follow each other stand side by side where there is room."""
    parts = []
    for is_figure, some in groupby(blocks, key=lambda block: isinstance(block, Figure)):
        text = "".join(block.html() for block in some)
        parts.append(f'<div class="figures">{text}</div>' if is_figure else text)
    return "".join(parts)


def write(directory: Path, stem: str, document: Document, others: Mapping[str, str]) -> tuple[Path, ...]:
    """Write `stem`.md, `stem`.html, the figures as PNG, and the texts of `others` by file name.

    Each file in `directory` is written whole or not at all. Raises `OutputError` if one cannot be written.
    """
    files = {
        f"{stem}.md": document.markdown().encode(),
        f"{stem}.html": document.html().encode(),
        **{name: text.encode() for name, text in others.items()},
        **{figure.file: figure.png for figure in document.figures},
    }
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with beside(directory, files):
            for name, data in files.items():
                replace_file(directory / name, data)
    except OSError as error:
        raise OutputError(
            f"cannot write the report to {directory}: {error.strerror or error}. Make it a writable "
            "directory with free space."
        ) from error
    return tuple(directory / name for name in files)


#: Not every renderer accepts brackets in the alternative text of an image.
_NO_BRACKETS = str.maketrans({"[": "(", "]": ")"})

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --paper: #ffffff; --faint: #5c636b; --line: #d5d9de;
  --shade: #f4f5f7; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e6e9; --paper: #16181b; --faint: #9aa2ab; --line: #363b41; --shade: #1f2226; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.25; margin-bottom: 0.3rem; }
h2 { font-size: 1.25rem; margin-top: 2.2rem; }
p, ul { max-width: 48rem; } ul { padding-left: 1.2rem; }
.about { color: var(--faint); margin-top: 0; }
.wide { overflow-x: auto; margin-bottom: 1.2rem; }
table { border-collapse: collapse; font-size: 0.9em; font-variant-numeric: tabular-nums;
  overflow-wrap: normal; }
th, td { padding: 0.3rem 0.6rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; border-bottom-width: 2px; white-space: normal; }
.word { text-align: left; white-space: normal; min-width: 5.5rem; }
tbody tr:nth-child(even) { background: var(--shade); }
.texts { width: 100%; table-layout: fixed; margin-bottom: 1.2rem; }
.texts th, .texts td { text-align: left; vertical-align: top; white-space: pre-wrap;
  overflow-wrap: anywhere; }
summary { cursor: pointer; margin: 0.4rem 0; }
.alike { color: var(--faint); }
.figures { display: grid; gap: 0 2rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 1rem 0; color: var(--ink); }
figure svg { width: 100%; max-width: 34rem; height: auto; }
figcaption { color: var(--faint); font-size: 0.9em; max-width: 34rem; }
code, pre { font: 0.92em ui-monospace, monospace; background: var(--shade); border-radius: 3px; }
code { padding: 0 0.25em; overflow-wrap: anywhere; }
pre { padding: 0.7rem; white-space: pre-wrap; overflow-wrap: anywhere; }
@media (max-width: 40rem) {
  .texts thead { display: none; } .texts tbody, .texts tr, .texts td { display: block; }
  .texts td { border-bottom: 0; } .texts tr { border-bottom: 1px solid var(--line); padding: 0.4rem 0; }
  .texts td::before { content: attr(data-of); display: block; font-size: 0.85em; font-weight: 600; }
}
@media (max-width: 30rem) {
  body { margin: 1rem auto; padding: 0 0.7rem; font-size: 15px; } h1 { font-size: 1.35rem; }
  th, td { padding: 0.25rem 0.4rem; }
}
@media print {
  @page { margin: 1.3cm; }
  :root { color-scheme: light; --ink: #000000; --paper: #ffffff; --faint: #444444; --line: #bbbbbb;
    --shade: #ffffff; }
  body { max-width: none; margin: 0; padding: 0; font-size: 8.5pt; line-height: 1.35; }
  h1 { font-size: 15pt; } h2 { font-size: 11pt; margin: 0.7rem 0 0.2rem; }
  p, ul { max-width: none; margin: 0.3rem 0; } pre { padding: 0.3rem; margin: 0.3rem 0; }
  table { font-size: 7pt; }
  th, td { padding: 0.1rem 0.3rem; } .word { min-width: 0; }
  .figures { grid-template-columns: 1fr 1fr; gap: 0 0.6cm; }
  figure { margin: 0.2rem 0; } figure svg { max-width: 8cm; } figcaption { font-size: 7pt; }
  figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  .wide { overflow: visible; } details { display: none; }
}
"""


def _cell(text: str) -> str:
    """Return a cell as HTML; line breaks do not split an error or a unit."""
    return re.sub(r"(?<=±) | (?=[kMGT]?B$|%)", "&nbsp;", escaping.html(text))


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(map(escaping.markdown_cell, cells)) + " |"
