"""A real limit of the kernel on the size of files, which also code in Rust runs into."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import SafetensorError

from quantkit.errors import QuantkitError

from .scenarios import Evaluate, Failed, Quantize, Save, Scenario, command

SOURCE = Path(__file__).parents[2] / "examples" / "stories260K"
OPTIONS = ("--method", "rtn", "--no-check", "--max-shard-size", "150KB")


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("limits") / "packed"
    command("quantize", SOURCE, directory, *OPTIONS)
    return directory


@contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """No file can grow beyond so many bytes: writes fail with EFBIG, after a short one."""
    # Python ignores the signal that comes with it.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


SLOW = [(kind, part) for kind in ("quantize", "save", "save shards") for part in (0, 0.05, 1)] + [
    ("eval", 0.5)
]


@pytest.mark.parametrize(
    ("kind", "part"),
    [
        *((kind, 0.5) for kind in ("quantize", "save", "save shards")),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW),
    ],
)
def test_files_that_cannot_grow(packed: Path, tmp_path: Path, kind: str, part: float) -> None:
    scenario: Scenario = {
        "quantize": Quantize(kind, SOURCE, OPTIONS),
        "save": Save(kind, packed),
        "save shards": Save(kind, packed, {"max_shard_size": "150KB"}),
        "eval": Evaluate(kind, SOURCE, packed),
    }[kind]
    whole, here = tmp_path / "whole", tmp_path / "here"
    for place in (whole, here):
        place.mkdir()
        scenario.prepare(place)
    expected = scenario.result(whole, scenario.run(whole))
    # Of an evaluation, the logits of a window of 64 tokens from a vocabulary of 512.
    largest = 63 * 512 * 4 if kind == "eval" else max(map(len, expected.values()))
    with (
        pytest.raises((Failed, QuantkitError, OSError, SafetensorError), match="File too large"),
        limited(int(largest * part) - (part == 1)),
    ):
        scenario.run(here)
    assert scenario.unsound(here, expected) is None
    assert scenario.result(here, scenario.rerun(here)) == expected
