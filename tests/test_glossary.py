"""docs/glossary.md is a contract: its names are in the code, and words that it bans are in no public name."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "quantkit"


def rows() -> list[list[str]]:
    """Cells of each term: term, symbol, name, banned words, meaning."""
    lines = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")][1:]


def banned() -> list[str]:
    return [word.strip() for row in rows() for word in row[3].split(",") if word.strip()]


def snake(name: str) -> str:
    """`HessianSum` and `HESSIAN_SUM` as `_hessian_sum_`, so that whole words are found."""
    return f"_{re.sub(r'(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])', '_', name).lower().strip('_')}_"


def public_names(source: str) -> Iterator[str]:
    """Classes, functions, constants and fields of a module; nothing inside of functions."""
    pending = list(ast.parse(source).body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.ClassDef):
            pending += node.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        yield from (one.id for one in targets if isinstance(one, ast.Name))


def offences(source: str, words: list[str]) -> list[tuple[str, str]]:
    names = [name for name in public_names(source) if not name.startswith("_")]
    return [(name, word) for name in names for word in words if f"_{word.replace(' ', '_')}_" in snake(name)]


def test_each_name_is_in_the_code() -> None:
    code = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    words = set(re.findall(r"\w+", code)) | {path.stem for path in PACKAGE.rglob("*.py")}
    assert not [row[2] for row in rows() if row[2].strip("`") not in words]


def test_no_public_name_has_a_banned_word() -> None:
    words = banned()
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if (names := offences(f"{path.stem} = 0\n" + path.read_text(encoding="utf-8"), words))
    }
    assert not found and len(words) > 20


def test_no_term_is_banned() -> None:
    assert not {row[0] for row in rows()} & set(banned())


@pytest.mark.parametrize(
    "code", ["class SecondMoment: ...", "class A:\n    moments: int", "TTFT = 1", "twin = 0"]
)
def test_a_banned_name_is_found(code: str) -> None:
    assert offences(code, banned())
    assert not offences("def _twin():\n    moments = 0", banned())
