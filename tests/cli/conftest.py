"""Packed checkpoints to run the command line on, whole and damaged."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import quantkit
from quantkit.verification.prompt_logits import compare

from ..conftest import Run

__all__ = ["EXAMPLES", "SOURCE", "STORIES", "Run"]

EXAMPLES = Path(__file__).parents[2] / "examples"
SOURCE = EXAMPLES / "stories260K"
STORIES = EXAMPLES / "stories.txt"


@pytest.fixture(autouse=True)
def small_products(one_thread: None) -> None:
    """Also where no command runs."""


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in int4, groups of 128, on which no test may write."""
    directory = tmp_path_factory.mktemp("cli") / "int4"
    quantkit.quantize(SOURCE, directory, format="int4")
    return directory


@pytest.fixture
def damaged(packed: Path, tmp_path: Path) -> Path:
    """A copy of `packed` to damage."""
    return Path(shutil.copytree(packed, tmp_path / "damaged"))


@pytest.fixture
def reloaded_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """`verify` runs the model in this process: a fresh one, which other tests have, imports for seconds."""

    run = subprocess.run

    def compared(command: list[str], **options: Any) -> Any:
        # matplotlib looks for fonts so, too.
        if command[0] != sys.executable:
            return run(command, **options)
        return subprocess.CompletedProcess(command, 0, json.dumps(compare(Path(command[-1]))), "")

    monkeypatch.setattr("quantkit.verification.verify.subprocess.run", compared)
