"""The architecture's dependency direction, read from the imports."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "quantkit"

#: Modules that every part may import.
COMMON = {"about", "errors", "escaping", "files", "leaving", "progress", "signals"}
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
    "verification": PROVING,
    "eval": RUNNING | {"runtime"},
    "bench": RUNNING | {"runtime", "eval"},
    "report": {"checkpoint", "eval", "bench"},
    "publish": PROVING | {"verification", "eval", "bench", "report"},
    "cli": PROVING | {"verification", "eval", "bench", "report", "publish", "quantizing", "converting"},
}
#: Lines of a file.
LONGEST = 450
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


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_down(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0]
    found = imported_parts(path.read_text(encoding="utf-8")) - {part, *COMMON, "__version__"}
    assert found <= ALLOWED[part], f"{path.name} in {part} imports {sorted(found - ALLOWED[part])}"


def test_a_planted_upward_import_is_found() -> None:
    assert imported_parts("def f():\n    from quantkit.cli.main import app\n") == {"cli"}


def test_no_file_is_longer_than_a_reader_can_hold() -> None:
    """CONTRIBUTING.md says so."""
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in PACKAGE.rglob("*.py")}
    assert {path.name: count for path, count in lines.items() if count > LONGEST} == {}


def test_every_part_is_covered() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders <= set(ALLOWED)


def test_nothing_unpickles_or_evaluates_or_trusts_remote_code() -> None:
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"torch.load", "eval", "exec", "pickle.load", "pickle.loads"}, path
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert ast.unparse(node.value) == "False", path
