"""Low-rank binary matrices are found where they are, and every step lowers the error."""

from types import ModuleType

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture
def hidden(benchmark: ModuleType) -> torch.Tensor:
    """A weight that is a low-rank binary matrix."""
    draw = torch.Generator().manual_seed(1)
    u, v = (torch.randint(0, 2, (n, 6), generator=draw) * 2.0 - 1 for n in (48, 64))
    a, c, b = (torch.rand(n, generator=draw) + 0.5 for n in (48, 6, 64))
    return benchmark.LowRank(u, v, a, c, b).matrix()


def test_a_low_rank_binary_matrix_is_found(benchmark: ModuleType, hidden: torch.Tensor) -> None:
    found = benchmark.fit(hidden, 6)
    # Scales are rounded to bfloat16.
    assert found.error(hidden) < 1e-4
    assert set(found.u.unique().tolist()) == set(found.v.unique().tolist()) == {-1.0, 1.0}


def test_coordinate_descent_lowers_the_error(benchmark: ModuleType) -> None:
    weight = torch.randn(40, 64)
    # More columns than a block.
    start = benchmark.scaled(weight, benchmark.admm(weight, 50, 5))
    better = benchmark.refine(weight, start, 1)
    assert better.error(weight) < start.error(weight)
    # No sign alone is better the other way.
    done = benchmark.refine(weight, start, 100)
    u = benchmark.descended(weight, done)
    flipped = [(u * (1 - 2 * one)) for one in torch.eye(50)]
    right = done.v * done.b[:, None] * done.c
    errors = [(weight - done.a[:, None] * one @ right.T).square().sum(1) for one in (u, *flipped)]
    assert (torch.stack(errors[1:]).min(0).values >= errors[0] * (1 - 1e-2)).all()


def test_importance_weights_the_errors_of_columns(benchmark: ModuleType) -> None:
    weight, importance = torch.randn(48, 64), torch.rand(64).square() * 10

    def error(made: torch.Tensor) -> float:
        return float(((weight - made).square() @ importance).sum())

    plain, weighted = benchmark.fit(weight, 20), benchmark.fit(weight, 20, importance)
    assert error(weighted.matrix()) < 0.9 * error(plain.matrix())


def test_steps_on_latent_numbers_end_in_signs(benchmark: ModuleType) -> None:
    weight = torch.randn(32, 32)
    found = benchmark.fit(weight, 16, steps=5)
    assert set(found.u.unique().tolist()) == {-1.0, 1.0} and found.error(weight) < 0.5


@pytest.mark.parametrize("shape", [(512, 512), (1408, 512), (4096, 14336)])
@pytest.mark.parametrize("bits", [1.125, 2.25])
def test_the_rank_is_the_largest_of_these_bits(
    benchmark: ModuleType, shape: tuple[int, int], bits: float
) -> None:
    rank = benchmark.rank_for(*shape, bits)
    assert benchmark.bits_of(*shape, rank) <= bits < benchmark.bits_of(*shape, rank + 1)
