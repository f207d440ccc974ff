"""Documents: the same content as Markdown and as HTML that stands alone."""

import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from quantkit.errors import OutputError
from quantkit.escaping import Code
from quantkit.report import plots
from quantkit.report.document import (
    Bullets,
    Command,
    Document,
    Figure,
    Passages,
    Section,
    Table,
    Text,
    write,
)

#: Elements without content, which are not closed.
VOID = {"meta", "br", "hr", "img", "link"}


class Outline(HTMLParser):
    """The elements of a page, checked to be nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def figure(name: str) -> Figure:
    drawn, axes = plots.drawing()
    axes.plot([1, 2, 3], [3, 1, 2], color=plots.COLORS[0], label="a & b")
    axes.set(xlabel=plots.plain("$x$"))
    axes.annotate("name", (1, 3))
    axes.legend()
    return plots.render(drawn, name, f"A [plot] of {name} & more")


def document() -> Document:
    return Document(
        "Title <b>",
        [
            Section(
                "One",
                [
                    Text(("run ", Code("a < b"), " & see")),
                    Bullets(["first", "se\ncond <script>"]),
                    figure("f"),
                ],
            ),
            Section(
                "Two",
                [
                    Table(["name", "n"], [["a|b", "1"], ["<i>", "2"]], frozenset({"name"})),
                    Command("quantkit eval ```x``` <y>"),
                    figure("g"),
                ],
            ),
        ],
    )


def test_the_page_stands_alone() -> None:
    page = document().html()
    assert not re.search(r"https?:|//|@import|<script|<link|<img|src=", page)
    outline = Outline(page)
    tags = [tag for tag, _ in outline.elements]
    assert tags.count("svg") == tags.count("figure") == 2
    assert "prefers-color-scheme: dark" in page and "@media print" in page
    # Every reference of a drawing is to an id of the page, and no two elements share one.
    ids = [attributes["id"] for _, attributes in outline.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
    assert targets and {a or b for a, b in targets} <= set(ids)


def test_names_are_text_and_no_markup() -> None:
    outline = Outline(document().html())
    assert "<script>" in outline.text and "Title <b>" in outline.text and "a < b" in outline.text
    assert {tag for tag, _ in outline.elements} & {"b", "i", "script"} == set()
    assert ("code", {}) in outline.elements


def test_markdown_has_the_same_content() -> None:
    lines = document().markdown().splitlines()
    assert lines[0] == "# Title &lt;b>"
    assert "run `a < b` & see" in lines
    assert "- se cond &lt;script>" in lines
    at = lines.index("| name | n |")
    assert lines[at + 1 : at + 4] == ["| :-- | --: |", r"| a\|b | 1 |", "| &lt;i> | 2 |"]
    assert "![A (plot) of f & more](f.png)" in lines
    fence = lines.index("````")
    assert lines[fence + 1 : fence + 3] == ["quantkit eval ```x``` <y>", "````"]


def test_long_texts_are_text_and_what_is_alike_is_faint() -> None:
    block = Passages(
        "2 texts of <c>",
        ("start", 'a "<b>"', "c"),
        [("<i>On</i>", "ce\nupon|a", "ce\nhe\u202e said"), ("x", "<p>", "&amp;")],
        alike=(3, 0),
    )
    page = Document("Title", [Section("Texts", [block])]).html()
    outline = Outline(page)
    cells = [attributes["data-of"] for tag, attributes in outline.elements if tag == "td"]
    assert cells == ["start", 'a "<b>"', "c"] * 2
    assert page.count('<span class="alike">ce\n</span>') == 2 and page.count("<span") == 2
    for text in ("<i>On</i>", "ce\nupon|a", "ce\nhe\\u202e said", "<p>", "&amp;"):
        assert text in outline.text
    assert not {tag for tag, _ in outline.elements} & {"i", "b"}
    assert "<details><summary>2 texts of &lt;c&gt;</summary>" in page.replace("&lt;c>", "&lt;c&gt;")
    assert block.markdown().splitlines() == [
        "2 texts of &lt;c>:",
        "",
        '| start | a "&lt;b>" | c |',
        "| :-- | :-- | :-- |",
        r"| &lt;i>On&lt;/i> | ce upon\|a | ce `he\u202e` said |",
        "| x | &lt;p> | &amp;amp; |",
    ]


def test_drawings_take_the_ink_of_the_page_and_are_the_same_each_time() -> None:
    first, second = figure("f"), figure("f")
    assert first == second
    assert plots.INK not in first.svg and "#000000" not in first.svg and "#ffffff" not in first.svg
    # Without a fill a glyph would be black.
    fills = re.findall(r"<!-- .+? -->\s*<g([^>]*)>", first.svg)
    assert len(fills) > 5 and all("fill: currentColor" in fill for fill in fills)
    assert plots.COLORS[0] in first.svg
    assert first.png.startswith(b"\x89PNG")
    ElementTree.fromstring(first.svg.replace("xlink:href", "href"))


def test_write_leaves_whole_files(tmp_path) -> None:
    files = write(tmp_path / "out", "report", document(), {"report.json": "{}\n"})
    assert [file.name for file in files] == ["report.md", "report.html", "report.json", "f.png", "g.png"]
    assert sorted(tmp_path.glob("out/*")) == sorted(files)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match=r"cannot write the report to .*file"):
        write(tmp_path / "file", "report", document(), {})
