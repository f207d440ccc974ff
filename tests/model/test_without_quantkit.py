"""What transformers makes of packed checkpoints in a process that does not import quantkit."""

import pytest
import torch

from .conftest import VERSION, logits_of, run_python

PLAIN = """
import sys, torch, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], **eval(sys.argv[3]))
prompt = torch.randint(3, 96, (2, 7), generator=torch.Generator().manual_seed(1))
with torch.no_grad():
    torch.save(model(prompt).logits, sys.argv[2])
assert "quantkit" not in sys.modules
"""


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "int4"), ("llama", "int8"), ("llama", "int4-asym"), ("qwen3_moe", "int4")],
)
def test_plain_transformers_reads_int4_and_int8(tiny, prompt, tmp_path, family, name):
    pytest.importorskip("compressed_tensors")
    if VERSION < (5, 22) and (family == "qwen3_moe" or "asym" in name):
        pytest.skip("transformers' own compressed-tensors support of this case starts with 5.22")
    checkpoint = tiny(family, name)
    options = (
        "dict(quantization_config=transformers.CompressedTensorsConfig(dequantize=True))"
        if "asym" in name
        else "{}"
    )
    run_python(PLAIN, str(checkpoint.packed), str(tmp_path / "logits.pt"), options)
    found = torch.load(tmp_path / "logits.pt", weights_only=True)
    expected = logits_of(checkpoint.dense_model(), prompt)
    # Where transformers dequantizes while it loads, it does so in the scales' dtype, bfloat16.
    tolerance = 1e-4 if options == "{}" and family == "llama" else 0.02
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=tolerance)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("name", ["fp6", "binary"])
def test_plain_transformers_refuses_other_formats(tiny, tmp_path, family, name):
    checkpoint = tiny(family, name)
    result = run_python(PLAIN, str(checkpoint.packed), str(tmp_path / "logits.pt"), "{}", check=False)
    assert result.returncode != 0
    assert "size mismatch" in result.stderr or "mismatch" in result.stderr.lower()
    assert not (tmp_path / "logits.pt").exists()
