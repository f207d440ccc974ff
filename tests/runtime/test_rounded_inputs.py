"""Packed modules round their inputs as their schemes say, before the product."""

import json
import logging
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import CheckpointError
from quantkit.packing.activations import ActivationScheme, activations_named
from quantkit.packing.presets import ACTIVATIONS
from quantkit.packing.schemes import scheme
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.ready import make_ready
from quantkit.runtime.shared_input import SharedInput

N, K = 96, 256
#: Parts of static schemes: numbers for inputs up to about 3.
INPUTS = {"input_scale": torch.tensor([3 / 448]), "input_global_scale": torch.tensor([448 * 6 / 3.0])}


def rounds_of(name: str) -> ActivationScheme:
    """The scheme of a name, with the number of `INPUTS`."""
    found = activations_named(name)
    assert found is not None
    return found if found.part is None else found.bind(float(INPUTS[found.part]))


def linear(
    activations: str | None, format: str = "int4", bias: bool = True
) -> tuple[PackedLinear, nn.Linear]:
    """Return a packed linear, and a dense one of the same weights."""
    torch.manual_seed(0)
    made = scheme(format, activations=activations)
    packed = quantize_tensor(torch.randn(N, K), made)
    assert packed.scheme == made.of_weights
    layer = PackedLinear(K, N, made.for_columns(K), "quantkit", bias_dtype=torch.float32 if bias else None)
    parts = {**dict(packed.parts()), "shape": torch.tensor(packed.shape), **INPUTS}
    for name, spec in layer.part_specs().items():
        getattr(layer, name).data.copy_(parts[spec.part])
    dense = nn.Linear(K, N, bias=bias)
    dense.weight.data = packed.dequantize()
    if bias:
        layer.bias.data.copy_(dense.bias)
    return layer, dense


@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_it_is_the_product_of_rounded_inputs(name, format):
    layer, dense = linear(name, format)
    x = torch.randn(2, 5, K)
    rounds = rounds_of(name)
    with torch.no_grad():
        y, expected = layer(x), dense(rounds.round(x))
        torch.testing.assert_close(y, expected)
        assert not torch.allclose(y, dense(x), atol=1e-4)


def test_the_rows_of_x_do_not_change_the_numbers():
    layer, _ = linear("int8")
    x = torch.randn(70, K)
    with torch.no_grad():
        torch.testing.assert_close(layer(x)[:1], layer(x[:1]), rtol=1e-5, atol=1e-5)


def test_gradients_reach_x_as_if_nothing_was_rounded():
    layer, dense = linear("fp8")
    x = torch.randn(3, K, requires_grad=True)
    layer(x).sum().backward()
    (expected,) = torch.autograd.grad(dense(x).sum(), x)
    torch.testing.assert_close(x.grad, expected)


def test_linears_that_share_their_input_round_it_too():
    members = [linear("int8", bias=False)[0] for _ in range(2)]
    dense = linear("int8", bias=False)[1]
    SharedInput(members).build(torch.float32)
    x, rounds = torch.randn(2, K), activations_named("int8")
    assert rounds is not None
    with torch.no_grad():
        for member in members:
            torch.testing.assert_close(member(x), F.linear(rounds.round(x), dense.weight))


@pytest.mark.parametrize("name", ["fp8-g128", "fp8-static", "int8-static", "nvfp4"])
def test_compiled_code_rounds_too(name):
    layer, _ = linear(name)
    x = torch.randn(4, K)
    layer.build_kernel_layouts(x.dtype)
    with torch.no_grad():
        compiled = torch.compile(lambda x: layer(x) * 2, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), layer(x) * 2)


def test_a_part_of_a_token_has_no_scale():
    assert scheme("int4", activations="int8").column_units(K)["256 inputs that share a scale"] == K
    assert scheme("int4", activations="fp8-g128").column_units(K)["128 inputs that share a scale"] == 128
    assert not any("inputs" in unit for unit in scheme("int4").column_units(K))


def test_loading_says_that_products_are_not_those_of_low_bits(caplog):
    class Model(nn.Module):
        dtype, device = torch.float32, torch.device("cpu")

        def __init__(self) -> None:
            super().__init__()
            self.layer = linear("mxfp8")[0]

    with caplog.at_level(logging.WARNING, logger="quantkit"):
        make_ready(Model())
    (record,) = caplog.records
    assert record.getMessage() == (
        "inputs of linears are rounded to fp8-e4m3 g32 e8m0, and multiplied in float32, as no 8-bit kernel "
        "runs them (it multiplies single integers, not columns' scales, with inputs in int8, one scale per "
        "token or tensor): this shows the accuracy of low-bit products, not their speed. Serve the model "
        "with an engine that reads it (quantkit formats --schemes) for that."
    )


#: Rows of x for a kernel of a few and of many rows.
ON_GPUS = (1, 7, 40, 300)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("format", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_on_a_gpu_products_round_their_inputs(name: str, format: str) -> None:
    layer, dense = linear(name, format)
    layer, dense = layer.cuda().bfloat16(), dense.cuda().bfloat16().float()
    rounds = rounds_of(name)
    # Code is compiled anew for each case, which torch allows 8 times.
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for m in ON_GPUS:
        x = torch.randn(m, K, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            expected = dense(rounds.round(x).float())
            # The second call is by a launch plan.
            for y in (layer(x), layer(x), compiled(x)):
                torch.testing.assert_close(
                    y.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max())
                )
    x.requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).float().sum(), x)
    torch.testing.assert_close(
        grad.float(), dense.weight.sum(0).expand_as(grad), rtol=2e-2, atol=2e-2 * grad.abs().max().item()
    )


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_linears_of_one_input_round_it() -> None:
    layers = [linear("fp8", "int4", bias=False)[0].cuda().bfloat16() for _ in range(2)]
    shared = SharedInput(layers)
    x = torch.randn(40, K, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        alone = [layer(x) for layer in layers]
        shared.build(torch.bfloat16)
        together = [layer(x) for layer in layers]
    for one, other in zip(alone, together, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2 * one.abs().max().item())


@pytest.mark.parametrize("leaf", ["q_proj", "down_proj"])
def test_groups_that_do_not_divide_the_features_are_an_error_that_names_the_linear(tmp_path, leaf):
    source = Path(__file__).parents[2] / "examples" / "stories260K"
    quantize(
        source, tmp_path / "out", format="int4", group_size=4, activations="int8", rules=(f"*{leaf}=keep",)
    )
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    config["quantization_config"]["quantkit"]["schemes"][0]["activations"]["group_size"] = 7
    (tmp_path / "out" / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        CheckpointError, match=r"_proj' is stored as int4 .* groups of 7 inputs do not divide"
    ):
        load(tmp_path / "out", device="cpu")
