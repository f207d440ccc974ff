"""Import circles inside a part of the package, and folders that hold more files than a reader can."""

import ast
from pathlib import Path

from .test_layers import PACKAGE

#: Files of a folder, `__init__.py` aside.
MOST_FILES = 20
#: Folders that have more. An entry goes when its folder is split.
LARGE_FOLDERS: set[str] = set()
#: Modules that import each other in a circle. An entry goes when its circle is opened.
CIRCLES: tuple[set[str], ...] = ()


def modules(package: Path) -> dict[str, Path]:
    """Files by the name they are imported by, such as "quantkit.packing.schemes"."""
    names = {path: path.relative_to(package.parent).with_suffix("").parts for path in package.rglob("*.py")}
    return {".".join(parts[:-1] if parts[-1] == "__init__" else parts): path for path, parts in names.items()}


def imports(source: str, known: set[str]) -> set[str]:
    """The modules that a file imports, also in functions and under `if TYPE_CHECKING`."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # A name is a module of a package, or something that the module defines.
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inner & known or {node.module}
            found |= {node.module} if inner - known else set()
    return found & known


def circles(graph: dict[str, set[str]]) -> set[frozenset[str]]:
    """The strongly connected components of more than one module, by the reach of each."""
    reach = {name: _reached(graph, name) for name in graph}
    return {
        frozenset(group)
        for name in graph
        if len(group := {other for other in reach[name] if name in reach[other]} | {name}) > 1
    }


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        if (name := waiting.pop()) not in seen:
            seen.add(name)
            waiting += graph[name]
    return seen


def graphs_of(package: Path) -> list[dict[str, set[str]]]:
    """What modules of each part import of the same part; the modules beside the parts are one, too.

    `tests/test_layers.py` sees to imports between parts. The package itself, which names what is public, is
    left out.
    """
    files = modules(package)
    parts: dict[str, set[str]] = {}
    for name, path in files.items():
        inside = path.relative_to(package).parts
        if path != package / "__init__.py":
            parts.setdefault(inside[0] if len(inside) > 1 else "", set()).add(name)
    return [
        {name: imports(files[name].read_text(encoding="utf-8"), names) - {name} for name in names}
        for names in parts.values()
    ]


def test_no_part_has_a_circle_of_imports() -> None:
    """Exactly those that `CIRCLES` lists, so that an entry goes with its circle."""
    files = modules(PACKAGE)
    # "packing/schemes" of "quantkit.packing.schemes".
    found = {
        frozenset(str(files[name].relative_to(PACKAGE).with_suffix("")) for name in circle)
        for graph in graphs_of(PACKAGE)
        for circle in circles(graph)
    }
    assert sorted(map(sorted, found)) == sorted(map(sorted, CIRCLES))


def test_no_folder_has_more_files_than_a_reader_can_hold() -> None:
    """Exactly those that `LARGE_FOLDERS` lists have more."""
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {folder: sum(file.name != "__init__.py" for file in folder.glob("*.py")) for folder in folders}
    found = {str(folder.relative_to(PACKAGE)) for folder, count in counts.items() if count > MOST_FILES}
    assert found == LARGE_FOLDERS


def test_planted_circles_are_found(tmp_path: Path) -> None:
    """Of indented and type-checking imports, and of a module by its package; not of what has no way back."""
    package = tmp_path / "toy"
    texts = {
        "__init__": "",
        "a/__init__": "",
        "a/one": "def f():\n    from toy.a.two import g\n",
        "a/two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.a import three\n",
        "a/three": "import toy.a.one\nfrom toy.b import shared\n",
        "a/four": "from toy.a.one import f\nfrom toy.b import shared\n",
        "b": "from toy.a.one import f\nshared = 1\n",
    }
    for name, text in texts.items():
        path = package / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    found = [circle for graph in graphs_of(package) for circle in circles(graph)]
    assert found == [{"toy.a.one", "toy.a.two", "toy.a.three"}]
