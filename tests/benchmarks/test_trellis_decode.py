"""The probe kernel of a trellis decodes what the slow reference does."""

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
