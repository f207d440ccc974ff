"""A packed checkpoint to run the command line on."""

from pathlib import Path

import pytest

import quantkit

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
