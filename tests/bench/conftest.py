"""A packed model to measure."""

from pathlib import Path

import pytest

import quantkit

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K in int4, on which no test may write."""
    directory = tmp_path_factory.mktemp("bench") / "int4"
    quantkit.quantize(SOURCE, directory, format="int4")
    return directory
