"""Routers against their twins in torch: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels.experts import pairs_of_segment
from quantkit.kernels.fused.launch.pairs import order_pairs
from quantkit.kernels.router import ROUTERS, orders_pairs, route, route_pairs, small_linear

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: A step of the dtype: the interpreter rounds bfloat16 towards zero.
STEP = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
#: Tokens, experts and slots: one of each, all experts, sizes that are no power of two, and of real models.
SIZES = [(1, 1, 1), (1, 5, 5), (3, 8, 2), (2, 60, 4), (5, 128, 8), (2, 512, 10), (17, 7, 3)]


def numbers(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def distinct(tokens: int, experts: int, dtype: torch.dtype) -> torch.Tensor:
    """Logits of which no two of a token are equal."""
    generator = torch.Generator().manual_seed(tokens)
    rows = [torch.randperm(experts, generator=generator) for _ in range(tokens)]
    return ((torch.stack(rows) - experts // 2) / 16).to(DEVICE, dtype)


def same(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> None:
    (weights, index), (its_weights, its_index) = found, expected
    assert weights.dtype == its_weights.dtype and index.dtype == its_index.dtype
    assert weights.is_contiguous() and index.is_contiguous()
    assert torch.equal(index, its_index)
    step = STEP[weights.dtype]
    torch.testing.assert_close(weights, its_weights, rtol=step, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "slots"), SIZES)
def test_routes_are_those_of_torch(
    poisoned: None, tokens: int, experts: int, slots: int, dtype: torch.dtype
) -> None:
    logits = distinct(tokens, experts, dtype)
    for twin, options in ROUTERS:
        expected = twin(logits, slots)
        same(route(logits, slots, **options), expected)
        if orders_pairs(tokens, experts, slots):
            weights, index, order, segments = route_pairs(logits, slots, **options, is_narrow=tokens > 1)
            same((weights, index), expected)
            size = pairs_of_segment(tokens * slots, experts, tokens > 1)
            by_itself = order_pairs(index.reshape(-1), experts, size)
            assert torch.equal(order, by_itself[0]) and torch.equal(segments, by_itself[1])


def test_logits_of_other_strides(poisoned: None) -> None:
    logits = distinct(3, 20, torch.bfloat16)
    wide = torch.full((3, 60), math.nan, dtype=logits.dtype, device=DEVICE)
    wide[:, 1:21], wide[:, 21::2] = logits, 0
    columns = logits.t().contiguous().t()
    expected = route(logits, 4, True, True)
    for strided in (wide[:, 1:21], columns, torch.stack([logits] * 2, -1)[..., 1]):
        same(route(strided, 4, True, True), expected)
        same(route_pairs(strided, 4, True, True, True)[:2], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_first_experts_are_taken(poisoned: None, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1, 3, 2, 3, 3, 0], [0, 0, 0, 0, 0, 0], [-2, -1, -1, -3, -1, -2]]).to(
        DEVICE, dtype
    )
    for of_chosen in (True, False):
        weights, index = route(logits, 2, of_chosen, False)
        assert index.tolist() == [[1, 3], [0, 1], [1, 2]]
        assert torch.equal(weights[:, 0], weights[:, 1])
    zeros = torch.tensor([[-0.0, 0.0, -0.0]], device=DEVICE, dtype=dtype)
    assert route(zeros, 3, True, False)[1].tolist() == [[0, 1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize(("twin", "options"), ROUTERS, ids=[twin.__name__ for twin, _ in ROUTERS])
def test_what_is_no_number_makes_no_number(twin: Callable[..., Any], options: dict[str, bool]) -> None:
    """Of all weights of its token, whose experts are experts; infinite logits are as in torch."""
    nan, inf = math.nan, math.inf
    logits = torch.tensor(
        [
            [1.0, nan, 2.0, 0.0],
            [nan, nan, nan, nan],
            [-nan, 1.0, 3.0, 2.0],
            [1.0, inf, 2.0, 3.0],
            [-inf, -inf, -inf, -inf],
            [-inf, 2.0, -inf, 1.0],
            [90.0, -90.0, 0.0, -1e30],
        ],
        device=DEVICE,
    )
    weights, index = route(logits, 3, **options)
    expected, its_index = twin(logits, 3)
    assert weights[[0, 1, 2, 4]].isnan().all()
    assert torch.equal(weights.isnan(), expected.isnan())
    torch.testing.assert_close(weights[[5, 6]], expected[[5, 6]], rtol=1e-6, atol=1e-7)
    # Beyond these all have weights of 0 among all experts, so torch may take any.
    assert index[5, :2].tolist() == its_index[5, :2].tolist() == [1, 3]
    assert index[6].tolist() == [0, 2, 1] and its_index[6, 0] == 0
    assert all(sorted(set(row)) == sorted(row) and set(row) <= {0, 1, 2, 3} for row in index.tolist())


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_any_sizes(data: Any) -> None:
    experts = data.draw(st.integers(1, 70))
    slots = data.draw(st.integers(1, min(experts, 12)))
    tokens = data.draw(st.integers(1, 9))
    logits = distinct(tokens, experts, torch.float32)
    for twin, options in ROUTERS:
        same(route(logits, slots, **options), twin(logits, slots))
    if orders_pairs(tokens, experts, slots):
        _, index, order, segments = route_pairs(logits, slots, True, False, True)
        assert index.reshape(-1)[order.long()].tolist() == sorted(index.reshape(-1).tolist())
        most = pairs_of_segment(tokens * slots, experts, True)
        assert segments[:, 2].sum() == tokens * slots and 0 < segments[:, 2].max() <= most


def test_more_pairs_are_ordered_by_themselves() -> None:
    assert orders_pairs(4, 256, 8) and orders_pairs(16, 8, 2) and orders_pairs(1, 512, 10)
    assert not orders_pairs(5, 256, 8) and not orders_pairs(33, 8, 1) and not orders_pairs(2, 512, 8)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 128, 100), (3, 8, 257), (4, 7, 2048), (9, 300, 40), (16, 1, 33)], ids=str
)
def test_small_products(poisoned: None, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = shape
    x, weight = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
    expected = (x.double() @ weight.double().t()).to(dtype)
    wide = torch.full((m, 2 * k + 3), math.nan, dtype=dtype, device=DEVICE)
    wide[:, 1 : k + 1] = x
    for rows, of in ((x, weight), (wide[:, 1 : k + 1], weight.t().contiguous().t())):
        y = small_linear(rows, of)
        assert y.dtype == dtype and y.shape == (m, n) and y.is_contiguous()
        torch.testing.assert_close(y, expected, rtol=STEP[dtype], atol=3e-5)
        assert torch.equal(y, small_linear(rows, of))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_small_products_of_powers_of_two_are_exact(poisoned: None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((1, 5, 64), (7, 3, 300), (16, 40, 96)):
        x = torch.randint(-3, 4, (m, k), generator=generator).to(DEVICE, dtype)
        weight = (2.0 ** torch.randint(-2, 2, (n, k), generator=generator)).to(DEVICE, dtype)
        exact = x.double() @ weight.double().t()
        # Sums that the dtype has room for.
        held = exact.to(dtype).double() == exact
        y = small_linear(x, weight)
        assert held.any() and torch.equal(y.double()[held], exact[held])
