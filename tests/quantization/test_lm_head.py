"""A quantized lm_head, from quantizing to saving the loaded model again, of real models."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkit.calibrate.methods import quantize_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.eval.evaluate import evaluate
from quantkit.eval.sizes import measure
from quantkit.model.tokenizer import tokenizer
from quantkit.quantizing import quantize
from quantkit.runtime.generate import generate
from quantkit.runtime.load import load
from quantkit.runtime.packed_linear import PackedLinear

from ..support.compare import assert_equal
from ..tiny.calibrated import data
from ..tiny.packed import assert_same_checkpoint

STORIES = Path(__file__).resolve().parents[2] / "examples" / "stories260K"


@pytest.fixture(params=["tied", "untied"])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """stories260K, whose head is tied to the embedding, or with a head of its own."""
    if request.param == "tied":
        return STORIES
    directory = tmp_path / "untied"
    directory.mkdir()
    for path in STORIES.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    config = json.loads((STORIES / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(STORIES / "model.safetensors")
    noise = torch.randn(
        tensors["model.embed_tokens.weight"].shape, generator=torch.Generator().manual_seed(0)
    )
    head = tensors["model.embed_tokens.weight"].float() * (1 + 0.01 * noise)
    tensors["lm_head.weight"] = head.to(tensors["model.embed_tokens.weight"].dtype)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.parametrize(("head", "most"), [("int8", 0.01), ("int4:32", 0.2)])
@pytest.mark.sampled(2)
def test_a_head_is_quantized_without_data(
    source: Path, tmp_path: Path, text: Path, head: str, most: float
) -> None:
    out = tmp_path / "out"
    rules = ("*layers*=keep",)
    result = quantize(source, out, lm_head=head, rules=rules, device="cpu")
    embedding = load_file(source / "model.safetensors")["model.embed_tokens.weight"]
    weight = load_file(source / "model.safetensors").get("lm_head.weight", embedding)
    config = json.loads((out / "config.json").read_text())
    assert config["tie_word_embeddings"] is False
    assert "lm_head" not in config["quantization_config"]["ignore"]

    model = load(out, device="cpu")
    assert isinstance(model.lm_head, PackedLinear)
    assert_equal(model.get_input_embeddings().weight, embedding)
    name, _, group = head.partition(":")
    expected = quantize_tensor(weight, name, group_size=int(group) if group else None)
    assert_equal(model.lm_head.packed.dequantize(), expected.dequantize())
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", out)

    report = evaluate(
        out, against=source, texts=[text], window=64, max_windows=2, device="cpu", per_block=True
    )
    assert 0 < report.texts[text.name].kl_mean < most
    # A head that was tied has no weights of its own to count.
    bits = measure(Checkpoint.open(out)).model
    assert bits == pytest.approx(result.plan.bits_per_weight["model"])
    generated = generate(model, tokenizer(out), "Once upon a time", max_new_tokens=4)
    assert len(generated.tokens) == 4


def test_a_head_is_calibrated(source: Path, tmp_path: Path, text: Path) -> None:
    result = quantize(
        source,
        tmp_path / "out",
        method="gptq",
        group_size=32,
        lm_head="int4:32",
        calibration=data(text, samples=4),
        device="cpu",
    )
    assert result.plan.layer_records({})["lm_head"].method == "gptq"
    assert isinstance(load(tmp_path / "out", device="cpu").lm_head, PackedLinear)
