"""The probe kernel of a trellis decodes what the slow reference does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import pytest

from ..kernels import gluon

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture
def interpreted(benchmark: ModuleType, interpreter: bool, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device on which the kernel runs, on a CPU in the interpreter."""
    if not interpreter:
        return "cuda"
    gluon.teach(monkeypatch)
    path = Path(benchmark.__file__).with_name("trellis_kernel.py")
    found = gluon.interpreted({"trellis_kernel": path})
    monkeypatch.setattr(benchmark, "gemv", found["trellis_kernel"].gemv)
    return "cpu"


@pytest.mark.parametrize("code", ["int2", "trellis", "pairs"])
@pytest.mark.parametrize("tile", [(32, 4, 1), (64, 4, 2)])
def test_the_kernel_decodes_as_the_reference(
    benchmark: ModuleType, interpreted: str, code: str, tile: tuple[int, int, int]
) -> None:
    assert benchmark.error(code, interpreted, tile) < 5e-3


def test_a_trellis_is_the_sum_of_two_halves_of_a_hash(benchmark: ModuleType) -> None:
    words = torch.zeros(1, 1, 32, 4, dtype=torch.int32)
    words[..., 0] = 0x0000_0004
    # The window of the first weight is 4, that of the second 1; the last words are zeros.
    first = (4 * 89226354 + 64248484) % 2**32 & 0x8FFF8FFF ^ 0x3B603B60
    halves = torch.tensor([first & 0xFFFF, first >> 16], dtype=torch.int32).to(torch.int16)
    value = halves.view(torch.float16).double().sum()
    weights = benchmark.decoded(words, "trellis")
    assert weights[0, 0] == value and weights[0, 1] != value
    # The window of the last weight has the first bits of the first word: 4 is moved by two bits.
    assert (weights[:, 63] == benchmark.hashed(torch.tensor(16)).sum()).all()


def test_values_of_a_trellis_are_about_normal(benchmark: ModuleType) -> None:
    values = benchmark.hashed(torch.arange(2**16)).sum(-1)
    assert abs(float(values.mean())) < 0.02 and abs(float((values / values.std()).pow(4).mean()) - 3) < 0.3


def test_the_fastest_tile_of_each_code_is_stored(
    benchmark: ModuleType, interpreted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time(calls: Sequence[Callable[[], None]]) -> float:
        for call in calls:
            call()
        return 4.0

    monkeypatch.setattr(benchmark, "TILES", ((32, 4, 1),))
    monkeypatch.setattr(benchmark, "SLICES", (1, 2))
    monkeypatch.setattr(benchmark, "copies", lambda nbytes: 2)
    monkeypatch.setattr(benchmark, "read_time", lambda nbytes: 3.0)
    monkeypatch.setattr(benchmark, "graph_time", time)
    found = json.loads(json.dumps({"32x512": benchmark.time_shape(32, 512, interpreted)}))
    assert found["32x512"]["codes"]["trellis"] == {"us": 4.0, "tile": [32, 4, 1, 1], "share": 0.75}
    assert "trellis     4.00         75.0%" in benchmark.table(found)


def test_a_trellis_takes_more_instructions_than_codes(benchmark: ModuleType) -> None:
    """In a process without the interpreter: what the compiler makes of each code."""
    command = [sys.executable, benchmark.__file__, "--instructions"]
    root = Path(benchmark.__file__).parents[1]
    variables = {**os.environ, "TRITON_INTERPRET": "0", "PYTHONPATH": str(root)}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    counts = {code: float(count) for code, count in re.findall(r"(\w+) (\d+\.\d+)", done.stdout)}
    assert counts["int2"] < 2.2 < counts["pairs"] < 2.8 < 4.4 < counts["trellis"] < 5.2
