"""A packed linear and the LoRA beside it as one function: numbers, gradients and refusals."""

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import quantkit
from quantkit.errors import KernelError
from quantkit.kernels.lora.lora_linear import Lora, lora_parts
from quantkit.packing.schemes import scheme
from quantkit.runtime.packed_linear import PackedLinear

from ...support.compare import assert_close, assert_equal

N, K, R = 24, 32, 4
FACTOR = 0.5


@pytest.fixture
def layer() -> PackedLinear:
    generator = torch.Generator().manual_seed(0)
    packed = quantkit.quantize_tensor(torch.randn(N, K, generator=generator), scheme("int4", group_size=16))
    found = PackedLinear.from_packed(packed, torch.randn(N, generator=generator))
    assert found.bias is not None
    found.bias.requires_grad_()
    return found


@pytest.fixture
def lora() -> Lora:
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*size, generator=generator, requires_grad=True) for size in ((R, K), (N, R)))
    return Lora(a, b, FACTOR)


def x_of(*size: int) -> torch.Tensor:
    return torch.randn(*size, K, generator=torch.Generator().manual_seed(2)).requires_grad_()


def by_torch(layer: PackedLinear, x: torch.Tensor, lora: Lora, dropped: torch.Tensor) -> torch.Tensor:
    """The slow twin: products of dense matrices."""
    dense = layer.packed.dequantize(x.dtype)
    low = nn.functional.linear(dropped, lora.a.to(x.dtype))
    return nn.functional.linear(x, dense, layer.bias) + FACTOR * nn.functional.linear(low, lora.b.to(x.dtype))


def half(x: torch.Tensor) -> torch.Tensor:
    """Stands for a dropout: every other column is left out, the rest doubled."""
    mask = torch.arange(x.shape[-1]) % 2 == 0
    return torch.where(mask, 2 * x, 0.0)


@pytest.mark.parametrize("dropout", [None, half])
@pytest.mark.parametrize("size", [(3,), (2, 5), ()])
@pytest.mark.parametrize("again", [False, True])
def test_numbers_and_gradients_are_those_of_torch(layer, lora, dropout, size, again):
    found, expected = x_of(*size), x_of(*size)
    wanted = [lora.a, lora.b, layer.bias]
    y = by_torch(layer, expected, lora, expected if dropout is None else dropout(expected))
    weights = torch.randn(y.shape, generator=torch.Generator().manual_seed(3))
    of_twin = torch.autograd.grad(y, [expected, *wanted], weights)

    def run(x: torch.Tensor) -> torch.Tensor:
        out = layer.with_lora(x, lora, dropout)
        assert out is not None
        return out

    ours = torch.utils.checkpoint.checkpoint(run, found, use_reentrant=False) if again else run(found)
    assert_close(ours, y, rtol=1e-5, atol=1e-5)
    for one, other in zip(torch.autograd.grad(ours, [found, *wanted], weights), of_twin, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chosen", [("x",), ("a", "b"), ("a",), ("b",), ("bias",), ("x", "a")])
def test_only_the_gradients_asked_for_are_computed(layer, lora, chosen):
    x = x_of(3)
    every = {"x": x, "a": lora.a, "b": lora.b, "bias": layer.bias}
    for name, tensor in every.items():
        tensor.requires_grad_(name in chosen)
    y, twin = layer.with_lora(x, lora, None), by_torch(layer, x, lora, x)
    asked = [every[name] for name in chosen]
    found, expected = (torch.autograd.grad(one.sum(), asked) for one in (y, twin))
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_under_autocast_all_is_computed_in_its_dtype(layer, lora):
    x = x_of(3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.with_lora(x, lora, None)
        twin = layer(x) + FACTOR * nn.functional.linear(nn.functional.linear(x, lora.a), lora.b)
    assert y.dtype == twin.dtype == torch.bfloat16
    assert_close(y.float(), twin.float(), rtol=2e-2, atol=5e-2)
    y.sum().backward()
    assert x.grad.dtype == lora.a.grad.dtype == torch.float32


def test_another_dtype_of_the_lora_is_left_to_the_modules(layer, lora):
    assert layer.with_lora(x_of(3).to(torch.bfloat16), lora, None) is None


def test_what_has_to_see_operators_gets_none(layer, lora):
    layer.register_forward_hook(lambda module, given, y: y + 1)
    assert layer.with_lora(x_of(3), lora, None) is None
    parts = layer.matrix.parts
    x = torch.empty(3, K, device="meta")
    assert lora_parts(x, parts, None, layer.scheme, N, None, lora=lora, dropout=None) is None


def test_a_lora_that_changed_since_is_refused(layer, lora):
    y = layer.with_lora(x_of(3), lora, None)
    with torch.no_grad():
        lora.b.add_(1)
    with pytest.raises(KernelError, match="or the LoRA beside it, was changed in place between"):
        y.sum().backward()


def test_a_graph_is_used_once_unless_it_is_retained(layer, lora):
    x = x_of(3)
    y = layer.with_lora(x, lora, None).sum()
    y.backward(retain_graph=True)
    first = x.grad.clone()
    y.backward()
    assert_equal(x.grad, 2 * first)
    with pytest.raises((KernelError, RuntimeError), match="second time"):
        y.backward()


def test_gradients_of_gradients_are_right_or_refused(layer, lora):
    x = x_of(3)
    twice = []
    # For a sum, W has no part in them.
    for y in (layer.with_lora(x, lora, None), by_torch(layer, x, lora, x)):
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        twice.append(torch.autograd.grad(first.square().sum(), lora.a)[0])
    assert_close(*twice, rtol=1e-4, atol=1e-2)
    y = layer.with_lora(x, lora, None)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(KernelError, match="have no gradients of gradients"):
        first.square().sum().backward()


def test_gradients_of_the_lora_have_gradients(layer, lora):
    x = x_of(3).requires_grad_(False)
    twice = []
    for y in (layer.with_lora(x, lora, None), by_torch(layer, x, lora, x)):
        (of_b,) = torch.autograd.grad(y.square().sum(), lora.b, create_graph=True)
        twice.append(torch.autograd.grad(of_b.square().sum(), lora.a)[0])
    assert_close(*twice, rtol=1e-4, atol=1e-2)


def test_casts_of_the_lora_are_not_kept_until_the_backward_pass(layer, lora):
    with torch.autocast("cpu", torch.bfloat16):
        y = layer.with_lora(x_of(3), lora, None)
    _, others = y.grad_fn.saved.unpack()
    assert others[0] is lora.a and others[1] is lora.b


def test_y_may_be_changed_in_place(layer, lora):
    x = x_of(2, 512)
    y = layer.with_lora(x, lora, None)
    y += 1
    y.sum().backward()
    assert x.grad is not None


HOOKS = {
    "forward": lambda one: one.register_forward_hook(lambda *_: None),
    "before": lambda one: one.register_forward_pre_hook(lambda *_: None),
    "backward": lambda one: one.register_full_backward_hook(lambda *_: None),
    "before backward": lambda one: one.register_full_backward_pre_hook(lambda *_: None),
    "every module": lambda one: nn.modules.module.register_module_forward_hook(lambda *_: None),
}


@pytest.mark.parametrize("name", [*HOOKS, "replaced"])
def test_who_observes_the_linear_gets_the_modules(layer, lora, name):
    if name == "replaced":
        layer.forward = layer.forward
    else:
        handle = HOOKS[name](layer)
    assert layer.with_lora(x_of(3), lora, None) is None
    if name != "replaced":
        handle.remove()
        assert layer.with_lora(x_of(3), lora, None) is not None
