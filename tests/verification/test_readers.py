"""Readers without quantkit are promised only where they take each linear for what the file has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.model_class import meta_model
from quantkit.planning import plan_checkpoint
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.saved_model import read_record
from quantkit.verification.readers import (
    check_own_class,
    readers_of,
    taken_as_packed,
    why_not_transformers,
)

from ..quantization.tiny import tiny_model
from ..support.compare import assert_equal

CLASSES = ("Qwen3_5ForConditionalGeneration", "WhisperForConditionalGeneration", "BertForMaskedLM")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`source(class name)`: the directory of a tiny model."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            tiny_model(name).save_pretrained(made[name])
        return made[name]

    return make


def planned(directory: Path, **options: Any) -> Any:
    return plan_checkpoint(directory, QuantizeOptions(recipe=RecipeOptions(format="int8", **options)))[1]


def specs(plan: Any) -> dict[str, Any]:
    return {spec.name: spec for shard in plan.shards for spec in shard.specs}


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_takes_linears_for_what_they_are(source, name):
    plan = planned(source(name), rules=("*.0.*=int4",))
    assert plan.readers == ("vLLM", "SGLang", "transformers")
    section = plan.model_config["quantization_config"]
    model = meta_model(plan.model_config, source(name))
    packed = {layer.linear.module for layer in plan.layers if layer.scheme is not None}
    assert taken_as_packed(model, section) == packed
    # compressed-tensors itself says the same.
    match = pytest.importorskip("compressed_tensors.utils.match")
    targets = [target for group in section["config_groups"].values() for target in group["targets"]]
    theirs = match.match_named_modules(model, targets, section["ignore"])
    assert {name for name, _ in theirs} == packed


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "MambaForCausalLM",
            "initializes 'backbone.layers.0.mixer' by weights that packed linears do not have",
        ),
        ("OlmoHybridForCausalLM", "conv1d.weight' in several tensors, which transformers does not join"),
    ],
)
def test_classes_at_which_transformers_stops_without_quantkit_are_not_promised(source, name, why):
    plan = planned(source(name))
    assert not plan.readers
    assert why in plan.notes[-1]


def test_a_text_class_has_names_of_its_own(source):
    plan = planned(source(CLASSES[0]), rules=("*.layers.0.*=keep", "*.mlp.up_proj=int4"))
    ignore = plan.model_config["quantization_config"]["ignore"]
    kept = "layers.0.mlp.gate_proj"
    assert {f"model.language_model.{kept}", f"model.{kept}"} <= set(ignore)
    assert "model.visual.blocks.0.attn.qkv" in ignore
    groups = plan.model_config["quantization_config"]["config_groups"].values()
    (int4,) = (group["targets"] for group in groups if group["weights"]["num_bits"] == 4)
    assert {"model.language_model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"} <= set(int4)


@pytest.mark.parametrize(
    ("missing", "reader"),
    [
        ("model.visual.blocks.0.attn.qkv", "Qwen3_5ForConditionalGeneration"),
        ("model.layers.0.mlp.gate_proj", "Qwen3_5ForCausalLM"),
        ("lm_head", "Qwen3_5ForConditionalGeneration"),
    ],
)
def test_what_is_not_declared_is_found(source, missing, reader):
    directory = source(CLASSES[0])
    plan = planned(directory, rules=("*.layers.0.*=keep",))
    config = json.loads(json.dumps(plan.model_config))
    config["quantization_config"]["ignore"].remove(missing)
    reason = why_not_transformers(config, directory, specs(plan))
    assert reason == f"{reader} would take {missing!r} to be packed, which it is not"


def test_a_tensor_too_few_or_too_many_is_found(source):
    directory = source(CLASSES[2])
    plan = planned(directory)
    tensors = specs(plan)
    check_own_class(plan.model_config, directory, tensors, plan.dense)
    stem = "bert.encoder.layer.0.output.dense.weight"
    fewer = {name: one for name, one in tensors.items() if name != f"{stem}_scale"}
    with pytest.raises(CheckpointError, match=f"tensor '{stem}_scale' is missing"):
        check_own_class(plan.model_config, directory, fewer, plan.dense)
    norm = "bert.embeddings.LayerNorm.weight"
    fewer = {name: one for name, one in tensors.items() if name != norm}
    with pytest.raises(CheckpointError, match=f"BertForMaskedLM has no tensor for '{norm}'"):
        check_own_class(plan.model_config, directory, fewer, plan.dense)
    more = {**tensors, "stray.weight": replace(tensors[norm], name="stray.weight")}
    with pytest.raises(CheckpointError, match=r"BertForMaskedLM has no place for tensor 'stray\.weight'"):
        check_own_class(plan.model_config, directory, more, plan.dense)


def test_what_is_much_of_the_model_and_dense_is_a_warning(source):
    directory = source("LlavaForConditionalGeneration")
    tensors = Checkpoint.open(directory).tensors
    matrices = [one for name, one in tensors.items() if name.endswith("weight") and len(one.shape) == 2]
    outside = [one for one in matrices if "language" not in one.name and "embed" not in one.name]
    share = sum(one.elements for one in outside if "lm_head" not in one.name)
    share /= sum(one.elements for one in tensors.values())
    warning, *_ = planned(directory).warnings
    assert warning.startswith(f"{share:.0%} of the weights stay dense: multi_modal_projector.")
    assert warning.endswith(" more tensors: a linear outside the decoder.")
    assert planned(source(CLASSES[2])).warnings == ()


def test_a_finished_directory_says_who_reads_it(source, tmp_path):
    import quantkit

    quantkit.quantize(source(CLASSES[2]), tmp_path / "out", format="int8", device="cpu")
    checkpoint = Checkpoint.open(tmp_path / "out")
    layers = read_record(tmp_path / "out").layers
    assert readers_of(checkpoint, layers) == (("vLLM", "SGLang", "transformers"), ())
    section = checkpoint.config["quantization_config"]
    section = {**section, "ignore": section["ignore"][1:]}
    changed = replace(checkpoint, config={**checkpoint.config, "quantization_config": section})
    readers, (reason,) = readers_of(changed, layers)
    assert readers == () and "only quantkit reads this" in reason


def test_a_head_that_is_new_stays_dense(source, tmp_path):
    import quantkit

    torch.manual_seed(0)
    tiny_model("LlamaForCausalLM").save_pretrained(tmp_path / "source")
    quantkit.quantize(tmp_path / "source", tmp_path / "out", format="int8", device="cpu")
    load = transformers.AutoModelForSequenceClassification.from_pretrained
    model, info = load(tmp_path / "out", output_loading_info=True)
    assert type(model.score) is torch.nn.Linear and info["missing_keys"] == {"score.weight"}
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "PackedLinear"
    bare = transformers.AutoModel.from_pretrained(tmp_path / "out")
    ids = torch.arange(8)[None]
    same = model(ids, output_hidden_states=True).hidden_states[-1]
    assert_equal(bare(ids).last_hidden_state, same)
