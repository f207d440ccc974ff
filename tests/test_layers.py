"""The architecture's dependency direction, read from the imports."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "quantkit"

#: Modules that every part may import.
COMMON = {"about", "errors", "escaping", "files", "leaving", "meant", "progress", "progress_bar", "signals"}
#: What else each part may import, besides itself.
BASE = {"packing", "checkpoint"}
QUANTIZING = BASE | {"calibrate", "recipes", "kernels", "model", "memory", "workers", "devices"}
RUNNING = BASE | {"calibrate", "kernels", "model", "memory", "workers", "devices"}
PROVING = QUANTIZING | {"quantization", "runtime"}
ALLOWED = {
    "packing": set(),
    "kernels": {"packing"},
    "checkpoint": {"packing"},
    "calibrate": BASE,
    "recipes": BASE | {"calibrate"},
    "model": {"packing", "checkpoint", "memory"},
    "quantization": QUANTIZING,
    "runtime": RUNNING,
    "targets": BASE | {"model"},
    "adapters": QUANTIZING | {"quantization", "targets"},
    "verification": PROVING,
    "eval": RUNNING | {"runtime"},
    "bench": RUNNING | {"runtime", "eval"},
    "report": {"packing", "checkpoint", "eval", "bench"},
    "publish": PROVING | {"verification", "eval", "bench", "report"},
    "cli": PROVING
    | {
        "verification",
        "eval",
        "bench",
        "report",
        "publish",
        "quantizing",
        "converting",
        "exporting",
        "fitting",
        "merging",
        "planning",
    },
}
#: Lines of a file, and parameters of a function that is no kernel.
LONGEST, MOST_PARAMETERS = 450, 10
#: Functions with more, and why.
MANY_PARAMETERS = {
    "evaluate": "public: a script's call has an option per parameter and needs no other import",
    "merge": "public: as `evaluate`",
    "rotated_attention": "the tensors of the two operations in whose place it is",
}
MODULES = sorted(path for path in PACKAGE.rglob("*.py") if path.parent != PACKAGE)


def imported_parts(source: str) -> set[str]:
    parts = set()
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        parts |= {name.split(".")[1] for name in names if name.startswith("quantkit.")}
    return parts


def test_imports_point_down() -> None:
    upwards = {}
    for path in MODULES:
        part = path.relative_to(PACKAGE).parts[0]
        found = imported_parts(path.read_text(encoding="utf-8")) - {part, *COMMON, "__version__"}
        if found - ALLOWED[part]:
            upwards[str(path.relative_to(PACKAGE))] = sorted(found - ALLOWED[part])
    assert upwards == {}


def test_what_every_part_may_import_imports_no_part() -> None:
    files = {name: PACKAGE / f"{name}.py" for name in COMMON}
    found = {name: imported_parts(path.read_text(encoding="utf-8")) for name, path in files.items()}
    assert {name: parts - COMMON for name, parts in found.items() if parts - COMMON} == {}


def test_a_planted_upward_import_is_found() -> None:
    assert imported_parts("def f():\n    from quantkit.cli.main import app\n") == {"cli"}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    """CONTRIBUTING.md says so."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert {path.name: count for path, count in lines.items() if count > LONGEST} == {}


def test_functions_with_many_parameters_have_a_reason() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and not any(
                ".jit" in ast.unparse(one) for one in node.decorator_list
            ):
                arguments = node.args
                count = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
                found |= {node.name} if count > MOST_PARAMETERS else set()
    assert found == set(MANY_PARAMETERS)


def test_every_part_is_covered() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(ALLOWED)
