"""Links in pages lead somewhere, pages stay short, and words of the glossary are there once."""

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import quantkit

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [
    *ROOT.glob("*.md"),
    *DOCS.rglob("*.md"),
    ROOT / "tests" / "README.md",
    ROOT / "examples" / "README.md",
]
#: Lines of all pages in docs, and of one that is read whole.
MOST_LINES, MOST_OF_ARCHITECTURE = 3000, 110
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def without_code(text: str) -> str:
    """A page without what stands in code."""
    return re.sub(r"`[^`\n]*`", "``", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    headings = re.findall(
        r"^#+ (.*)$",
        re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE),
        re.MULTILINE,
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for link in LINK.findall(without_code(page.read_text())):
        if link.startswith(("http://", "https://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{page.name}: there is no {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {target.name} has no heading #{anchor}"


def test_pages_that_code_names_exist() -> None:
    for folder in ("quantkit", "benchmarks", "tests"):
        for path in (ROOT / folder).rglob("*.py"):
            for name in re.findall(r"\bdocs/[\w-]+\.\w+", path.read_text()):
                assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def test_pages_stay_short() -> None:
    lines = {page.name: len(page.read_text().splitlines()) for page in DOCS.glob("*.md")}
    assert sum(lines.values()) <= MOST_LINES, lines
    assert lines["architecture.md"] <= MOST_OF_ARCHITECTURE


def rows(page: str, head: str) -> list[str]:
    """The first cells of the table with this head."""
    text = (DOCS / page).read_text()
    table = text.partition(f"| {head} |")[2].partition("\n\n")[0]
    return [line.split("|")[1].strip() for line in table.splitlines()[2:]]


def test_nouns_and_terms_are_few_and_defined_once() -> None:
    nouns, terms = rows("architecture.md", "noun"), rows("glossary.md", "term")
    assert 0 < len(nouns) <= 15 and 0 < len(terms) <= 30
    assert len({word.lower() for word in nouns + terms}) == len(nouns) + len(terms) - len({*nouns} & {*terms})
    # Only the Hessian is in both, as noun and symbol.
    assert {*nouns} & {*terms} <= {"Hessian"}


def test_what_to_edit_is_there() -> None:
    """Each path of "to add X, edit Y" exists, and each name stands in one of the files of its row."""
    text = (DOCS / "architecture.md").read_text().partition("| to add |")[2].partition("\n\n")[0]
    for row in text.splitlines()[2:]:
        quoted = re.findall(r"`([^`]+)`", row)
        paths = [ROOT / "quantkit" / one for one in quoted if "/" in one]
        assert paths and all(path.exists() for path in paths), row
        code = "".join(path.read_text() for path in paths if path.suffix == ".py")
        assert all(one in code for one in quoted if "/" not in one), row


def test_the_readme_has_a_table_on_its_first_screen() -> None:
    first = (ROOT / "README.md").read_text().splitlines()[:40]
    assert any(line.startswith("|---") for line in first)


SITE = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def pages_of(part: Any) -> Iterator[str]:
    """The pages below an entry of the site's navigation."""
    if isinstance(part, str):
        yield part
    for one in part if isinstance(part, list) else part.values() if isinstance(part, dict) else ():
        yield from pages_of(one)


def test_the_site_has_every_page_once_and_the_guide_first() -> None:
    listed = list(pages_of(SITE["nav"]))
    assert listed[0] == "guide/index.md" and len(listed) == len(set(listed))
    assert {*listed} == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}


def test_the_guide_names_each_of_its_pages() -> None:
    text = (DOCS / "guide" / "index.md").read_text()
    pages = {page.name for page in (DOCS / "guide").glob("*.md")} - {"index.md"}
    assert pages == {*re.findall(r"\]\(([\w-]+\.md)\)", text)}


def test_the_api_reference_names_what_there_is() -> None:
    """All public names are in it; a name that moved would be a page that cannot be built."""
    named = re.findall(r"^::: ([\w.]+)$", (DOCS / "api" / "index.md").read_text(), re.MULTILINE)
    for one in named:
        module, _, name = one.rpartition(".")
        assert one in sys.modules or hasattr(importlib.import_module(module), name), one
    public = {one.rpartition(".")[2] for one in named}
    assert {*quantkit.__all__} - {"__version__", "QuantkitError"} <= public


def test_notebooks_have_no_outputs() -> None:
    notebooks = list((DOCS / "notebooks").glob("*.ipynb"))
    assert len(notebooks) == 2
    for path in notebooks:
        cells = json.loads(path.read_text())["cells"]
        assert not [one for one in cells if one.get("outputs") or one.get("execution_count")], path.name


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90
