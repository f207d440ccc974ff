"""Routers in traced steps, and who orders pairs of what they choose: in the interpreter without a GPU."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import quantkit
from quantkit.kernels.moe import router
from quantkit.kernels.moe.grouped_gemm import SORT_OPERATOR
from quantkit.kernels.ops.norm import rms_norm_reference
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.passes import fused_forward
from quantkit.runtime.passes.patterns import fused
from quantkit.runtime.transformers.patches.generation import apply as graph_decoding

from ...support.compare import assert_close, assert_equal
from ..graphed import (
    DEVICE,
    calls,
    close,
    count_recordings,
    decode,
    decode_whole,
    ids,
    keep_modules,
    made,
    numbers,
    only,
)

pytest.importorskip("triton")

#: What the package has, and the interpreter has no time for.
SMALL_ROWS = router.SMALL_ROWS
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "Qwen2Moe": {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts": 12},
    "Qwen3Moe": {"moe_intermediate_size": 16, "norm_topk_prob": True, "num_experts": 12, "head_dim": 16},
    "Olmoe": {"num_experts": 12, "num_experts_per_tok": 3},
    "GraniteMoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "n_routed_experts": 16,
        "n_group": 4,
        "topk_group": 2,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 5,
        "first_k_dense_replace": 0,
        "q_lora_rank": 8,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_key_value_heads": 4,
    },
    "Glm4Moe": {
        "n_routed_experts": 12,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 16,
        "num_experts_per_tok": 3,
        "first_k_dense_replace": 0,
        "head_dim": 16,
    },
}


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch, interpreter: bool) -> None:
    """Chains of launches, and products with experts, also on a CPU."""
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    count_recordings(monkeypatch)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.mark.parametrize(
    ("family", "inference"),
    [*((family, False) for family in FAMILIES), ("Qwen3Moe", True), ("Glm4Moe", True)],
)
@pytest.mark.sampled(2)
def test_steps_of_each_mixture_are_routed_in_one_launch(
    family: str, inference: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = keep_modules(monkeypatch)
    model = made(family, **FAMILIES[family], num_hidden_layers=1)
    expected = decode_whole(model, ids(), 2)
    graph_decoding(model)
    with torch.inference_mode(inference):
        found = decode(model, forward_of(model), static_cache(model, 40), ids(), steps=2)
    close(found, expected)
    module = only(modules)
    layers = model.config.num_hidden_layers
    found = calls(module)
    assert found["route"] == found["norm_linear"] == layers
    assert not {"topk.default", "_softmax.default", "gather.default"} & set(found)


def test_what_a_router_rounds_stays_rounded() -> None:
    """In two bytes, where weights of Mixtral are float32 and those of others are not."""
    logits = numbers(3, 9).to(torch.bfloat16)
    for twin, _ in router.ROUTERS:
        module = fused(lambda given, twin=twin: twin(given, 4), [logits], "functions")
        # Its cast as well.
        assert calls(module)["route"] == 1 and not calls(module)["_to_copy.default"]
        (weights, index), (expected, its_index) = module(logits), twin(logits, 4)
        assert weights.dtype == expected.dtype
        assert_equal(index, its_index)
        assert_close(weights, expected, rtol=2**-7, atol=1e-6)


WEIGHTS = {columns: numbers(6, columns) for columns in (12, 24, 48)}


def routed(x: torch.Tensor, other: torch.Tensor, norm: torch.Tensor, step: Callable[..., Any]) -> Any:
    """A sum, the norm of it, and what a router chooses by a product of what `step` makes of that."""
    total = x + other
    made = rms_norm_reference(total, norm, 1e-3)
    x = step(made).flatten(0, -2)
    logits = torch.nn.functional.linear(x, WEIGHTS[x.shape[1]])
    return total, made, *router.route_mixtral_reference(logits, 2)


@torch.no_grad()
def test_routers_take_the_norm_before_them() -> None:
    for tokens, step, taken in (
        (1, lambda made: made, True),
        (2, lambda made: made, True),
        (3, lambda made: made, False),
        (2, lambda made: made[:1], False),
        (2, lambda made: made.mul_(2), False),
        (2, lambda made: made * 2, False),
        # Of rows of half as many columns, and of twice as many.
        (1, lambda made: made.view(2, 12), False),
        (2, lambda made: made.view(1, 48), False),
    ):
        given = numbers(tokens, 1, 24), 2 * numbers(tokens, 1, 24), numbers(24) + 1
        one = partial(routed, step=step)
        module = fused(one, given, "steps")
        found = calls(module)
        assert (found["norm_linear"] == 1) is taken and found["add_rms_norm"] + found["norm_linear"] == 1
        assert_close(module(*given), one(*given), rtol=1e-5, atol=1e-5)


Step = Callable[[torch.Tensor], Any]


def ordered(step: Step, tokens: int) -> Any:
    """The calls of what `step` of logits of six experts becomes, which computes the same."""
    logits = numbers(tokens, 6)
    module = fused(step, [logits.clone()], "functions")
    found, expected = module(logits.clone()), step(logits.clone())
    assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return calls(module)


@torch.no_grad()
def test_routers_order_few_pairs() -> None:
    def step(logits: torch.Tensor) -> Any:
        weights, index = router.route_mixtral_reference(logits, 2)
        return weights, index, *SORT_OPERATOR(index, 6, True)

    def without_weights(logits: torch.Tensor) -> Any:
        return SORT_OPERATOR(router.route_olmo_reference(logits, 2)[1], 6, False)

    for tokens in (1, 5, 16):
        for one in (step, without_weights):
            found = ordered(one, tokens)
            assert (
                found["route_and_sort"] == 1
                and not found["route"]
                and not found["sort_tokens_by_expert.default"]
            )
    found = ordered(step, 17)
    assert found["route"] == found["sort_tokens_by_expert.default"] == 1


@torch.no_grad()
def test_pairs_of_others_than_the_router_chose_are_ordered_by_themselves() -> None:
    def fewer_experts(logits: torch.Tensor) -> Any:
        return SORT_OPERATOR(router.route_mixtral_reference(logits, 2)[1], 4, True)

    def other_experts(logits: torch.Tensor) -> Any:
        return SORT_OPERATOR(router.route_mixtral_reference(logits, 2)[1] - 1, 6, True)

    def some_slots(logits: torch.Tensor) -> Any:
        return SORT_OPERATOR(router.route_mixtral_reference(logits, 3)[1][:, :2], 6, True)

    def changed_after(logits: torch.Tensor) -> Any:
        weights, index = router.route_mixtral_reference(logits, 2)
        index[:, 1] = 6
        return weights, *SORT_OPERATOR(index, 6, True)

    for step in (fewer_experts, other_experts, some_slots, changed_after):
        found = ordered(step, 3)
        assert found["route"] == found["sort_tokens_by_expert.default"] == 1, step


@torch.no_grad()
def test_two_orders_of_one_choice() -> None:
    """The first is written with it, the other by itself."""

    def step(logits: torch.Tensor) -> Any:
        index = router.route_mixtral_reference(logits, 2)[1]
        return *SORT_OPERATOR(index, 6, True), *SORT_OPERATOR(index, 6, False)

    found = ordered(step, 3)
    assert found["route_and_sort"] == found["sort_tokens_by_expert.default"] == 1


@torch.no_grad()
@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (4, 2)])
def test_routers_by_sigmoids_of_what_is_made_wide(groups: int, kept: int) -> None:
    """As DeepSeek-V3 and GLM-4.5 have it in bfloat16: x and the weight in float32 first."""
    weight, bias = numbers(16, 24).to(torch.bfloat16), numbers(16).to(torch.bfloat16) / 4

    def step(x: torch.Tensor) -> Any:
        logits = router.wide_linear_reference(x, weight)
        weights, index = router.route_deepseek_reference(logits, bias, 3, 2.5, groups, kept)
        return weights, index, *SORT_OPERATOR(index, 16, True)

    x = numbers(3, 24).to(torch.bfloat16)
    module = fused(step, [x.clone()], "functions")
    assert calls(module)["small_linear"] == calls(module)["route_and_sort"] == 1
    assert not {"_to_copy.default", "topk.default", "sigmoid.default"} & set(calls(module))
    found, expected = module(x), step(x)
    # Torch has those that were chosen in no order.
    for one, other in zip(by_expert(*found[:2]), by_expert(*expected[:2]), strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-6)
    again = SORT_OPERATOR(found[1], 16, True)
    assert_equal(found[2], again[0])
    assert_equal(found[3], again[1])


def by_expert(weights: torch.Tensor, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    index, order = index.sort(-1)
    return weights.gather(1, order), index


@torch.no_grad()
def test_scores_in_groups_that_a_kernel_has_no_blocks_for_stay_as_they_are() -> None:
    def routes(experts: int, top_k: int, groups: int, kept: int) -> int:
        bias = numbers(experts)

        def step(logits: torch.Tensor) -> Any:
            return router.route_deepseek_reference(logits, bias, top_k, 2.5, groups, kept)

        return calls(fused(step, [numbers(3, experts)], "functions"))["route"]

    assert routes(16, 4, 4, 2) == routes(12, 4, 1, 1) == routes(16, 8, 4, 2) == 1
    # Groups of three; slots for which the groups that are kept have no experts.
    assert routes(12, 4, 4, 2) == routes(16, 9, 4, 2) == 0

    def a_bias_for_each_token(logits: torch.Tensor) -> Any:
        return router.route_deepseek_reference(logits, logits * 2, 3, 2.5, 4, 2)

    def two_rows_of_groups(logits: torch.Tensor) -> Any:
        """Of eight experts two groups of two, twice."""
        scores = logits.sigmoid()
        choice = scores + bias
        of_groups = choice.view(-1, 2, 2).topk(2, dim=-1)[0].sum(dim=-1)
        of_kept = torch.topk(of_groups, k=1, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(of_groups)
        mask.scatter_(1, of_kept, 1)
        mask = mask.unsqueeze(-1).expand(-1, 2, 2).reshape(-1, 8)
        choice = choice.masked_fill(~mask.bool(), float("-inf"))
        index = torch.topk(choice, k=2, dim=-1, sorted=False)[1]
        weights = scores.gather(1, index)
        weights /= weights.sum(dim=-1, keepdim=True) + 1e-20
        return weights * 2.5, index

    bias = numbers(8)
    for step, experts in ((a_bias_for_each_token, 16), (two_rows_of_groups, 8)):
        assert calls(fused(step, [numbers(3, experts)], "functions"))["route"] == 0


@torch.no_grad()
def test_what_is_chosen_in_many_slots_stays_as_it_is() -> None:
    def chosen(top_k: int) -> int:
        def step(logits: torch.Tensor) -> Any:
            return router.route_mixtral_reference(logits, top_k)

        return calls(fused(step, [numbers(2, 80)], "functions"))["route"]

    assert chosen(router.MAX_TOP_K) == 1 and chosen(router.MAX_TOP_K + 1) == 0


@torch.no_grad()
def test_products_that_are_not_small_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router, "SMALL_ROWS", SMALL_ROWS)
    weight, tall, turned = numbers(4, 8), numbers(SMALL_ROWS + 1, 8), numbers(8, 4).t()
    long, longer = numbers(1, router.MOST_COLUMNS), numbers(1, router.MOST_COLUMNS + 1)
    large = numbers(router.SMALL // 4, 8)

    def product(weight: torch.Tensor) -> Step:
        return lambda x: torch.nn.functional.linear(x, weight) + 1

    def of_what_is_made(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight * 2) + 1

    def small(step: Step, rows: int, columns: int = 8) -> int:
        return calls(fused(step, [numbers(rows, columns)], "functions"))["small_linear"]

    assert (
        small(product(weight), 3) == small(product(large), 4) == small(product(long), 1, long.shape[1]) == 1
    )
    assert small(product(weight), router.SMALL // 4 + 1) == small(product(large), 5) == 0
    assert small(product(longer), 1, longer.shape[1]) == small(product(tall), 1) == 0
    assert small(product(turned), 3) == small(of_what_is_made, 3) == 0


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_for_which_torch_converts_weights_may_be_larger(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """16 x 64 x 16384 is twice what others may be; in float32 there is nothing to convert."""
    monkeypatch.setattr(router, "SMALL_ROWS", SMALL_ROWS)
    assert 16 * 64 * router.MOST_COLUMNS == 2 * router.SMALL_PRODUCTS <= router.WIDE_PRODUCTS
    weight = torch.zeros(64, router.MOST_COLUMNS, dtype=dtype, device=DEVICE)
    x = torch.zeros(16, router.MOST_COLUMNS, dtype=dtype, device=DEVICE)
    for linear, taken in (
        (router.wide_linear_reference, dtype == torch.bfloat16),
        (router.small_linear_reference, False),
    ):
        module = fused(lambda x, linear=linear: linear(x, weight), [x], "functions")
        assert calls(module)["small_linear"] == taken


@pytest.mark.skipif(DEVICE == "cpu", reason="products with experts are grouped on a GPU only")
def test_a_packed_mixture_routes_and_sorts_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    modules = keep_modules(monkeypatch)
    model = made("Qwen3Moe", **FAMILIES["Qwen3Moe"] | {"hidden_size": 64, "moe_intermediate_size": 32})
    model.save_pretrained(tmp_path / "source")
    quantkit.quantize(tmp_path / "source", tmp_path / "out", format="int4", group_size=32, method="rtn")
    packed = quantkit.load(tmp_path / "out", device=DEVICE, dtype=torch.bfloat16)
    decode(packed, forward_of(packed), static_cache(packed, 40), ids(), steps=2)
    found, layers = calls(modules[-1]), packed.config.num_hidden_layers
    assert found["route_and_sort"] == layers and found["run_experts"] == layers
    assert not {"sort_tokens_by_expert.default", "topk.default", "gate"} & set(found)
