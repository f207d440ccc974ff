"""`PackedExperts` against transformers' own experts modules."""

import importlib

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM

from quantkit.checkpoint.compressed_tensors import stored_format, why_not_compressed_tensors
from quantkit.errors import FormatError, KernelError
from quantkit.kernels.gemm import fused_kernels
from quantkit.kernels.moe import stacked_weights
from quantkit.model.experts import DOWN, GATE_UP
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_experts import PackedExperts

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import SCHEMES, absmax_pack, config_of

CLASSES = [("mixtral", "MixtralExperts"), ("qwen3_moe", "Qwen3MoeExperts")]


def experts_of(family: str, name: str, **changes) -> nn.Module:
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    config = config_of(family, **changes)
    config._experts_implementation = "eager"
    experts = getattr(module, name)(config)
    torch.manual_seed(0)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.3)
    return experts


def pack_into(packed: PackedExperts, dense: nn.Module, schemes: dict[str, Scheme]) -> None:
    """Fill both with the same numbers."""
    for parameter, halves in ((GATE_UP, 2), (DOWN, 1)):
        weight = getattr(dense, parameter).data
        matrices = [[absmax_pack(h, schemes[parameter]) for h in expert.chunk(halves)] for expert in weight]
        weight.copy_(torch.stack([torch.cat([h.dequantize() for h in halves_]) for halves_ in matrices]))
        parts: dict[str, list[torch.Tensor]] = {}
        for one in matrices:
            for part, _ in one[0].parts():
                parts.setdefault(part, []).append(torch.cat([dict(half.parts())[part] for half in one]))
        for part, tensors in parts.items():
            stored = stored_format(schemes[parameter], weight.shape[-1], packed.container)
            tensor = stored.to_file(part, torch.stack(tensors))
            setattr(packed, stored.part_name(parameter, part), nn.Parameter(tensor, requires_grad=False))


@pytest.mark.parametrize(("family", "name"), CLASSES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("container", ["quantkit", "compressed-tensors"])
def test_packed_experts_compute_what_the_dense_ones_do(family, name, scheme, container):
    dense = experts_of(family, name)
    # Different schemes of the two matrices, and sizes at which words of zero-points have a ragged end.
    schemes = {GATE_UP: SCHEMES[scheme], DOWN: SCHEMES["int4-asym"]}
    if container == "compressed-tensors" and why_not_compressed_tensors(schemes[GATE_UP], 64):
        with pytest.raises(FormatError, match="is not in the container compressed-tensors: it"):
            PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], container)
        return
    packed = PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], container)
    pack_into(packed, dense, schemes)
    hidden = torch.randn(11, 64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(11)])
    weights = torch.rand(11, 2)
    with torch.no_grad():
        expected = dense(hidden, index, weights)
    for _ in range(2):
        assert_close(packed(hidden, index, weights), expected, rtol=1e-4, atol=1e-4)
        packed.build_kernel_layouts(torch.float32)


def test_intermediate_size_that_is_no_multiple_of_the_word():
    dense = experts_of("qwen3_moe", "Qwen3MoeExperts", moe_intermediate_size=20)
    schemes = {GATE_UP: SCHEMES["int4-asym"], DOWN: SCHEMES["int4-asym"]}
    packed = PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], "quantkit")
    pack_into(packed, dense, schemes)
    # Two halves of 20 rows take 3 words each; 40 rows together would take 5.
    assert packed.gate_up_proj_zero_point.shape == (4, 6, 2)
    hidden, index, weights = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    with torch.no_grad():
        expected = dense(hidden, index, weights)
    assert_close(packed(hidden, index, weights), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [0, 1])
def test_experts_take_few_tokens_and_none(tokens):
    dense = experts_of("mixtral", "MixtralExperts")
    packed = PackedExperts.replacing(dense, SCHEMES["int4"], SCHEMES["int4"], "quantkit")
    pack_into(packed, dense, {GATE_UP: SCHEMES["int4"], DOWN: SCHEMES["int4"]})
    hidden, index = torch.randn(tokens, 64), torch.full((tokens, 2), 3)
    assert packed(hidden, index, torch.ones(tokens, 2)).shape == (tokens, 64)


def test_autocast_reaches_packed_experts():
    dense = experts_of("mixtral", "MixtralExperts")
    packed = PackedExperts.replacing(dense, SCHEMES["int4"], SCHEMES["int4"], "quantkit")
    pack_into(packed, dense, {GATE_UP: SCHEMES["int4"], DOWN: SCHEMES["int4"]})
    x, index, weights = torch.randn(5, 64), torch.randint(0, 4, (5, 2)), torch.rand(5, 2)
    dtypes = []
    packed.act_fn.register_forward_hook(lambda _, inputs, output: dtypes.append(output.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, expected = packed(x, index, weights), dense(x, index, weights)
    assert set(dtypes) == {torch.bfloat16} and y.dtype == expected.dtype
    assert float((y - expected).abs().max()) < 2e-2 * float(expected.abs().max())


def test_an_index_past_the_experts_is_no_expert():
    dense = experts_of("mixtral", "MixtralExperts")
    packed = PackedExperts.replacing(dense, SCHEMES["int4"], SCHEMES["int4"], "quantkit")
    pack_into(packed, dense, {GATE_UP: SCHEMES["int4"], DOWN: SCHEMES["int4"]})
    hidden, weights = torch.randn(3, 64), torch.rand(3, 2)
    index = torch.tensor([[4, 0], [1, 4], [4, 4]])
    none = index == 4
    with torch.no_grad():
        expected = dense(hidden, index.masked_fill(none, 0), weights.masked_fill(none, 0))
    assert_close(packed(hidden, index, weights), expected, rtol=1e-4, atol=1e-4)
    assert not packed(hidden, index, weights)[2].any()


def test_packed_gives_the_matrices_of_one_expert():
    dense = experts_of("mixtral", "MixtralExperts")
    packed = PackedExperts.replacing(dense, SCHEMES["int4"], SCHEMES["fp6"], "quantkit")
    pack_into(packed, dense, {GATE_UP: SCHEMES["int4"], DOWN: SCHEMES["fp6"]})
    gate, up = packed.packed(GATE_UP, 2)
    (down,) = packed.packed(DOWN, 2)
    assert all(isinstance(matrix, PackedTensor) for matrix in (gate, up, down))
    assert_equal(torch.cat([gate.dequantize(), up.dequantize()]), dense.gate_up_proj[2])
    assert_equal(down.dequantize(), dense.down_proj[2])


# All experts at once, as on a GPU

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: Triton's interpreter knows no products of 16-bit floats.
DTYPE, LIMIT = (torch.bfloat16, 2e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)
#: Small, as the interpreter takes long.
SMALL = {"hidden_size": 32, "intermediate_size": 20}


@pytest.fixture
def grouped(interpreter, monkeypatch):
    """Without a GPU the kernels run in Triton's interpreter."""
    pytest.importorskip("triton")
    if DEVICE == "cpu":
        monkeypatch.setattr(fused_kernels, "why_not_groupable", lambda problem: None)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: None)


def both(gate_up: str, down: str = "int4-asym") -> tuple[PackedExperts, nn.Module]:
    dense = experts_of("mixtral", "MixtralExperts", **SMALL)
    schemes = {GATE_UP: SCHEMES[gate_up], DOWN: SCHEMES[down]}
    packed = PackedExperts.replacing(dense, schemes[GATE_UP], schemes[DOWN], "quantkit")
    pack_into(packed, dense, schemes)
    return packed.requires_grad_(False).to(DEVICE), dense.requires_grad_(False).to(DEVICE, DTYPE)


def inputs(index: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, weights = (torch.randn(len(index), size, generator=generator) for size in (32, 2))
    return hidden.to(DEVICE, DTYPE), torch.tensor(index).to(DEVICE), weights.to(DEVICE)


@pytest.mark.parametrize("scheme", ["int4", "int4-asym", "fp6", "nvfp4", "mxfp4"])
def test_grouped_experts_compute_what_the_loop_does(grouped, scheme):
    packed, dense = both(scheme)
    assert packed.is_grouped(DTYPE)
    operands = inputs([[1, 0], [0, 3]])
    assert_close(packed(*operands), dense(*operands), norm=LIMIT)
    # Experts that are none.
    operands = inputs([[4, 0], [4, 4]])
    found = packed(*operands)
    assert_close(found, packed._one_by_one(*operands), norm=LIMIT)
    assert found[0].any() and not found[1].any()
    empty = tuple(operand[:0] for operand in operands)
    assert packed(*empty).shape == (0, 32)


def transposed(family: str) -> tuple[PackedExperts, nn.Module]:
    """Experts that the model stores transposed: with biases, or that take rows of each expert."""
    name, config, fields = {
        "gpt_oss": ("GptOssExperts", "GptOssConfig", {"swiglu_limit": 0.5}),
        "llama4": ("Llama4TextExperts", "Llama4TextConfig", {}),
    }[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    parsed = getattr(transformers, config)(**SMALL, num_local_experts=4, **fields)
    parsed._experts_implementation = "eager"
    dense = getattr(module, name)(parsed)
    torch.manual_seed(0)
    for parameter in dense.parameters():
        nn.init.normal_(parameter, std=0.3)
    packed = PackedExperts.replacing(dense, SCHEMES["int4"], SCHEMES["int4-asym"], "quantkit")
    for parameter in packed.spec.parameters:
        weight = getattr(dense, parameter).data
        scheme = SCHEMES["int4" if parameter == GATE_UP else "int4-asym"]
        parts: dict[str, list[torch.Tensor]] = {}
        for of_expert in weight:
            halves = [
                absmax_pack(one.contiguous(), scheme) for one in packed.spec.split(of_expert.T, parameter, 0)
            ]
            of_expert.copy_(packed.spec.joined([one.dequantize() for one in halves]))
            for part, _ in halves[0].parts():
                parts.setdefault(part, []).append(torch.cat([dict(half.parts())[part] for half in halves]))
        for part, tensors in parts.items():
            stored = stored_format(scheme, weight.shape[1], packed.container)
            tensor = stored.to_file(part, torch.stack(tensors))
            setattr(packed, stored.part_name(parameter, part), nn.Parameter(tensor, requires_grad=False))
        if packed.spec.biased:
            setattr(packed, f"{parameter}_bias", getattr(dense, f"{parameter}_bias"))
    packed, dense = packed.requires_grad_(False).to(DEVICE), dense.requires_grad_(False).to(DEVICE, DTYPE)
    packed.to(DTYPE)
    return packed, dense


@pytest.mark.parametrize("family", ["gpt_oss", "llama4"])
def test_grouped_experts_with_biases_and_with_rows_by_expert(grouped, family):
    packed, dense = transposed(family)
    operands = inputs([[1, 0], [0, 3], [2, 3]])
    if family == "llama4":
        # Three tokens for each expert, most of which did not choose it.
        rows = torch.zeros(12, 32, dtype=DTYPE, device=DEVICE)
        rows[[0, 4, 5, 11]] = torch.randn(4, 32).to(DEVICE, DTYPE)
        operands = (rows,)
    assert packed.is_grouped(DTYPE)
    found = packed(*operands)
    assert_close(found, dense(*operands), norm=LIMIT)
    assert_close(found, packed._one_by_one(*packed.spec.as_routed(operands, 4)), norm=LIMIT)


def test_grouped_experts_never_ask_the_device(grouped):
    packed, _ = both("int4")
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager", dynamic=True)
    with torch.no_grad():
        for index in ([[1, 2], [0, 1]], [[3, 2], [0, 3], [3, 4]]):
            operands = inputs(index)
            # Layouts are not built while something is compiled.
            expected = packed(*operands)
            assert_equal(compiled(*operands), expected)


def test_gradients_come_from_one_expert_after_the_other(grouped):
    packed, dense = both("int4")
    gradients = []
    for experts in (packed, dense):
        hidden, index, weights = inputs([[1, 2], [0, 3]])
        hidden.requires_grad_(), weights.requires_grad_()
        experts(hidden, index, weights).square().sum().backward()
        gradients.append((hidden.grad, weights.grad))
    assert_close(*gradients, norm=LIMIT)


def test_tangents_are_refused(grouped):
    packed, _ = both("int4")
    hidden, index, weights = inputs([[1, 2], [0, 3]])
    with pytest.raises(KernelError, match="no forward derivatives"):
        torch.func.jvp(lambda x, w: packed(x, index, w), (hidden, weights), (hidden, weights))


def test_grouped_layouts_are_built_once_and_do_not_survive_other_words(grouped, monkeypatch):
    packed, dense = both("int4")
    other, _ = both("int4")
    for name, parameter in other.named_parameters():
        if not name.endswith("scale"):
            parameter.data.bitwise_not_()
    built = []
    stacked = stacked_weights.stacked
    monkeypatch.setattr(stacked_weights, "stacked", lambda *given: built.append(1) or stacked(*given))
    operands = inputs([[1, 2]])
    packed.build_kernel_layouts(DTYPE)
    for _ in range(2):
        assert_close(packed(*operands), dense(*operands), norm=LIMIT)
    # Those of single experts are in the same memory.
    packed._one_by_one(*operands)
    assert len(built) == 2
    packed.load_state_dict(other.state_dict())
    expected = packed._one_by_one(*operands)
    assert_close(packed(*operands), expected, norm=LIMIT)
    assert not torch.allclose(expected, dense(*operands), rtol=1e-1, atol=1e-1)
    assert len(built) == 4


def test_a_model_with_grouped_experts(tiny, grouped, monkeypatch):
    checkpoint = tiny("mixtral", "int4").packed
    ids = torch.tensor([[1, 5]]).to(DEVICE)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=DTYPE, device_map=DEVICE)
    assert model.model.layers[0].mlp.experts.is_grouped(DTYPE) and model.hf_quantizer.is_compileable
    with torch.no_grad():
        found = model(ids).logits
        monkeypatch.setattr(PackedExperts, "forward", PackedExperts._one_by_one)
        assert_close(found, model(ids).logits, norm=LIMIT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_another_dtype_than_the_files(tiny, dtype):
    """Routers too, which have another name in the files."""
    model = AutoModelForCausalLM.from_pretrained(tiny("mixtral", "int4").packed, dtype=dtype)
    assert {layer.mlp.gate.weight.dtype for layer in model.model.layers} == {dtype}
    with torch.no_grad():
        assert model(torch.tensor([[1, 5]])).logits.dtype == dtype
