"""No code asks for a kernel by its name: what differs between kernels are fields of `Kernel`."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import quantkit
from quantkit.kernels.registry import KERNELS

PACKAGE = Path(quantkit.__file__).parent
NAMES = {kernel.name for kernel in KERNELS}
#: Files that may spell names: old names in tile tables are converted to those of today.
CONVERTS = {"kernels/tuning/tile_table.py"}


def spelled(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each kernel's name in code, but for the rows that give it."""
    tree = ast.parse(source)
    given = {
        id(part)
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") in ("Kernel", "Layout", "_fused")
        for part in (*call.args[:1], *(word.value for word in call.keywords if word.arg == "name"))
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and node.value in NAMES and id(node) not in given:
            yield node.lineno, str(node.value)


def test_a_kernel_is_told_by_its_fields() -> None:
    found = {
        f"{path.relative_to(PACKAGE)}:{line}": name
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).as_posix() not in CONVERTS
        for line, name in spelled(path.read_text(encoding="utf-8"))
    }
    assert not found


@pytest.mark.parametrize(
    "code", ['kernel == "fused-gemv"', 'kernel in ("unpack", "other")', '{"dequantize": 1}']
)
def test_a_spelled_name_is_found(code: str) -> None:
    assert list(spelled(code))
    assert not list(spelled('Kernel(name="fused-gemv", layout=Layout("torch-int4", build))'))
