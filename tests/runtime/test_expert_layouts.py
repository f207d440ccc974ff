"""Mixtures whose experts are stored in one tensor for all, in every layout, from a checkpoint to logits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import quantkit
from quantkit.converting import convert
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.saved_model import read_record

from ..support.compare import assert_close, assert_equal
from ..tiny.sizes import SIZES

FEW = {"num_local_experts": 4, "num_experts_per_tok": 2}
#: By model type: its config class, fields, the experts' module in a layer, and its layout of gate and up
#: [I, H] in `gate_up_proj`, written down by hand.
FAMILIES: dict[str, tuple[str, dict[str, Any], str, Callable[..., torch.Tensor]]] = {
    "gpt_oss": (
        "GptOssConfig",
        {**FEW, "intermediate_size": 40, "sliding_window": 16},
        "mlp.experts",
        lambda gate, up: torch.stack([gate.T, up.T], -1).reshape(len(gate.T), -1),
    ),
    "llama4_text": (
        "Llama4TextConfig",
        {
            **{"num_local_experts": 4, "intermediate_size": 44, "intermediate_size_mlp": 96},
            **{"interleave_moe_layer_step": 1, "attention_chunk_size": 32},
        },
        "feed_forward.experts",
        lambda gate, up: torch.cat([gate.T, up.T], 1),
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {**FEW, "intermediate_size": 36},
        "block_sparse_moe.experts",
        lambda gate, up: torch.cat([gate, up]),
    ),
}
NAMES = sorted(FAMILIES)


def write(directory: Path, name: str, **changes: Any) -> Path:
    config, fields, _, _ = FAMILIES[name]
    torch.manual_seed(0)
    parsed = getattr(transformers, config)(**{**SIZES, **fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(parsed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.2)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=NAMES)
def packed(request, tmp_path_factory) -> tuple[str, Path, Path]:
    """(family, source, output) of an int8 model."""
    name = request.param
    source, out = tmp_path_factory.mktemp(name) / "source", tmp_path_factory.mktemp(name) / "out"
    quantkit.quantize(write(source, name), out, format="int8", group_size=32)
    return name, source, out


def dense_of(directory: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def logits_of(model: Any) -> torch.Tensor:
    tokens = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(tokens).logits


def rounded(source: Path, model: Any, name: str) -> Any:
    """The dense model with the values of the packed `model`, whose experts the test lays out itself."""
    dense, (_, _, module, lay) = dense_of(source), FAMILIES[name]
    linears = {key: one for key, one in model.named_modules() if hasattr(one, "in_features")}
    with torch.no_grad():
        for key, one in linears.items():
            if not isinstance(one, nn.Linear):
                (weight,) = one.dense_weights(torch.float32).values()
                before = dense.get_submodule(key).weight
                assert (weight - before).abs().max() < 0.01 * before.abs().max()
                before.copy_(weight)
        for layer, of_dense in zip(model.model.layers, dense.model.layers, strict=True):
            experts, before = layer.get_submodule(module), of_dense.get_submodule(module)
            assert isinstance(experts, PackedExperts)
            for expert in range(4):
                gate, up = (one.dequantize() for one in experts.packed("gate_up_proj", expert))
                (down,) = (one.dequantize() for one in experts.packed("down_proj", expert))
                down = down if before.down_proj.shape[1:] == (64, down.shape[1]) else down.T
                for parameter, weight in ((before.gate_up_proj, lay(gate, up)), (before.down_proj, down)):
                    assert (weight - parameter[expert]).abs().max() < 0.01 * parameter.abs().max()
                    parameter[expert].copy_(weight)
    return dense


def test_logits_are_those_of_the_dense_model_rounded_by_hand(packed):
    name, source, out = packed
    model = quantkit.load(out, device="cpu", dtype=torch.float32)
    expected = logits_of(rounded(source, model, name))
    assert_close(logits_of(model), expected, rtol=1e-4, atol=1e-4)


def test_experts_are_stored_one_by_one_and_only_quantkit_finds_them(packed):
    name, _, out = packed
    module = FAMILIES[name][2]
    with safe_open(out / "model.safetensors", "pt") as file:
        names = [one for one in file.keys() if f"layers.0.{module}." in one]  # noqa: SIM118
    matrices = {one.removeprefix(f"model.layers.0.{module}.").rsplit(".", 1)[0] for one in names}
    wanted = {f"{e}.{leaf}" for e in range(4) for leaf in ("gate_proj", "up_proj", "down_proj")}
    assert wanted <= matrices
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "quantkit"
    assert any("one tensor for all experts" in reason for reason in read_record(out).needs_quantkit)


def test_saved_again_and_dequantized_it_is_the_same_model(packed, tmp_path):
    _, source, out = packed
    model = quantkit.load(out, device="cpu", dtype=torch.float32)
    expected = logits_of(model)
    model.save_pretrained(tmp_path / "saved")
    before, after = (load_file(path / "model.safetensors") for path in (out, tmp_path / "saved"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name].float(), after[name].float()) for name in before)
    assert_equal(logits_of(quantkit.load(tmp_path / "saved", device="cpu", dtype=torch.float32)), expected)
    dense = model.dequantize(torch.float32)
    dense.save_pretrained(tmp_path / "dense")
    assert {n: t.shape for n, t in load_file(tmp_path / "dense" / "model.safetensors").items()} == {
        n: t.shape for n, t in load_file(source / "model.safetensors").items()
    }
    assert_close(logits_of(dense_of(tmp_path / "dense")), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_experts_that_are_kept_keep_their_tensors(tmp_path, name):
    source = write(tmp_path / "source", name, num_hidden_layers=1)
    rules = ["*experts*=keep"]
    quantkit.quantize(source, tmp_path / "out", format="int8", rules=rules)
    before, after = (load_file(tmp_path / one / "model.safetensors") for one in ("source", "out"))
    kept = [one for one in before if before[one].dim() == 3]
    assert len(kept) == 2 and all(torch.equal(before[one], after[one]) for one in kept)
    assert not any(".experts.0." in one for one in after)
    assert logits_of(quantkit.load(tmp_path / "out", device="cpu")).isfinite().all()


def test_words_of_three_numbers_and_biases_in_half_precision(tmp_path):
    """bfloat16 as engines run it: the same model as in float32, but for rounding."""
    source = write(tmp_path / "source", "gpt_oss")
    quantkit.quantize(source, tmp_path / "out", format="int4", group_size=32)
    model = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    half = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    experts = half.model.layers[0].mlp.experts
    assert experts.gate_up_proj_bias.dtype == torch.bfloat16 and not experts.gate_up_proj_bias.requires_grad
    x = torch.randn(7, 64)
    index = torch.stack([torch.randperm(4)[:2] for _ in range(7)])
    weights = torch.rand(7, 2)
    expected = model.model.layers[0].mlp.experts(x, index, weights)
    actual = experts(x.bfloat16(), index, weights.bfloat16()).float()
    assert (actual - expected).abs().max() < 0.02 * expected.abs().max()


def test_mxfp4_experts_of_gpt_oss_are_converted_exactly(tmp_path):
    source = write(tmp_path / "source", "gpt_oss", intermediate_size=64)
    tensors = load_file(source / "model.safetensors")
    for name in [one for one in tensors if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, columns, rows = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.randint(
            0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
        )
        tensors[f"{name}_scales"] = torch.randint(119, 124, (experts, rows, columns // 32), dtype=torch.uint8)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    section = {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "router", "lm_head"]}
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    convert(source, tmp_path / "out")
    model = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert str(model.model.layers[0].mlp.experts.first_scheme).startswith("fp4-e2m1 g32")
    dequantized = transformers.Mxfp4Config(dequantize=True, **dict(list(section.items())[1:]))
    dense = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=dequantized
    ).eval()
    # transformers 5.17 leaves the experts in bfloat16, which has all values of MXFP4.
    dense.float()
    torch.testing.assert_close(logits_of(model), logits_of(dense), rtol=1e-5, atol=1e-5)
