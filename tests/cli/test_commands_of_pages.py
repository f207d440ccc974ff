"""Commands in the pages of docs exist, with the options that the pages give them.

`tests/test_snippets.py` runs those of the guide. Pages of reference have commands with words such as SOURCE
in place of files; their options are looked up here.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import typer.main

from quantkit.cli.app import app

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: At the start of a line, of what is in backticks, after a prompt, or after `python -m`.
COMMAND = re.compile(r"(?:^ *|`|\$ |-m )quantkit +([a-z]+)\b([^`#\n]*)", re.MULTILINE)
OPTION = re.compile(r"(?<!\S)\[?(--?[a-z][\w-]*)")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands in fences and between backticks of a page, and what follows them."""
    joined = re.sub(r"\\\n *", " ", text)
    code = [*FENCE.findall(joined), *re.findall(r"`[^`\n]+`", FENCE.sub("", joined))]
    for part in code:
        yield from COMMAND.findall(part)


def test_commands_and_options_of_pages_exist() -> None:
    known = {
        name: {option for parameter in one.params for option in (*parameter.opts, *parameter.secondary_opts)}
        for name, one in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
    }
    pages = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
    found = [(page.name, *one) for page in pages for one in commands(page.read_text())]
    assert len(found) > 150, "the pages are read"
    for page, name, rest in found:
        assert name in known, f"{page}: quantkit {name}"
        for option in OPTION.findall(rest):
            assert option in known[name] or option in ("-h", "--help"), f"{page}: quantkit {name} {option}"


def test_an_option_that_is_none_is_found() -> None:
    page = "```\nquantkit eval OUT \\\n  --agianst MODEL [--json FILE]\n```\n`quantkit plan M --fit 24GB`\n"
    assert [(name, OPTION.findall(rest)) for name, rest in commands(page)] == [
        ("eval", ["--agianst", "--json"]),
        ("plan", ["--fit"]),
    ]
