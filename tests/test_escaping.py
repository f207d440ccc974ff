"""Whatever a name is, nothing but its text comes of it, as parsers of each language read it."""

import ast
import re
from html.parser import HTMLParser

import yaml
from huggingface_hub import ModelCard
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from markdown_it.token import Token

from quantkit import escaping
from quantkit.escaping import Code
from quantkit.report.document import Bullets, Command, Document, Section, Table, Text

#: What markup of any kind is made of, and what is no character of a page.
PIECES = (
    *"`\\|<>&![](){}*_~@#-+=.:;^$'\"/%,? \t\n\r\0\x1b\x7f\x85\xa0\u2028\u202e\u2066\u200b\ufeff\udc80",
    *("``", "```", "~~~", "---", "***", "===", "  ", "    ", "\r\n", "\\`", "\\|", "\\\\|", "`|`", "]("),
    *(
        "a",
        "B",
        "é",
        "字",
        "1",
        "12345678901",
        "1.",
        "2)",
        "- ",
        "+ ",
        "# ",
        "> ",
        "q_proj",
        "__init__",
        "![",
    ),
    *("http://a.b/c", "https://", "ftp://x.y", "www.a.de", "me@a.org", "@user", "//a.com", "model.md"),
    *("mailto:a@b.c", ":smile:", "$x$", "$$", "\\(x\\)", "&amp;", "&#35;", "&copy", "&#x0;", "[^1]", "x.com"),
    *("<b>", "</td>", "<!--", "-->", "<script>", "<http://a.b>", "<a@b.c>", "<?", "<![CDATA[", "[a]: /u"),
    *(
        "[!NOTE]",
        ":--",
        "| - |",
        "![t](http://a/b.png)",
        "[red]",
        "\x1b[31m",
        "\x1b]8;;http://a\x1b\\",
        "[a]",
    ),
)
NAMES = st.lists(st.sampled_from(PIECES) | st.characters(), max_size=12).map("".join)
PARSER = MarkdownIt("commonmark").enable(["table", "strikethrough"])
#: Extended autolinks of GitHub's specification, and names of domains, which some renderers link too.
LINKS = re.compile(
    r"(?i)www\.[\w-]|(?:https?|ftp)://|(?:mailto|xmpp):|[\w.+-]+@[\w-]|//[\w-]+\.\w|\$\$|\\[(\[]|:\w+:"
)


def text_of(inline: Token) -> str:
    """The text of a line, of which nothing else may be made: text, and code in which nothing is read."""
    plain, whole = "", ""
    for child in inline.children or ():
        assert child.type in {"text", "text_special", "code_inline"}, child
        assert not child.attrs
        whole += child.content
        plain += child.content if child.type != "code_inline" else "\0"
    # Renderers look for links in neighbouring texts together.
    assert not LINKS.search(plain), plain
    return whole


def only_text(markdown: str) -> list[str]:
    """The texts of the lines of a document that has no links, no HTML and no images but plots beside it."""
    texts = []
    for token in PARSER.parse(markdown):
        assert token.type not in {"html_block", "blockquote_open", "hr", "code_block", "lheading_open"}, token
        for child in token.children or ():
            if child.type == "image":
                assert re.fullmatch(r"[\w-]+\.png", str(child.attrs["src"])), child
                # What stands for an image is an attribute, in which nothing is read.
                child.attrs, child.type = {}, "code_inline"
        if token.type == "inline":
            texts.append(text_of(token))
    return texts


def read(markdown: str, *shape: str) -> list[str]:
    """The texts of the lines of a document that is made of the elements of `shape` and of nothing else."""
    tokens = PARSER.parse(markdown)
    assert [token.tag for token in tokens if token.nesting == 1 or token.type == "fence"] == list(shape)
    return [text_of(token) for token in tokens if token.type == "inline"]


def line(text: str) -> str:
    """The text as one line of printable characters."""
    joined = text.replace("\r\n", " ").replace("\n", " ").replace("\r", " ")
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in joined)


@settings(max_examples=400, deadline=None)
@example("``x` <img src=x>`")
@example("\\`<b>`")
@example("![t](http://a.b/c.png)")
@example("a|b`c|d")
@example("     x")
@given(NAMES)
def test_nothing_but_text_comes_of_a_name_in_markdown(name: str) -> None:
    for text in (name, Code(name), ("of ", Code(name), name, " and", name)):
        whole = line(text if isinstance(text, str) else "".join(text))
        if whole.strip():
            assert read(escaping.markdown_block(text), "p") == [whole]
            assert read(f"- {escaping.markdown_block(text)}\n- b", "ul", "li", "p", "li", "p") == [whole, "b"]
        assert read(f"## {escaping.markdown(text)}", "h2") == [whole]
        row = f"| {escaping.markdown_cell(text)} |"
        table = read(f"{row}\n| --: |\n{row}", "table", "thead", "tr", "th", "tbody", "tr", "td")
        assert table == [whole, whole]


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_bars_and_backslashes_end_no_cell_for_the_other_parser_either(name: str) -> None:
    """GitHub's own takes a backslash and what follows it together, before it looks for bars."""
    for text in (name, Code(name)):
        cell = escaping.markdown_cell(text)
        assert "|" not in re.sub(r"\\.", "", cell)


@settings(max_examples=100, deadline=None)
@given(NAMES)
@example("1")
@example("n")
def test_nothing_but_text_comes_of_a_name_in_a_document(name: str) -> None:
    document = Document(
        name,
        [
            Section(
                name,
                [
                    Text(("of ", name)),
                    Bullets([name, ("x", Code(name))]),
                    Table([name, "n"], [[name, "1"]], frozenset({name})),
                    Command(name),
                ],
            )
        ],
    )
    lists = ["ul", "li", *(["p"] if line(name) else []), "li", "p"]
    rows = ["table", "thead", "tr", "th", "th", "tbody", "tr", "td", "td"]
    texts = read(document.markdown(), "h1", "h2", "p", *lists, *rows, "code")
    # Two cells are the table's own, which a name may be like.
    assert texts.count(line(name)) - ("n", "1").count(line(name)) >= 4
    (fence,) = [token for token in PARSER.parse(document.markdown()) if token.type == "fence"]
    assert fence.content.rstrip("\n") == escaping.printable(name).rstrip("\n") and not fence.info
    page = Page(document.html())
    assert set(page.tags) <= PAGE
    assert not line(name) or page.lines.count(line(name)) >= 4
    document.markdown().encode()
    document.html().encode()


PAGE = {
    *("html", "head", "meta", "title", "style", "body", "section", "h1", "h2", "p", "ul", "li", "code"),
    *("pre", "div", "table", "thead", "tbody", "tr", "th", "td"),
}


class Page(HTMLParser):
    """The elements of a page, and the text between two tags."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.lines: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        assert {key for key, _ in attrs} <= {"class", "lang", "charset", "name", "content"}

    def handle_data(self, data: str) -> None:
        self.lines.append(data)

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)

    def unknown_decl(self, data: str) -> None:
        raise AssertionError(data)


@settings(max_examples=200, deadline=None)
@given(NAMES, st.lists(NAMES, max_size=3))
def test_front_matter_is_what_was_put_in_it(name: str, names: list[str]) -> None:
    front = {"base_model": name, "tags": names}
    text = f"---\n{escaping.yaml(front)}---\n\n# card\n"
    assert text.isascii() and yaml.safe_load(escaping.yaml(front)) == front
    if "\ud800" <= max(name + "".join(names), default="") <= "\udfff":
        return
    card = ModelCard(text, ignore_metadata_errors=True)
    assert card.text == "\n# card\n"


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_code_to_copy_has_a_name_as_a_literal(name: str) -> None:
    literal = escaping.python(name)
    assert literal.isprintable() and ast.literal_eval(literal) == name


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_labels_of_plots_are_neither_formulas_nor_hidden(name: str) -> None:
    from matplotlib.text import Text as Label

    label = escaping.plot(name)
    assert not label.startswith("_") and label.isprintable() and len(label) < 130
    shown, is_formula = Label()._preprocess_math(label)
    assert not is_formula
    assert len(line(name)) > 60 or shown.strip() == line(name).strip()


@settings(max_examples=200, deadline=None)
@given(NAMES)
def test_terminals_get_no_control_characters(name: str) -> None:
    assert escaping.printable(name).replace("\n", "").replace("\t", "").isprintable()
    assert escaping.one_line(name) == line(name)


def test_words_that_renderers_act_on_are_code_and_others_stay_readable() -> None:
    plain = "model.layers.0.self_attn.q_proj int4 g32 ± 0.01 (4.5 %), stories.txt: 1-2, 0.1.0 & more"
    assert escaping.markdown(plain) == plain
    assert escaping.markdown("see http://a.b and @me") == "see `http://a.b` and `@me`"
    assert escaping.markdown(("run ", Code("a`b"), "!")) == "run ``a`b``!"
    assert escaping.markdown("*a* _b_ [c](d) <e> `f` ~g~ #h") == (
        r"\*a\* \_b\_ \[c\](d) &lt;e> &#96;f&#96; \~g\~ \#h"
    )
    assert escaping.plot("__x" * 50) == f" {('__x' * 50)[:30]}…{('__x' * 50)[-30:]}"
