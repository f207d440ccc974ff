"""Linears that a class keeps as [K, N], and linears that the code of a model reads, from file to logits."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

from quantkit.calibrate.methods import quantize_tensor
from quantkit.quantizing import quantize
from quantkit.runtime.load import load
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import unpack_modules

from ..support.compare import assert_close
from ..tiny.calibrated import write

TOKENS = torch.arange(20)[None]


@torch.no_grad()
def test_gpt2_is_what_it_is_with_rounded_weights(tmp_path: Path) -> None:
    source, out = write(tmp_path, "gpt2", torch.float32), tmp_path / "out"
    kept = "transformer.h.0.mlp.c_proj"
    result = quantize(source, out, format="int4", group_size=16, method="mse", rules=(f"{kept}=keep",))
    config = json.loads((out / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "quantkit"
    assert "no packed form of its class" in result.plan.not_portable[0]

    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    packed = load(out, device="cpu", dtype=torch.float32)
    stored = load_file(out / "model.safetensors")
    assert_close(stored[f"{kept}.weight"], dense.get_submodule(kept).weight, rtol=0, atol=0)
    names = [name for name, module in packed.named_modules() if isinstance(module, PackedLinear)]
    assert len(names) == 11 and kept not in names
    for name in names:
        weight = dense.get_submodule(name).weight
        rounded = quantize_tensor(weight.T.contiguous(), format="int4", group_size=16, method="mse")
        weight.copy_(rounded.dequantize().T)
    expected = dense(TOKENS).logits
    assert_close(packed(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)
    unpack_modules(packed, torch.float32)
    assert type(packed.get_submodule(names[0])) is type(dense.get_submodule(names[0]))
    assert_close(packed(TOKENS).logits, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rwkv_keeps_what_its_code_rescales_and_runs(tmp_path: Path) -> None:
    source, out = write(tmp_path, "rwkv", torch.float32), tmp_path / "out"
    result = quantize(source, out, format="int8", method="rtn")
    assert "reads its weight itself" in result.plan.dense["rwkv.blocks.1.feed_forward.value.weight"]
    dense = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    packed = load(out, device="cpu", dtype=torch.float32)
    difference = packed(TOKENS).logits - dense(TOKENS).logits
    assert float(difference.norm() / dense(TOKENS).logits.norm()) < 0.02
