"""Products with experts in one launch, against one expert after the other; as `gemm/test_fused.py` runs."""

import itertools
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quantkit.errors import KernelError
from quantkit.kernels.gemm import fused_kernels
from quantkit.kernels.gemm.decode import decode_launch
from quantkit.kernels.gemm.decode.decode_tiles import DecodeTile
from quantkit.kernels.gemm.operands import Grouping, Operands, RoutedTokens, max_expert_blocks
from quantkit.kernels.gemm.portable import portable_gemm_launch, portable_gemv_launch
from quantkit.kernels.gemm.portable.portable_gemm_launch import PortableGemmTile, portable_gemm_tile
from quantkit.kernels.gemm.portable.portable_gemv_launch import PortableGemvTile, portable_gemv_tile
from quantkit.kernels.gemm.small_m import small_m_launch
from quantkit.kernels.gemm.small_m.small_m_tiles import SmallMTile
from quantkit.kernels.layouts.geometry import geometry
from quantkit.kernels.linear import linear_parts
from quantkit.kernels.moe import grouped_gemm, permute, stacked_weights
from quantkit.kernels.moe.grouped_gemm import (
    ExpertsLayout,
    build_experts_layout,
    combine_experts,
    experts_linear,
    run_experts,
    sort_tokens_by_expert,
    why_not_grouped,
)
from quantkit.kernels.moe.permute import usual_block_rows
from quantkit.kernels.ops import activation
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem, device_features
from quantkit.kernels.registry import FORCE_VARIABLE, VERBOSE_VARIABLE, quietly
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ...support.compare import assert_close, assert_equal

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EVERY = device_features("cuda") if DEVICE == "cuda" else GPU_FEATURES
FEATURES = [EVERY, EVERY - {"ptx"}]
DTYPE = torch.bfloat16
#: Relative Frobenius error: weights rounded with their scales, and outputs.
LIMIT = 4e-3
#: Tokens, of which the interpreter takes long.
MANY = 40 if DEVICE == "cuda" else 9
RUNS = {
    DecodeTile: decode_launch.run,
    PortableGemvTile: portable_gemv_launch.run,
    SmallMTile: small_m_launch.run,
    PortableGemmTile: portable_gemm_launch.run,
}
FORMATS = ("int4", "int8", "int3", "fp6", "nvfp4", "mxfp4", "nf4")


@dataclass(frozen=True)
class Experts:
    """`matrices` weights [n, k] of each expert, and their layouts one after the other."""

    weights: list[list[PackedTensor]]
    layout: ExpertsLayout

    @property
    def dense(self) -> torch.Tensor:
        """[experts, matrices * n, k] in float64."""
        return torch.stack([torch.cat([w.dequantize() for w in one]) for one in self.weights]).double()


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operators run where the interpreter does."""
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.fixture
def make_experts(make_packed: Callable[..., PackedTensor]) -> Callable[..., Experts]:
    def make(name: str, count: int, matrices: int, shape: tuple[int, int], **options: Any) -> Experts:
        weights = [
            [make_packed(name, shape, seed=matrices * e + i, **options).to(DEVICE) for i in range(matrices)]
            for e in range(count)
        ]
        every = [weight for one in weights for weight in one]
        tensors = stacked_weights.stacked(every, DTYPE)
        token = every[0].scheme.token
        asked = Problem.on(torch.device(DEVICE), 1, *shape, every[0].scheme, DTYPE)
        shares = fused_kernels.why_not_shared(asked, matrices) is None
        single_row_ratio = decode_launch.single_row_ratio(asked) if shares else 0
        layout = ExpertsLayout(DTYPE, token, count, matrices, shape[0], tensors, single_row_ratio)
        return Experts(weights, layout)

    return make


def numbers(*size: int, exact: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    if exact:
        return torch.randint(-4, 5, size, generator=generator).to(DEVICE, DTYPE)
    return torch.randn(*size, generator=generator).to(DEVICE, DTYPE)


def choices(tokens: int, top_k: int, count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.stack([torch.randperm(count, generator=generator)[:top_k] for _ in range(tokens)]).to(DEVICE)


def sorted_by_hand(index: list[int], count: int, size: int) -> tuple[list[int], list[tuple[int, ...]]]:
    """The slow twin of `sort_tokens_by_expert`: the order, and the segments that have pairs."""
    order: list[int] = []
    expert_blocks = []
    for expert in range(count):
        mine = [pair for pair, chosen in enumerate(index) if chosen == expert]
        for start in range(0, len(mine), size):
            expert_blocks.append((expert, len(order) + start, len(mine[start : start + size])))
        order += mine
    return order + [p for p, chosen in enumerate(index) if not 0 <= chosen < count], expert_blocks


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize(
    ("pairs", "count"),
    # Compared with each other; counted by all experts; counted by chunks, of which the last are not full.
    [
        (1, 1),
        (2, 8),
        (33, 128),
        (64, 1),
        (120, 300),
        (65, 5),
        (512, 2),
        (150, 300),
        (600, 3),
        (4700, 9),
    ],
    ids=str,
)
def test_pairs_are_sorted_as_by_hand(pairs: int, count: int, size: int, poisoned: None) -> None:
    generator = torch.Generator().manual_seed(pairs)
    # Some of no expert, which are past the last or below 0.
    index = torch.randint(-1, count + 2, (pairs,), generator=generator)
    order, expert_blocks = sorted_by_hand(index.tolist(), count, size)
    for dtype in (torch.int64, torch.int32):
        found = permute.launch_sort_by_expert(index.to(DEVICE, dtype), count, size)
        assert found[0].tolist() == order
        table = [tuple(row) for row in found[1].tolist()]
        assert table[: len(expert_blocks)] == expert_blocks
        assert all(row[2] == 0 for row in table[len(expert_blocks) :])
    assert len(expert_blocks) <= max_expert_blocks(pairs, count, size) <= pairs


@pytest.mark.parametrize("count", [1, 3, 9])
def test_no_more_segments_than_the_bound(count: int) -> None:
    for pairs in (1, 2, 7, 8, 9, 40):
        for size in (2, 8):
            # Experts with one pair each waste the most.
            used = min(pairs, count)
            worst = [1] * (used - 1) + [pairs - used + 1]
            assert sum(-(-c // size) for c in worst) <= max_expert_blocks(pairs, count, size)
            assert max_expert_blocks(pairs, count, size) <= pairs


def run_with(
    made: Experts,
    x: torch.Tensor,
    index: torch.Tensor,
    size: int,
    features: frozenset[str],
    tile: Any,
    gate: str = "",
) -> torch.Tensor:
    """`experts_linear` in a tile of one's own."""
    first = made.weights[0][0]
    flat = index.reshape(-1).contiguous()
    layout = made.layout
    order, expert_blocks = permute.launch_sort_by_expert(flat, layout.experts, size, features)
    top_k = flat.shape[0] // x.shape[0]
    grouping = Grouping(flat.shape[0], layout.experts, size, layout.matrices, top_k)
    pairs = RoutedTokens(order, expert_blocks, grouping)
    operands = Operands(x, layout.tensors, None, first.scheme, layout.n, pairs, gate=gate)
    return RUNS[type(tile)](operands, tile, features)


def tiles(
    made: Experts, features: frozenset[str]
) -> Iterator[tuple[int, PortableGemvTile | SmallMTile | DecodeTile | PortableGemmTile]]:
    """Pairs of a segment, and a tile for them: those of the rules and others."""
    n, k = made.weights[0][0].shape
    shape = geometry(n, k, made.weights[0][0].scheme, DTYPE)
    asked = Problem(1, n, k, made.weights[0][0].scheme, DTYPE, "cuda", features)
    if fused_kernels.why_not_shared(asked, made.layout.matrices) is None:
        yield 8, SmallMTile(8, 1)
        yield 16, SmallMTile(8, min(2, shape.k_steps), 4)
        yield 1, DecodeTile(4, 1, prefetch=2)
        yield (
            2,
            DecodeTile(4, 1, tiles_per_iter=2, prefetch=1, int8_mma=decode_launch.why_no_int8(asked) is None),
        )
        # The interpreter takes long.
        if DEVICE == "cuda" or shape.bits == 4:
            yield (
                4,
                DecodeTile(8, 2, prefetch=2, int8_mma=decode_launch.why_no_int8(replace(asked, m=4)) is None),
            )
    yield 8, portable_gemv_tile(shape, 8)
    # Several tiles of a segment.
    yield 32, PortableGemmTile(4, 16, stages=2)
    # The interpreter takes long.
    if DEVICE == "cuda" or shape.bits == 4:
        yield 16, PortableGemvTile(1, max(shape.span, 128), 2, True, 2)
    if DEVICE == "cuda":
        yield 32, replace(portable_gemm_tile(shape, 32), split_k=1)
    if shape.span <= 128:
        # Fewer pairs than a tile has room for.
        yield 8, PortableGemmTile(4, 16, stages=2, accumulators=2)


def product(made: Experts, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """The slow twin: [P, matrices * n] in float64, NaN for pairs without an expert."""
    dense, flat = made.dense, index.reshape(-1).tolist()
    top_k = len(flat) // x.shape[0]
    none = torch.full((dense.shape[1],), float("nan"), dtype=torch.float64, device=x.device)
    found = [dense[e] @ x[pair // top_k].double() if e < len(dense) else none for pair, e in enumerate(flat)]
    return torch.stack(found)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(1, 2, 40, 200), (3, 2, 48, 328), (MANY, 2, 17, 128)], ids=str)
@pytest.mark.sampled(3)
def test_kernels_multiply_each_pair_with_its_expert(
    make_experts: Callable[..., Experts], poisoned: None, name: str, size: tuple[int, ...]
) -> None:
    tokens, top_k, n, k = size
    made = make_experts(name, 4, 2, (n, k))
    x, index = numbers(tokens, k), choices(tokens, top_k, 4)
    expected = product(made, x, index)
    for features in FEATURES:
        for rows_, tile in tiles(made, features):
            y = run_with(made, x, index, rows_, features, tile)
            assert relative(y, expected) < LIMIT, tile
            if DEVICE == "cuda":
                assert_equal(y, run_with(made, x, index, rows_, features, tile), tile)


@pytest.mark.parametrize("kind", ["silu", "gelu"])
@pytest.mark.parametrize(
    ("name", "columns", "tile"),
    [
        ("int4", 136, SmallMTile(16)),
        ("int3", 136, SmallMTile(8)),
        ("nvfp4", 136, SmallMTile(8)),
        ("int4", 392, SmallMTile(8, 2)),
        ("nvfp4", 520, SmallMTile(16, 4)),
        ("int4", 136, DecodeTile(4, 1, prefetch=1, int8_mma=True)),
        ("nvfp4", 520, DecodeTile(8, 1, tiles_per_iter=2, prefetch=1)),
        ("int3", 392, DecodeTile(4, 2, prefetch=2)),
    ],
)
@pytest.mark.sampled(4)
def test_products_that_are_gated_are_those_gated_next(
    make_experts: Callable[..., Experts],
    poisoned: None,
    name: str,
    columns: int,
    tile: SmallMTile | DecodeTile,
    kind: str,
) -> None:
    # The interpreter takes long for pairs one by one.
    streams = isinstance(tile, DecodeTile)
    n, tokens = (48, 3) if streams else (176, 11)
    made = make_experts(name, 4, 2, (n, columns))
    x, index = numbers(tokens, columns), choices(tokens, 2, 4)
    index[2, 1] = 4
    written = (index < 4).reshape(-1)
    run = partial(run_with, made, x, index, 1 if streams else 8, EVERY, tile)
    expected = activation.gate(*run().chunk(2, dim=1), kind)
    y = run(gate=kind)
    assert_equal(y[written], expected[written])
    assert y.shape == (2 * tokens, n) and y[~written].isnan().all()


def relative(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float((y.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", FORMATS[:-1] if DEVICE == "cuda" else ("int4", "int3", "nvfp4"))
def test_sums_of_powers_of_two_are_those_of_one_expert_after_the_other(
    make_experts: Callable[..., Experts], poisoned: None, name: str
) -> None:
    options = {"group_size": 64, "exact": True} if name in ("int4", "int8", "int3") else {"exact": True}
    made = make_experts(name, 3, 2, (24, 192), **options)
    x, index = numbers(5, 192, exact=True), choices(5, 2, 3)
    index[1, 0], index[4] = 3, 7
    expected = product(made, x, index).to(DTYPE)
    written = (index < 3).reshape(-1)
    for features in FEATURES:
        for size, tile in tiles(made, features):
            y = run_with(made, x, index, size, features, tile)
            assert_equal(y[written], expected[written], tile)
            # What no program writes is left as it was.
            assert y[~written].isnan().all(), tile


@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("zero_point", ["integer", "float"])
@pytest.mark.sampled(3)
def test_zero_points_and_factors_are_those_of_the_expert(
    make_experts: Callable[..., Experts], poisoned: None, zero_point: str, tokens: int
) -> None:
    made = make_experts("int4", 3, 1, (40, 96), group_size=32, zero_point=zero_point)
    x, index = numbers(2 * tokens, 96), choices(tokens, 2, 3)
    # A row of x for each pair.
    expected = torch.cat([product(made, x[i : i + 1], index.reshape(-1)[i : i + 1]) for i in range(len(x))])
    for features in FEATURES:
        for size, tile in tiles(made, features):
            assert relative(run_with(made, x, index, size, features, tile), expected) < LIMIT, tile


@pytest.mark.parametrize("n", [24, 32])
def test_scales_of_tensors_are_those_of_the_matrix(
    make_experts: Callable[..., Experts], poisoned: None, n: int
) -> None:
    """Powers of two, which are the same for all matrices otherwise, change no digit."""
    made = make_experts("nvfp4", 3, 2, (n, 128))
    x, index = numbers(5, 128), choices(5, 2, 3)
    # What sums are divided by, of each matrix.
    divisors = 2.0 ** torch.arange(6, device=DEVICE)
    tensors = list(made.layout.tensors)
    tensors[3] = tensors[3] * divisors.view(-1, *[1] * (tensors[3].dim() - 1))
    changed = replace(made, layout=replace(made.layout, tensors=tuple(tensors)))
    times = (1 / divisors).view(3, 2)[index.reshape(-1)].repeat_interleave(n, 1)
    for features in FEATURES:
        for size, tile in tiles(made, features):
            y = run_with(made, x, index, size, features, tile)
            assert_equal(run_with(changed, x, index, size, features, tile), (y * times).to(y.dtype), tile)


@pytest.mark.parametrize("tokens", [1, 9])
def test_code_books_are_those_of_the_expert(
    make_experts: Callable[..., Experts], poisoned: None, tokens: int
) -> None:
    made = make_experts("book4", 3, 2, (24, 128))
    every = [weight for one in made.weights for weight in one]
    for number, weight in enumerate(every):
        book = weight.part("codebook")
        assert book is not None
        book.copy_(torch.linspace(-1, 1 + number, 16))
    tensors = stacked_weights.stacked(every, DTYPE)
    made = replace(made, layout=replace(made.layout, tensors=tensors))
    x, index = numbers(tokens, 128), choices(tokens, 2, 3)
    expected = product(made, x, index)
    for features in FEATURES:
        for size, tile in tiles(made, features):
            assert relative(run_with(made, x, index, size, features, tile), expected) < LIMIT, tile


@pytest.mark.parametrize("name", ["int4", "nvfp4"])
def test_streams_in_float16(
    make_experts: Callable[..., Experts], poisoned: None, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "DTYPE", torch.float16)
    made = make_experts(name, 4, 2, (48, 200))
    x, index = numbers(5, 200), choices(5, 2, 4)
    index[3, 1] = 4
    expected, written = product(made, x, index), (index < 4).reshape(-1)
    for size in (1, 2):
        y = run_with(made, x, index, size, EVERY, DecodeTile(4, 1, 2, 1, name == "int4"))
        assert y.dtype == torch.float16 and relative(y[written], expected[written]) < LIMIT


def test_all_tokens_may_choose_one_expert(make_experts: Callable[..., Experts], poisoned: None) -> None:
    made = make_experts("int4", 8, 1, (16, 128))
    x, index = numbers(40, 128), torch.full((40, 1), 5, device=DEVICE)
    expected = product(made, x, index)
    for size, tile in tiles(made, EVERY):
        assert relative(run_with(made, x, index, size, EVERY, tile), expected) < LIMIT, tile


@pytest.mark.skipif(DEVICE == "cpu", reason="a GPU captures graphs")
@pytest.mark.parametrize("tokens", [1, 3, 200])
def test_graphs_capture_them_and_see_later_choices(make_experts: Callable[..., Experts], tokens: int) -> None:
    made = make_experts("int4", 8, 2, (256, 256))
    x, weights = numbers(tokens, 256), numbers(tokens, 2)
    index = torch.zeros(tokens, 2, dtype=torch.int64, device=DEVICE)

    down = make_experts("nvfp4", 8, 1, (256, 256))

    def forward() -> torch.Tensor:
        pairs = sort_tokens_by_expert(index, made.layout, down.layout)
        gate, up = experts_linear(x, pairs, made.layout).chunk(2, -1)
        y = experts_linear(activation.gate(gate, up, "silu"), pairs, down.layout, chained=True)
        return combine_experts(y, index, weights, 8)

    forward()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = forward()
    for chosen in (choices(tokens, 2, 8), choices(tokens, 2, 7) + 1, torch.full_like(index, 8)):
        index.copy_(chosen)
        graph.replay()
        assert_equal(captured, forward())


@pytest.mark.parametrize("tokens", [0, 1, 3, 40])
def test_the_operators_take_any_number_of_tokens(
    make_experts: Callable[..., Experts], poisoned: None, tokens: int
) -> None:
    made = make_experts("int4", 4, 2, (24, 128))
    x, index, weights = numbers(tokens, 128), choices(tokens, 2, 4) if tokens else None, numbers(tokens, 2)
    index = torch.empty(0, 2, dtype=torch.int64, device=DEVICE) if index is None else index
    y = experts_linear(x, sort_tokens_by_expert(index, made.layout), made.layout)
    found = combine_experts(y, index, weights, 4)
    assert y.shape == (2 * tokens, 48) and found.shape == (tokens, 48)
    if tokens:
        expected = product(made, x, index)
        assert relative(y, expected) < LIMIT
        weighed = (expected.view(tokens, 2, 48) * weights.double()[..., None]).sum(1)
        assert relative(found, weighed) < 2 * LIMIT
        assert_equal(found, combine_experts(y, index, weights, 4))


def test_the_operators_keep_their_contract_with_torch(make_experts: Callable[..., Experts]) -> None:
    made = make_experts("int4", 4, 2, (24, 128))
    x, index, weights = numbers(3, 128), choices(3, 2, 4), numbers(3, 2)
    layout = made.layout
    order, expert_blocks, single_row_ratio = pairs = sort_tokens_by_expert(index, layout)
    y = experts_linear(x, pairs, layout)
    product_of = (
        x,
        order,
        expert_blocks,
        list(layout.tensors),
        layout.scheme,
        4,
        2,
        24,
        single_row_ratio,
        False,
    )
    for op, operands in (
        (torch.ops.quantkit.sort_tokens_by_expert, (index, 4, single_row_ratio)),
        (torch.ops.quantkit.experts_linear, product_of),
        (torch.ops.quantkit.combine_experts, (y, index, weights, 4)),
    ):
        torch.library.opcheck(op, operands, test_utils=["test_schema", "test_faketensor"])


def test_weights_are_added_up_in_the_order_of_slots(poisoned: None) -> None:
    y = numbers(15, 1030)
    index = torch.tensor([[0, 1, 2], [3, 1, 0], [3, 9, -1], [2, 3, 1], [1, 1, 1]], device=DEVICE)
    weights = torch.rand(5, 3, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    none = (index < 0) | (index >= 3)
    # What stands in the rows of no expert, and for their weights, is nothing.
    y[none.reshape(-1)] = float("nan")
    weights[none] = float("nan")
    found = permute.combine_experts(y, index, weights, 3)
    expected = torch.zeros(5, 1030, device=DEVICE)
    for token in range(5):
        for slot in range(3):
            if not none[token, slot]:
                expected[token] += weights[token, slot] * y[3 * token + slot].float()
    assert_close(found, expected.to(DTYPE), rtol=1e-2, atol=1e-6)
    assert not found[2].any()


def test_layouts_of_single_matrices_are_in_the_same_memory(make_experts: Callable[..., Experts]) -> None:
    made = make_experts("nvfp4", 3, 2, (24, 128))
    one = made.layout.of(3)
    expected = fused_kernels.FRAGMENTS.build(made.weights[1][1], DTYPE)
    assert one.name == "fragments" and one.dtype == DTYPE
    for part, stack, alone in zip(one.tensors, made.layout.tensors, expected, strict=True):
        assert_equal(part, alone)
        assert part.untyped_storage().data_ptr() == stack.untyped_storage().data_ptr()


def test_layouts_are_built_on_the_gpu_that_has_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are launched on the current one, which need not be it."""
    current: list[torch.device] = []

    @contextmanager
    def device(which: torch.device) -> Iterator[None]:
        current.append(which)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(fused_kernels, "wait_for", lambda which: None)
    monkeypatch.setattr(
        fused_kernels, "build", lambda weight, dtype, count: (torch.tensor([one.index for one in current]),)
    )
    weight: Any = SimpleNamespace(device=torch.device("cuda", 1))
    assert fused_kernels.build_fragments(weight, DTYPE)[0].tolist() == [1]
    assert not current


def test_layouts_built_in_inference_mode_serve_a_backward_pass(
    make_packed: Callable[..., PackedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped_gemm, "why_not_grouped", lambda *asked: None)
    packed = make_packed("int4", (16, 128), exact=True).to(DEVICE)
    with torch.inference_mode():
        layout = build_experts_layout([packed], 1, 1, DTYPE)
    assert layout is not None
    x = torch.ones(2, 128, dtype=DTYPE, device=DEVICE, requires_grad=True)
    # The words are where they are when they were released: in the layout only.
    linear_parts(x, packed.tensors[1:], None, packed.scheme, 16, layout.of(0)).sum().backward()
    assert x.grad is not None
    assert_equal(x.grad[0], packed.dequantize().sum(0).to(DTYPE))


# What is chosen, and what is said of it


def problem(name: str = "int4", **changes: Any) -> Problem:
    asked = {"m": 2, "n": 4096, "k": 4096, "dtype": torch.bfloat16, "device": "cuda"} | changes
    size = {"group_size": asked.pop("group_size")} if "group_size" in asked else {}
    features = asked.pop("features", frozenset({"triton", "ptx"}))
    return Problem(scheme=scheme(name, **size), features=features, **asked)


def test_what_cannot_be_grouped_is_refused_with_the_reason() -> None:
    for name in FORMATS:
        assert why_not_grouped(problem(name)) is None
    for found, reason in (
        (problem(device="cpu"), "run on cuda, the tensors are on cpu"),
        (problem(dtype=torch.float32), "bfloat16 or float16 activations"),
        (problem(features=frozenset()), "Triton is not installed"),
        (problem(group_size=48), "multiples of 32 columns, not of 48"),
        (problem("binary-residual"), "sums of 2"),
        (problem("binary-rank1"), "scales the columns of x by factors of its own"),
        (problem("book4", features=frozenset({"triton"})), "look up every value of codebook4"),
        (problem("nf4", features=frozenset({"triton"})), "look up every value"),
    ):
        assert reason in str(why_not_grouped(found))


def test_a_forced_row_is_kept_or_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for pairs, forced, row, size in (
        (1024, "", "fused-portable", 128),
        (1024, "fused-portable-gemv", "fused-portable-gemv", 8),
        (2, "", "fused-portable-gemv", 8),
        (2, "fused-portable", "fused-portable", 16),
    ):
        chosen, grouping, _ = fused_kernels.group(problem(m=pairs), 8, 2, 2, 0, forced)
        assert (chosen, grouping.rows) == (row, size)
    asked = problem()
    monkeypatch.setenv(FORCE_VARIABLE, "fused-portable")
    assert why_not_grouped(asked) is None
    monkeypatch.setenv(FORCE_VARIABLE, "unpack")
    assert "QUANTKIT_KERNEL=unpack multiplies with one weight at a time" in str(why_not_grouped(asked))
    with pytest.raises(KernelError, match="Set it before the model is loaded"):
        torch.ops.quantkit.sort_tokens_by_expert(torch.zeros(1, 1, dtype=torch.int64, device=DEVICE), 8, 0)
    monkeypatch.setenv(FORCE_VARIABLE, "nothing")
    with pytest.raises(KernelError, match="unknown kernel 'nothing'"):
        why_not_grouped(asked)


def test_segments_grow_with_the_pairs_of_an_expert() -> None:
    found = [usual_block_rows(pairs, 8, 2) for pairs in (1, 4, 5, 63, 64, 128, 1024, 9999)]
    assert found == [1, 1, 8, 8, 16, 32, 128, 128]
    # One after the other where hardly any expert has two.
    assert [usual_block_rows(pairs, 128, 1) for pairs in (1, 128, 129)] == [1, 1, 8]
    assert [usual_block_rows(pairs, 128, 4) for pairs in (32, 33)] == [1, 8]
    assert usual_block_rows(8, 128, 0) == 8
    # Where `fused-small-m` does not run, `fused-portable` does earlier.
    assert [usual_block_rows(pairs, 8, 0) for pairs in (31, 32, 64)] == [8, 16, 16]
    for tokens in (1, 64, 4096):
        for name in FORMATS:
            for features in (GPU_FEATURES, frozenset({"triton"})):
                asked = problem(name, m=2 * tokens, features=features)
                single_row_ratio = decode_launch.single_row_ratio(asked) if features == GPU_FEATURES else 0
                row, grouping, tile = fused_kernels.group(asked, 8, 2, 2, single_row_ratio)
                assert (row == "fused-portable") == (tokens > 1)
                assert (row == "fused-gemv") == (tokens == 1 and single_row_ratio > 0)
                assert grouping.rows == (1 if row == "fused-gemv" else 8) or tokens > 1
                assert getattr(tile, "split", 1) == 1


def test_few_pairs_are_multiplied_with_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem(m=32, features=GPU_FEATURES)
    for pairs, row, size in ((8, "fused-gemv", 1), (64, "fused-gemv", 1), (65, "fused-small-m", 8)):
        found, grouping, _ = fused_kernels.group(replace(asked, m=pairs), 128, 2, 8, 2)
        assert (found, grouping.rows) == (row, size)
    assert fused_kernels.group(asked, 128, 2, 8, 0)[0] == "fused-portable-gemv"
    for single_row_ratio, size in ((1, 1), (0, 8)):
        row, grouping, tile = fused_kernels.group(asked, 128, 2, 8, single_row_ratio, "fused-gemv")
        assert (row, grouping.rows) == ("fused-gemv", size) and isinstance(tile, DecodeTile)
    with pytest.raises(KernelError, match=r"fused-gemv cannot run experts of .* multiples of 16 rows"):
        fused_kernels.group(replace(asked, n=4104), 128, 2, 8, 0, "fused-gemv")
    # What has no room for it is for the other, in the same segments.
    kernels = [
        replace(kernel, grouped=kernel.grouped and replace(kernel.grouped, tile=lambda *_: None))
        if kernel.name == "fused-gemv"
        else kernel
        for kernel in fused_kernels.FUSED_KERNELS
    ]
    monkeypatch.setattr(fused_kernels, "FUSED_KERNELS", kernels)
    found, grouping, _ = fused_kernels.group(asked, 128, 2, 8, 1)
    assert (found, grouping.rows) == ("fused-small-m", 1)


@pytest.mark.parametrize("forced", ["", "fused-gemv"])
def test_streams_of_experts_have_tiles_on_small_gpus(forced: str) -> None:
    """Of one weight alone the tiles of the rules would not fit some of these."""
    for name, processors, (n, k), pairs in itertools.product(
        ("int4", "nvfp4", "nf4"), (16, 24, 130), ((14336, 4096), (768, 2048), (2048, 7168)), (1, 2, 32)
    ):
        gpu = Gpu("Test GPU 3000", (8, 9), processors, 99 << 10)
        asked = problem(name, m=pairs, n=n, k=k, features=GPU_FEATURES, gpu=gpu)
        single_row_ratio = decode_launch.single_row_ratio(asked)
        row, grouping, tile = fused_kernels.group(asked, 128, 2, 2, single_row_ratio, forced)
        assert row == "fused-gemv" and isinstance(tile, DecodeTile)
        every = replace(asked, m=grouping.rows, n=2 * n)
        memory = decode_launch.shared_memory(tile, every, "silu", grouping=grouping)
        assert memory * tile.occupancy <= gpu.shared_memory


def test_single_pairs_have_a_tile_that_fits_or_none() -> None:
    small = Gpu("Test GPU 3000", (9, 0), 130, 90 << 10)
    grouping = Grouping(8, 128, 1, 2, 8)
    for name, n, k, fits in (
        ("int4", 4096, 24576, True),
        ("fp8", 1 << 20, 8192, True),
        ("int4", 4096, 51200, False),
    ):
        asked = problem(name, m=1, n=n, k=k, features=GPU_FEATURES, gpu=small)
        tile = decode_launch.experts_tile(asked, grouping)
        assert (tile is not None) == fits
        if tile is not None:
            memory = decode_launch.shared_memory(tile, asked, grouping=grouping)
            assert memory * tile.occupancy <= small.shared_memory
    asked = problem("int4", m=8, n=4096, k=51200, features=GPU_FEATURES, gpu=small)
    with pytest.raises(KernelError, match=r"fused-gemv cannot run experts of .*shared memory"):
        fused_kernels.group(asked, 128, 2, 8, 1, "fused-gemv")


def test_what_fused_narrow_cannot_multiply_few_pairs_with() -> None:
    for changes, matrices, reason in (
        ({}, 2, None),
        ({"n": 4104}, 1, None),
        ({"n": 4104}, 2, "multiples of 16 rows, not for 4104"),
        ({"k": 4100}, 1, "16 bytes of x at a time"),
        ({"features": frozenset({"triton"})}, 1, "from compute capability 8.0 on"),
        ({"name": "book4"}, 1, "values of its own"),
    ):
        found = fused_kernels.why_not_shared(problem(**{"features": GPU_FEATURES} | changes), matrices)
        assert found is None if reason is None else reason in str(found)
    asked = problem(n=4104, features=GPU_FEATURES)
    with pytest.raises(KernelError, match=r"fused-small-m cannot run experts of .* multiples of 16 rows"):
        fused_kernels.group(asked, 8, 2, 2, 0, "fused-small-m")


def test_layouts_say_whether_few_pairs_are_for_fused_narrow(
    make_packed: Callable[..., PackedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(rows_of_weight: int, matrices: int = 2) -> ExpertsLayout | None:
        packed = make_packed("int4", (rows_of_weight, 128)).to(DEVICE)
        return build_experts_layout([packed] * matrices, 1, matrices, DTYPE)

    monkeypatch.setattr(
        grouped_gemm.Problem,
        "on",
        lambda device, m, n, k, of, dtype: problem(m=m, n=n, k=k, dtype=dtype, features=GPU_FEATURES),
    )
    fine, odd = built(16), built(24)
    assert fine is not None and odd is not None
    slow = replace(fine, single_row_ratio=4)
    index = choices(3, 1, 1)
    for layouts, single_row_ratio in (((fine, fine), 1), ((fine, slow), 4), ((fine, odd), 0), ((odd,), 0)):
        assert sort_tokens_by_expert(index, *layouts).single_row_ratio == single_row_ratio
    for forced, single_row_ratio in (
        ("fused-small-m", 1),
        ("fused-gemv", 1),
        ("fused-portable-gemv", 0),
        ("fused-portable", 0),
    ):
        monkeypatch.setenv(FORCE_VARIABLE, forced)
        layout = built(16)
        assert layout is not None and layout.single_row_ratio == single_row_ratio
    # What cannot be multiplied as it is forced is not grouped.
    monkeypatch.setenv(FORCE_VARIABLE, "fused-small-m")
    assert built(24) is None and built(24, 1) is not None


def test_experts_get_tiles_that_can_run() -> None:
    mixtral, qwen = problem(m=8, n=28672), problem(m=8, n=1536, k=2048)
    for asked in (mixtral, qwen, problem(m=8, n=4096, k=14336), problem("nf4", m=8, n=2048, k=768)):
        for weights in (1, 2, 7, 64):
            assert (
                small_m_launch.TILE_SPACE.why_invalid(asked, small_m_launch.experts_tile(asked, weights))
                is None
            )


@pytest.mark.fault(70)
def test_a_gpu_that_loops_over_experts_says_so_once(
    make_packed: Callable[..., PackedTensor],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = [make_packed("int4", (16, 96), group_size=48) for _ in range(2)]
    assert build_experts_layout(weights, 2, 1, torch.bfloat16) is None
    assert not caplog.records
    monkeypatch.setattr(
        grouped_gemm.Problem, "on", lambda *given: problem(n=16, k=96, group_size=48, dtype=given[-1])
    )
    # Not where nobody asked; later all the same.
    with quietly():
        assert build_experts_layout(weights, 2, 1, torch.bfloat16) is None
    assert not caplog.records
    for _ in range(2):
        assert build_experts_layout(weights, 2, 1, torch.bfloat16) is None
    (record,) = caplog.records
    assert record.message.startswith("2 experts, int4")
    assert "not grouped: it takes groups of 16 or of multiples of 32 columns, not of 48" in record.message
    assert build_experts_layout([], 0, 1, torch.bfloat16) is None


def test_verbose_says_what_runs(
    make_experts: Callable[..., Experts], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VERBOSE_VARIABLE, "1")
    made = make_experts("int4", 4, 1, (56, 128))
    index = choices(1, 2, 4)
    with caplog.at_level(logging.INFO, logger="quantkit.kernels"):
        for _ in range(2):
            experts_linear(numbers(1, 128), sort_tokens_by_expert(index, made.layout), made.layout)
    (record,) = caplog.records
    slower = "grouped fused-portable-gemv warps=4", "; not fused-small-m: "
    for part in ("4 experts", *(slower if DEVICE == "cpu" else ["grouped fused-gemv warps="])):
        assert part in record.message


def test_what_does_not_fit_is_refused(make_experts: Callable[..., Experts]) -> None:
    made = make_experts("int4", 2, 1, (16, 128))
    layout = made.layout
    pairs = sort_tokens_by_expert(choices(3, 2, 2), layout)
    of = (
        pairs.order,
        pairs.expert_blocks,
        list(layout.tensors),
        layout.scheme,
        2,
        1,
        16,
        pairs.single_row_ratio,
        False,
    )
    with pytest.raises(KernelError, match=r"which runs experts of int4 .* does not gate y"):
        run_experts(numbers(3, 128), *of, gate="silu")
    with pytest.raises(KernelError, match="build one for x's dtype"):
        experts_linear(numbers(3, 128).to(torch.float32), pairs, layout)
    with pytest.raises(KernelError, match=r"x has shape \(4, 128\) for 6 routed tokens"):
        experts_linear(numbers(4, 128), pairs, layout)
