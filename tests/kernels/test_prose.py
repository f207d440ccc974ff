"""Docstrings of kernels are read once: they begin with a verb or a term, and sentences are short."""

import ast
import re
from pathlib import Path

import pytest

import quantkit

KERNELS = Path(quantkit.__file__).parent / "kernels"
#: Words of a sentence.
LONGEST = 25
#: Openings of a sentence without a subject, and words that stand for a number or a name.
OPENINGS = re.compile(r"(What|That|Those|Whether|Why|How|Where|Who|Of)\b")
VAGUE = re.compile(r"\b(so many|so much|sooner|nobody|whoever)\b", re.IGNORECASE)


def faults(docstring: str) -> list[str]:
    # Indented lines are drawings; a name and two spaces begin the row of a table.
    lines = [line for line in docstring.splitlines() if not re.match(r"    |\w[\w, ]*  \S", line)]
    prose = "\n".join(lines)
    sentences = re.split(r"(?<=[.:;?])\s+|\n\n", prose)
    found = [one for one in sentences if len(one.split()) > LONGEST]
    return [*found, *OPENINGS.findall(docstring[:12]), *VAGUE.findall(prose)]


def test_docstrings_are_read_once() -> None:
    found = {}
    for path in KERNELS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                name = f"{path.relative_to(KERNELS)}: {getattr(node, 'name', 'module')}"
                if wrong := faults(ast.get_docstring(node) or ""):
                    found[name] = wrong
    assert not found


@pytest.mark.parametrize(
    "text", ["What x is.", "Room for so many rows.", "Return " + "one more word " * 9 + "."]
)
def test_a_sentence_that_stumbles_is_found(text: str) -> None:
    assert faults(text)
    assert not faults("Return y [m, n] = x W^T.\n\n    What is drawn here may be of any length.")
