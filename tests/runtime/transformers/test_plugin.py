"""Packed checkpoints through transformers' own `from_pretrained` and `save_pretrained`."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.trainer_utils import validate_quantization_for_training

import quantkit
from quantkit.errors import CheckpointError, QuantkitError, UsageError
from quantkit.runtime.packed_experts import PackedExperts
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import packed_modules
from quantkit.runtime.transformers.quantizer import QuantkitConfig, QuantkitQuantizer, register

from ...support.compare import assert_close, assert_equal
from ...tiny.packed import (
    FAMILIES,
    HALF_ON_DISK,
    SCHEMES,
    VERSION,
    assert_same_checkpoint,
    logits_of,
    write_tiny,
)

CASES = [(family, "int4") for family in FAMILIES]
CASES += [("llama", name) for name in SCHEMES if name != "int4"]
CASES += [("qwen2", "fp6"), ("qwen2", "int4-asym")]
CASES += [
    (family, name)
    for family in ("mixtral", "qwen3_moe")
    for name in (
        "int4-asym",
        "int8",
        "int4-ragged",
        "fp6",
        "binary",
        "ternary-radix",
        "fp8",
        "fp8-tensor",
        "int8-tensor",
        "ternary-tensor",
        "mxfp4",
        "nvfp4",
    )
]


@pytest.mark.parametrize(("family", "name"), CASES)
@pytest.mark.sampled(3)
def test_logits_equal_those_of_the_dequantized_model(tiny, prompt, transformers_warnings, family, name):
    checkpoint = tiny(family, name)
    model, info = AutoModelForCausalLM.from_pretrained(checkpoint.packed, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    # Some versions warn of their own Gemma configuration.
    assert [text for text in transformers_warnings if "rope_parameters" not in text] == []
    assert any(True for _ in packed_modules(model))
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)


def test_the_packing_of_other_engines_gives_the_same_logits(tiny, prompt, tmp_path):
    stream = SCHEMES["int3-stream"]
    own = write_tiny(tmp_path / "own", "llama", dataclasses.replace(stream, packing="bits"))
    theirs = tiny("llama", "int3-stream")
    methods = [one.quantization_config["quant_method"] for one in (own, theirs)]
    assert methods == ["quantkit", "compressed-tensors"]
    found = [logits_of(AutoModelForCausalLM.from_pretrained(one.packed), prompt) for one in (own, theirs)]
    assert_equal(*found)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "int4"),
        ("llama", "fp6"),
        ("llama", "int3-stream"),
        ("qwen2", "int4-asym"),
        ("mixtral", "int4-asym"),
        ("qwen3_moe", "fp6"),
        *[("llama", name) for name in ("ternary-radix", "fp8", "fp8-groups", "mxfp8", "mxfp4", "nvfp4")],
        *[("llama", name) for name in ("fp8-blocks", "fp8-tensor", "int8-tensor", "ternary-tensor")],
        *[("mixtral", name) for name in ("fp8", "fp8-blocks", "fp8-tensor", "nvfp4")],
        *[("qwen3_moe", name) for name in ("fp8", "mxfp4", "nvfp4", "ternary-radix", "ternary-tensor")],
    ],
)
@pytest.mark.sampled(2)
def test_saving_writes_back_the_same_tensors_and_configuration(tiny, prompt, tmp_path, family, name):
    checkpoint = tiny(family, name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    before = logits_of(model, prompt)
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert_close(logits_of(again, prompt), before, rtol=0, atol=0)


@pytest.mark.parametrize("shard", ["20KB", "45KB", "1GB"])
@pytest.mark.parametrize("placement", [{}, {"device_map": HALF_ON_DISK}], ids=["in memory", "on disk"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_saving_over_the_files_that_it_was_loaded_from(tiny, prompt, tmp_path, family, placement, shard):
    """In shards of another size, whose files have the names of other tensors or are removed first."""
    checkpoint = tiny(family)
    AutoModelForCausalLM.from_pretrained(checkpoint.packed).save_pretrained(
        tmp_path / "here", max_shard_size="20KB"
    )
    files = sorted((tmp_path / "here").glob("*.safetensors"))
    assert len(files) > 2
    model = AutoModelForCausalLM.from_pretrained(
        tmp_path / "here", offload_folder=tmp_path / "offload", **placement
    )
    expected = logits_of(model, prompt)
    model.save_pretrained(tmp_path / "here", max_shard_size=shard)
    assert (sorted((tmp_path / "here").glob("*.safetensors")) == files) <= (shard == "20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "here")
    assert_close(logits_of(again, prompt), expected)
    if not placement:
        assert_equal(logits_of(model, prompt), expected)


@pytest.mark.parametrize("format", ["int4", "fp6"])
@pytest.mark.parametrize("family", ["MambaConfig", "FalconMambaConfig", "Mamba2Config"])
def test_models_that_initialize_or_read_weights_of_their_linears(tmp_path, prompt, family, format):
    sizes = {"num_heads": 4, "head_dim": 32, "n_groups": 1} if family == "Mamba2Config" else {}
    config = getattr(transformers, family)(vocab_size=96, hidden_size=64, num_hidden_layers=2, **sizes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    quantkit.quantize(tmp_path / "dense", tmp_path / "packed", format=format)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "packed")
    assert "in_proj" in "".join(name for name, _ in packed_modules(model))
    found = logits_of(model, prompt)
    assert_close(found, logits_of(model.dequantize(), prompt), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "fp6"])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_tied_embeddings_stay_tied(tiny, prompt, family, name):
    checkpoint = tiny(family, name, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "fp6", "fp8", "mxfp4"])
def test_a_packed_head_is_loaded_and_saved_again(tiny, prompt, tmp_path, name):
    checkpoint = tiny("llama", name, pack_head=True)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    assert isinstance(model.lm_head, PackedLinear)
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)


def test_a_packed_lm_head_that_the_config_ties_is_refused(tiny):
    checkpoint = tiny("llama", "int4", pack_head=True)
    edit_config(checkpoint.packed, tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"'lm_head' is packed, but config\.json ties"):
        AutoModelForCausalLM.from_pretrained(checkpoint.packed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["int4-asym", "int4-fp32", "fp6", "fp8", "fp8-groups", "fp8-tensor"])
def test_scales_keep_their_dtype(tiny, prompt, dtype, name):
    checkpoint = tiny("qwen2", name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed, dtype=dtype)
    layer = model.model.layers[0].self_attn.q_proj
    assert layer.weight_scale.dtype == SCHEMES[name].scale_dtype
    assert layer.bias.dtype == dtype
    assert layer.packed.words.dtype == torch.int32
    expected = logits_of(checkpoint.dense_model(dtype), prompt)
    found = logits_of(model, prompt)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05 * expected.abs().max().item()
    assert_close(found, expected, rtol=0, atol=tolerance)


def test_scales_of_experts_keep_their_dtype(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("mixtral", "fp6").packed, dtype=torch.bfloat16)
    assert model.model.layers[0].mlp.experts.gate_up_proj_scale.dtype == torch.float16


def test_casting_the_loaded_model(tiny, prompt):
    checkpoint = tiny("llama", "int4-fp32")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed).bfloat16()
    assert model.model.layers[0].self_attn.q_proj.weight_scale.dtype == torch.bfloat16
    expected = logits_of(checkpoint.dense_model(torch.bfloat16), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=0, atol=0.1 * expected.abs().max().item())


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_moe"])
def test_generate_gives_the_tokens_of_the_dense_model(tiny, prompt, family):
    checkpoint = tiny(family, "int4-fp32")
    options = {"max_new_tokens": 8, "do_sample": False, "attention_mask": torch.ones_like(prompt)}
    found = AutoModelForCausalLM.from_pretrained(checkpoint.packed).generate(prompt, **options)
    assert found.tolist() == checkpoint.dense_model().generate(prompt, **options).tolist()


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "int4-asym"), ("qwen3_moe", "int4-asym"), ("llama", "fp8"), ("llama", "nvfp4")],
)
@pytest.mark.parametrize("placement", ["auto", "cpu", "disk"])
def test_any_device_map_gives_the_same_logits(tiny, prompt, tmp_path, family, name, placement):
    checkpoint = tiny(family, name)
    # Which GPUs there are, accelerate sees for itself.
    options: dict[str, Any] = {"device_map": placement, "max_memory": {"cpu": 1 << 30}}
    if placement == "disk":
        options = {"device_map": HALF_ON_DISK, "offload_folder": tmp_path / "offload"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed, **options)
    if placement == "disk":
        assert any(parameter.is_meta for parameter in model.parameters())
    expected = logits_of(checkpoint.dense_model(), prompt)
    for _ in range(2):
        assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)
    if placement == "disk" and family != "llama" and VERSION < (5, 17):
        return  # this version cannot save offloaded experts, dense ones neither
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", checkpoint.packed)


def test_the_model_is_frozen_and_trains_adapters(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("qwen2").packed)
    assert not any(p.requires_grad for _, m in packed_modules(model) for p in m.parameters())
    assert model.hf_quantizer.is_trainable is True
    with pytest.raises(ValueError, match="Please attach trainable adapters"):
        validate_quantization_for_training(model)
    assert model.hf_quantizer.is_compileable is True


@pytest.mark.parametrize(
    ("family", "name"), [("llama", "int4"), ("qwen2", "fp6"), ("mixtral", "int4"), ("qwen3_moe", "binary")]
)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=str)
def test_dequantize_gives_the_dense_model(tiny, prompt, tmp_path, family, name, dtype):
    checkpoint = tiny(family, name)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    assert model.dequantize(dtype) is model
    assert not list(packed_modules(model))
    reference = checkpoint.dense_model(dtype or torch.float32)
    expected = reference.state_dict()
    found = model.state_dict()
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert_close(found[key], tensor, rtol=0, atol=0, name=key)
    assert_equal(logits_of(model, prompt), logits_of(reference, prompt))
    model.save_pretrained(tmp_path / "dense")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert not hasattr(again.config, "quantization_config")
    assert_equal(logits_of(again, prompt), logits_of(model, prompt))


def test_a_model_that_was_saved_is_dequantized(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny("llama", "int4").packed)
    model.save_pretrained(tmp_path / "saved")
    assert model.dequantize().dtype == torch.float32


def test_an_offloaded_model_is_not_dequantized(tiny, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(
        tiny().packed, device_map=HALF_ON_DISK, offload_folder=tmp_path / "offload"
    )
    with pytest.raises(UsageError, match=r"cannot be dequantized.*offloaded.*on one device"):
        model.dequantize()
    assert list(packed_modules(model))


def test_a_model_with_adapters_is_not_dequantized_in_part(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny().packed)
    attention = model.model.layers[0].self_attn
    attention.v_proj = torch.nn.ModuleDict({"base_layer": attention.v_proj})
    packed = len(list(packed_modules(model)))
    with pytest.raises(UsageError, match=r"v_proj.base_layer' cannot be dequantized.*Take adapters out"):
        model.dequantize()
    assert len(list(packed_modules(model))) == packed


def test_push_to_hub_sends_the_packed_files(tiny, tmp_path, monkeypatch):
    from huggingface_hub import HfApi

    checkpoint = tiny("llama", "fp6")
    sent: dict[str, bytes] = {}

    def create_commit(self: Any, repo_id: str, operations: Any, **options: Any) -> Any:
        for operation in operations:
            sent[operation.path_in_repo] = Path(operation.path_or_fileobj).read_bytes()

    class Url:
        repo_id = "someone/tiny"

    class Card:
        def save(self, path: str) -> None:
            Path(path).write_text("card")

    def instead(name: str) -> Any:
        if name == "create_commit":
            return lambda *args, **options: create_commit(None, *args, **options)
        return lambda *args, **options: Card() if "card" in name else Url()

    monkeypatch.setattr(HfApi, "create_repo", lambda *a, **k: Url())
    monkeypatch.setattr(HfApi, "create_commit", create_commit)
    for module in ("transformers.utils.hub", "transformers.modeling_utils"):
        for name in ("create_repo", "create_commit", "create_branch", "create_and_tag_model_card"):
            if hasattr(sys.modules[module], name):
                monkeypatch.setattr(f"{module}.{name}", instead(name))
    AutoModelForCausalLM.from_pretrained(checkpoint.packed).push_to_hub("someone/tiny")
    assert {"config.json", "model.safetensors"} <= set(sent)
    received = tmp_path / "received"
    received.mkdir()
    for name, data in sent.items():
        (received / name).write_bytes(data)
    assert_same_checkpoint(received, checkpoint.packed)


# What is refused


def drop(name: str):
    return lambda tensors: tensors.pop(name)


def replace(name: str, change: Any):
    def apply(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = change(tensors[name])

    return apply


Q = "model.layers.1.self_attn.q_proj.weight"
E = "model.layers.1.mlp.experts.2.up_proj.weight"
DAMAGES = [
    ("llama", "int4", drop(f"{Q}_packed"), f"tensor '{Q}_packed' is missing"),
    ("llama", "int4", drop(f"{Q}_scale"), f"tensor '{Q}_scale' is missing"),
    ("llama", "int4", drop(f"{Q}_shape"), f"tensor '{Q}_shape' is missing"),
    ("llama", "int4-asym", drop(f"{Q}_zero_point"), f"tensor '{Q}_zero_point' is missing"),
    ("llama", "fp6", drop(Q), f"tensor '{Q}' is missing"),
    (
        "llama",
        "int4",
        replace(f"{Q}_packed", lambda t: t.float()),
        r"float32 .*torch.int32 \(64, 8\)",
    ),
    ("llama", "int4", replace(f"{Q}_packed", lambda t: t.long()), f"'{Q}_packed' .*int64 .*torch.int32"),
    ("llama", "int4", replace(f"{Q}_packed", lambda t: t.T.contiguous()), r"\(8, 64\); .*\(64, 8\)"),
    ("llama", "int4", replace(f"{Q}_scale", lambda t: t.int()), f"'{Q}_scale' .*int32 .*torch.bfloat16"),
    ("llama", "int4", replace(f"{Q}_scale", lambda t: t[:, :1].contiguous()), r"\(64, 1\); .*\(64, 2\)"),
    ("llama", "int4", replace(f"{Q}_shape", lambda t: t + 1), rf"'{Q}_shape' .* says \(65, 65\)"),
    ("qwen3_moe", "int4", drop(f"{E}_packed"), f"tensor '{E}_packed' is missing"),
    ("qwen3_moe", "int4-asym", drop(f"{E}_zero_point"), f"tensor '{E}_zero_point' is missing"),
    ("qwen3_moe", "fp6", drop(E), f"tensor '{E}' is missing"),
    ("qwen3_moe", "int4", replace(f"{E}_packed", lambda t: t.long()), f"tensor '{E}_packed' .*torch.int64"),
    ("qwen3_moe", "int4", replace(f"{E}_shape", lambda t: t + 1), f"tensor '{E}_shape' .* says"),
]


@pytest.mark.parametrize(("family", "name", "damage", "message"), DAMAGES)
def test_damaged_files_are_refused_before_loading(tiny, family, name, damage, message):
    checkpoint = tiny(family, name)
    tensors = checkpoint.tensors()
    damage(tensors)
    checkpoint.rewrite(tensors)
    with pytest.raises(QuantkitError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint.packed)


def test_a_whole_missing_expert_is_refused(tiny):
    checkpoint = tiny("qwen3_moe", "int4")
    tensors = {k: v for k, v in checkpoint.tensors().items() if not k.startswith(E)}
    checkpoint.rewrite(tensors)
    with pytest.raises(QuantkitError, match=r"gate_up_proj' is stored as 7 matrices.* expected 8 or 1"):
        AutoModelForCausalLM.from_pretrained(checkpoint.packed)


def test_a_tensor_in_two_shards_is_refused(tiny):
    checkpoint = tiny()
    tensors = checkpoint.tensors()
    from safetensors.torch import save_file

    (checkpoint.packed / "model.safetensors").unlink()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    save_file(tensors, checkpoint.packed / names[0], metadata={"format": "pt"})
    save_file({f"{Q}_scale": tensors[f"{Q}_scale"]}, checkpoint.packed / names[1], metadata={"format": "pt"})
    weight_map = {name: names[name == f"{Q}_scale"] for name in tensors}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (checkpoint.packed / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(QuantkitError, match=f"'{Q}_scale' is in .*00001.* and in .*00002"):
        AutoModelForCausalLM.from_pretrained(checkpoint.packed)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 99}, "version is 99"),
        (
            {"modules": {"model.layers.9.self_attn.q_proj": 0}},
            r"layers\.9\.self_attn\.q_proj.*does not have",
        ),
        ({"modules": []}, "'modules' is list"),
        ({"default": 7}, "default is 7"),
    ],
)
def test_a_wrong_configuration_is_refused(tiny, changes, message):
    checkpoint = tiny()
    config = checkpoint.quantization_config
    config["quantkit"] = {**config["quantkit"], **changes}
    edit_config(checkpoint.packed, quantization_config=config)
    with pytest.raises(CheckpointError, match=message):
        AutoModelForCausalLM.from_pretrained(checkpoint.packed)


def test_the_config_of_a_packed_checkpoint_quantizes_nothing(tiny):
    checkpoint = tiny()
    with pytest.raises(UsageError, match="is of a packed checkpoint, and the one to load is dense"):
        AutoModelForCausalLM.from_pretrained(
            checkpoint.dense, quantization_config=QuantkitConfig(**checkpoint.quantization_config)
        )


# Registration


def test_registering_twice_changes_nothing():
    from transformers.quantizers import auto

    before = dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)
    register()
    assert (dict(auto.AUTO_QUANTIZER_MAPPING), dict(auto.AUTO_QUANTIZATION_CONFIG_MAPPING)) == before


def test_foreign_compressed_tensors_configurations_keep_their_classes(tiny):
    pytest.importorskip("compressed_tensors")
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_compressed_tensors import CompressedTensorsHfQuantizer
    from transformers.utils.quantization_config import CompressedTensorsConfig

    foreign = {k: v for k, v in tiny().quantization_config.items() if k != "quantkit"}
    config = auto.AutoQuantizationConfig.from_dict(foreign)
    assert type(config) is CompressedTensorsConfig
    assert isinstance(config, auto.LOADING_ATTRIBUTES_CONFIG_TYPES)
    assert type(auto.AutoHfQuantizer.from_config(config, pre_quantized=True)) is CompressedTensorsHfQuantizer
    config_class = auto.AUTO_QUANTIZATION_CONFIG_MAPPING["compressed-tensors"]
    assert issubclass(config_class, CompressedTensorsConfig)
    assert type(config_class(**foreign)) is CompressedTensorsConfig
    assert issubclass(auto.AUTO_QUANTIZER_MAPPING["compressed-tensors"], CompressedTensorsHfQuantizer)
    with pytest.warns(UserWarning, match="loading attributes"):
        merged = auto.AutoHfQuantizer.merge_quantization_configs(foreign, CompressedTensorsConfig())
    assert type(merged) is CompressedTensorsConfig


def test_a_foreign_compressed_tensors_checkpoint_loads_as_before(tiny, prompt):
    pytest.importorskip("compressed_tensors")
    checkpoint = tiny("llama", "int4")
    config = {k: v for k, v in checkpoint.quantization_config.items() if k != "quantkit"}
    edit_config(checkpoint.packed, quantization_config=config)
    model = AutoModelForCausalLM.from_pretrained(checkpoint.packed)
    assert not any(True for _ in packed_modules(model))
    expected = logits_of(checkpoint.dense_model(), prompt)
    assert_close(logits_of(model, prompt), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["int4", "fp6"])
def test_our_configuration_is_kept_verbatim(tiny, name):
    from transformers.quantizers import auto

    found = tiny("llama", name).quantization_config
    config = auto.AutoQuantizationConfig.from_dict(found)
    assert type(config) is QuantkitConfig
    assert config.to_dict() == found
    assert json.loads(config.to_json_string()) == found
    assert isinstance(auto.AutoHfQuantizer.from_config(config), QuantkitQuantizer)
    assert type(auto.AUTO_QUANTIZATION_CONFIG_MAPPING[found["quant_method"]](**found)) is QuantkitConfig


def test_experts_are_packed(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny("mixtral", "fp6").packed)
    assert isinstance(model.model.layers[0].mlp.experts, PackedExperts)
    assert model.hf_quantizer.is_compileable is False


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
