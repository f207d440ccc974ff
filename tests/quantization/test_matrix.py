"""Tiny models of transformers' classes are packed, load as their class and compute what their files say."""

from pathlib import Path

import pytest
import torch
import transformers

import quantkit
from quantkit.errors import QuantkitError

from . import matrix

#: One of each kind: text, vision-language, encoder, classifier, embedding, seq2seq, speech, experts, hybrid.
SAMPLE = (
    *(
        "Qwen3ForCausalLM",
        "LlavaForConditionalGeneration",
        "BertForMaskedLM",
        "LlamaForSequenceClassification",
    ),
    *("BertModel", "BartForConditionalGeneration", "WhisperForConditionalGeneration", "Wav2Vec2ForCTC"),
    *("GptOssForCausalLM", "GPT2LMHeadModel", "T5ForConditionalGeneration"),
    *("ViTForImageClassification", "Qwen3_5MoeForConditionalGeneration", "CLIPModel", "Qwen3Model"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_class_of_each_kind(name: str, tmp_path: Path) -> None:
    line = matrix.attempt(name, tmp_path, format="int8")
    assert line.startswith("right: "), line


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"format": "int8"}, {"format": "int4", "group_size": 32}], ids=str)
def test_no_class_is_wrong(options: dict[str, object], tmp_path: Path) -> None:
    lines = {name: matrix.attempt(name, tmp_path / name, **options) for name in matrix.names()}
    wrong = {name: line for name, line in lines.items() if line.startswith("WRONG")}
    assert not wrong
    assert sum(line.startswith("right") for line in lines.values()) >= 140


def test_an_embedding_model_is_taken_for_its_base(tmp_path: Path) -> None:
    matrix.tiny_model("LlamaForCausalLM").model.save_pretrained(tmp_path / "source")
    config = tmp_path / "source" / "config.json"
    config.write_text(config.read_text().replace("LlamaModel", "LlamaForCausalLM"))
    result = quantkit.quantize(tmp_path / "source", tmp_path / "out", format="int8", device="cpu", check=True)
    assert result.plan.notes == (
        "config.json names LlamaForCausalLM; the tensors are those of LlamaModel, which the output names.",
    )
    model = quantkit.load(tmp_path / "out", device="cpu")
    assert isinstance(model, transformers.LlamaModel)
    dense = transformers.AutoModel.from_pretrained(tmp_path / "source")
    ids = torch.arange(12)[None]
    with torch.no_grad():
        found, expected = model(ids).last_hidden_state, dense(ids).last_hidden_state
    assert float((found - expected).norm() / expected.norm()) < 0.05


def test_heads_of_further_tokens_are_kept_and_declared(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, out = tmp_path / "source", tmp_path / "out"
    matrix.tiny_model("Qwen3ForCausalLM").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    stem = "model.layers.1.mlp.up_proj"
    added = {"mtp.fc": stem, "mtp.layers.0.mlp.up_proj": stem, "model.layers.2.mlp.up_proj": stem}
    tensors |= {f"{name}.weight": tensors[f"{of}.weight"].clone() for name, of in added.items()}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = quantkit.quantize(source, out, format="int8", device="cpu", check=True)
    assert set(added) <= set(result.plan.model_config["quantization_config"]["ignore"])
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[f"{name}.weight"], tensors[f"{name}.weight"]) for name in added)


def test_a_model_without_next_tokens_is_refused_by_what_needs_them(tmp_path: Path) -> None:
    from quantkit.runtime.load import load_language_model

    matrix.tiny_model("BertForMaskedLM").save_pretrained(tmp_path)
    with pytest.raises(QuantkitError, match="BertForMaskedLM, which does not continue a text"):
        load_language_model(tmp_path, device="cpu")


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "LlavaForConditionalGeneration"])
def test_classes_with_more_than_a_decoder_generate(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    matrix.tiny_model(name).save_pretrained(source)
    quantkit.quantize(source, out, format="int8")
    ours = quantkit.load(out, dtype="float32")
    matrix.rounded(source, out, tmp_path / "dense")
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "dense").to(ours.device).eval()
    prompt = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(2)).to(ours.device)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1}
    found, expected = (model.generate(prompt, **options) for model in (ours, theirs))
    assert torch.equal(found, expected)
