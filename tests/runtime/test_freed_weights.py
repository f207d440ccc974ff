"""Words that are in kernel layouts only: whoever asks gets the same bits, and nobody gets other numbers.

The fragment layout is built on the CPU here, and what runs on it are the weights that it holds.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import quantkit
from quantkit.bench.speed import weight_bytes
from quantkit.checkpoint.compressed_tensors import why_not_compressed_tensors
from quantkit.errors import KernelError
from quantkit.kernels import registry
from quantkit.kernels.layouts.fragment_layout import build, join, read_codes, restore
from quantkit.kernels.layouts.geometry import geometry
from quantkit.kernels.linear import linear_parts
from quantkit.kernels.problem import Kernel, Layout, Problem, always
from quantkit.kernels.registry import FORCE_VARIABLE
from quantkit.kernels.weight_layouts import build_layout
from quantkit.model.experts import DOWN, GATE_UP
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.parallel_plan import TensorParallelPlan
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.shared_input import shared_inputs

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import SCHEMES, absmax_pack, assert_same_checkpoint, logits_of
from .test_packed_experts import experts_of, pack_into

HELD = [name for name in SCHEMES if name != "int4-ragged"]


def why_unsupported(problem: Problem) -> str | None:
    size = problem.scheme.group_columns(problem.k)
    fits = problem.scheme.planes == 1 and (size in (16, problem.k) or size % 32 == 0)
    return None if fits else "it takes other groups"


def dense_of(layout: tuple[torch.Tensor, ...], shape: tuple[int, int], row: Any, dtype: torch.dtype):
    """The weight that a fragment layout holds, without any part that is stored."""
    codes, scale, zero, factor, values = layout
    sizes, (n, k) = geometry(*shape, row, dtype), shape

    def spread(by_lane: torch.Tensor) -> torch.Tensor:
        per_group = by_lane.permute(0, 4, 2, 1, 3).reshape(len(codes) * 16, -1)
        return per_group.repeat_interleave(sizes.group, 1)[:n, :k]

    if sizes.scale_kind == "e5m3":
        # Exponent and mantissa one place further than those of the byte; 255 is zero.
        one = scale.view(torch.uint8).int() + 1
        scale = torch.where(one == 256, 0.0, 2.0 ** (97 + one // 8).double() * (1 + one % 8 / 8))
    elif sizes.scale_kind:
        scale = scale.view({"e4m3": torch.float8_e4m3fn, "e8m0": torch.float8_e8m0fnu}[sizes.scale_kind])
    weight = values[read_codes(codes, row.format, sizes)[:n, :k].int()]
    if zero.numel():
        weight = weight - spread(zero.float())
    weight = weight.double() * spread(scale.double())
    return (weight / factor.double() if factor.numel() else weight).float()


@pytest.fixture(autouse=True)
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """A row that runs the fragment layout on a CPU; the rows of each product that it computes."""
    calls: list[int] = []

    def launch(x, weight, layout, bias):
        calls.append(weight.shape[0])
        dense = dense_of(layout, weight.shape, weight.scheme, x.dtype)
        return nn.functional.linear(x.float(), dense, None if bias is None else bias.float()).to(x.dtype)

    fragments = Layout("fragments", build, join, restore)
    row = Kernel("held", "", ("cpu",), why_unsupported, always, fragments, launch)
    monkeypatch.delenv(FORCE_VARIABLE, raising=False)
    monkeypatch.setattr(
        registry, "KERNELS", (row, *(one for one in registry.KERNELS if "cuda" not in one.devices[:1]))
    )
    registry.forget_tile_tables()
    yield calls
    registry.forget_tile_tables()


def make(name: str = "int4", container: str = "quantkit", size: tuple[int, int] = (64, 96)) -> PackedLinear:
    weight = torch.randn(*size, generator=torch.Generator().manual_seed(0))
    bias = torch.randn(size[0], generator=torch.Generator().manual_seed(1))
    return PackedLinear.from_packed(absmax_pack(weight, SCHEMES[name]), bias, container)


def freed(*args: Any, **kwargs: Any) -> PackedLinear:
    layer = make(*args, **kwargs)
    layer.build_kernel_layouts(torch.float32)
    assert layer.is_freed("weight")
    return layer


def same_state(found: nn.Module, expected: nn.Module) -> None:
    here, there = found.state_dict(), expected.state_dict()
    assert list(here) == list(there)
    for name, tensor in there.items():
        assert here[name].dtype == tensor.dtype, name
        assert_equal(here[name].contiguous().view(torch.uint8), tensor.contiguous().view(torch.uint8), name)


def memory(module: nn.Module) -> int:
    """Bytes of the storages that a packed module keeps alive."""
    tensors = [*module.parameters(), *module.buffers()]
    for one in module.modules():
        for layout in getattr(one, "_layouts", {}).values():
            tensors += layout.tensors
        for held in getattr(one, "_freed", {}).values():
            tensors += [tensor for layout in held.layouts for tensor in layout.tensors]
    storages = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if not t.is_meta
    }
    return sum(storages.values())


@pytest.mark.parametrize("container", ["quantkit", "compressed-tensors"])
@pytest.mark.parametrize("name", HELD)
def test_the_state_dict_has_the_same_bits(name, container):
    if container == "compressed-tensors" and why_not_compressed_tensors(SCHEMES[name], 96):
        return
    layer, before = freed(name, container), make(name, container)
    same_state(layer, before)
    kept = layer.state_dict(keep_vars=True)
    assert all(isinstance(kept[key], nn.Parameter) for key, _ in layer.named_parameters())
    words = layer.stored_words("weight")
    assert_equal(words.view(torch.uint8), before.words.view(torch.uint8))
    for (part, found), expected in zip(layer.packed.parts(), before.packed.tensors, strict=True):
        # NaN is a code of some scales.
        assert_equal(found.view(torch.uint8), expected.view(torch.uint8), part)
    assert_equal(layer.packed.dequantize(), before.packed.dequantize())
    # None of it brought the words back.
    assert layer.is_freed("weight")


@pytest.mark.parametrize("name", HELD)
def test_products_are_those_of_the_weight(launches, name):
    layer = freed(name)
    x = torch.randn(2, 3, 96)
    expected = nn.functional.linear(x, make(name).packed.dequantize(), layer.bias)
    assert_close(layer(x), expected, rtol=1e-4, atol=1e-4)
    assert launches == [64]


@pytest.mark.parametrize("container", ["quantkit", "compressed-tensors"])
def test_negative_scales_come_back_with_their_words(launches, container):
    layer, before = make("nvfp4", container), make("nvfp4", container)
    with torch.no_grad():
        for one in (layer, before):
            scale = one.packed.part("scale")
            scale[5:40:3, 2] = -scale[5:40:3, 2].float()
    expected = before.packed.dequantize()
    assert not torch.equal(expected, make("nvfp4").packed.dequantize())
    x = torch.randn(3, 96)
    for dtype in (torch.float16, torch.float32):
        layer.build_kernel_layouts(dtype)
        assert layer.is_freed("weight")
        same_state(layer, before)
        again = nn.functional.linear(x, expected, layer.bias)
        assert_close(layer(x), again, rtol=1e-4, atol=1e-4)
    assert launches == [64, 64]


def test_what_is_odd_comes_back_too():
    for name, size in (
        ("int4", (17, 33)),
        ("fp6", (1, 1)),
        ("ternary-radix", (40, 21)),
        ("binary", (33, 97)),
    ):
        same_state(freed(name, size=size), make(name, size=size))


def test_the_placeholder_says_how_large_the_words_are():
    layer, before = freed(), make()
    words = layer.weight
    assert words.is_meta and isinstance(words, nn.Parameter) and not words.requires_grad
    assert (words.shape, words.dtype, words.nbytes) == (before.weight.shape, before.weight.dtype, 64 * 12 * 4)
    for read in (
        words.tolist,
        words.cpu,
        lambda: torch.equal(words, words),
        lambda: bool((words == 0).all()),
    ):
        with pytest.raises((NotImplementedError, RuntimeError)):
            read()


def test_memory_is_little_more_than_what_is_stored():
    layer = make(size=(512, 1024))
    stored = memory(layer)
    layer.build_kernel_layouts(torch.float32)
    # Scales are there twice: 16 bits for each group of 32 of 4 bits.
    assert memory(layer) - stored < stored * 0.12
    layer.drop_kernel_layouts()
    assert memory(layer) == stored


def test_gradients_come_from_what_the_layout_holds():
    layer, before = freed(), make()
    x = torch.randn(3, 96, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    nn.functional.linear(x, before.packed.dequantize(), before.bias).square().sum().backward()
    assert_close(found, x.grad, rtol=1e-4, atol=1e-4)
    # A layout that came to be in inference mode serves too, and so does one that is dropped meanwhile.
    layer = make()
    with torch.inference_mode():
        layer(torch.randn(1, 96))
    x.grad = None
    y = layer(x).square().sum()
    layer.drop_kernel_layouts()
    y.backward()
    assert_close(found, x.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_have_the_words(duplicate):
    layer = freed()
    twin = duplicate(layer)
    assert not twin.is_freed("weight") and layer.is_freed("weight")
    assert_equal(twin.weight, make().weight)
    x = torch.randn(2, 96)
    assert_equal(twin(x), layer(x))
    same_state(twin, make())


@pytest.mark.parametrize(
    "change",
    [
        lambda layer: layer.to(torch.bfloat16),
        lambda layer: layer.cpu(),
        lambda layer: layer.to("cpu", torch.float16),
        lambda layer: layer.double().float(),
        lambda layer: layer.share_memory(),
        lambda layer: layer.drop_kernel_layouts() or layer,
        lambda layer: layer.load_state_dict({"bias": layer.bias * 2}, strict=False) and layer,
    ],
    ids=["cast", "cpu", "both", "twice", "share", "drop", "some of the state"],
)
def test_what_changes_the_module_restores_the_words(change):
    layer, plain = change(freed()), change(make())
    assert not layer.is_freed("weight") and not layer.weight.is_meta
    same_state(layer, plain)
    x = torch.randn(2, 96, dtype=layer.bias.dtype)
    assert_equal(layer(x), plain(x))
    assert layer.is_freed("weight")
    same_state(layer, plain)


def inverted() -> PackedLinear:
    other = make()
    other.weight.data.bitwise_not_()
    return other


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, other: layer.load_state_dict(other.state_dict()),
        lambda layer, other: layer.load_state_dict(other.state_dict(), assign=True),
        lambda layer, other: setattr(layer, "weight", nn.Parameter(other.weight.data, requires_grad=False)),
        lambda layer, other: layer._parameters.__setitem__("weight", other.weight),
    ],
    ids=["load", "assign", "setattr", "behind its back"],
)
def test_new_words_take_the_place_of_released_ones(change):
    layer, x = freed(), torch.randn(2, 96)
    change(layer, inverted())
    assert not layer.is_freed("weight")
    same_state(layer, inverted())
    assert_close(layer(x), inverted()(x))
    assert layer.is_freed("weight")
    same_state(layer, inverted())


def test_the_placeholder_of_another_module_is_refused():
    layer, other = make(), freed()
    layer.weight = other.weight
    with pytest.raises(
        KernelError, match=r"words of 'weight' are not in memory: .* take them from its state_d"
    ):
        layer(torch.randn(2, 96))
    layer.load_state_dict({"weight": other.state_dict()["weight"]}, strict=False, assign=True)
    assert_equal(layer(x := torch.randn(2, 96)), other(x))


def test_another_dtype_gets_a_layout_from_the_words_that_come_back(launches):
    layer, x = freed(), torch.randn(2, 96)
    layer.bias = None
    low = layer(x.to(torch.bfloat16))
    assert_close(low.float(), layer(x), rtol=2e-2, atol=2e-2)
    assert len(launches) == 2 and len(layer._layouts) == 2
    assert_equal(layer.stored_words("weight"), make().weight)


def test_a_row_that_is_forced_later_gets_the_words(launches, monkeypatch):
    layer, x = freed(), torch.randn(2, 96)
    expected = layer(x)
    monkeypatch.setenv(FORCE_VARIABLE, "unpack")
    assert_close(layer(x), expected)
    assert launches == [64] and layer.is_freed("weight")


def test_it_compiles_without_a_break(launches):
    layer, x = freed(), torch.randn(2, 96)
    layer.bias = None
    compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert_close(compiled(x), layer(x) * 2)
        assert launches == [64, 64]
        # Nothing is built while it compiles: the words come from the layout of the other dtype.
        low = compiled(x.to(torch.bfloat16))
    assert_close(low.float(), layer(x) * 2, rtol=2e-2, atol=0.2)
    assert len(layer._layouts) == 1
    x.requires_grad_()
    compiled(x).sum().backward()
    assert_close(x.grad, 2 * make().packed.dequantize().sum(0).expand(2, 96))


def test_the_operators_keep_their_contracts():
    packed = make().packed
    layout = build_layout(packed, torch.float32)
    assert layout is not None
    token, tensors = packed.scheme.token, list(layout.tensors)
    x = torch.randn(2, 96, requires_grad=True)
    parts = list(packed.tensors[1:])
    calls: list[tuple[Any, tuple[Any, ...]]] = [
        (torch.ops.quantkit.linear, (x, parts, tensors, None, token, 64, layout.name)),
        (torch.ops.quantkit.linear_grad_x, (torch.randn(2, 64), parts, tensors, token, 96, layout.name)),
        (torch.ops.quantkit.restore_words, (tensors, packed.scale, layout.name, token, 64, 96)),
    ]
    for operator, operands in calls:
        torch.library.opcheck(operator, operands)
    assert_equal(linear_parts(x, parts, None, token, 64, layout), quantkit.linear(x, packed))


def test_offloading_takes_the_words_along():
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_module

    layer, x = freed(), torch.randn(2, 96)
    expected = layer(x)
    cpu_offload(layer, execution_device="cpu")
    for _ in range(2):
        assert_close(layer(x), expected)
        assert not layer.is_freed("weight")
    remove_hook_from_module(layer, recurse=True)
    same_state(layer, make())


def test_rows_whose_layout_is_no_way_back_keep_the_words(monkeypatch):
    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS[1:])
    registry.forget_tile_tables()
    layer = make()
    layer.build_kernel_layouts(torch.float32)
    layer(torch.randn(1, 96))
    assert not layer.is_freed("weight") and not layer.weight.is_meta


def test_what_ranks_divide_keeps_its_words():
    layer = make()
    layer.tensor_parallel = TensorParallelPlan("", ())
    layer.build_kernel_layouts(torch.float32)
    assert not layer.is_freed("weight") and not layer.weight.is_meta


class Attention(nn.Module):
    def __init__(self, make_one: Callable[[int], PackedTensor]) -> None:
        super().__init__()
        for name, rows in (("q_proj", 64), ("k_proj", 16), ("v_proj", 16)):
            setattr(self, name, PackedLinear.from_packed(make_one(rows)))

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


def attention(name: str = "int4") -> Attention:
    def make_one(rows: int) -> PackedTensor:
        weight = torch.randn(rows, 1024, generator=torch.Generator().manual_seed(rows))
        return absmax_pack(weight, SCHEMES[name])

    return Attention(make_one)


@pytest.mark.parametrize("name", ["int4", "mxfp4", "nvfp4", "fp8-tensor"])
@torch.no_grad()
def test_joined_layouts_hold_the_words_of_each(launches, name):
    model, before = attention(name), attention(name)
    stored = memory(model)
    for shared in shared_inputs(model):
        shared.build(torch.float32)
    assert all(layer.is_freed("weight") for layer in model.children())
    # mxfp4 and nvfp4 have scales of 16 bits there.
    assert memory(model) - stored < stored * (0.12 if name != "nvfp4" else 0.3)
    x = torch.randn(2, 1024)
    weights = torch.cat([layer.packed.dequantize() for layer in before.children()])
    launches.clear()
    assert_close(model(x), x @ weights.T, rtol=1e-4, atol=1e-3)
    assert launches == [96]
    same_state(model, before)
    same_state(copy.deepcopy(model), before)
    model.k_proj.drop_kernel_layouts()
    launches.clear()
    assert_close(model(x), x @ weights.T, rtol=1e-4, atol=1e-3)
    assert launches == [64, 16, 16]
    same_state(model, before)
    same_state(model.cpu(), before)


def test_weights_with_column_scales_do_not_share(launches):
    def make_one(rows: int) -> PackedTensor:
        weight = torch.randn(rows, 96, generator=torch.Generator().manual_seed(rows))
        return quantkit.quantize_tensor(weight, scheme("binary-rank1"))

    model = Attention(make_one)
    assert list(shared_inputs(model)) == []
    for layer in model.children():
        layer.build_kernel_layouts(torch.float32)
        assert layer.is_freed("weight")
    x = torch.randn(2, 96)
    weights = torch.cat([layer.packed.dequantize() for layer in model.children()])
    assert_close(model(x), x @ weights.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["int4-asym", "fp8", "mxfp4", "ternary-radix"])
def test_experts_give_their_words_back_with_the_same_bits(name):
    container = "quantkit" if why_not_compressed_tensors(SCHEMES[name], 64) else "compressed-tensors"
    dense = experts_of("mixtral", "MixtralExperts")
    schemes = {GATE_UP: SCHEMES[name], DOWN: SCHEMES["int4"]}
    modules = [PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], container) for _ in "ab"]
    for module in modules:
        pack_into(module, copy.deepcopy(dense), schemes)
        for buffer in module.buffers():
            buffer.zero_()
    module, before = modules
    module.build_kernel_layouts(torch.float32)
    assert module.is_freed(GATE_UP) and module.is_freed(DOWN)
    same_state(module, before)
    hidden = torch.randn(5, module.hidden_dim)
    index, weights = torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    assert_close(module(hidden, index, weights), before(hidden, index, weights), rtol=1e-4, atol=1e-4)
    for parameter in (GATE_UP, DOWN):
        for found, expected in zip(module.packed(parameter, 2), before.packed(parameter, 2), strict=True):
            assert_equal(found.words, expected.words)
    same_state(module.cpu(), before)


def test_negative_scales_of_experts_come_back_with_their_words():
    dense = experts_of("mixtral", "MixtralExperts")
    schemes = dict.fromkeys((GATE_UP, DOWN), SCHEMES["nvfp4"])
    modules = [PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], "quantkit") for _ in "ab"]
    for module in modules:
        pack_into(module, copy.deepcopy(dense), schemes)
        for buffer in module.buffers():
            buffer.zero_()
        with torch.no_grad():
            for parameter in schemes:
                for packed in module.packed(parameter, 1):
                    scale = packed.part("scale")
                    scale[::3, 1] = -scale[::3, 1].float()
    module, before = modules
    module.build_kernel_layouts(torch.float32)
    assert module.is_freed(GATE_UP) and module.is_freed(DOWN)
    same_state(module, before)
    for parameter in schemes:
        for found, expected in zip(module.packed(parameter, 1), before.packed(parameter, 1), strict=True):
            assert_equal(found.words, expected.words)


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "int4-asym"), ("llama", "nvfp4"), ("llama", "fp8"), ("qwen2", "int4"), ("qwen3_moe", "int4")],
)
def test_a_model_is_saved_as_it_was(tiny, prompt, tmp_path, family, name):
    checkpoint = tiny(family, name)
    model = quantkit.load(checkpoint.packed, device="cpu", dtype=torch.float32)
    layers = [module for _, module in packed_modules(model)]
    assert layers and all(module.is_freed(p) for module in layers for p in module._entries)
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-3, atol=1e-3)
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)
    assert all(module.is_freed(p) for module in layers for p in module._entries)


def test_counts_of_a_model_stay_right(monkeypatch, tiny):
    checkpoint = tiny("llama", "int4")
    model = quantkit.load(checkpoint.packed, device="cpu", dtype=torch.float32)
    counts = (weight_bytes(model), model.get_memory_footprint(), model.num_parameters(), model.device)
    monkeypatch.setattr(registry, "KERNELS", registry.KERNELS[1:])
    registry.forget_tile_tables()
    plain = quantkit.load(checkpoint.packed, device="cpu", dtype=torch.float32)
    assert any(p.is_meta for p in model.parameters()) and not any(p.is_meta for p in plain.parameters())
    assert counts == (
        weight_bytes(plain),
        plain.get_memory_footprint(),
        plain.num_parameters(),
        plain.device,
    )
