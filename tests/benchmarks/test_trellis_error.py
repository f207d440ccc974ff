"""Viterbi's algorithm finds what trying everything finds."""

from itertools import product
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")


@pytest.fixture
def small(benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Windows of four bits."""
    monkeypatch.setattr(benchmark, "BITS", 4)
    monkeypatch.setattr(benchmark, "WINDOWS", 16)
    return benchmark


def of_ring(bits: tuple[int, ...], step: int) -> list[int]:
    """The windows of four bits of a ring, each `step` bits further."""
    count = len(bits)
    return [sum(bits[(at + i) % count] << i for i in range(4)) for at in range(0, count, step)]


@pytest.mark.parametrize("step", [1, 2])
def test_the_best_ring_with_a_seam_is_found(small: ModuleType, step: int) -> None:
    values, chunk = torch.randn(16, step), torch.randn(6, step)
    rings = [of_ring(bits, step) for bits in product((0, 1), repeat=6 * step)]
    for seam in range(1 << 4 - step):
        closed = [ring for ring in rings if ring[0] % (1 << 4 - step) == seam]
        wanted = min(float((chunk - values[ring]).square().sum()) for ring in closed)
        error, windows = small.viterbi(chunk, values, step, seam)
        assert error == pytest.approx(wanted, rel=1e-5)
        assert windows in closed


def test_a_ring_is_near_the_best_of_all(small: ModuleType) -> None:
    values, step, ratios = torch.randn(16, 1), 2, []
    rings = [of_ring(bits, step) for bits in product((0, 1), repeat=12)]
    for _ in range(10):
        chunk = torch.randn(6, 1)
        best = min(float((chunk - values[ring]).square().sum()) for ring in rings)
        ratios.append(small.ring_error(chunk, values, step) / best)
    assert min(ratios) > 1 - 1e-5 and sum(ratios) < 15
