"""`quantkit inspect` of what quantkit did not pack: what it is, its bits, and what can be done with it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.manifest import MANIFEST_NAME

from ..checkpoint.gguf_files import tiny_model, write_gguf
from ..checkpoint.low_bit.makers import CASES, write
from ..reliability.faults import edit_json
from .conftest import SOURCE, Run


def test_an_ordinary_model_is_said_to_be_one(run: Run) -> None:
    done = run("inspect", SOURCE)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "LlamaForCausalLM, not quantized, 1.04 MB",
        "stored as tensors weights   bits",
        "float32        47  260032 32.000",
        "bits per weight: whole model 32.000",
        "for, by their documentation: transformers",
        f"`quantkit quantize {SOURCE} OUT` packs it",
        f"`quantkit eval {SOURCE} --text FILE`, `bench` and `generate` run it",
    ]
    found = json.loads(run("inspect", SOURCE, "--json").out)
    assert found["bits_per_weight"] == {"linears": None, "model": 32.0}
    assert found["commands"][0] == f"quantize {SOURCE} OUT"


#: By the name of a case: method, how it is stored, bits, a tool, and whether `convert` keeps it.
FOREIGN = {
    "gptq 4": ("gptq", "GPTQ: int4, groups of 32, zero-points", 5.125, "optimum and gptqmodel\n", True),
    "gptq desc_act": ("gptq", "GPTQ: int4, groups of 16, zero-points, desc_act", 6.05, "vLLM", False),
    "awq": ("awq", "AWQ: int4, groups of 16, zero-points", 5.25, "vLLM", True),
    "bitsandbytes nf4": ("bitsandbytes", "bitsandbytes NF4: nf4", 4.795, "bitsandbytes", True),
    "bitsandbytes int8": ("bitsandbytes", "bitsandbytes int8: int8", 8.97, "bitsandbytes", False),
    "fp8 blocks": ("fp8", "FP8 with block scales: fp8-e4m3, blocks of 128x128", 8.007, "vLLM", True),
    "pack-quantized 4": ("compressed-tensors", "pack-quantized: int4, groups of 32", 4.671, "SGLang", True),
    "nvfp4 modelopt": ("modelopt", "NVFP4: fp4-e2m1, groups of 16", 4.544, "TensorRT-LLM", True),
    "mlx 4": ("MLX", "MLX: int4, groups of 64, minimums", 4.5, "mlx-lm", True),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_what_another_tool_packed_is_described(run: Run, tmp_path: Path, case: str) -> None:
    method, stored, bits, tool, converts = FOREIGN[case]
    made = CASES[case]()
    directory = write(tmp_path / "model", made.parts, made.section, architectures=["LlamaForCausalLM"])
    done = run("inspect", directory)
    assert done.code == 0, done.err
    assert done.out.startswith(f"LlamaForCausalLM, {method}, ")
    assert f"{stored}" in done.out and f" {bits:.3f}\n" in done.out
    assert f"low-bit tensors {bits:.3f}" in done.out
    assert tool in done.out
    assert ("`quantkit convert " in done.out) is converts
    assert ("cannot keep the values" in done.err) is not converts
    assert f"`quantkit quantize {directory} OUT` rounds it again" in done.out
    assert f"`quantkit eval {directory} --text FILE` measures it, on dequantized weights\n" in done.out
    runs = re.search(r"`quantkit bench .* run it by (.*)\n", done.out)
    assert (runs is not None) is (method in {"gptq", "awq", "bitsandbytes", "fp8", "compressed-tensors"})


def test_formats_that_are_not_read_are_told_by_settings_and_the_class(run: Run, tmp_path: Path) -> None:
    config = json.loads((SOURCE / "config.json").read_text())
    codes = {"model.layers.0.self_attn.q_proj.W_q": torch.zeros(32, 64, dtype=torch.uint8)}
    sections: dict[str, tuple[dict[str, Any], str]] = {
        "hqq": (
            {"quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
            "its settings say 4 bits, 64 weights per scale",
        ),
        "torchao": (
            {"quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 128}}}},
            "its settings say 128 weights per scale",
        ),
    }
    for method, (section, says) in sections.items():
        directory = write(tmp_path / method, codes, {"quant_method": method, **section}, **config)
        done = run("inspect", directory)
        assert done.code == 0, done.err
        assert f"LlamaForCausalLM, {method}, 2.05 kB\n{says}\n" in done.out
        assert f"whole model {8 * 2048 / 260032:.3f}" in done.out
        assert f"run it by transformers with {method}\n" in done.out
        assert "quantkit quantize" not in done.out
        assert "note: quantkit does not read these weights: " in done.err


@pytest.mark.parametrize(("kind", "bits", "converts"), [("Q4_0", 4.5, True), ("Q4_K", 4.5, False)])
def test_a_gguf_file_is_described_by_its_header(
    run: Run, tmp_path: Path, kind: str, bits: float, converts: bool
) -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    file = write_gguf(
        tmp_path / "model.gguf", "llama", model, lambda name, shape: kind if len(shape) > 1 else "F32"
    )
    done = run("inspect", file)
    assert done.code == 0, done.err
    assert done.out.startswith("llama, gguf, ")
    assert f"low-bit tensors {bits:.3f}" in done.out and "llama.cpp" in done.out
    assert (f"`quantkit convert {file} OUT`" in done.out) is converts
    assert f"`quantkit eval {file} --text FILE` measures it" in done.out and "bench" not in done.out
    assert (f"is {kind}, whose scales have scales" in done.err) is not converts


def test_without_its_own_section_a_packed_checkpoint_is_of_compressed_tensors(
    run: Run, damaged: Path
) -> None:
    (damaged / MANIFEST_NAME).unlink()
    section = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    edit_json(damaged / "config.json", lambda config: config.update(quantization_config=section))
    done = run("inspect", damaged)
    assert done.code == 0, done.err
    assert done.out.startswith("LlamaForCausalLM, compressed-tensors, ")


@pytest.mark.parametrize("option", [("--plot", "x.png"), ("--tensor-parallel",)])
def test_options_for_what_quantkit_packed_are_refused(run: Run, option: tuple[str, ...]) -> None:
    done = run("inspect", SOURCE, *option)
    assert (done.code, done.out) == (2, "")
    assert f"{option[0]} is for what quantkit packed, and {SOURCE} was not" in done.err
