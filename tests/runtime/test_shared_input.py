"""q, k and v, gate and up by one launch: the same numbers as one by one, whatever is called when."""

import copy
import functools
import gc
import math
import pickle
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

import quantkit
from quantkit.errors import KernelError
from quantkit.kernels import registry
from quantkit.kernels.layouts import fragment_layout
from quantkit.kernels.problem import Kernel, Layout, always
from quantkit.packing.schemes import scheme
from quantkit.runtime import shared_input
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.shared_input import shared_inputs

from ..support.compare import assert_close, assert_equal

MODELS = Path(__file__).parents[2] / "examples"


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A row whose layout joins, of dense weights; the rows of each product that it computes."""
    calls: list[int] = []

    def launch(x, weight, layout, bias):
        calls.append(weight.shape[0])
        return nn.functional.linear(x, layout[0], bias)

    def join(weights, rows, *_):
        if any(count % 16 for count in rows[:-1]):
            return None
        whole = torch.cat([dense for (dense,) in weights])
        return (whole,), tuple((part,) for part in torch.split(whole, rows))

    row = Kernel(
        name="dense",
        summary="",
        devices=("cpu",),
        why_unsupported=always,
        why_slower=always,
        layout=Layout("dense", lambda packed, dtype: (packed.dequantize(dtype),), join),
        launch=launch,
    )
    monkeypatch.setattr(registry, "KERNELS", (row, *registry.KERNELS))
    registry.forget_tile_tables()
    yield calls
    registry.forget_tile_tables()


class Attention(nn.Module):
    def __init__(self, rows=(64, 16, 16), bias=(False, False, False), formats=("int4",) * 3) -> None:
        super().__init__()
        for name, count, has, number in zip(("q_proj", "k_proj", "v_proj"), rows, bias, formats, strict=True):
            weight = torch.randn(count, 96, generator=torch.Generator().manual_seed(count + len(name)))
            packed = quantkit.quantize_tensor(weight, scheme(number, group_size=32))
            setattr(self, name, PackedLinear.from_packed(packed, torch.randn(count) if has else None))

    def forward(self, x):
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)

    def alone(self, x):
        layers = (self.q_proj, self.k_proj, self.v_proj)
        return tuple(nn.functional.linear(x, one.packed.dequantize(), one.bias) for one in layers)


def joined(model: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    for shared in shared_inputs(model):
        shared.build(dtype)
    return model


close = functools.partial(assert_close, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_one_launch_computes_all(launches, bias):
    model = joined(Attention(bias=(bias,) * 3))
    for size in ((3, 96), (2, 5, 96), (96,), (0, 96)):
        x = torch.randn(size)
        launches.clear()
        found = model(x)
        close(found, model.alone(x))
        assert launches == [96] * min(1, math.prod(size))
        # The parts can be seen as heads, as models do.
        assert found[0].view(*size[:-1], 4, 16).shape[-1] == 16


@torch.no_grad()
def test_many_rows_are_multiplied_with_weights_of_one_size_one_by_one(launches, monkeypatch):
    monkeypatch.setattr(shared_input, "SEPARATE_ROWS", 8)
    for rows, calls in (((32, 32, 32), [32] * 3), ((64, 16, 16), [96])):
        model = joined(Attention(rows, bias=(True,) * 3))
        for size, expected in (((7, 96), [sum(rows)]), ((8, 96), calls), ((2, 4, 96), calls)):
            x = torch.randn(size)
            launches.clear()
            found = model(x)
            close(found, model.alone(x))
            assert launches == expected
            assert len(expected) == 1 or all(part.is_contiguous() for part in found)


@torch.no_grad()
def test_what_is_joined_takes_no_second_memory(launches):
    model = joined(Attention())
    parts = [model.q_proj, model.k_proj, model.v_proj]
    (storage,) = {part.layout(torch.float32).tensors[0].untyped_storage().data_ptr() for part in parts}
    whole = parts[0].layout(torch.float32).tensors[0].untyped_storage()
    assert whole.nbytes() == 96 * 96 * 4 and storage == whole.data_ptr()


@torch.no_grad()
def test_a_module_called_with_something_else_computes_its_own(launches):
    model = joined(Attention())
    x, other = torch.randn(3, 96), torch.randn(3, 96)
    q, k, v = model.alone(x)
    close(model.v_proj(x), v)
    close(model.k_proj(x), k)
    close(model.q_proj(x), q)
    close(model.k_proj(other), model.alone(other)[1])
    close(model.v_proj(x), v)
    close(model.q_proj(x), q)
    # Equal, but not the same tensor.
    close(model.k_proj(x.clone()), k)
    assert launches == [16, 16, 96, 16, 16, 96, 16]
    launches.clear()
    close(
        (model.q_proj(x), model.k_proj(x), model.q_proj(x), model.v_proj(x), model.k_proj(x)), (q, k, q, v, k)
    )
    assert launches == [96, 96]
    # Nothing is kept once all have their part.
    assert all(shared._x is None and not shared._rest for shared in [model.q_proj._shared[0]])


@torch.no_grad()
def test_members_are_freed_without_the_garbage_collector(launches):
    model = joined(Attention())
    x = torch.randn(3, 96)
    expected = model.alone(x)
    model(x)
    held = [weakref.ref(module) for module in model.modules()]
    gc.disable()
    try:
        model.v_proj, key = nn.Identity(), model.k_proj
        launches.clear()
        close((model.q_proj(x), key(x)), expected[:2])
        # One of them is gone: each of the others computes its own.
        assert launches == [64, 16] and held[3]() is None
        del model, key
        assert [reference() for reference in held] == [None] * 4
    finally:
        gc.enable()


def test_one_launch_computes_all_under_autocast(launches):
    model = joined(Attention(), torch.bfloat16)
    x = torch.randn(3, 96)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        ys, expected = model(x), model.alone(x)
    assert launches == [96]
    for y, other in zip(ys, expected, strict=True):
        assert_close(y, other, rtol=2e-2, atol=2e-2)


def test_with_gradients_each_computes_its_own(launches):
    model = joined(Attention(bias=(True,) * 3))
    x = torch.randn(2, 96, requires_grad=True)
    close(model(x), model.alone(x))
    sum(y.sum() for y in model(x)).backward()
    found, x.grad = x.grad, None
    sum(y.sum() for y in model.alone(x)).backward()
    close(found, x.grad)
    assert 96 not in launches


@pytest.mark.parametrize(
    "change",
    [
        lambda model, other: model.load_state_dict(other.state_dict()),
        lambda model, other: model.k_proj.load_state_dict(other.k_proj.state_dict()),
        lambda model, other: setattr(model.v_proj, "weight", other.v_proj.weight),
        lambda model, other: model.q_proj._parameters.__setitem__("weight", other.q_proj.weight),
        lambda model, other: model.double().float(),
    ],
    ids=["all", "one", "setattr", "replaced behind its back", "cast"],
)
@torch.no_grad()
def test_joined_layouts_do_not_survive_a_change_of_the_words(launches, change):
    model, other = joined(Attention()), Attention()
    for layer in other.children():
        layer.weight.data.bitwise_not_()
    x = torch.randn(2, 96)
    model(x)
    change(model, other)
    launches.clear()
    close(model(x), model.alone(x))
    assert launches == [64, 16, 16]
    joined(model)
    launches.clear()
    close(model(x), model.alone(x))
    assert launches == [96]


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.bias.add_(1),
        lambda layer: layer.bias.data.copy_(torch.arange(16.0)),
        lambda layer: setattr(layer, "bias", nn.Parameter(torch.arange(16.0), requires_grad=False)),
        lambda layer: layer._parameters.__setitem__("bias", nn.Parameter(torch.arange(16.0))),
        lambda layer: setattr(layer, "bias", None),
    ],
    ids=["in place", "data", "setattr", "behind its back", "none"],
)
@torch.no_grad()
def test_a_changed_bias_is_seen(launches, change):
    model, x = joined(Attention(bias=(True,) * 3)), torch.randn(2, 96)
    model(x)
    change(model.k_proj)
    close(model(x), model.alone(x))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"rows": (60, 16, 16)}, "row tiles"),
        ({"bias": (True, False, False)}, "biases"),
        ({"formats": ("int4", "int4", "int8")}, "schemes"),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
@torch.no_grad()
def test_what_does_not_join_stays_apart(launches, given, reason):
    model = joined(Attention(**given))
    x = torch.randn(2, 96)
    close(model(x), model.alone(x))
    assert len(launches) == 3


@torch.no_grad()
def test_it_compiles_without_a_break(launches):
    model = joined(Attention(bias=(True,) * 3))
    compiled = torch.compile(lambda x: [y * 2 for y in model(x)], fullgraph=True, backend="eager")
    x = torch.randn(2, 96)
    expected = [y * 2 for y in model.alone(x)]
    for _ in range(2):
        launches.clear()
        close(compiled(x), expected)
        assert launches == [96]


@torch.no_grad()
def test_copies_do_not_share_with_the_original(launches):
    model = joined(Attention())
    x = torch.randn(2, 96)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        for layer in twin.children():
            layer.weight.data.bitwise_not_()
            layer.drop_kernel_layouts()
        close(twin(x), twin.alone(x))
        close(model(x), model.alone(x))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@torch.no_grad()
def test_a_copy_of_one_linear_is_that_one_alone(launches, duplicate):
    model, x = joined(Attention()), torch.randn(2, 96)
    one = duplicate(model.q_proj)
    close(one(x), model.alone(x)[0])
    one.weight = nn.Parameter(~model.q_proj.weight, requires_grad=False)
    close(one(x), nn.functional.linear(x, one.packed.dequantize()))
    assert len(pickle.dumps(model.k_proj)) < len(pickle.dumps(model.q_proj))


@torch.no_grad()
def test_what_ranks_divide_does_not_share(launches):
    """transformers calls each of their linears with a tensor of its own."""
    model, x = Attention(), torch.randn(2, 96)
    for layer in model.children():
        layer.shares_x = False
        layer.register_forward_pre_hook(lambda _, args: (args[0].view_as(args[0]),))
    joined(model)
    close(model(x), model.alone(x))
    assert launches == [64, 16, 16]


@torch.no_grad()
def test_another_row_cannot_run_what_is_joined(launches, monkeypatch):
    model = joined(Attention())
    monkeypatch.setenv(registry.FORCE_VARIABLE, "unpack")
    with pytest.raises(KernelError, match=r"unpack needs the weight as it is stored, .* before the model is"):
        model.q_proj(torch.randn(2, 96))


@torch.no_grad()
def test_a_model_has_fewer_launches_and_the_same_logits(launches, tmp_path):
    quantkit.quantize(MODELS / "stories260K", tmp_path / "int8", format="int8")
    model = quantkit.load(tmp_path / "int8", device="cpu", dtype=torch.float32)
    ids = torch.arange(20)[None]
    found = model(ids).logits
    layers = model.config.num_hidden_layers
    # qkv, o, gate, up, down: the 172 rows of gate are no whole row tiles.
    assert len(launches) == 5 * layers
    saved = model.state_dict()
    again = quantkit.load(tmp_path / "int8", device="cpu", dtype=torch.float32)
    for _, module in again.named_modules():
        if isinstance(module, PackedLinear):
            module._shared = None
    launches.clear()
    assert_close(found, again(ids).logits, rtol=1e-4, atol=1e-4)
    assert len(launches) == 7 * layers
    assert saved.keys() == again.state_dict().keys()


def test_joined_biases_are_saved_apart(launches, tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    source = Qwen2ForCausalLM(Qwen2Config(vocab_size=512, num_hidden_layers=2, **sizes))
    for name, parameter in source.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    source.save_pretrained(tmp_path / "dense")
    quantkit.quantize(tmp_path / "dense", tmp_path / "packed", format="int4", group_size=32)
    model = quantkit.load(tmp_path / "packed", device="cpu", dtype=torch.float32)
    attention = model.model.layers[0].self_attn
    assert attention.q_proj.bias.untyped_storage().data_ptr() == (
        attention.k_proj.bias.untyped_storage().data_ptr()
    )
    model.save_pretrained(tmp_path / "saved")
    found, again = model.state_dict(), quantkit.load(tmp_path / "saved", device="cpu").state_dict()
    assert_equal({name: again[name].to(found[name].dtype) for name in again}, found)


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_q_k_and_v_with_e4m3_scales_have_layouts_that_join(tmp_path: Path, method: str) -> None:
    data = None if method == "rtn" else str(MODELS / "stories.txt")
    options = {
        "format": "int2",
        "group_size": 16,
        "scale_dtype": "e4m3",
        "method": method,
        "calibration": data,
    }
    quantkit.quantize(MODELS / "stories260K", tmp_path / "out", **options, check=False, device="cpu")
    attention = quantkit.load(tmp_path / "out", device="cpu").model.layers[0].self_attn
    members = [attention.q_proj, attention.k_proj, attention.v_proj]
    layouts = [fragment_layout.build(one.packed, torch.bfloat16) for one in members]
    rows, first = [one.out_features for one in members], members[0]
    joined = fragment_layout.join(layouts, rows, first.scheme, first.in_features, torch.bfloat16)
    assert joined is not None
    assert_equal(joined[0][0], torch.cat([codes for codes, *_ in layouts]))
