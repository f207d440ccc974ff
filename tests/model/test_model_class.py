"""The class of a checkpoint is the one that `architectures` names, of transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import transformers

from quantkit.errors import CheckpointError
from quantkit.model.model_class import meta_model, model_class
from quantkit.model.parts import OUTSIDE_BLOCKS, OUTSIDE_DECODER, packed_parts

from ..quantization.tiny import tiny_config

HERE = Path()


def config(name: str, *named: object, **changes: Any) -> dict[str, Any]:
    """The config.json of a tiny config of class `name` whose architectures are `named`."""
    made = tiny_config(getattr(transformers, name)).to_dict()
    return {**made, "architectures": list(named) or None, **changes}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (config("LlamaConfig", "LlamaForCausalLM"), "LlamaForCausalLM"),
        (config("LlamaConfig", "LlamaModel"), "LlamaModel"),
        (config("LlamaConfig", "LlamaForSequenceClassification"), "LlamaForSequenceClassification"),
        (config("LlamaConfig", "OwnModel", "LlamaForTokenClassification"), "LlamaForTokenClassification"),
        # Nothing that is no model class of transformers, or is of another config.
        (config("LlamaConfig", "Trainer", "pipeline", 7, "a.b"), "LlamaForCausalLM"),
        (config("LlamaConfig", "MistralForCausalLM"), "LlamaForCausalLM"),
        (config("LlamaConfig", "MistralForSequenceClassification"), "LlamaForSequenceClassification"),
        (config("CamembertConfig", "RobertaForMaskedLM"), "CamembertForMaskedLM"),
        # Without a name the mappings, in order.
        (config("LlamaConfig"), "LlamaForCausalLM"),
        (config("T5Config"), "T5ForConditionalGeneration"),
        (config("ViTConfig"), "ViTModel"),
        (config("LlamaConfig", architectures="LlamaModel"), "LlamaForCausalLM"),
    ],
)
def test_the_class_of_a_config(made, expected):
    cls, parsed = model_class(made, HERE)
    assert cls.__name__ == expected and type(parsed).model_type == made["model_type"]


def test_a_text_class_gets_the_text_config():
    cls, parsed = model_class(config("Qwen3_5Config", "Qwen3_5ForCausalLM"), HERE)
    assert cls is transformers.Qwen3_5ForCausalLM and type(parsed) is transformers.Qwen3_5TextConfig


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ({}, "'model_type' is None; expected an architecture of transformers"),
        ({"model_type": "martian"}, "'model_type' is 'martian'; expected an architecture of transformers"),
        (config("LlamaConfig", hidden_size="wide"), "cannot read it as the config of a 'llama'"),
        (config("LlamaConfig", head_dim=-4), "cannot build a LlamaForCausalLM from it"),
    ],
)
def test_a_refusal_names_one_cause_and_no_list_of_classes(made, text):
    with pytest.raises(CheckpointError, match=text) as caught:
        meta_model(made, HERE)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    ("made", "packed", "dense", "reason"),
    [
        (config("LlamaConfig"), ["model.layers.0.mlp.up_proj"], ["lm_head"], OUTSIDE_DECODER),
        (config("LlamaConfig", "LlamaModel"), ["layers.0.mlp.up_proj"], [], OUTSIDE_BLOCKS),
        (
            config("LlavaConfig", "LlavaForConditionalGeneration"),
            ["model.language_model.layers.0.mlp.up_proj"],
            ["model.vision_tower.encoder.layers.0.mlp.fc1", "model.multi_modal_projector.linear_1"],
            OUTSIDE_DECODER,
        ),
        (
            config("WhisperConfig", "WhisperForConditionalGeneration"),
            ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"],
            ["proj_out"],
            OUTSIDE_DECODER,
        ),
        (
            config("BertConfig", "BertForSequenceClassification"),
            ["bert.encoder.layer.0.output.dense"],
            ["bert.pooler.dense", "classifier"],
            OUTSIDE_BLOCKS,
        ),
        (
            config("CLIPConfig", "CLIPModel"),
            ["text_model.encoder.layers.0.mlp.fc1", "vision_model.encoder.layers.0.mlp.fc1"],
            ["text_projection"],
            OUTSIDE_BLOCKS,
        ),
        (
            config("ModernBertDecoderConfig", "ModernBertDecoderForCausalLM"),
            ["model.layers.0.mlp.Wo"],
            ["decoder", "lm_head.dense"],
            OUTSIDE_DECODER,
        ),
        (
            config("GitConfig", "GitForCausalLM"),
            ["git.encoder.layer.0.output.dense"],
            ["git.image_encoder.vision_model.encoder.layers.0.mlp.fc1"],
            OUTSIDE_DECODER,
        ),
    ],
    ids=lambda value: (value.get("architectures") or ["none"])[0] if isinstance(value, dict) else "",
)
def test_the_parts_that_are_packed(made, packed, dense, reason):
    model = meta_model(made, HERE)
    parts, modules = packed_parts(model), dict(model.named_modules())
    assert {*packed, *dense} <= set(modules)
    assert [name in parts for name in packed + dense] == [True] * len(packed) + [False] * len(dense)
    assert parts.outside == reason
