"""The int8 products of a CPU, with inputs that a scheme rounds, against products of what they become."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quantkit.kernels.gemm.cpu_int8 import DYNAMIC_ROW
from quantkit.kernels.linear import linear_parts
from quantkit.kernels.problem import Problem
from quantkit.kernels.registry import choose, explain
from quantkit.kernels.weight_layouts import build_layout
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_close, assert_equal

INT8 = activations_named("int8")
assert INT8 is not None
CASES = (("int8", "channel"), ("int4", 128), ("int4", 96), ("fp6", 64), ("binary", "channel"))


def product(
    x: torch.Tensor, packed: PackedTensor, bias: torch.Tensor | None = None, inputs: ActivationScheme = INT8
) -> torch.Tensor:
    """y [M, N], by the kernel whatever is faster."""
    layout = DYNAMIC_ROW.layout
    assert layout is not None
    return DYNAMIC_ROW.launch(x, packed, layout.build(packed, x.dtype), bias, activations=inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("name", "group_size"), CASES)
def test_it_is_the_product_of_rounded_inputs(
    make_packed: Callable[..., PackedTensor], name: str, group_size: int | str, dtype: torch.dtype
) -> None:
    packed = make_packed(name, (40, 300), group_size=group_size)
    generator = torch.Generator().manual_seed(1)
    bias = torch.randn(40, generator=generator).to(dtype)
    for m in (1, 5, 130, 300):
        x = torch.randn(m, 300, generator=generator).to(dtype)
        kept = x.clone()
        y = product(x, packed, bias)
        rounded = INT8.round(x.float()).double()
        expected = rounded @ packed.dequantize(torch.float32).double().T + bias.double()
        assert_close(y.double(), expected, norm={torch.float32: 1e-6}.get(dtype, 3e-3))
        assert_equal(x, kept)


@pytest.mark.parametrize(("name", "group_size"), [("int8", "channel"), ("int4", 64)])
def test_sums_of_integers_are_exact(
    make_packed: Callable[..., PackedTensor], name: str, group_size: int | str
) -> None:
    packed = make_packed(name, (40, 256), group_size=group_size)
    scale = torch.exp2(torch.arange(packed.group_scale().numel()) % 5 - 2.0).view_as(packed.group_scale())
    packed = PackedTensor.from_codes(packed.codes(), scale, None, packed.scheme)
    x = torch.randint(-127, 128, (9, 256), generator=torch.Generator().manual_seed(0)).float()
    # The largest code: the scale is 1.
    x[:, 3] = 127
    assert_equal(product(x, packed).double(), x.double() @ packed.dequantize(torch.float32).double().T)


def test_static_scales_saturate(make_packed: Callable[..., PackedTensor]) -> None:
    packed = make_packed("int8", (40, 256), group_size="channel")
    static = ActivationScheme("int8", static=True).fit(1.5)
    x = torch.randn(9, 256, generator=torch.Generator().manual_seed(0)) * 2
    x[0, :4] = torch.tensor([1.5, -1.5, 1e30, -1e30])
    rounded = static.round(x)
    # Half the range is 127.5 of a scale: its ends are the largest codes.
    assert_equal(rounded[0, :4], torch.tensor([127.0, -128.0, 127.0, -128.0]) * torch.tensor(1.5 / 127.5))
    expected = rounded.double() @ packed.dequantize(torch.float32).double().T
    assert_close(product(x, packed, None, static).double(), expected, norm=1e-6)


def test_a_row_that_is_not_finite_is_nan_alone(make_packed: Callable[..., PackedTensor]) -> None:
    packed = make_packed("int4", (40, 256), group_size=64)
    x = torch.randn(5, 256)
    x[1, 3], x[3, 200] = torch.inf, torch.nan
    y = product(x, packed)
    assert y[[1, 3]].isnan().all() and y[[0, 2, 4]].isfinite().all()


def test_tokens_of_zeros_are_the_bias(make_packed: Callable[..., PackedTensor]) -> None:
    packed, bias = make_packed("int8", (40, 256), group_size="channel"), torch.randn(40)
    assert_equal(product(torch.zeros(3, 256), packed, bias), bias.expand(3, 40))


def test_the_operator_runs_it_with_a_scheme_that_rounds(make_packed: Callable[..., PackedTensor]) -> None:
    packed = make_packed("int8", (256, 512), group_size="channel")
    asked = replace(packed.scheme, activations=INT8)
    x = torch.randn(3, 2, 512, requires_grad=True)
    layout = build_layout(packed, x.dtype, INT8)
    y = linear_parts(x, packed.tensors, None, asked, 256, layout)
    assert_close(y.detach().view(6, 256), product(x.detach().view(6, 512), packed), rtol=1e-6, atol=1e-5)
    # Gradients pass as if nothing was rounded.
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert_close(grad, packed.dequantize(torch.float32).sum(0).expand_as(x), rtol=1e-4, atol=1e-4)


def test_it_is_chosen_where_it_is_faster() -> None:
    def chosen(name: str, group_size: int | str, dtype: torch.dtype, activations: str, *features: str) -> str:
        asked = scheme(name, group_size=group_size, activations=activations)  # type: ignore[arg-type]
        problem = Problem(
            1, 1024, 1024, asked.of_weights, dtype, "cpu", frozenset(features), activations=asked.activations
        )
        return choose(problem).kernel.name

    vnni = ("avx2", "avx512", "vnni")
    assert chosen("int8", "channel", torch.bfloat16, "int8", *vnni) == "int8-dynamic"
    assert chosen("int4", 128, torch.float32, "int8", *vnni) == "int8-dynamic"
    assert chosen("int4", 128, torch.bfloat16, "int8", *vnni) == "torch-int4"
    assert chosen("int8", "channel", torch.float32, "fp8", *vnni) == "int-digits"
    assert chosen("int8", "channel", torch.bfloat16, "int8", "avx2", "avx512") == "torch-int8"


@pytest.mark.parametrize(
    ("name", "activations", "reason"),
    [
        ("fp8", "int8", "with inputs in int8, one scale per token or tensor"),
        ("int4", "fp8", "with inputs in int8, one scale per token or tensor"),
    ],
)
def test_it_says_what_it_does_not_multiply(name: str, activations: str, reason: str) -> None:
    asked = scheme(name, activations=activations)
    problem = Problem(
        1, 1024, 1024, asked.of_weights, torch.float32, "cpu", frozenset(), activations=asked.activations
    )
    assert reason in (dict(explain(problem))["int8-dynamic"] or "")


@pytest.mark.parametrize(("k", "group_size"), [(1, "channel"), (64, 1)])
def test_products_of_one_column_are_left_to_others(
    make_packed: Callable[..., PackedTensor], k: int, group_size: int | str
) -> None:
    # torch's int8 product of one column reads what nobody wrote.
    packed = make_packed("int4", (40, k), group_size=group_size)
    asked = replace(packed.scheme, activations=INT8)
    problem = Problem(
        3, 40, k, packed.scheme, torch.float32, "cpu", frozenset({"vnni"}), None, activations=INT8
    )
    reasons = dict(explain(problem))
    assert all("one column" in (reasons[name] or "") for name in ("int8-dynamic", "int-digits"))
    x = torch.randn(3, k)
    y = linear_parts(x, packed.tensors, None, asked, 40, build_layout(packed, x.dtype, INT8))
    expected = INT8.round(x).double() @ packed.dequantize(torch.float32).double().T
    assert_close(y.double(), expected, norm=1e-5)
