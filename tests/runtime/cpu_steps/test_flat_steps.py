"""Flat steps on a CPU: the numbers of the model's own forward, where they can be, and else the reason."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from quantkit import quantize_tensor
from quantkit.kernels.ops.norm import rms_norm_reference
from quantkit.packing.schemes import scheme
from quantkit.quantizing import quantize
from quantkit.runtime import ready
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.cpu_steps.flat_forward import FlatForward
from quantkit.runtime.cpu_steps.flat_step import FASTER, flat
from quantkit.runtime.cuda_graphs.capture import NotCaptured
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.load import load
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.transformers.patches import generation

from ...support.compare import assert_close, assert_equal
from ..graphed import SEVEN, ids, made

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="models of these tests are on the GPU then")


def packed(
    family: str = "Llama", dtype: torch.dtype = torch.bfloat16, alike: bool = False, **more: Any
) -> Any:
    """A tiny model whose linears are packed at 4 bits, but for every third unless `alike`, which is at 8."""
    model = made(family, **{"hidden_size": 64, "intermediate_size": 128} | more).to(dtype)
    linears = [name for name, one in model.named_modules() if type(one) is torch.nn.Linear]
    for number, name in enumerate(linears):
        linear = model.get_submodule(name)
        layout = scheme("int8") if number % 3 == 2 and not alike else scheme("int4", group_size=32)
        tensor = quantize_tensor(linear.weight.detach(), layout)
        model.set_submodule(name, PackedLinear.from_packed(tensor, linear.bias))
    generation.apply(model)
    return model


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2"])
def test_flat_steps_give_the_logits_of_the_model(family: str, dtype: torch.dtype) -> None:
    model = packed(family, dtype)
    steps, found = graphs_of(model), []
    assert type(steps) is FlatForward
    with torch.no_grad():
        for forward in (model, steps.renew()):
            cache, token, logits = static_cache(model, 30), ids(), []
            model(input_ids=token, use_cache=True, **{CACHE: cache})
            for number in range(4):
                token = torch.full((2, 1), 7 + number)
                logits.append(forward(input_ids=token, use_cache=True, **{CACHE: cache}).logits)
            found.append(torch.stack(logits))
    assert not steps.refused
    assert_equal(*found)


@pytest.mark.parametrize("rows", [1, 2, 40])
def test_joined_products_of_a_step_give_the_logits_of_each_alone(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 sequences are more rows of x than the joined layout is for."""
    found, products = [], []
    real = ready.shared_inputs
    for joined in (False, True):
        model = packed(alike=True, num_key_value_heads=4)
        monkeypatch.setattr(ready, "shared_inputs", real if joined else lambda _: ())
        ready.make_ready(model)
        with torch.no_grad():
            cache, steps = static_cache(model, 30), graphs_of(model).renew()
            model(input_ids=ids(rows), use_cache=True, **{CACHE: cache})
            found.append(steps(input_ids=ids(rows)[:, :1], use_cache=True, **{CACHE: cache}).logits)
        assert not steps.refused
        (graph,) = steps._graphs.values()
        products.append(sum(name.startswith("product") for name in vars(graph.run.module.args[0])))
    assert_equal(*found)
    # Of two layers, and the head: q, k, v, o, gate, up and down; or qkv, o, gate-up and down.
    assert products == ([15, 9] if rows < 40 else [15, 15])


def test_generate_runs_flat_steps_and_makes_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    # In float32, as logits in bfloat16 tie, and the cache of another length has sums of another order.
    model, calls = packed(dtype=torch.float32), []
    real = FlatForward.step
    monkeypatch.setattr(FlatForward, "step", lambda *given: calls.append(1) or real(*given))
    expected = model.generate(ids(), **SEVEN, disable_compile=True)
    assert not calls
    for _ in range(2):
        assert_equal(model.generate(ids(), **SEVEN), expected)
    assert len(calls) == 12 and len(graphs_of(model)._graphs) == 1
    # A batch of another size is another step.
    assert_equal(model.generate(ids(1), **SEVEN), model.generate(ids(1), **SEVEN, disable_compile=True))
    assert not graphs_of(model).refused


@pytest.mark.parametrize(
    "options", [{"format": "fp8"}, {"scheme": "W8A8"}, {"scheme": "FP8_DYNAMIC"}], ids=str
)
def test_words_of_another_dtype_and_rounded_inputs_run_flat(tmp_path: Path, options: dict[str, str]) -> None:
    quantize(STORIES, tmp_path / "out", **options)
    model = load(tmp_path / "out", device="cpu", dtype=torch.float32)
    expected = model.generate(ids(), **SEVEN, disable_compile=True)
    assert_equal(model.generate(ids(), **SEVEN), expected)
    assert len(graphs_of(model)._graphs) == 1 and not graphs_of(model).refused


def test_a_weight_that_is_replaced_is_seen_by_the_next_generation() -> None:
    model = packed(dtype=torch.float32)
    model.generate(ids(), **SEVEN)
    with torch.no_grad():
        model.model.norm.weight = torch.nn.Parameter(-model.model.norm.weight)
    expected = model.generate(ids(), **SEVEN, disable_compile=True)
    assert_equal(model.generate(ids(), **SEVEN), expected)


def test_a_hook_keeps_the_modules_and_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model, calls = packed(), []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    with caplog.at_level(logging.WARNING, "quantkit.model"):
        for _ in range(2):
            model.generate(ids(), **SEVEN)
    assert len(calls) == 14
    said = [one.getMessage() for one in caplog.records if one.name == "quantkit.model"]
    reason = "a hook of 'model.layers.1' is to be called at each; remove it"
    assert said == [f"decoding steps run module by module, which takes longer: {reason}"]


def test_what_python_decides_by_numbers_is_not_recorded() -> None:
    def decides(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * 2 if x.sum() > 0 else x]

    def counts(x: torch.Tensor) -> list[torch.Tensor]:
        return [x.nonzero()]

    for forward in (decides, counts):
        with torch.no_grad(), pytest.raises(NotCaptured, match="Python decides by numbers of aten"):
            flat(forward, [torch.ones(3)])


def test_what_is_computed_twice_or_of_numbers_alone_is_computed_once() -> None:
    counter, other = torch.zeros(()), torch.zeros(())

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        y = torch.cos(x) + torch.cos(x) + torch.arange(3) + torch.arange(3)
        # Counters with the same number are not one.
        return [y + counter.add_(1) + other.add_(2)]

    x = torch.rand(3)
    with torch.no_grad():
        run = flat(forward, [x])
        names = run.func.__code__.co_names
        assert names.count("cos") == 1
        assert "arange" not in names
        (found,) = run(x)
        assert_equal(found, 2 * torch.cos(x) + torch.arange(3) + torch.arange(3) + 2 + 4)
    assert (counter, other) == (2, 4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 576), (2, 3, 7), (5, 1)], ids=str)
def test_norms_of_16_bits_are_one_call(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight = torch.rand(shape[-1]).to(dtype)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        normed = rms_norm_reference(x, weight, 1e-5)
        return [normed, x.float().pow(2).mean(-1, keepdim=True)]

    x = torch.randn(shape).to(dtype)
    with torch.no_grad():
        run = flat(forward, [x])
        for one in (x, 1e-4 * x, x.fill_(0)):
            for found, expected in zip(run(one), forward(one), strict=True):
                assert_equal(found, expected)
    assert ("rms_norm" in run.func.__code__.co_names) == (dtype != torch.float32)


def test_norms_of_what_changes_meanwhile_or_lies_elsewise_stay_as_they_are() -> None:
    def changed(x: torch.Tensor) -> list[torch.Tensor]:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
        x.mul_(2)
        return [normed.to(x.dtype)]

    def turned(x: torch.Tensor) -> list[torch.Tensor]:
        x = x.view(2, 3, 4, 4).transpose(1, 2)
        normed = rms_norm_reference(x, torch.ones(4, dtype=x.dtype), 1e-5)
        return [normed.transpose(1, 2).view(2, 12, 4)]

    for forward in (changed, turned):
        x = torch.randn(2, 12, 4).bfloat16()
        with torch.no_grad():
            run = flat(forward, [x.clone()])
            assert_equal(*run(x.clone()), *forward(x.clone()))
        assert "rms_norm" not in run.func.__code__.co_names


def test_slices_are_narrow_where_both_agree() -> None:
    x = torch.rand(3, 8)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [
            one + 1 for one in (x[:, 2:5], x[:, 6:20], x[:, -3:], x[:, ::2], x[1:2], x[:, 8:], x[:, 9:])
        ] + [torch.ops.aten.slice.Tensor(x, 0, None, 2) + 1]

    with torch.no_grad():
        run = flat(forward, [x])
        for found, expected in zip(run(x), forward(x), strict=True):
            assert_equal(found, expected)
    assert "narrow" in run.func.__code__.co_names


@pytest.mark.parametrize("operation", [one for one in FASTER if hasattr(one, "_schema")], ids=str)
def test_what_is_called_in_place_of_an_operation_computes_the_same(operation: Any) -> None:
    x, y = torch.rand(3, 4), torch.rand(3, 4)
    arguments: dict[str, tuple[Any, ...]] = {
        "aten::_unsafe_view": (x, [2, 6]),
        "aten::view": (x, [4, -1]),
        "aten::cat": ([x, y], -1),
        "aten::expand": (x[:1], [3, -1]),
        "aten::index_copy_": (x.clone(), 1, torch.tensor([2]), y[:, :1]),
        "aten::mean": (x, [-1], True),
        "aten::mm": (x, y.t()),
        "aten::pow": (x, 2),
        "aten::split_with_sizes": (x, [1, 3], 1),
        "aten::transpose": (x, 0, 1),
        "aten::unsqueeze": (x, 1),
        "aten::where": (x > 0.5, x, y),
    }
    heads = torch.rand(3, 1, 2, 3, 8)
    arguments["aten::_scaled_dot_product_flash_attention_for_cpu"] = tuple(heads)
    binary = {"aten::add", "aten::mul", "aten::le"}
    name = operation._schema.name
    given = arguments.get(name, (x, y) if name in binary else (x,))
    for found, expected in zip(
        *(pytree.tree_leaves(one(*given)) for one in (FASTER[operation], operation)), strict=True
    ):
        assert_close(found, expected, rtol=0, atol=0)


def test_views_of_views_are_one_view() -> None:
    x = torch.rand(2, 1, 12)

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        heads = x.view(2, 1, 3, 4).transpose(1, 2)
        turned = x.view(2, 3, 4).transpose(1, 2)
        parts = [part.view(2, 1, 2, 3).transpose(1, 2) for part in x.split(6, -1)]
        once = x[:1].view(1, 1, 3, 4).transpose(1, 2).unsqueeze(0)
        once.add_(1)
        return [heads + 1, turned + 1, turned.transpose(1, 2).unsqueeze(1) + 1, *(part + 1 for part in parts)]

    with torch.no_grad():
        given, expected = x.clone(), forward(x)
        run = flat(forward, [torch.rand(2, 1, 12)])
        for found, wanted in zip(run(given), expected, strict=True):
            assert_equal(found, wanted)
        assert_equal(given, x)
    # `turned` and back.
    assert run.func.__code__.co_names.count("transpose") == 1


def test_experts_on_a_cpu_run_module_by_module(caplog: pytest.LogCaptureFixture) -> None:
    model = made("Mixtral", num_local_experts=4, num_experts_per_tok=2)
    generation.apply(model)
    with caplog.at_level(logging.WARNING, "quantkit.model"):
        model.generate(ids(), **SEVEN)
    assert "takes longer: Python reads which experts are chosen" in caplog.text


def test_a_step_that_cannot_be_changed_runs_module_by_module(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is not replayed, which would call the forward again that has the lock."""

    def fails(*_: Any) -> Any:
        raise RuntimeError("not today")

    monkeypatch.setattr("quantkit.runtime.cpu_steps.flat_forward.flat", fails)
    model = packed(dtype=torch.float32)
    expected = model.generate(ids(), **SEVEN, disable_compile=True)
    with caplog.at_level(logging.WARNING, "quantkit.model"):
        assert_equal(model.generate(ids(), **SEVEN), expected)
    assert "what a step computes is not what torch sees of it" in caplog.text
