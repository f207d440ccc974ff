"""Linears of several stored matrices, and experts, as serving engines load them."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from quantkit.checkpoint.compressed_tensors import stored_format
from quantkit.errors import CheckpointError, UsageError
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.serving.fused_linear import FusedLinear
from quantkit.runtime.serving.routed_experts import LoadedExperts
from quantkit.runtime.serving.shares import Share

from ...support.compare import assert_close, assert_equal
from ...tiny.packed import SCHEMES, absmax_pack

K = 64
INT4, INT8, NVFP4 = SCHEMES["int4-asym"], SCHEMES["int8"], SCHEMES["nvfp4"]


def file_entries(packed: PackedTensor, container: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, by what their names have after that of the module."""
    stored = stored_format(packed.scheme, packed.shape[1], container)
    parts = {**dict(packed.parts()), "shape": torch.tensor(packed.shape)}
    names = stored.shapes(packed.scheme.storage_shapes(packed.shape))
    return {stored.part_name("weight", part): stored.to_file(part, parts[part]) for part in names}


def whole(name: str, one: Scheme | None, rows: int) -> Share:
    return Share(name, one and one.for_columns(K), (rows, K), ((0, rows),), (0, K))


@pytest.mark.parametrize("container", ["quantkit", "compressed-tensors"])
@pytest.mark.parametrize(
    ("schemes", "blocks"),
    [
        ((INT4, INT4, INT4), 1),
        ((INT8, INT4, INT4), 2),
        ((INT8, INT4, INT8), 3),
        # A scale of its own, which rows of another matrix must not share.
        ((NVFP4, NVFP4, INT8), 3),
        ((None, None, SCHEMES["mxfp4"]), 2),
    ],
)
def test_parts_of_any_schemes_are_one_linear(schemes, blocks, container):
    rows = (32, 16, 24)
    fused = FusedLinear(
        [whole(f"m{i}", one, rows[i]) for i, one in enumerate(schemes)], container, torch.float32
    )
    weights = []
    for index, one in enumerate(schemes):
        weight = torch.randn(rows[index], K)
        if one is None:
            fused.load(index, "weight", weight)
        else:
            packed = absmax_pack(weight, one)
            weight = packed.dequantize()
            for entry, tensor in file_entries(packed, container).items():
                fused.load(index, entry, tensor)
        weights.append(weight)
    fused.finish(torch.float32)
    assert len(fused.blocks) == blocks
    x, bias = torch.randn(5, K), torch.randn(sum(rows))
    with torch.no_grad():
        assert_close(fused(x), F.linear(x, torch.cat(weights)), rtol=1e-4, atol=1e-4)
        assert_close(fused(x, bias), F.linear(x, torch.cat(weights), bias), rtol=1e-4, atol=1e-4)


def test_words_of_zero_points_that_end_inside_keep_matrices_apart():
    fused = FusedLinear([whole("gate", INT4, 12), whole("up", INT4, 12)], "quantkit", torch.float32)
    assert len(fused.blocks) == 2


def test_tensors_that_are_missing_or_of_another_scheme_are_refused():
    fused = FusedLinear([whole("q", INT4, 32), whole("k", INT8, 32)], "quantkit", torch.float32)
    with pytest.raises(CheckpointError, match=r"^q\.weight and 4 more is not in the checkpoint"):
        fused.finish(torch.float32)
    with pytest.raises(
        CheckpointError, match=r"k\.weight_zero_point is in the file, and config.json says .* int8"
    ):
        fused.load(1, "weight_zero_point", torch.zeros(1))


def test_words_that_vllm_transposed_as_a_conv1d_are_read():
    # As many words in a row as there are rows: the shape alone does not tell.
    packed = absmax_pack(torch.randn(16, K), INT8)
    fused = FusedLinear([whole("c_fc", INT8, 16)], "quantkit", torch.float32)
    for entry, tensor in file_entries(packed, "quantkit").items():
        fused.load(0, entry, tensor.t() if entry == "weight" else tensor)
    fused.finish(torch.float32)
    with torch.no_grad():
        assert_close(fused(torch.eye(K)), packed.dequantize().T, rtol=1e-4, atol=1e-4)


def dense_experts(x, ids, weights, gates, ups, downs):
    out = torch.zeros_like(x)
    for token, (chosen, scales) in enumerate(zip(ids.tolist(), weights, strict=True)):
        for expert, scale in zip(chosen, scales, strict=True):
            if expert < len(gates):
                between = F.silu(gates[expert] @ x[token]) * (ups[expert] @ x[token])
                out[token] += scale * (downs[expert] @ between)
    return out


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("of_first", ["int8", "nvfp4", "int4-asym"])
def test_experts_of_all_ranks_add_up_to_the_dense_ones(ranks, of_first):
    count, hidden, between = 3, 64, 128
    schemes = {"w1": SCHEMES[of_first], "w3": SCHEMES[of_first], "w2": scheme("fp6", group_size=32)}
    shapes = {"w1": (between, hidden), "w3": (between, hidden), "w2": (hidden, between)}
    packed = {
        name: [absmax_pack(torch.randn(shape) * 0.1, schemes[name]) for _ in range(count)]
        for name, shape in shapes.items()
    }
    x, ids = torch.randn(4, hidden), torch.tensor([[0, 2], [1, 3], [2, 1], [0, 1]])
    weights = torch.rand(4, 2)
    total = torch.zeros_like(x)
    names = [(f"experts.{name}", schemes[name]) for name in ("w1", "w3", "w2")]
    for rank in range(ranks):
        sizes = (count, hidden, between // ranks)
        experts = LoadedExperts(names, sizes, "silu", (rank, ranks), "quantkit")
        with pytest.raises(CheckpointError, match=r"of w1 of expert 0 and .* are not in the checkpoint"):
            experts.finish(torch.float32)
        for name, of_experts in packed.items():
            for expert, one in enumerate(of_experts):
                for entry, tensor in file_entries(one, "quantkit").items():
                    experts.load(name, expert, entry, tensor)
        experts.finish(torch.float32)
        with torch.no_grad():
            total += experts.experts(x, ids, weights)
    dense = [[one.dequantize() for one in packed[name]] for name in ("w1", "w3", "w2")]
    assert_close(total, dense_experts(x, ids, weights, *dense), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_round_their_inputs_by_the_largest_scale(ranks):
    count, hidden, between = 3, 64, 128
    static = scheme("fp8", activations="fp8-static")
    shapes = {"w1": (between, hidden), "w3": (between, hidden), "w2": (hidden, between)}
    packed = {
        name: [absmax_pack(torch.randn(shape) * 0.1, static.of_weights) for _ in range(count)]
        for name, shape in shapes.items()
    }
    numbers = {"w1": [0.001, 0.004, 0.002], "w3": [0.001, 0.004, 0.003], "w2": [0.0005, 0.0004, 0.0002]}
    x, ids = torch.randn(4, hidden), torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1]])
    weights, total = torch.rand(4, 2), torch.zeros_like(x)
    names = [(f"experts.{name}", static) for name in ("w1", "w3", "w2")]
    for rank in range(ranks):
        sizes = (count, hidden, between // ranks)
        experts = LoadedExperts(names, sizes, "silu", (rank, ranks), "compressed-tensors")
        assert {"w13_input_scale", "w2_input_scale"} <= experts.entries().keys()
        for name, of_experts in packed.items():
            for expert, one in enumerate(of_experts):
                scale = {"input_scale": torch.tensor([numbers[name][expert]])}
                for entry, tensor in (file_entries(one, "compressed-tensors") | scale).items():
                    experts.load(name, expert, entry, tensor)
        experts.finish(torch.float32)
        with torch.no_grad():
            total += experts.experts(x, ids, weights)
    first, down = (static.activations.bind(number) for number in (0.004, 0.0005))
    gates, ups, downs = ([one.dequantize() for one in packed[name]] for name in ("w1", "w3", "w2"))
    expected = torch.zeros_like(x)
    for token, chosen in enumerate(ids.tolist()):
        rows = first.round(x[token])
        for expert, scale in zip(chosen, weights[token], strict=True):
            middle = down.round(F.silu(gates[expert] @ rows) * (ups[expert] @ rows))
            expected[token] += scale * (downs[expert] @ middle)
    assert_close(total, expected, rtol=1e-3, atol=1e-4)


def test_experts_of_unequal_gate_and_up_are_refused():
    names = [("e.gate_up_proj", INT4), ("e.gate_up_proj", INT8), ("e.down_proj", INT8)]
    with pytest.raises(UsageError, match=r"'e\.gate_up_proj' and 'e\.down_proj': the plug-in runs experts"):
        LoadedExperts(names, (2, 64, 64), "silu", (0, 1), "quantkit")


def test_a_bias_that_is_given_is_added_in_place_of_the_layers_own():
    from quantkit.runtime.packed_linear import PackedLinear

    packed = absmax_pack(torch.randn(32, K), INT4)
    layer = PackedLinear.from_packed(packed, torch.randn(32))
    x, bias = torch.randn(3, K), torch.randn(32)
    with torch.no_grad():
        assert_close(layer(x, bias), F.linear(x, packed.dequantize(), bias), rtol=1e-4, atol=1e-4)
        assert_equal(layer(x), layer(x, layer.bias))
    assert isinstance(layer.bias, nn.Parameter)
