"""What transformers makes of packed checkpoints in a process that does not import quantkit."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import quantkit  # noqa: F401  registers the plug-in
from quantkit.packing.schemes import Scheme

from .conftest import SCHEMES, VERSION, Tiny, assert_same_checkpoint, logits_of, run_python, write_tiny

PLAIN = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **eval(sys.argv[3]))
prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    torch.save(model(prompt).logits, sys.argv[2])
assert "quantkit" not in sys.modules
"""


DEQUANTIZE = "dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))"
BFLOAT16 = "dict(dtype=torch.bfloat16)"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int4"),
        ("llama", "int8"),
        ("llama", "int8-tensor"),
        ("llama", "int4-asym"),
        ("qwen3_moe", "int4"),
        ("qwen3_moe", "int8-tensor"),
    ],
)
def test_plain_transformers_reads_int4_and_int8(tiny, prompt, tmp_path, family, name):
    pytest.importorskip("compressed_tensors")
    if VERSION < (5, 22) and (family == "qwen3_moe" or "asym" in name):
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")
    checkpoint = tiny(family, name)
    options = DEQUANTIZE if "asym" in name else "{}"
    found = logits_without_quantkit(checkpoint, tmp_path, options)
    expected = logits_of(checkpoint.dense_model(), prompt)
    # Where transformers dequantizes while it loads, it does so in the scales' dtype, bfloat16.
    tolerance = 1e-4 if options == "{}" and family == "llama" else 0.02
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize(
    ("family", "name", "options"),
    [
        ("llama", "fp8", "{}"),
        ("llama", "fp8-groups", "{}"),
        ("llama", "fp8-tensor", "{}"),
        ("llama", "fp8", BFLOAT16),
        # compressed-tensors dequantizes these to bfloat16, which takes all products of these numbers.
        ("llama", "mxfp8", BFLOAT16),
        ("llama", "mxfp4", BFLOAT16),
        ("llama", "nvfp4", BFLOAT16),
        ("qwen3_moe", "fp8", BFLOAT16),
        ("qwen3_moe", "fp8-tensor", BFLOAT16),
        ("qwen3_moe", "mxfp4", BFLOAT16),
    ],
)
def test_plain_transformers_reads_fp8_and_fp4(tiny, prompt, tmp_path, family, name, options):
    pytest.importorskip("compressed_tensors")
    if VERSION < (5, 22) and family == "qwen3_moe":
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")
    checkpoint = tiny(family, name)
    assert checkpoint.quantization_config["quant_method"] == "compressed-tensors"
    found = logits_without_quantkit(checkpoint, tmp_path, options)
    dtype = torch.bfloat16 if options == BFLOAT16 else torch.float32
    expected = logits_of(checkpoint.dense_model(dtype), prompt)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0)
    # And quantkit computes the same from the same files.
    ours = AutoModelForCausalLM.from_pretrained(checkpoint.packed, dtype=dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.05 * expected.abs().max().item()
    torch.testing.assert_close(logits_of(ours, prompt), expected, rtol=0, atol=tolerance)


MIXES = {
    "linears": (
        "llama",
        {"q_proj": "mxfp4", "k_proj": "nvfp4", "down_proj": "int4", "o_proj": "mxfp8"},
        "fp8",
    ),
    "experts": ("qwen3_moe", {"experts": "int4"}, "fp8"),
}


@pytest.mark.parametrize("mix", MIXES)
def test_plain_transformers_reads_a_mix_of_formats(prompt, tmp_path, mix):
    pytest.importorskip("compressed_tensors")
    family, chosen, default = MIXES[mix]
    if VERSION < (5, 22) and family == "qwen3_moe":
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")

    def scheme_of(module: str) -> Scheme:
        return SCHEMES[next((name for part, name in chosen.items() if part in module), default)]

    checkpoint = write_tiny(tmp_path / "mixed", family, scheme_of)
    assert checkpoint.quantization_config["format"] == "mixed-precision"
    found = logits_without_quantkit(checkpoint, tmp_path, BFLOAT16)
    expected = logits_of(checkpoint.dense_model(torch.bfloat16), prompt)
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=0)
    ours = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    expected = logits_of(checkpoint.dense_model(), prompt)
    torch.testing.assert_close(logits_of(ours, prompt), expected, rtol=0, atol=1e-4)
    ours.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)


@pytest.mark.parametrize("name", ["nvfp4", "mxfp8", "fp8-groups"])
def test_experts_that_transformers_would_misread_need_quantkit(tiny, tmp_path, name):
    checkpoint = tiny("qwen3_moe", name)
    assert checkpoint.quantization_config["quant_method"] == "quantkit"
    result = run_python(PLAIN, str(checkpoint.packed), str(tmp_path / "logits.pt"), "{}", check=False)
    assert result.returncode != 0 and "mismatch" in result.stderr.lower()


def logits_without_quantkit(checkpoint: Tiny, tmp_path: Path, options: str) -> torch.Tensor:
    run_python(PLAIN, str(checkpoint.packed), str(tmp_path / "logits.pt"), options)
    found: torch.Tensor = torch.load(tmp_path / "logits.pt", weights_only=True)
    return found


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", ["fp6", "binary"])
def test_plain_transformers_refuses_other_formats(tiny, tmp_path, family, name):
    checkpoint = tiny(family, name)
    result = run_python(PLAIN, str(checkpoint.packed), str(tmp_path / "logits.pt"), "{}", check=False)
    assert result.returncode != 0
    assert "size mismatch" in result.stderr or "mismatch" in result.stderr.lower()
    assert not (tmp_path / "logits.pt").exists()
