"""Docstrings are read once: they begin with a verb or a term, sentences are short, tensors have shapes."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit

PACKAGE = Path(quantkit.__file__).parent
#: All parts but cli, whose docstrings are help texts.
PARTS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name != "cli")
#: Words of a sentence.
LONGEST = 25
#: Openings of a sentence without a subject, and words that stand for a number or a name.
OPENINGS = re.compile(r"(What|That|Those|Whether|Why|How|Where|Who|Of)\b")
VAGUE = re.compile(r"\b(so many|so much|sooner|nobody|whoever)\b", re.IGNORECASE)
#: A shape, such as [M, K] or [...], or that numbers are none.
SHAPE = re.compile(r"\[[^\]]*[\w.][^\]]*\]|\bscalars?\b")
HOLDS_NUMBERS = re.compile(r"\b(Tensor|PackedTensor)\b")
ON_DEVICE = re.compile(r"(triton|gluon)\.(jit|constexpr_function)\b")


def faults(docstring: str) -> list[str]:
    # Indented lines are drawings; a name and two spaces begin the row of a table.
    lines = [line for line in docstring.splitlines() if not re.match(r"    |\w[\w, ()]*  \S", line)]
    prose = "\n".join(lines)
    sentences = re.split(r"(?<=[.:;?])\s+|\n\n", prose)
    found = [one for one in sentences if len(one.split()) > LONGEST]
    return [*found, *OPENINGS.findall(docstring[:12]), *VAGUE.findall(prose)]


def documented(part: str) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]]:
    for path in (PACKAGE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                yield f"{path.relative_to(PACKAGE)}: {getattr(node, 'name', 'module')}", node


def takes_tensors(function: ast.FunctionDef) -> bool:
    """Return True for kernels with operands, which Triton gives no type, and for functions of tensors."""
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    kinds = [match[2] for one in function.decorator_list if (match := ON_DEVICE.search(ast.unparse(one)))]
    if kinds:
        return kinds == ["jit"] and any(one.annotation is None for one in every)
    return any(one.annotation and HOLDS_NUMBERS.search(ast.unparse(one.annotation)) for one in every)


@pytest.mark.parametrize("part", PARTS)
def test_docstrings_are_read_once(part: str) -> None:
    docstrings = {name: ast.get_docstring(node) or "" for name, node in documented(part)}
    assert not {name: wrong for name, text in docstrings.items() if (wrong := faults(text))}


def test_kernel_functions_name_the_shapes_of_their_tensors() -> None:
    functions = [(name, one) for name, one in documented("kernels") if isinstance(one, ast.FunctionDef)]
    taking = {name: ast.get_docstring(one) or "" for name, one in functions if takes_tensors(one)}
    assert len(taking) > 300
    assert not [name for name, text in taking.items() if not SHAPE.search(text)]


@pytest.mark.parametrize(
    "text", ["What x is.", "Room for so many rows.", "Return " + "one more word " * 9 + "."]
)
def test_a_sentence_that_stumbles_is_found(text: str) -> None:
    assert faults(text)
    assert not faults("Return y [m, n] = x W^T.\n\n    What is drawn here may be of any length.")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("@triton.jit\ndef f(x, N: tl.constexpr): ...", True),
        ("@triton.jit\ndef f(N: tl.constexpr): ...", False),
        ("@gluon.constexpr_function\ndef f(W): ...", False),
        ("def f(x: list[torch.Tensor]): ...", True),
        ("def f(x: torch.dtype): ...", False),
    ],
)
def test_functions_of_tensors_are_told_apart(source: str, expected: bool) -> None:
    function = ast.parse(source).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert takes_tensors(function) is expected
