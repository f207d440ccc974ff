"""Scripts that run engines need their environments; that each imports what it needs holds here."""

import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path != Path(__file__))


@pytest.mark.parametrize("name", [name for name in SCRIPTS if name != "__init__"])
def test_a_script_imports(name: str) -> None:
    importlib.import_module(f".{name}", __package__)
