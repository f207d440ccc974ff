"""Every reason against a CUDA graph is a row of one table, and docs/running.md lists it."""

import ast
from pathlib import Path

import quantkit
from quantkit.runtime.cuda_graphs import refusals

RUNTIME = Path(quantkit.__file__).parent / "runtime"
DOCS = Path(__file__).parents[3] / "docs" / "running.md"
#: Functions whose texts say why something is not captured.
ASKED = {
    "why_unfit",
    "why_unfit_adapters",
    "why_ranks_unfit",
    "why_no_static_cache",
    "why_not_asked",
    "why_not",
    "why_never",
}


def own_texts(source: str) -> list[str]:
    """Texts that such functions return, and that `NotCaptured` is raised with, without the table."""
    tree = ast.parse(source)
    found: list[ast.AST | None] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name in ASKED:
            found += [one.value for one in ast.walk(node) if isinstance(one, ast.Return)]
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("NotCaptured", "_refuse"):
            found += node.args
    texts = [one for one in found if isinstance(one, ast.Constant | ast.JoinedStr)]
    return [ast.unparse(one) for one in texts if getattr(one, "value", one) is not None]


def test_reasons_are_taken_from_the_table() -> None:
    files = [path for path in RUNTIME.rglob("*.py") if path.name != "parallel_plan.py"]
    assert not {path.name: texts for path in files if (texts := own_texts(path.read_text(encoding="utf-8")))}
    assert own_texts('def why_never():\n    return "no"\nraise NotCaptured(f"{x} is odd")')


def test_the_docs_have_the_table() -> None:
    rows: dict[str, list[str]] = {}
    for one in refusals.REFUSALS:
        rows.setdefault(one.scope, []).append(one.text)
    section = DOCS.read_text(encoding="utf-8").split("## What is not captured")[1].split("\n## ")[0]
    assert [line for line in section.splitlines() if line.startswith("| ")][1:] == [
        f"| {what} | {'<br>'.join(texts)} |" for what, texts in rows.items()
    ]


def test_no_reason_is_unused() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in RUNTIME.rglob("*.py"))
    names = [name for name, value in vars(refusals).items() if isinstance(value, refusals.Refusal)]
    assert [name for name in names if f"refusals.{name}.because" not in code] == []
