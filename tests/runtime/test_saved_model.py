"""Directories that `save_pretrained` wrote: what a manifest would say of them is read from their headers."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

import quantkit
from quantkit.checkpoint.manifest import MANIFEST_NAME, read_manifest
from quantkit.checkpoint.model_record import ModelRecord
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.saved_model import file_names, is_saved, read_record, record_of
from quantkit.runtime.weights import packed_weights
from quantkit.verification.verify import verify

from ..tiny.packed import config_of


def quantized(family: str, directory: Path, format: str, **options: Any) -> Path:
    model = AutoModelForCausalLM.from_config(config_of(family, tie_word_embeddings=True)).to(torch.bfloat16)
    model.save_pretrained(directory / "source")
    quantkit.quantize(directory / "source", directory / "out", format=format, device="cpu", **options)
    return directory / "out"


@pytest.mark.parametrize(
    ("family", "format", "options"),
    [
        ("llama", "int4", {"group_size": 32, "rules": ("*.down_proj=keep",)}),
        ("llama", "fp6", {"group_size": 32, "lm_head": "int8"}),
        ("qwen3_moe", "int4", {"group_size": 32}),
        ("mixtral", "nvfp4", {}),
    ],
)
def test_the_record_is_that_of_the_manifest(tmp_path, family, format, options):
    out, again = quantized(family, tmp_path, format, **options), tmp_path / "again"
    model = AutoModelForCausalLM.from_pretrained(out)
    model.save_pretrained(again, max_shard_size="40KB")
    assert len(list(again.glob("*.safetensors"))) > 1 and is_saved(again) and not is_saved(out)
    expected, found = ModelRecord.from_manifest(read_manifest(out)), read_record(again)
    assert {name for name, layer in found.layers.items() if layer.scheme is not None} == {
        name for name, layer in expected.layers.items() if layer.scheme is not None
    }
    for name, layer in expected.layers.items():
        # Rows of one group are stored per channel whatever the group size.
        scheme = found.layers[name].scheme
        assert (scheme or "").split()[:1] == (layer.scheme or "").split()[:1]
        unknown = {"method": None, "relative_error": None, "reason": found.layers[name].reason}
        assert found.layers[name] == replace(layer, scheme=scheme, **unknown)
    assert found.bits_per_weight["linears"] == pytest.approx(expected.bits_per_weight["linears"])
    assert found.container == expected.container
    assert set(found.needs_quantkit) == set(expected.needs_quantkit)
    assert (found.source, found.source_bytes, found.versions) == (None, None, {})
    assert packed_weights(again) == packed_weights(out)
    assert file_names(again) == sorted(path.name for path in again.iterdir())
    assert file_names(out) == sorted(path.name for path in out.iterdir())


@pytest.fixture
def saved(tiny):
    """A packed directory without a manifest."""
    return tiny("llama", "int4").packed


def results(directory: Path) -> dict[str, tuple[bool, str]]:
    return {
        check.name: (check.skipped, " ".join(check.problems)) for check in verify(directory, reload=False)
    }


def test_verify_says_what_it_cannot_check(saved):
    assert results(saved) == {"files": (True, ""), "headers": (False, ""), "layers": (False, "")}


@pytest.mark.parametrize("part", ["packed", "scale", "shape"])
def test_verify_finds_a_missing_part(tiny, part):
    checkpoint = tiny("llama", "int4")
    tensors = checkpoint.tensors()
    name = next(name for name in sorted(tensors) if name.endswith(f"_{part}"))
    del tensors[name]
    checkpoint.rewrite(tensors)
    assert name in results(checkpoint.packed)["layers"][1]


def test_verify_finds_parts_of_another_shape(tiny):
    checkpoint = tiny("llama", "int4")
    tensors = checkpoint.tensors()
    name = next(name for name in sorted(tensors) if name.endswith("_scale"))
    checkpoint.rewrite(tensors | {name: tensors[name][:-1].clone()})
    assert f"tensor {name!r}" in results(checkpoint.packed)["layers"][1]


def test_verify_reads_headers(saved):
    data = (saved / "model.safetensors").read_bytes()
    (saved / "model.safetensors").write_bytes(data[:-10])
    assert "model.safetensors" in results(saved)["headers"][1]


def test_what_is_no_packed_directory(saved):
    config = json.loads((saved / "config.json").read_text())
    (saved / ".quantkit-journal.jsonl").touch()
    with pytest.raises(CheckpointError, match=rf"{MANIFEST_NAME} is missing: .* continue it with --resume"):
        read_record(saved)
    (saved / ".quantkit-journal.jsonl").unlink()
    assert record_of(Checkpoint.open(saved)) == read_record(saved)
    for section, says in (
        (None, "is not a finished quantkit checkpoint"),
        ({"quant_method": "compressed-tensors"}, "is of another tool"),
    ):
        (saved / "config.json").write_text(json.dumps(config | {"quantization_config": section}))
        with pytest.raises(CheckpointError, match=says):
            read_record(saved)


def again(model: Any, directory: Path) -> Any:
    """`model` saved and loaded as its class; its saved directory passes `verify`."""
    model.save_pretrained(directory)
    loaded, info = type(model).from_pretrained(directory, dtype=model.dtype, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert not any(check.problems for check in verify(directory, reload=False))
    saved, found = model.state_dict(), loaded.state_dict()
    assert saved.keys() == found.keys()
    assert all(torch.equal(saved[name], found[name]) for name in saved)
    return loaded


@pytest.mark.parametrize(
    ("of", "head"),
    [
        (transformers.AutoModel, None),
        (transformers.AutoModelForSequenceClassification, "score"),
        (transformers.AutoModelForTokenClassification, "score"),
        # transformers calls its base model "transformer", and loads none of the original.
        (transformers.AutoModelForQuestionAnswering, "qa_outputs"),
    ],
)
@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_another_class_of_the_family_is_saved_as_itself(tmp_path, of, head, format):
    rules = ("*.down_proj=keep", "*.layers.1.*.up_proj=int4:32")
    out = quantized("llama", tmp_path, format, rules=rules, group_size=32 if format == "nf4" else None)
    model, info = of.from_pretrained(out, output_loading_info=True)
    assert {name.partition(".")[0] for name in info["missing_keys"]} == {head} - {None}
    packed = dict(packed_modules(AutoModelForCausalLM.from_pretrained(out)))
    schemes = {name.partition(".")[2]: module.scheme for name, module in packed.items()}
    for one in (model, again(model, tmp_path / "again")):
        inside = packed_modules(one.base_model)
        assert {name: module.scheme for name, module in inside} == schemes
        assert head is None or type(one.get_submodule(head)) is torch.nn.Linear
    # Other readers find both names.
    config = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    if format == "int8":
        named = {
            *config["ignore"],
            *(name for group in config["config_groups"].values() for name in group["targets"]),
        }
        prefix = f"{model.base_model_prefix}." if head else ""
        assert named >= {
            f"{prefix}layers.0.mlp.down_proj",
            f"{prefix}layers.1.mlp.up_proj",
            *({head} - {None}),
        }


def test_linears_replaced_after_loading_are_saved_as_they_are(tmp_path):
    out = quantized("llama", tmp_path, "int4", group_size=32)
    model = AutoModelForCausalLM.from_pretrained(out)
    name = "model.layers.0.mlp.down_proj"
    dense = torch.nn.Linear(96, 64, bias=False, dtype=model.dtype)
    assert dense.weight.shape == model.get_submodule(name).packed.shape
    model.set_submodule(name, dense)
    loaded = again(model, tmp_path / "again")
    assert name not in dict(packed_modules(loaded))
    assert (
        name in json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]["ignore"]
    )


def test_what_was_not_changed_is_saved_verbatim(tmp_path):
    out = quantized("qwen3_moe", tmp_path, "int4", group_size=32, rules=("*.q_proj=keep",))
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again")
    configs = [json.loads((path / "config.json").read_text()) for path in (out, tmp_path / "again")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
