"""Escape text from outside: one function for each language that quantkit writes.

Names of models, tensors, tasks and files are untrusted. Each function returns source text that displays its
argument literally: `printable`, `markdown`, `html`, `yaml`, `plot`, and `python` for code to copy.
"""

import html as html_library
import json
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any


class Code(str):
    """Text that Markdown and HTML show as code."""

    __slots__ = ()


#: One line: plain text, or a tuple of pieces, some of them `Code`.
Prose = str | tuple[str, ...]

#: Longest name in a plot, in characters.
_PLOT_LENGTH = 60

#: Words that renderers turn into more than CommonMark does: links (also bare addresses and names that end
#: like domains), mentions, emoji and formulas. Only code is safe from all of them.
_ACTIVE = re.compile(
    r"[@$\\]|//|www\.|mailto:|xmpp:|:[\w+-]+:"
    r"|[\w-]\.(?:[a-z]{2}|com|edu|gov|net|org|pro|web|xxx|biz|aero|asia|coop|info|museum|name|shop|рф|xn--\w+)"
    r"(?![a-z0-9-]|_[a-z0-9])",
    re.IGNORECASE,
)
#: Characters that CommonMark, or GitHub's strikethrough, may read as markup inside a line.
_INLINE = re.compile(r"[\\`*\[\]<~]|&(?=[#A-Za-z])|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])|(?<!\S)#")
#: Entities for characters that a backslash does not escape.
_ENTITIES = {"&": "&amp;", "<": "&lt;", "`": "&#96;", "\\": "&#92;"}
#: Start of a line that would make it a list, a quote or an underline.
_BLOCK = re.compile(r"(?=[-+=>:])|\d{1,9}(?=[.)](?: |$))")


def printable(text: str) -> str:
    """Return `text` with unprintable characters as escapes such as `\\u202e`; line ends and tabs stay.

    Unprintable are control characters, changes of the writing direction, invisible characters, and unpaired
    surrogates, which cannot be encoded.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else ascii(c)[1:-1] for c in text)


def one_line(text: str) -> str:
    """Return `printable(text)` in one line: a space for each line end, and tabs as escapes."""
    return printable(re.sub(r"\r\n|[\r\n]", " ", text)).replace("\t", r"\t")


def markdown(text: Prose) -> str:
    """Return one line of GitHub's Markdown, for a heading or within a paragraph."""
    pieces = list(_pieces(text))
    shown = []
    for number, (is_code, piece) in enumerate(pieces):
        if is_code:
            shown.append(_code_span(piece))
            continue
        escaped = _INLINE.sub(lambda found: _ENTITIES.get(found[0], f"\\{found[0]}"), piece)
        # Markdown would drop these spaces.
        escaped = re.sub("(?<= ) ", "&#32;", escaped)
        escaped = re.sub("^ ", "&#32;", escaped) if number == 0 else escaped
        shown.append(re.sub(" $", "&#32;", escaped) if number == len(pieces) - 1 else escaped)
    return "".join(shown)


def markdown_cell(text: Prose) -> str:
    """Return one line of Markdown for a cell of a table."""
    # Escaped in every case: parsers disagree on a bar inside code and after a backslash.
    return markdown(text).replace("|", r"\|")


def markdown_block(text: Prose) -> str:
    """Return one line of Markdown for a paragraph or an item of a list."""
    line = markdown(text)
    found = _BLOCK.match(line)
    return line if found is None else f"{found[0]}\\{line[found.end() :]}"


def markdown_fence(text: str) -> str:
    """Return lines of Markdown that show `text` as a block of code."""
    lines = printable(text)
    # A fence longer than any in the text.
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", lines)), default=0))
    return f"{fence}\n{lines}\n{fence}"


def _pieces(text: Prose) -> Iterator[tuple[bool, str]]:
    """Yield `text` cut at spaces, bars and the ends of code, each part with True if it is to be code."""
    found = []
    for part in _parts(text):
        line = one_line(part)
        words = [line] if isinstance(part, Code) else re.split("( +)", line)
        for word in words:
            is_code = isinstance(part, Code) or bool(_ACTIVE.search(word))
            # Code must have no bar, see `markdown_cell`, and must not be all spaces, of which some parsers
            # drop two.
            found += [
                (is_code and piece != "|" and not piece.isspace(), piece)
                for piece in re.split(r"(\|)", word)
                if piece
            ]
    for is_code, pieces in groupby(found, key=lambda piece: piece[0]):
        yield is_code, "".join(piece for _, piece in pieces)


def _code_span(text: str) -> str:
    runs = {len(run) for run in re.findall("`+", text)}
    fence = "`" * next(length for length in range(1, len(runs) + 2) if length not in runs)
    # Parsers strip one space from both ends.
    padded = text.startswith("`") or text.endswith("`") or (text[0] == text[-1] == " ")
    return f"{fence} {text} {fence}" if padded else f"{fence}{text}{fence}"


def html(text: Prose) -> str:
    """Return one line of HTML: for an element or, without `Code`, for an attribute in quotes."""
    parts = ((part, html_library.escape(one_line(part))) for part in _parts(text))
    return "".join(f"<code>{shown}</code>" if isinstance(part, Code) else shown for part, shown in parts)


def html_lines(text: str) -> str:
    """Return lines of HTML for `<pre>`."""
    return html_library.escape(printable(text))


def _parts(text: Prose) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def yaml(values: Mapping[str, Any]) -> str:
    """Return a mapping as ASCII YAML, each text in one line, so that no text can end a front matter."""
    import yaml as library

    class Dumper(library.SafeDumper):  # type: ignore[misc]
        pass

    def represent(dumper: library.SafeDumper, text: str) -> library.ScalarNode:
        style = None if text.isprintable() else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)

    Dumper.add_representer(str, represent)
    Dumper.add_representer(Code, represent)
    dumped: str = library.dump(dict(values), Dumper=Dumper, sort_keys=False, width=float("inf"))
    return dumped


def plot(text: str) -> str:
    """Return text without formulas and hidden legend entries for matplotlib, cut in the middle if long."""
    line = one_line(text)
    if len(line) > _PLOT_LENGTH:
        half = _PLOT_LENGTH // 2
        line = f"{line[:half]}…{line[-half:]}"
    # A legend hides entries that begin with an underscore.
    return (" " if line.startswith("_") else "") + line.replace("$", r"\$")


def python(text: str) -> str:
    """Return a Python string literal in double quotes."""
    return printable(json.dumps(text, ensure_ascii=False))
