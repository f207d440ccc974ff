"""What runs in fewer launches computes what the model does: in Triton's interpreter without a GPU."""

import collections
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast

import quantkit
from quantkit import linear, quantize_tensor
from quantkit.errors import KernelError
from quantkit.kernels.linear import OPERATOR
from quantkit.kernels.linear_fused import (
    gated_linear,
    linear_of_begun,
    linear_of_norm,
    linear_then_norm,
)
from quantkit.kernels.moe import stacked_weights
from quantkit.kernels.moe.grouped_gemm import (
    EXPERTS_OPERATOR,
    ExpertsLayout,
    combine_experts,
    experts_linear,
    sort_tokens_by_expert,
)
from quantkit.kernels.ops import activation, kv_append, rope
from quantkit.kernels.ops.norm import add_rms_norm, rms_norm, rms_norm_reference
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cuda_graphs import prefill
from quantkit.runtime.cuda_graphs.capture import NotCaptured
from quantkit.runtime.decoding import forward_of
from quantkit.runtime.passes import fuse_linear, fused_forward
from quantkit.runtime.passes.patterns import fused
from quantkit.runtime.passes.trace import trace
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
    step_of,
)

pytest.importorskip("triton")

#: Functions of `quantkit.kernels.ops` that steps call instead of torch.
OPS = {"embed", "rms_norm", "add_rms_norm", "gate", "cos_sin", "rotate", "append", "rotate_append"}
#: Config and model of a family, what sets its config apart, and launches of a layer, and of all else.
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, int], dict[str, int]]] = {
    "Llama": (
        {},
        {"add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Qwen2": (
        {},
        {"add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Mistral": (
        {"sliding_window": 5},
        {"add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Qwen3": (
        {"head_dim": 16},
        {"add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Gemma": (
        {"head_dim": 16},
        {"add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Gemma2": (
        {"head_dim": 16, "sliding_window": 5},
        {"rms_norm": 2, "add_rms_norm": 2, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
    "Olmo2": (
        {},
        {"rms_norm": 4, "rotate_append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "add_rms_norm": 1},
    ),
    # Of its heads only a part is rotated.
    "Phi3": (
        {"pad_token_id": 0},
        {"add_rms_norm": 2, "rotate": 2, "append": 1, "gate": 1},
        {"embed": 1, "cos_sin": 1, "rms_norm": 1},
    ),
}

#: Of a model for prompts: the interpreter runs one program after the other, one for each head of a token.
OF_PROMPTS = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


@pytest.fixture(autouse=True)
def recordings(monkeypatch: pytest.MonkeyPatch, interpreter: bool) -> tuple[list[int], list[int]]:
    monkeypatch.setattr(fused_forward, "can_fuse", lambda device: True)
    fused_forward.warn_unchanged.cache_clear()
    return count_recordings(monkeypatch)


@pytest.fixture
def steps(recordings: tuple[list[int], list[int]]) -> list[int]:
    """How many steps were recorded."""
    return recordings[0]


@pytest.fixture
def prompts(recordings: tuple[list[int], list[int]]) -> list[int]:
    """How many prompts were recorded."""
    return recordings[1]


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What steps became."""
    return keep_modules(monkeypatch)


def beside_torch(x: torch.Tensor) -> torch.Tensor:
    """What torch does not see."""
    y = torch.zeros_like(x)
    with torch.utils._python_dispatch._disable_current_modes():
        y.copy_(x.tanh())
    return y


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(3)
def test_steps_of_each_family_are_fused_and_right(
    family: str, inference: bool, modules: list[Any], steps: list[int]
) -> None:
    more, of_layer, others = FAMILIES[family]
    model = made(family, **more)
    expected = decode_whole(model, ids(), 6)
    graph_decoding(model)
    with torch.inference_mode(inference):
        found = decode(model, forward_of(model), static_cache(model, 40), ids())
    close(found, expected)
    module = only(modules)
    assert len(steps) == 1
    layers = model.config.num_hidden_layers
    ours = {name: number for name, number in calls(module).items() if name in OPS}
    assert ours == {
        name: layers * of_layer.get(name, 0) + others.get(name, 0) for name in of_layer.keys() | others.keys()
    }
    # Counters of all layers at once, and no write of keys but ours.
    assert calls(module)["_foreach_add_.Scalar"] == 1
    assert not {"add_.Tensor", "index_copy_.default"} & set(calls(module))


def test_counters_of_one_dimension(modules: list[Any]) -> None:
    """transformers 5.12.1 has them so, 5.17 of none: either is written and counted with."""
    for shape in ((1,), ()):
        model = made("Llama")
        expected = decode_whole(model, ids(), 4)
        cache = static_cache(model, 40)
        for layer in cache.layers:
            layer.cumulative_length = layer.cumulative_length.reshape(shape)
        graph_decoding(model)
        close(decode(model, forward_of(model), cache, ids(), steps=4), expected)
        assert calls(modules[-1])["rotate_append"] == model.config.num_hidden_layers


@torch.no_grad()
def prompt(model: Any, tokens: torch.Tensor, **more: Any) -> list[torch.Tensor]:
    """The logits of the last token, and keys and values."""
    cache = DynamicCache()
    output = model(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1, **more)
    return [output.logits, *(part for layer in cache.layers for part in (layer.keys, layer.values))]


def steps_are_right(model: Any) -> None:
    """Six tokens of recorded steps, or of what runs in their place."""
    expected = decode_whole(model, ids(), 6)
    graph_decoding(model)
    close(decode(model, forward_of(model), static_cache(model, 40), ids()), expected)


def prompts_are_right(model: Any, given: Sequence[dict[str, Any]]) -> None:
    """Such inputs, one after the other, of which the second is recorded."""
    expected = [prompt(model, **inputs) for inputs in given]
    graph_decoding(model)
    for inputs, whole in zip(given, expected, strict=True):
        for one, other in zip(prompt(model, **inputs), whole, strict=True):
            close(one, other)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.sampled(2)
def test_prompts_of_families(family: str, modules: list[Any], prompts: list[int]) -> None:
    more, of_layer, others = FAMILIES[family]
    model = made(family, **more, **OF_PROMPTS)
    prompts_are_right(model, [{"tokens": ids(1, length, seed=length)} for length in (9, 9, 12)])
    module = only(modules)
    assert len(prompts) == 1
    expected = collections.Counter(of_layer) + collections.Counter(others)
    del expected["rotate_append"], expected["append"]
    # What rotates and keeps a token takes norms of its heads, which `rotate` does not.
    expected["rms_norm"] += 2 * (family == "Qwen3")
    found = calls(module)
    assert {name: number for name, number in found.items() if name in OPS} == expected | {"rotate": 2}
    # What a GPU would be asked or given by the host.
    assert not {"lift_fresh.default", "_local_scalar_dense.default"} & set(found)


def padded(kind: str, seed: int) -> dict[str, Any]:
    """A prompt of seven tokens, the first of which are padding."""
    tokens = ids(1, 7, seed)
    mask = torch.ones_like(tokens)
    mask[:, : seed + 1] = 0
    shown = torch.ones(7, 7, dtype=torch.bool, device=DEVICE).tril() & (mask[:, None, None] > 0)
    # A row without any key would be no numbers.
    shown = shown | torch.eye(7, dtype=torch.bool, device=DEVICE)
    hidden = torch.zeros(shown.shape, device=DEVICE).masked_fill(~shown, torch.finfo(torch.float32).min)
    masks = {
        "tokens": mask,
        "keys": shown,
        "layers": {"full_attention": hidden, "sliding_attention": hidden},
    }
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    return {"tokens": tokens, "attention_mask": masks[kind], "position_ids": positions}


@pytest.mark.parametrize(("kind", "inference"), [("tokens", True), ("keys", False), ("layers", True)])
def test_prompts_with_padding(
    kind: str, inference: bool, modules: list[Any], prompts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = made("Gemma2" if kind == "layers" else "Llama", **OF_PROMPTS)
    with torch.inference_mode(inference):
        prompts_are_right(model, [padded(kind, seed) for seed in range(3)])
    assert len(prompts) == 1
    # A GPU is asked whether a mask of tokens is all true, unless a graph is recorded.
    asked = kind == "tokens" and DEVICE == "cuda"
    assert len(modules) == (not asked) and ("as they are, with more launches" in caplog.text) == asked


@pytest.fixture
def cache() -> tuple[torch.Tensor, ...]:
    """Keys, values, their number, and what is to be written."""
    held = torch.tensor(3, device=DEVICE)
    return numbers(1, 2, 9, 8), numbers(1, 2, 9, 4), held, numbers(1, 2, 1, 8), numbers(1, 2, 1, 4)


@torch.no_grad()
def test_counters_are_counted_once_nobody_reads_them(cache: tuple[torch.Tensor, ...]) -> None:
    def two_layers(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        first = kv_append.append_reference(keys, values, held, k, v)
        held.add_(1)
        return first[0] * 2, first[1] + 1

    def read_after(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        first = kv_append.append_reference(keys, values, held, k, v)
        held.add_(1)
        return first[0] * held, first[1]

    def between(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(1, device=k.device) + held
        held.add_(1)
        return keys.index_copy_(2, positions, k), values.index_copy_(2, positions, v)

    # The counter is an input here, whose memory is its own.
    found = step_of(*cache)(two_layers)
    assert found["append"] == found["_foreach_add_.Scalar"] == 1
    assert step_of(*cache)(between)["append"] == 1
    found = step_of(*cache)(read_after)
    assert found["append"] == found["add_.Tensor"] == 1 and not found["_foreach_add_.Scalar"]


@torch.no_grad()
def test_what_is_read_or_written_between_stays_in_its_order(cache: tuple[torch.Tensor, ...]) -> None:
    def reads_keys(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(1, device=k.device) + held
        written = keys.index_copy_(2, positions, k)
        total = keys.sum()
        return written, values.index_copy_(2, positions, v), total

    def reads_values(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(1, device=k.device) + held
        written = keys.index_copy_(2, positions, k)
        total = values[:, :, 1:].sum()
        return written, values.index_copy_(2, positions, v), total

    def writes_what_is_written(keys: Any, values: Any, held: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(1, device=k.device) + held
        written = keys.index_copy_(2, positions, k)
        v[..., :2].add_(1.0)
        k.mul_(2.0)
        return written, values.index_copy_(2, positions, v)

    for function in (reads_keys, reads_values, writes_what_is_written):
        assert step_of(*cache)(function)["append"] == 0, function


@torch.no_grad()
def test_counters_by_more_than_they_say_stay_as_they_are() -> None:
    def step(x: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
        held.add_(1, alpha=2)
        return x * 2

    assert step_of(numbers(3), torch.tensor(3, device=DEVICE))(step)["add_.Tensor"] == 1


#: Operators whose schema says nothing of what they return.
_OWN = torch.library.Library("quantkit_tests", "DEF")
_OWN.define("viewed(Tensor x) -> Tensor")
_OWN.impl("viewed", lambda x: x.view(-1), "CompositeExplicitAutograd")
_OWN.define("nested(Tensor x) -> (Tensor, Tensor[])")
_OWN.impl("nested", lambda x: (x + 1, [x * 2, x * 3]), "CompositeExplicitAutograd")


@torch.no_grad()
def test_memory_is_shared_whatever_operations_say() -> None:
    def norm_of_what_is_written(x: torch.Tensor, weight: torch.Tensor, view: Callable[..., Any]) -> Any:
        y = x.clone()
        part = view(y)
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)
        part.mul_(3.0)
        return weight * (y * scale)

    for view in (torch.ops.quantkit_tests.viewed, lambda y: torch.unsafe_split(y, 8, -1)[0]):
        found = step_of(numbers(2, 3, 16), numbers(16))(partial(norm_of_what_is_written, view=view))
        assert not found["rms_norm"], view

    def same_memory_for_both(both: Any, held: Any, k: Any, v: Any) -> Any:
        positions = torch.arange(1, device=k.device) + held
        return both.index_copy_(2, positions, k).index_copy_(2, positions, v).clone()

    def overlapping(both: Any, held: Any, k: Any, v: Any) -> Any:
        keys, values = kv_append.append_reference(both[..., :8], both[..., 4:], held, k, v)
        return keys.clone(), values.clone()

    held = torch.tensor(3, device=DEVICE)
    for function, size in ((same_memory_for_both, 8), (overlapping, 12)):
        given = numbers(1, 2, 9, size), held, numbers(1, 2, 1, 8), numbers(1, 2, 1, 8) + 1
        assert not step_of(*given)(function)["append"], function


@torch.no_grad()
def test_results_within_results_are_not_constants() -> None:
    module = trace(lambda x: torch.ops.quantkit_tests.nested(x)[1][1] + 1, [numbers(4)])
    assert_equal(module(numbers(5)), numbers(5) * 3 + 1)


def test_a_number_that_the_host_gives_a_gpu_cannot_be_traced() -> None:
    """It may be another one at the next call, and the tensor lives no longer than what was traced."""

    def step(x: torch.Tensor) -> torch.Tensor:
        if x.is_cuda:
            return x * torch.tensor([1.0, 2.0], device=x.device)
        # What `torch.tensor` calls at its end, though not for the meta device.
        return x * torch.ops.aten.lift_fresh(torch.empty(2, device=x.device))

    with pytest.raises(NotCaptured, match="gives the GPU a number of the host"):
        trace(step, [torch.zeros(2, device="cuda" if DEVICE == "cuda" else "meta")])


@torch.no_grad()
def test_what_others_use_as_well_is_computed_for_them() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> Any:
        wide = x.to(torch.float32)
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight * scaled.to(x.dtype), scaled.sum()

    found = step_of(numbers(2, 3, 16), numbers(16))(step)
    assert found["rms_norm"] == found["rsqrt.default"] == 1


@torch.no_grad()
def test_what_kernels_do_not_take_stays_as_it_is() -> None:
    weight = numbers(16)

    def of_other_dtypes(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x.half(), weight, 1e-5)

    def along_others(x: torch.Tensor) -> torch.Tensor:
        return weight * (x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-5))

    def a_weight_for_each_row(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, x + 1, 1e-5)

    def of_other_shapes(x: torch.Tensor) -> torch.Tensor:
        return activation.silu_gate_reference(x, weight)

    def without_halves(x: torch.Tensor) -> torch.Tensor:
        x = x[None]
        turned = torch.cat((-x[..., 9:], x[..., :9]), dim=-1)
        return x * x.cos() + turned * x.sin()

    def rounded_to_others(x: torch.Tensor) -> torch.Tensor:
        wide = x.half().float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        return weight.half() * wide.to(torch.bfloat16)

    def of_64_bits(x: torch.Tensor) -> torch.Tensor:
        x = x.double()[None]
        return rope.rotate_reference(x, x[:, :1].cos(), x[:, :1].sin())

    def with_strides_that_are_counted_on(x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x.transpose(0, 1), weight, 1e-5).as_strided((3, 2, 16), (16, 48, 1))

    def of_one_number(x: torch.Tensor) -> torch.Tensor:
        return activation.silu_gate_reference(x[0, 0, 0], x[0, 0, 1])

    for function in (
        of_other_dtypes,
        along_others,
        a_weight_for_each_row,
        of_other_shapes,
        without_halves,
        rounded_to_others,
        of_64_bits,
        with_strides_that_are_counted_on,
        of_one_number,
    ):
        found = step_of(numbers(2, 3, 16))(function)
        assert not [name for name in found if name in OPS], function


@torch.no_grad()
def test_weights_that_a_step_makes_or_writes_are_not_read_before_it_has() -> None:
    def of_its_sum(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        total = x + other
        return rms_norm_reference(total, total, 1e-5)

    def of_what_it_writes(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight.mul_(2), 1e-5)

    def of_what_it_will_write(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = rms_norm_reference(x, weight, 1e-5)
        weight.mul_(2)
        return y

    def of_a_view(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, weight.view(4, 4).view(16), 1e-5)

    for step in (of_its_sum, of_what_it_writes, of_what_it_will_write):
        found = step_of(numbers(16), numbers(16) + 1)(step)
        assert not found["rms_norm"] and not found["add_rms_norm"], step
    assert step_of(numbers(16), numbers(16))(of_a_view)["rms_norm"] == 1


@torch.no_grad()
@pytest.mark.parametrize("larger", ["before", "after"])
def test_what_follows_a_norm_waits_for_longer_products_than_itself(larger: str) -> None:
    small, large = (quantize_tensor(numbers(64, 64).repeat(times, 1), "int4") for times in (1, 4))
    before, after = (large, small) if larger == "before" else (small, large)

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y = linear(x, before).view(-1, 64)
        total = y + y.flip(0)
        return total + linear(rms_norm_reference(total, weight, 1e-5), after)[:, :64]

    given = [numbers(2, 64), numbers(64)]
    step(*given)  # Layouts are built before a step is recorded.
    module = fused(step, given, "steps")
    (node,) = module.graph.find_nodes(op="call_function", target=add_rms_norm)
    assert node.kwargs.get("late", False) == (larger == "before")
    close(module(*given), step(*given))


@torch.no_grad()
def test_products_compute_the_norms_that_they_alone_take(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def does_norm(part: str, rows: int, columns: int, *of: Any) -> bool:
        if part == "whole":
            asked.append((rows, columns))
        return part == "whole"

    def of_norm(x: Any, other: Any, weight: Any, eps: float, kind: str, *of: Any) -> Any:
        if other is None:
            return x, OPERATOR(rms_norm(x, weight, eps, kind), *of)
        total, y = add_rms_norm(x, other, weight, eps, kind)
        return total, OPERATOR(y, *of)

    monkeypatch.setattr(fuse_linear, "does_norm", does_norm)
    monkeypatch.setattr(fuse_linear, "linear_of_norm", of_norm)
    packed = quantize_tensor(numbers(64, 64), "int4")

    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        first = linear(rms_norm_reference(x, weight, 1e-5), packed)
        total = x + first
        second = linear(rms_norm_reference(total, weight, 1e-6), packed)
        # Two products, a sum that is needed before, part of the rows, and what is written before the product.
        both = rms_norm_reference(total + second, weight, 1e-5)
        twice = linear(both, packed) + linear(both * 2, packed)
        early = total + twice
        normed = rms_norm_reference(early, weight, 1e-5)
        third = linear(normed, packed, (early * 2)[0, 0])
        part = linear(rms_norm_reference(third, weight, 1e-5)[:, -1:], packed)
        written = third + part
        normed = rms_norm_reference(written, weight, 1e-5)
        written.add_(1)
        return total + linear(normed, packed) + written

    given = [numbers(2, 3, 64), numbers(64)]
    step(*given)  # Layouts are built before a step is recorded.
    module = fused(step, given, "steps")
    assert calls(module)["of_norm"] == 2 and calls(module)["linear.default"] == 5
    assert asked == [(6, 64), (6, 64)]
    close(module(*given), step(*given))


@torch.no_grad()
def test_products_begin_and_end_norms_of_what_they_are_added_to(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, int, int]] = []

    def does_norm(part: str, rows: int, columns: int, *of: Any) -> bool:
        asked.append((part, rows, columns))
        return part != "whole"

    def then_norm(x: Any, other: Any, weight: Any, kind: str, *of: Any) -> Any:
        total = OPERATOR(x, *of).view(other.shape) + other
        return total, total * weight, total.pow(2).flatten(0, -2)

    def of_begun(x: Any, squares: Any, eps: float, *of: Any) -> Any:
        means = squares.mean(1).view(*x.shape[:-1], 1)
        return OPERATOR(x * torch.rsqrt(means + eps), *of)

    monkeypatch.setattr(fuse_linear, "does_norm", does_norm)
    monkeypatch.setattr(fuse_linear, "linear_then_norm", then_norm)
    monkeypatch.setattr(fuse_linear, "linear_of_begun", of_begun)
    packed, wide = (quantize_tensor(numbers(64, k) / 8, "int4") for k in (64, 128))

    def step(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x + linear(y, wide)
        both = rms_norm_reference(total, weight, 1e-5)
        total = linear(linear(both, packed) * linear(both, packed), packed) + total
        total = total + linear(rms_norm_reference(total, weight, 1e-6)[:, -1:], packed)
        # A product that others need too, norms that no product begins or ends, and what is written between.
        needed = linear(total, packed)
        total = total + needed
        total = total + linear(rms_norm_reference(total, weight, 1e-5), packed) * needed
        total = total + linear(rms_norm_reference(total, weight, 1e-5), packed)
        first = rms_norm_reference(total, weight, 1e-5)
        total = total + first + linear(first, packed)
        late = linear(total, packed)
        total.mul_(2)
        total = total + late
        total = total + linear(rms_norm_reference(total, weight, 1e-5), packed)
        twice = linear(total, packed)
        total = twice + twice
        total = total + linear(rms_norm_reference(total, weight, 1e-5), packed)
        # The sum of what was split is written before it is begun again.
        third = linear(total, packed) + total
        fourth = linear(rms_norm_reference(third, weight, 1e-5), packed)
        after = linear(third, packed)
        third.mul_(2)
        total = third + after
        total = total + linear(rms_norm_reference(total, weight, 1e-5), packed) + fourth
        return total

    given = [numbers(2, 1, 64), numbers(2, 1, 128), numbers(64)]
    step(*given)  # Layouts are built before a step is recorded.
    module = fused(step, given, "steps")
    found = calls(module)
    assert (found["then_norm"], found["of_begun"]) == (3, 4), found
    assert asked[:3] == [("begin", 2, 128), ("end", 2, 64), ("end", 2, 64)]
    close(module(*given), step(*given))

    def turned(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x + linear(x.transpose(0, 1).contiguous(), packed).transpose(0, 1)
        return total + linear(rms_norm_reference(total, weight, 1e-5), packed)

    given = [numbers(2, 3, 64), numbers(64)]
    module = fused(turned, given, "steps")
    assert not calls(module)["then_norm"] and calls(module)["add_rms_norm"] == 1
    close(module(*given), turned(*given))


@torch.no_grad()
def test_products_gate_what_nobody_else_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int]] = []

    def gates(rows: int, columns: int, *of: Any) -> bool:
        asked.append((rows, columns))
        return True

    def gated(x: Any, *of: Any, gate: str) -> Any:
        return activation.gate(*OPERATOR(x, *of).chunk(2, dim=-1), gate)

    monkeypatch.setattr(fuse_linear, "gates", gates)
    monkeypatch.setitem(fuse_linear.GATED, OPERATOR, replace(fuse_linear.GATED[OPERATOR], run=gated))
    monkeypatch.setattr(fuse_linear, "PRODUCTS", (OPERATOR, gated))
    packed, narrower = (quantize_tensor(numbers(n, 64) / 8, "int4") for n in (128, 64))
    up = quantize_tensor(numbers(64, 64) / 8, "nf4")

    def step(x: torch.Tensor) -> torch.Tensor:
        first = linear(activation.silu_gate_reference(*torch.split(linear(x, packed), 64, dim=-1)), narrower)
        second = activation.gelu_gate_reference(*linear(first, packed).chunk(2, dim=-1))
        # Two products, halves the other way round, parts of halves, and a product that others need.
        other = activation.silu_gate_reference(linear(second, narrower), linear(second, up))
        turned = activation.silu_gate_reference(*torch.split(linear(other, packed), 64, dim=-1)[::-1])
        quarter = linear(turned, packed)
        part = activation.silu_gate_reference(quarter[..., :32], quarter[..., 32:64])
        both = linear(first, packed)
        kept = activation.silu_gate_reference(*both.chunk(2, dim=-1))
        return part.sum() + both[..., :64] + kept

    given = [numbers(2, 3, 64)]
    step(*given)  # Layouts are built before a step is recorded.
    module = fused(step, given, "steps")
    assert calls(module)["gated"] == 2 and calls(module)["gate"] == 4
    assert asked == [(6, 64), (6, 64)]
    close(module(*given), step(*given))


@torch.no_grad()
def test_products_with_experts_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, ...]] = []

    def gates(device: Any, x: Any, order: Any, scheme: str, *sizes: int) -> bool:
        asked.append((*x.shape, *order.shape, *sizes))
        return True

    def gated(*of: Any, gate: str) -> Any:
        return activation.gate(*EXPERTS_OPERATOR(*of).chunk(2, dim=-1), gate)

    monkeypatch.setattr(fuse_linear, "gates_experts", gates)
    monkeypatch.setitem(
        fuse_linear.GATED, EXPERTS_OPERATOR, replace(fuse_linear.GATED[EXPERTS_OPERATOR], run=gated)
    )
    if DEVICE == "cpu":
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    packed = [quantize_tensor(numbers(32, 64) / 8, "int4") for _ in range(6)]
    narrower = [quantize_tensor(numbers(64, 32) / 8, "int4", group_size=32) for _ in range(3)]
    layouts = [
        ExpertsLayout(
            torch.bfloat16,
            weights[0].scheme.token,
            3,
            len(weights) // 3,
            weights[0].shape[0],
            stacked_weights.stacked(weights, torch.bfloat16),
        )
        for weights in (packed, narrower)
    ]
    index = torch.tensor([[0, 2], [1, 0]], device=DEVICE)

    def step(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        pairs = sort_tokens_by_expert(index, *layouts)
        gate, up = experts_linear(x, pairs, layouts[0]).chunk(2, -1)
        y = experts_linear(activation.silu_gate_reference(gate, up), pairs, layouts[1], chained=True)
        return combine_experts(y, index, weights, 3)

    given = [numbers(2, 64).to(torch.bfloat16), numbers(2, 2)]
    module = fused(step, given, "steps")
    assert calls(module)["gated"] == 1 and not calls(module)["gate"]
    assert asked == [(2, 64, 4, 3, 2, 32, False, False)]
    close(module(*given), step(*given))


@torch.no_grad()
def test_products_compute_norms_and_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    def of_norm(x: Any, other: Any, weight: Any, eps: float, kind: str, *of: Any, gate: str) -> Any:
        total, y = add_rms_norm(x, other, weight, eps, kind)
        return total, activation.gate(*OPERATOR(y, *of).chunk(2, dim=-1), gate)

    for name, taken in {"does_norm": lambda part, *of: part == "whole", "gates": lambda *of: True}.items():
        monkeypatch.setattr(fuse_linear, name, taken)
    monkeypatch.setattr(fuse_linear, "linear_of_norm", of_norm)
    packed, narrower = (quantize_tensor(numbers(n, 64) / 8, "int4") for n in (128, 64))

    def step(x: torch.Tensor, other: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        total = x + other
        gate, up = torch.split(linear(rms_norm_reference(total, weight, 1e-5), packed), 64, dim=-1)
        return total + linear(activation.silu_gate_reference(gate, up), narrower)

    given = [numbers(2, 3, 64), numbers(2, 3, 64).flip(0), numbers(64)]
    step(*given)  # Layouts are built before a step is recorded.
    module = fused(step, given, "steps")
    found = calls(module)
    assert found["of_norm"] == found["linear.default"] == 1 and not found["gate"] + found["add_rms_norm"]
    close(module(*given), step(*given))


@torch.no_grad()
def test_norms_for_another_kernel_are_refused() -> None:
    packed = quantize_tensor(numbers(64, 64), "int4")
    norm: Any = (numbers(2, 64), None, numbers(64), 1e-5, "llama")
    with pytest.raises(
        KernelError, match=r"unpack, which runs .* does not do a norm \(whole\): it takes x, and gives y, as"
    ):
        linear_of_norm(*norm, list(packed.tensors), [], None, packed.scheme.token, 64, "")


@torch.no_grad()
def test_norms_begun_or_ended_by_another_kernel_are_refused() -> None:
    packed = quantize_tensor(numbers(64, 64), "int4")
    of: Any = (list(packed.tensors), [], None, packed.scheme.token, 64, "")
    with pytest.raises(KernelError, match=r"unpack, which runs .* does not do a norm \(begin\)"):
        linear_then_norm(numbers(2, 64), numbers(2, 64), numbers(64), "llama", *of)
    with pytest.raises(KernelError, match=r"unpack, which runs .* does not do a norm \(end\)"):
        linear_of_begun(numbers(2, 64), numbers(2, 64), 1e-5, *of)


@torch.no_grad()
def test_gates_for_another_kernel_are_refused() -> None:
    packed = quantize_tensor(numbers(64, 64), "int4")
    with pytest.raises(KernelError, match=r"unpack, which runs .* does not gate y: it gives y as it is"):
        gated_linear(numbers(2, 64), list(packed.tensors), [], None, packed.scheme.token, 64, "", gate="silu")


@torch.no_grad()
def test_dtypes_that_no_chain_has_are_no_hindrance() -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x * weight.to(torch.float8_e4m3fn).to(x.dtype), weight, 1e-5)

    assert step_of(numbers(2, 3, 16), numbers(16))(step)["rms_norm"] == 1


@torch.no_grad()
def test_a_number_that_the_host_reads_cannot_be_traced() -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * int(x.sum()) if float(x[0]) > 0 else x

    if DEVICE == "cuda":
        with pytest.raises(NotCaptured, match="asks the GPU for a number"):
            trace(step, [numbers(4)])
    else:
        # On the host it may read what it likes: a graph has what it read when it was recorded.
        trace(step, [numbers(4)])


def test_what_is_launched_is_shown_on_demand(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("QUANTKIT_VERBOSE", "1")
    model = made("Llama")
    graph_decoding(model)
    decode(model, forward_of(model), static_cache(model, 40), ids(), steps=1)
    (said,) = (one.getMessage() for one in caplog.records if "decoding steps" in one.getMessage())
    assert said.startswith("decoding steps launch ")
    assert {"4 add_rms_norm", "2 rotate_append", "2 gate", "1 rms_norm"} <= set(
        said.split("launch ")[1].split(", ")
    )
    assert "view" not in said and "part" not in said


def test_a_model_that_cannot_be_traced_is_recorded_as_it_is(
    monkeypatch: pytest.MonkeyPatch, steps: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise TypeError("no such thing")

    monkeypatch.setattr(fused_forward, "fused", fails)
    steps_are_right(made("Llama"))
    assert len(steps) == 1
    assert "decoding steps run as they are, with more launches: no such thing" in caplog.text


def test_a_step_that_cannot_be_recorded_leaves_the_cache_as_it_was(
    monkeypatch: pytest.MonkeyPatch, steps: list[int]
) -> None:
    def refuse(output: Any) -> None:
        raise NotCaptured("the model returns more")

    monkeypatch.setattr(fused_forward, "check_output", refuse)
    model = made("Llama")
    steps_are_right(model)
    assert not steps and list(forward_of(model).refused) == ["the model returns more"]


@torch.no_grad()
def test_fewer_launches_are_no_less_exact(monkeypatch: pytest.MonkeyPatch, modules: list[Any]) -> None:
    """In 16 bits, against float32: what is rounded is rounded where it was."""
    dtype = torch.bfloat16 if DEVICE == "cuda" else torch.float16
    model = made("Llama")
    token = ids(tokens=1)
    exact = model(input_ids=torch.cat([ids(), token], 1), use_cache=False).logits[:, -1]
    model.to(dtype)
    graph_decoding(model)
    errors = []
    for possible in (False, True):
        monkeypatch.setattr(fused_forward, "can_fuse", lambda device, possible=possible: possible)
        forward_of(model)._graphs.clear()
        cache = static_cache(model, 40)
        model(input_ids=ids(), past_key_values=cache, use_cache=True)
        logits = forward_of(model)(input_ids=token, past_key_values=cache, use_cache=True).logits[:, -1]
        errors.append(float((logits.float() - exact).norm() / exact.norm()))
    assert len(modules) == 1
    assert 0 < errors[1] < 1.25 * errors[0]


@torch.no_grad()
def test_what_torch_does_not_see_is_not_left_out(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A module that computes beside torch: what it had returned would be returned for ever."""
    model = made("Llama")
    model.model.layers[0].mlp.forward = beside_torch
    steps_are_right(model)
    assert "something computes that torch does not see" in caplog.text


@pytest.mark.parametrize("error", [TypeError("no such thing"), NotCaptured("the host reads")], ids=str)
def test_prompts_that_cannot_be_traced_are_recorded_as_they_are(
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What the host reads while a prompt is traced it may not read while a graph is recorded."""

    def fails(*_: Any) -> None:
        raise error

    monkeypatch.setattr(fused_forward, "fused", fails)
    # Of two models.
    prompts_are_right(made("Llama"), [{"tokens": ids(seed=seed)} for seed in range(3)])
    prompts_are_right(made("Llama"), [{"tokens": ids(2, seed=seed)} for seed in range(3)])
    assert len(prompts) == 2
    assert caplog.text.count(f"prompts run as they are, with more launches: {error}") == 1


@torch.no_grad()
def test_what_does_not_run_in_fewer_launches_is_recorded_as_it_is(
    monkeypatch: pytest.MonkeyPatch, prompts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """A kernel that does not compile, say: neither the prompt nor the step ends with its error."""
    traced = fused_forward.fused

    def fused(*arguments: Any) -> Any:
        traced(*arguments)

        def fails(*_: torch.Tensor) -> None:
            raise RuntimeError("no such kernel")

        return fails

    monkeypatch.setattr(fused_forward, "fused", fused)
    model = made("Llama")
    prompts_are_right(model, [{"tokens": ids(seed=seed)} for seed in range(3)])
    assert len(prompts) == 1
    steps_are_right(model)
    for what in ("prompts", "decoding steps"):
        assert f"{what} run as they are, with more launches: no such kernel" in caplog.text


def test_prompts_without_memory_to_trace_them_run(
    monkeypatch: pytest.MonkeyPatch, prompts: list[int]
) -> None:
    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError("none left")

    monkeypatch.setattr(fused_forward, "fused", fails)
    model = made("Llama")
    prompts_are_right(model, [{"tokens": ids(seed=seed)} for seed in range(3)])
    assert not prompts
    assert forward_of(model)._prompts.refused == "there is too little memory for graphs"


def test_prompts_are_not_without_what_torch_does_not_see(
    prompts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    model = made("Llama", num_hidden_layers=1)
    model.model.layers[0].mlp.forward = beside_torch
    prompts_are_right(model, [{"tokens": ids(1, seed=seed)} for seed in range(3)])
    assert len(prompts) == 1
    assert "prompts run as they are, with more launches: something computes that" in caplog.text


@pytest.mark.parametrize("never", [-math.inf, math.nan])
@pytest.mark.sampled(2)
def test_what_is_no_number_in_both_is_no_difference(
    never: float, prompts: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    """Logits of tokens that are never said, which some models make so."""
    model = made("Llama", **OF_PROMPTS)
    own = model.lm_head.forward

    def forward(x: torch.Tensor) -> torch.Tensor:
        logits = own(x)
        return logits.masked_fill(torch.arange(logits.shape[-1], device=DEVICE) < 3, never)

    model.lm_head.forward = forward
    given = [{"tokens": ids(1, seed=seed)} for seed in range(3)]
    expected = [prompt(model, **inputs) for inputs in given]
    graph_decoding(model)
    for inputs, whole in zip(given, expected, strict=True):
        for one, other in zip(prompt(model, **inputs), whole, strict=True):
            assert_close(one, other, rtol=1e-3, atol=1e-3, equal_nan=True)
    assert len(prompts) == 1 and "as they are" not in caplog.text


@pytest.mark.parametrize(("one", "other"), [(math.inf, 1.0), (1.0, math.nan), (math.inf, -math.inf)])
def test_what_is_no_number_in_one_is_a_difference(one: float, other: float) -> None:
    found = fused_forward._relative(torch.tensor([1.0, one]), torch.tensor([1.0, other]))
    assert not found <= fused_forward.MOST_DIFFERENCE


@torch.no_grad()
@pytest.mark.parametrize("unseen", [False, True])
def test_keys_are_those_of_the_tokens_and_nothing_is_kept(
    unseen: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Values alone that torch does not see, which the logits of this token do not depend on."""
    given, features = {"input_ids": ids()}, numbers(4)
    made_before: list[weakref.ref[torch.Tensor]] = []

    def forward() -> Any:
        cache = DynamicCache()
        cache.layer_class_to_replicate = prefill._PromptLayer
        x = given["input_ids"][:, None, :, None] * features
        values = beside_torch(x / 500) if unseen else x + 1
        cache.update(x * 2, values, 0)
        made_before.extend(map(weakref.ref, (cache.layers[0].keys, cache.layers[0].values)))
        return CausalLMOutputWithPast(logits=x.sum(), past_key_values=cache)

    found = fused_forward.fused_forward("forwards", forward, given)
    assert len(made_before) == 4 and not any(one() is not None for one in made_before)
    assert (found is forward) == unseen == ("does not see (relative difference " in caplog.text)
    given["input_ids"].copy_(ids(seed=5))
    (layer,), (expected,) = found().past_key_values.layers, forward().past_key_values.layers
    close(torch.stack([layer.keys, layer.values]), torch.stack([expected.keys, expected.values]))


def test_steps_of_a_packed_model_are_fused_and_right(modules: list[Any], tmp_path: Path) -> None:
    source = Path(__file__).parents[3] / "examples/stories260K"
    quantkit.quantize(source, tmp_path / "out", format="int4", method="rtn")
    model = quantkit.load(tmp_path / "out", device=DEVICE, dtype=torch.float32)
    expected = decode_whole(model, ids(), 3)
    graph_decoding(model)
    close(decode(model, forward_of(model), static_cache(model, 40), ids(), steps=3), expected)
    module = only(modules)
    layers = model.config.num_hidden_layers
    found = calls(module)
    # A GPU has one launch for q, k and v, and one for gate and up, where their layouts can be joined.
    assert found["linear.default"] in (7 * layers, 5 * layers, 4 * layers)
    assert [found[name] for name in ("add_rms_norm", "rotate_append", "gate")] == [2 * layers, layers, layers]
