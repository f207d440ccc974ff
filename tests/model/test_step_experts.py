"""Routers in traced steps, and who orders pairs of what they choose: in the interpreter without a GPU."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quantkit.kernels import router
from quantkit.kernels.experts import ORDER_OPERATOR
from quantkit.model import fused_forward
from quantkit.model.decoding import forward_of, graph_decoding, static_cache
from quantkit.model.fusion import fused

from .graphed import (
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
)

pytest.importorskip("triton")

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
    monkeypatch.setattr(fused_forward, "is_possible", lambda device: True)
    count_recordings(monkeypatch)
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, inference: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = keep_modules(monkeypatch)
    model = made(family, **FAMILIES[family])
    expected = decode_whole(model, ids(), 3)
    graph_decoding(model)
    with torch.inference_mode(inference):
        found = decode(model, forward_of(model), static_cache(model, 40), ids(), steps=3)
    close(found, expected)
    (module,) = modules
    layers = model.config.num_hidden_layers
    found = calls(module)
    assert found["route"] == layers and found["small_linear"] >= layers
    assert not {"topk.default", "_softmax.default", "gather.default"} & set(found)


def test_what_a_router_rounds_stays_rounded() -> None:
    """In two bytes, where weights of Mixtral are float32 and those of others are not."""
    logits = numbers(3, 9).to(torch.bfloat16)
    for twin, _ in router.ROUTERS:
        module = fused(lambda given, twin=twin: twin(given, 4), [logits], "functions")
        # Its cast as well.
        assert calls(module)["route"] == 1 and not calls(module)["_to_copy.default"]
        (weights, index), (expected, its_index) = module(logits), twin(logits, 4)
        assert weights.dtype == expected.dtype and torch.equal(index, its_index)
        torch.testing.assert_close(weights, expected, rtol=2**-7, atol=1e-6)


Step = Callable[[torch.Tensor], Any]


def ordered(step: Step, tokens: int) -> Any:
    """The calls of what `step` of logits of six experts becomes, which computes the same."""
    logits = numbers(tokens, 6)
    module = fused(step, [logits.clone()], "functions")
    found, expected = module(logits.clone()), step(logits.clone())
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    return calls(module)


@torch.no_grad()
def test_routers_order_few_pairs() -> None:
    def step(logits: torch.Tensor) -> Any:
        weights, index = router.slow_route_mixtral(logits, 2)
        return weights, index, *ORDER_OPERATOR(index, 6, True)

    def without_weights(logits: torch.Tensor) -> Any:
        return ORDER_OPERATOR(router.slow_route_olmo(logits, 2)[1], 6, False)

    for tokens in (1, 5, 16):
        for one in (step, without_weights):
            found = ordered(one, tokens)
            assert found["route_pairs"] == 1 and not found["route"] and not found["order_pairs.default"]
    found = ordered(step, 17)
    assert found["route"] == found["order_pairs.default"] == 1


@torch.no_grad()
def test_pairs_of_others_than_the_router_chose_are_ordered_by_themselves() -> None:
    def fewer_experts(logits: torch.Tensor) -> Any:
        return ORDER_OPERATOR(router.slow_route_mixtral(logits, 2)[1], 4, True)

    def other_experts(logits: torch.Tensor) -> Any:
        return ORDER_OPERATOR(router.slow_route_mixtral(logits, 2)[1] - 1, 6, True)

    def some_slots(logits: torch.Tensor) -> Any:
        return ORDER_OPERATOR(router.slow_route_mixtral(logits, 3)[1][:, :2], 6, True)

    for step in (fewer_experts, other_experts, some_slots):
        found = ordered(step, 3)
        assert found["route"] == found["order_pairs.default"] == 1, step


@torch.no_grad()
def test_two_orders_of_one_choice() -> None:
    """The first is written with it, the other by itself."""

    def step(logits: torch.Tensor) -> Any:
        index = router.slow_route_mixtral(logits, 2)[1]
        return *ORDER_OPERATOR(index, 6, True), *ORDER_OPERATOR(index, 6, False)

    found = ordered(step, 3)
    assert found["route_pairs"] == found["order_pairs.default"] == 1


@torch.no_grad()
def test_products_that_are_not_small_stay_as_they_are() -> None:
    weight, wide = numbers(4, 8), numbers(router.SMALL_ROWS + 1, 8)

    def product(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight) + 1

    def of_many_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, wide) + 1

    def of_what_is_made(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, weight * 2) + 1

    def small(step: Step, rows: int) -> int:
        return calls(fused(step, [numbers(rows, 8)], "functions"))["small_linear"]

    assert small(product, 3) == 1 and small(product, router.SMALL // 4 + 1) == 0
    assert small(of_many_rows, 1) == small(of_what_is_made, 3) == 0
