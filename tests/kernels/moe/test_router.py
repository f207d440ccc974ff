"""Routers against their twins in torch: in Triton's interpreter on a CPU, for real on a GPU."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.kernels.moe.grouped_gemm import expert_block_rows
from quantkit.kernels.moe.permute import launch_sort_by_expert
from quantkit.kernels.moe.router import (
    ROUTERS,
    can_route_and_sort,
    norm_linear,
    route,
    route_and_sort,
    route_deepseek_reference,
    small_linear,
)
from quantkit.kernels.ops.norm import NORMS, add_rms_norm

from ...support.compare import assert_close, assert_equal

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
    assert weights.is_contiguous() and index.is_contiguous()
    assert_equal(index, its_index)
    step = STEP[weights.dtype]
    assert_close(weights, its_weights, rtol=step, atol=1e-7, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k"), SIZES)
def test_routes_are_those_of_torch(
    poisoned: None, tokens: int, experts: int, top_k: int, dtype: torch.dtype
) -> None:
    logits = distinct(tokens, experts, dtype)
    for twin, options in ROUTERS:
        expected = twin(logits, top_k)
        same(route(logits, top_k=top_k, **options), expected)
        if can_route_and_sort(logits, top_k):
            weights, index, order, expert_blocks = route_and_sort(
                logits, top_k=top_k, **options, single_row_ratio=2 * (tokens > 1)
            )
            same((weights, index), expected)
            size = expert_block_rows(tokens * top_k, experts, 2 * (tokens > 1))
            by_itself = launch_sort_by_expert(index.reshape(-1), experts, size)
            assert_equal(order, by_itself[0])
            assert_equal(expert_blocks, by_itself[1])


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 40), (3, 264), (4, 1000)])
def test_norms_before_products(poisoned: None, rows: int, columns: int, kind: str) -> None:
    """Of whole numbers, whose squares are summed exactly in any order: norms are those of a launch."""
    generator = torch.Generator().manual_seed(rows)

    def whole(*size: int) -> torch.Tensor:
        return torch.randint(-8, 9, size, generator=generator).to(DEVICE, torch.float32)

    for dtype in DTYPES:
        x, other = whole(rows, 1, columns).to(dtype), whole(rows, 1, columns).to(dtype)
        norm, weight = (whole(columns) / 8).to(dtype), (whole(7, columns) / 8).to(dtype)
        for wide in (False, True):
            *found, y = norm_linear(x, other, norm, weight, eps=1e-3, kind=kind, wide=wide)
            expected = add_rms_norm(x, other, norm, 1e-3, kind)
            for one, its in zip(found, expected, strict=True):
                # Of float32, GPUs round otherwise where products are not rounded before they are added.
                assert dtype == torch.float32 or torch.equal(one, its)
                assert_close(one, its)
            product = small_linear(found[1].view(rows, columns), weight, wide)
            assert y.shape == (rows, 7) and (dtype == torch.float32 or torch.equal(y, product))
            assert_close(y, product)


def test_logits_of_other_strides(poisoned: None) -> None:
    logits = distinct(3, 20, torch.bfloat16)
    wide = torch.full((3, 60), math.nan, dtype=logits.dtype, device=DEVICE)
    wide[:, 1:21], wide[:, 21::2] = logits, 0
    columns = logits.t().contiguous().t()
    how = {"top_k": 4, "rounded": True}
    expected = route(logits, **how)
    for strided in (wide[:, 1:21], columns, torch.stack([logits] * 2, -1)[..., 1]):
        same(route(strided, **how), expected)
        same(route_and_sort(strided, **how, single_row_ratio=2)[:2], expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_of_equal_logits_the_first_experts_are_taken(poisoned: None, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1, 3, 2, 3, 3, 0], [0, 0, 0, 0, 0, 0], [-2, -1, -1, -3, -1, -2]]).to(
        DEVICE, dtype
    )
    for of_chosen in (True, False):
        weights, index = route(logits, top_k=2, of_chosen=of_chosen)
        assert index.tolist() == [[1, 3], [0, 1], [1, 2]]
        assert_equal(weights[:, 0], weights[:, 1])
    zeros = torch.tensor([[-0.0, 0.0, -0.0]], device=DEVICE, dtype=dtype)
    assert route(zeros, top_k=3)[1].tolist() == [[0, 1, 2]]


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
    weights, index = route(logits, top_k=3, **options)
    expected, its_index = twin(logits, 3)
    assert weights[[0, 1, 2, 4]].isnan().all()
    assert_equal(weights.isnan(), expected.isnan())
    assert_close(weights[[5, 6]], expected[[5, 6]], rtol=1e-6, atol=1e-7)
    # Beyond these all have weights of 0 among all experts, so torch may take any.
    assert index[5, :2].tolist() == its_index[5, :2].tolist() == [1, 3]
    assert index[6].tolist() == [0, 2, 1] and its_index[6, 0] == 0
    assert all(sorted(set(row)) == sorted(row) and set(row) <= {0, 1, 2, 3} for row in index.tolist())


#: Tokens, experts, slots, groups and those of them that are kept: of DeepSeek-V3 and GLM-4.5, and small ones.
GROUPS = [
    (2, 256, 8, 8, 4),
    (3, 128, 8, 1, 1),
    (1, 12, 3, 1, 1),
    (5, 16, 5, 4, 2),
    (1, 8, 8, 4, 4),
    (9, 4, 2, 2, 1),
]


def by_expert(found: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights and experts in the order of the experts: torch has them in none."""
    index, order = found[1].sort(-1)
    return found[0].gather(1, order), index


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("tokens", "experts", "top_k", "groups", "kept"), GROUPS)
def test_scores_of_sigmoids_and_groups(
    poisoned: None, tokens: int, experts: int, top_k: int, groups: int, kept: int, dtype: torch.dtype
) -> None:
    logits = distinct(tokens, experts, torch.float32)
    for seed in range(2):
        # Large enough to change who is chosen.
        bias = numbers(experts, dtype=dtype, seed=seed) / 3
        how = {"top_k": top_k, "factor": 2.5, "groups": groups, "kept": kept}
        expected = route_deepseek_reference(logits, bias, **how)
        found = route(logits, bias, **how)
        same(by_expert(found), by_expert(expected))
        scores = (logits.sigmoid() + bias).gather(1, found[1])
        assert (scores[:, 1:] <= scores[:, :-1]).all()
        if can_route_and_sort(logits, top_k):
            *both, order, expert_blocks = route_and_sort(logits, bias, **how, single_row_ratio=2)
            same((both[0], both[1]), found)
            size = expert_block_rows(tokens * top_k, experts, 2)
            by_itself = launch_sort_by_expert(found[1].reshape(-1), experts, size)
            assert_equal(order, by_itself[0])
            assert_equal(expert_blocks, by_itself[1])


def test_scores_that_are_no_number_make_no_number(poisoned: None) -> None:
    logits = torch.zeros(2, 8, device=DEVICE)
    logits[0, 5] = math.nan
    weights, index = route(logits, logits[1], top_k=3, groups=4, kept=2)
    assert weights[0].isnan().all() and index[0, 0] == 5 and not weights[1].isnan().any()
    assert index[1].tolist() == [0, 1, 2]


@settings(max_examples=10, deadline=None)
@given(st.data())
def test_routers_of_any_size_choose_as_torch_does(data: Any) -> None:
    experts = data.draw(st.integers(1, 70))
    top_k = data.draw(st.integers(1, min(experts, 12)))
    tokens = data.draw(st.integers(1, 9))
    logits = distinct(tokens, experts, torch.float32)
    for twin, options in ROUTERS:
        same(route(logits, top_k=top_k, **options), twin(logits, top_k))
    if can_route_and_sort(logits, top_k):
        _, index, order, expert_blocks = route_and_sort(logits, top_k=top_k, single_row_ratio=2)
        assert index.reshape(-1)[order.long()].tolist() == sorted(index.reshape(-1).tolist())
        most = expert_block_rows(tokens * top_k, experts, 2)
        assert expert_blocks[:, 2].sum() == tokens * top_k and 0 < expert_blocks[:, 2].max() <= most


def test_more_pairs_are_ordered_by_themselves() -> None:
    def orders(tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return can_route_and_sort(torch.empty(tokens, experts, dtype=dtype, device="meta"), top_k)

    assert orders(4, 256, 8) and orders(16, 8, 2) and orders(1, 512, 10) and orders(4, 128, 8, torch.float32)
    assert not orders(5, 256, 8) and not orders(33, 8, 1) and not orders(2, 512, 8)
    assert not orders(2, 256, 8, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 128, 100), (3, 8, 257), (4, 7, 2048), (16, 130, 33), (16, 1, 33)], ids=str
)
@pytest.mark.sampled(3)
def test_small_products_are_those_of_torch(
    poisoned: None, shape: tuple[int, int, int], dtype: torch.dtype
) -> None:
    m, n, k = shape
    x, weight = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype, seed=1)
    expected = (x.double() @ weight.double().t()).to(dtype)
    part = torch.full((m, 2 * k + 3), math.nan, dtype=dtype, device=DEVICE)
    part[:, 1 : k + 1] = x
    for rows, of in ((x, weight), (part[:, 1 : k + 1], torch.cat([weight] * 2, 1)[:, k:])):
        y = small_linear(rows, of)
        wide = small_linear(rows, of, wide=True)
        assert wide.dtype == torch.float32
        assert_equal(wide.to(dtype), y)
        assert y.dtype == dtype and y.shape == (m, n) and y.is_contiguous()
        assert_close(y, expected, rtol=STEP[dtype], atol=3e-5)
        assert_equal(y, small_linear(rows, of))


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
        assert held.any()
        assert_equal(y.double()[held], exact[held])
