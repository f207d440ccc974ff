"""`PackedLinear` and what has a packed stand-in."""

import copy
import gc
import pickle
import re
import weakref
from pathlib import Path

import pytest
import torch
import torch.utils.checkpoint
import transformers
from torch import nn

from quantkit.errors import FormatError, KernelError
from quantkit.kernels import weight_layouts
from quantkit.kernels.eager import KernelLayout
from quantkit.kernels.problem import ACTIVATION_DTYPES
from quantkit.model.architectures import why_not_packable
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime import packed_linear, packed_module
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import packed_replacement

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import SCHEMES, absmax_pack


def make(
    name: str = "int4", bias: bool = True, container: str = "quantkit"
) -> tuple[PackedLinear, nn.Linear]:
    torch.manual_seed(0)
    dense = nn.Linear(96, 64, bias=bias)
    packed = absmax_pack(dense.weight.detach(), SCHEMES[name])
    dense.weight.data = packed.dequantize()
    layer = PackedLinear.from_packed(packed, dense.bias.detach() if bias else None, container)
    return layer, dense


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_computes_what_the_dense_one_does(name, bias):
    layer, dense = make(name, bias)
    x = torch.randn(2, 3, 96)
    assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    assert_close(layer.packed.dequantize(), dense.weight.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("size", [(), (64,), (2, 95), (2, 3, 128)], ids=str)
def test_activations_have_its_features(size):
    """A kernel layout is of whole steps, and does not say how many columns of the last there are."""
    layer, _ = make()
    with pytest.raises(KernelError, match=r"x has shape .*; its last dimension must be .* 96 input features"):
        layer(torch.ones(size))


def test_activations_are_a_tensor():
    layer, _ = make()
    with pytest.raises(KernelError, match=r"x is a list; expected a tensor"):
        layer([1.0] * 96)


@pytest.mark.parametrize(
    ("container", "words"), [("quantkit", "weight"), ("compressed-tensors", "weight_packed")]
)
def test_the_state_dict_has_the_names_of_the_container(container, words):
    layer, _ = make("int4-asym", container=container)
    assert set(layer.state_dict()) == {words, "weight_scale", "weight_zero_point", "weight_shape", "bias"}
    assert layer.weight_shape.tolist() == [64, 96]
    assert not any(parameter.requires_grad for parameter in layer.parameters())


#: Words and scales of each float format of compressed-tensors, in a state dict.
FLOATS = {
    "fp8": {"weight": ("float8_e4m3fn", (64, 96)), "weight_scale": ("bfloat16", (64, 1))},
    "fp8-groups": {"weight": ("float8_e4m3fn", (64, 96)), "weight_scale": ("float16", (64, 3))},
    "mxfp8": {"weight": ("float8_e4m3fn", (64, 96)), "weight_scale": ("uint8", (64, 3))},
    "mxfp4": {"weight_packed": ("uint8", (64, 48)), "weight_scale": ("uint8", (64, 3))},
    "nvfp4": {
        "weight_packed": ("uint8", (64, 48)),
        "weight_scale": ("float8_e4m3fn", (64, 6)),
        "weight_global_scale": ("float32", (1,)),
    },
}


@pytest.mark.parametrize("name", FLOATS)
def test_the_state_dict_is_what_compressed_tensors_stores(name):
    layer, dense = make(name, bias=False, container="compressed-tensors")
    entries = {
        key: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for key, t in layer.state_dict().items()
    }
    assert entries == FLOATS[name]
    assert {key: (spec.dtype, spec.shape) for key, spec in layer.part_specs().items()} == {
        key: (t.dtype, tuple(t.shape)) for key, t in layer.state_dict().items()
    }
    (words,) = (tensor for key, tensor in layer.state_dict().items() if key in ("weight", "weight_packed"))
    assert layer.packed.words.dtype == torch.int32
    assert layer.packed.words.data_ptr() == words.data_ptr()
    x = torch.randn(2, 96)
    assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert_equal(compiled(x), layer(x))


@pytest.mark.parametrize("container", ["quantkit", "compressed-tensors"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", ["int8", "int4-asym", *FLOATS])
def test_the_first_parameter_has_a_dtype_to_compute_in_and_a_device(name, bias, container):
    """Code of models takes both from it: Swin V2 its table, transformers the device of heads."""
    layer, _ = make(name, bias, container)
    first = next(layer.parameters())
    # Scales of e8m0 are bytes: there are no floats without a bias.
    assert first.dtype in ACTIVATION_DTYPES or (name.startswith("mx") and not bias)
    assert first is not layer.word_and_bias_parameters()[0]


def test_no_class_of_transformers_takes_its_dtype_from_a_linear_without_a_bias():
    """e8m0 formats would give it the dtype of bytes. The first parameters of these are other than that."""
    models = Path(transformers.__file__).parent / "models"
    read = re.compile(r"next\((self[\w.]*)\.parameters\(\)\)\.dtype")
    found = {
        (path.parent.name, name)
        for path in models.glob("*/modeling_*.py")
        for name in read.findall(path.read_text(encoding="utf-8"))
    }
    biased = {(kind, "self.continuous_position_bias_mlp") for kind in ("swinv2", "swin2sr")}
    # An embedding of tokens, a convolution, and a comparison that turns autocast on.
    others = {("openai", "self"), ("hunyuan_vl", "self.vision_tower"), ("esmfold2", "self.esmc")}
    assert found <= biased | others


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", FLOATS)
def test_a_cast_leaves_codes_alone(name, dtype):
    layer, _ = make(name, container="compressed-tensors")
    before = {key: tensor.clone() for key, tensor in layer.state_dict().items()}
    layer.to(dtype)
    assert layer.bias.dtype == dtype
    cast = {key for key, tensor in layer.state_dict().items() if tensor.dtype != before[key].dtype}
    scales = {"weight_scale"} if name.startswith("fp8") and layer.weight_scale.dtype == dtype else set()
    assert cast - {"bias"} == {key for key in scales if before[key].dtype != dtype}
    for key in before.keys() - cast:
        assert_equal(layer.state_dict()[key].view(torch.uint8), before[key].view(torch.uint8))


@pytest.mark.parametrize("name", ["fp8", "mxfp4"])
def test_words_of_a_mapped_file_may_begin_anywhere(name):
    layer, dense = make(name, container="compressed-tensors")
    (entry,) = (key for key, spec in layer.part_specs().items() if spec.part == "packed")
    words = getattr(layer, entry)
    memory = torch.zeros(words.numel() + 1, dtype=torch.uint8)
    memory[1:] = words.detach().view(torch.uint8).flatten()
    words.data = memory[1:].view(words.shape).view(words.dtype)
    x = torch.randn(2, 96)
    assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)
    layer.align()
    assert getattr(layer, entry).data_ptr() % 4 == 0
    assert layer.packed.words.data_ptr() == getattr(layer, entry).data_ptr()
    assert_close(layer(x), dense(x), rtol=1e-5, atol=1e-5)


def test_from_packed_shares_storage():
    layer, _ = make()
    assert layer.packed.words.data_ptr() == layer.weight.data_ptr()
    assert isinstance(layer.weight, nn.Parameter)


def test_repr_names_the_scheme():
    layer, _ = make("int4-asym")
    assert repr(layer) == (
        "PackedLinear(in_features=96, out_features=64, bias=True, scheme=int4 g32 asym bfloat16)"
    )


def test_gradients_reach_the_input():
    layer, dense = make()
    x = torch.randn(3, 96, requires_grad=True)
    layer(x).square().sum().backward()
    found, x.grad = x.grad, None
    dense(x).square().sum().backward()
    assert_close(found, x.grad, rtol=1e-4, atol=1e-4)


def test_gradients_pass_a_checkpoint():
    layer, dense = make(bias=False)
    x = torch.randn(5, 96, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    expected = x.detach().requires_grad_(True)
    dense(expected).square().sum().backward()
    assert_close(x.grad, expected.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_autocast_reaches_packed_linears(dtype, compiled):
    layer, dense = make()
    x = torch.randn(5, 96, dtype=dtype)
    run = torch.compile(layer, fullgraph=True, backend="eager") if compiled else layer
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = run(x), dense(x)
    assert y.dtype == expected.dtype == torch.bfloat16
    assert_close(y, expected, rtol=2e-2, atol=2e-2)
    assert layer(x.float()).dtype == torch.float32


def test_a_cast_of_the_scales_changes_no_code():
    layer, dense = make("int4-fp32")
    x = torch.randn(3, 96)
    expected = dense(x)
    layer.to(torch.bfloat16)
    assert layer.weight.dtype == torch.int32
    assert_close(layer(x.bfloat16()).float(), expected, rtol=0.05, atol=0.05)


# Kernel layouts


@pytest.fixture
def builds(monkeypatch) -> list[tuple[int, torch.dtype]]:
    """Calls of `build_layout`, each as the address of the words and the activation dtype."""
    calls: list[tuple[int, torch.dtype]] = []

    def build(packed: PackedTensor, dtype, rounding):
        calls.append((packed.words.data_ptr(), dtype))
        return weight_layouts.build_layout(packed, dtype, rounding)

    monkeypatch.setattr(packed_module, "build_layout", build)
    return calls


def test_a_layout_is_built_once_per_activation_dtype(builds):
    layer, _ = make(bias=False)
    layer.build_kernel_layouts(torch.float32)
    for _ in range(3):
        layer(torch.randn(1, 96))
    layer(torch.randn(1, 96, dtype=torch.bfloat16))
    assert [dtype for _, dtype in builds] == [torch.float32, torch.bfloat16]


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize(
    "change",
    [
        lambda layer, other: layer.load_state_dict(other.state_dict()),
        lambda layer, other: setattr(
            layer, "weight", nn.Parameter(other.weight.clone(), requires_grad=False)
        ),
        lambda layer, other: layer._parameters.__setitem__("weight", other.weight),
        lambda layer, other: layer.to(torch.bfloat16).float(),
    ],
    ids=["load_state_dict", "setattr", "replaced behind its back", "to"],
)
def test_a_layout_does_not_survive_a_change_of_the_words(builds, change):
    layer, _ = make(bias=False)
    other, _ = make(bias=False)
    other.weight.data.bitwise_not_()
    layer(torch.randn(1, 96))
    change(layer, other)
    x = torch.randn(1, 96)
    expected = x @ layer.packed.dequantize().T
    assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert len(builds) == 2


def test_offloaded_layers_build_no_layout_and_keep_no_words(builds):
    from accelerate import cpu_offload

    layer, dense = make()
    expected = dense(x := torch.randn(2, 96))
    cpu_offload(layer, execution_device="cpu")
    for _ in range(2):
        assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)
    assert layer.weight.is_meta
    assert builds == []


def test_the_cache_does_not_keep_replaced_words_alive():
    import weakref

    layer, _ = make()
    layer(torch.randn(1, 96))
    old = weakref.ref(layer.weight)
    layer.weight = nn.Parameter(layer.weight.clone(), requires_grad=False)
    gc.collect()
    assert old() is None


def test_a_share_runs_by_the_plan_of_its_layout(monkeypatch):
    """The parameter of a weight that ranks divide is a DTensor, the layout is of what this rank has."""
    layer, x, y = (
        PackedLinear.from_packed(absmax_pack(torch.randn(4, 64), SCHEMES["int8"])),
        *torch.ones(2, 64),
    )
    words, divided = layer.words, nn.Parameter(layer.words.detach(), requires_grad=False)
    divided._local_tensor = words
    layer._parameters[layer._words_key] = divided
    layer._layouts["weight", 0, x.dtype] = KernelLayout("planned", x.dtype, ())
    layer._layout_owners["weight"] = weakref.ref(words)
    monkeypatch.setattr(packed_linear, "planned", lambda *_: y)
    assert layer(x) is y


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_compute_the_same(duplicate):
    layer, dense = make()
    x = torch.randn(2, 96)
    layer(x)
    assert_close(duplicate(layer)(x), dense(x), rtol=1e-5, atol=1e-5)


def test_torch_compile_keeps_one_graph():
    layer, dense = make()
    x = torch.randn(2, 96)
    layer(x)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    assert_close(compiled(x), dense(x), rtol=1e-5, atol=1e-5)


# What can be packed


def test_what_a_subclass_of_linear_computes_decides_whether_it_is_packable():
    class Same(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x @ self.weight.T
            return y if self.bias is None else y + self.bias

    class Special(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).sigmoid()

    for bias in (True, False):
        assert why_not_packable(nn.Linear(4, 4, bias)) is None
        assert why_not_packable(Same(6, 4, bias)) is None
    assert why_not_packable(Special(4, 4)) == "Special computes something else than x W^T + b"


def test_a_linear_without_inputs_is_refused_by_its_name():
    for scheme in SCHEMES.values():
        with pytest.raises(
            FormatError, match=r"'a\.b' has 0 input features by config\.json; .* at least one"
        ):
            packed_replacement("a.b", nn.Linear(0, 8), lambda _, scheme=scheme: scheme, "quantkit")
