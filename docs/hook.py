"""Hook of mkdocs: pages are written for a reader of the repository, and become a site.

Links to files beside docs become text, as the site does not have these files. Words after the language of a
block are for `tests/test_snippets.py`. A directory of the site opens with the guide.
"""

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(?<!!)\[([^\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^```(\w+) [^\n]+$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page as the site has it."""
    place = ROOT / "docs" / Path(page.file.src_uri).parent

    def link(found: re.Match[str]) -> str:
        target = (place / found[2]).resolve()
        outside = not found[2].startswith(("http:", "https:")) and not target.is_relative_to(ROOT / "docs")
        if outside and target.exists():
            return f"{found[1]} (`{target.relative_to(ROOT)}`)"
        return found[0]

    return FENCE.sub(r"```\1", LINK.sub(link, markdown))


def on_post_build(config: Any, **_: Any) -> None:
    """Write the page that the directory of the site opens with."""
    to = "guide/index.html"
    text = f'<!doctype html><meta http-equiv="refresh" content="0; url={to}"><a href="{to}">The guide</a>\n'
    (Path(config["site_dir"]) / "index.html").write_text(text, encoding="utf-8")
