"""Tiny models of transformers' classes are packed, load as their class and compute what their files say."""

from pathlib import Path

import pytest
import torch
import transformers

import quantkit
from quantkit.errors import QuantkitError
from quantkit.quantization.blockwise.block_output import NOT_RUN

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
    (found,) = matrix.attempt(name, tmp_path, {"int8": matrix.COLUMNS["int8"]}).values()
    assert found["result"] == "right", found


def test_blocks_with_parameters_made_of_several_tensors_are_calibrated(tmp_path: Path) -> None:
    """Convolutions of q, k and v, which the file has one by one."""
    columns = {key: matrix.COLUMNS[key] for key in ("int4", "gptq")}
    found = matrix.attempt("OlmoHybridForCausalLM", tmp_path, columns)
    assert [one["result"] for one in found.values()] == ["right", "right"], found
    assert found["gptq"]["calibrated"] == 1.0


@pytest.mark.slow
def test_no_class_is_wrong(tmp_path: Path) -> None:
    found = {name: matrix.attempt(name, tmp_path / name, matrix.COLUMNS) for name in matrix.names()}
    for column in matrix.COLUMNS:
        assert not {name: one[column] for name, one in found.items() if one[column]["result"] == "WRONG"}
        assert sum(one[column]["result"] == "right" for one in found.values()) >= 140


def test_linears_that_do_not_run_are_quantized_without_data(tmp_path: Path) -> None:
    """Longformer's linears for global attention, of which no token of a text has any."""
    source = tmp_path / "source"
    matrix.save_source(matrix.tiny_model("LongformerForMaskedLM"), source)
    plain = quantkit.quantize(source, tmp_path / "plain", **matrix.INT4)
    found = quantkit.quantize(source, tmp_path / "out", **matrix.COLUMNS["gptq"])
    idle = {name for name, one in found.measured.items() if one.note == NOT_RUN}
    assert idle == {name for name in found.measured if name.endswith("_global")} != set()
    for name, one in found.measured.items():
        assert (one.output_error is None) == (name in idle)
        assert (one.relative_error == plain.measured[name].relative_error) == (name in idle)


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
