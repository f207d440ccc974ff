"""A plan says, before a weight is read, what the files will hold to the byte."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.engines import ENGINES, SGLANG
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.plan import Plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.recipes.recipe_options import RecipeOptions

from ..support.compare import assert_equal
from ..tiny.sizes import SIZES

MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "qwen2_moe": ("Qwen2MoeConfig", {**MOE, "shared_expert_intermediate_size": 48}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}


def write(directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16) -> Path:
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, name)(**{**SIZES, **fields})
    transformers.AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(directory / family)
    return directory / family


def planned(source: Path, *, max_shard_bytes: int = 2 << 30, **options: Any) -> Plan:
    asked = QuantizeOptions(RecipeOptions(**options), max_shard_bytes=max_shard_bytes)
    return plan(source, asked)[1]


def files_of(directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    return {path.name: load_file(path) for path in sorted(directory.glob("*.safetensors"))}


OPTIONS: list[dict[str, Any]] = [
    {"format": "int4"},
    {"format": "int4", "zero_point": "integer", "group_size": 32},
    {"format": "int8", "zero_point": "integer"},
    {"format": "fp6", "group_size": 32, "lm_head": "int8"},
    {"format": "binary", "rules": ("*.down_proj=int8", "*.q_proj=keep")},
]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_plan_is_what_is_written(tmp_path, family, options):
    source = write(tmp_path, family)
    options = {**options, "max_shard_bytes": 30_000}
    expected = planned(source, **options)
    quantize(source, tmp_path / "out", method="rtn", **options)
    files = files_of(tmp_path / "out")
    assert {name: file for file, tensors in files.items() for name in tensors} == expected.weight_map
    for shard in expected.shards:
        tensors = files[shard.filename]
        assert sum(tensor.nbytes for tensor in tensors.values()) == sum(task.nbytes for task in shard.tasks)
        for spec in shard.specs:
            assert (tensors[spec.name].dtype, tuple(tensors[spec.name].shape)) == (
                spec.torch_dtype,
                spec.shape,
            )
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors.values())
    assert total == expected.output_bytes
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total


@pytest.mark.parametrize("family", ["llama", "tied", "qwen3_moe"])
def test_bits_per_weight_count_every_stored_byte(tmp_path, family):
    source = write(tmp_path, family)
    expected = planned(source, format="int4", lm_head="int8").bits_per_weight
    quantize(source, tmp_path / "out", format="int4", lm_head="int8", method="rtn")
    stored, original = files_of(tmp_path / "out")["model.safetensors"], files_of(source)["model.safetensors"]
    packed = {name.removesuffix("_scale") for name in stored if name.endswith("_scale")}
    parts = [t.nbytes for name, t in stored.items() if any(name.startswith(base) for base in packed)]
    weights = sum(original.get(name, original["model.embed_tokens.weight"]).numel() for name in packed)
    assert expected["linears"] == pytest.approx(8 * sum(parts) / weights)
    # A tied head adds bytes to the model, but no weights.
    model = sum(tensor.numel() for tensor in original.values())
    assert expected["model"] == pytest.approx(8 * sum(t.nbytes for t in stored.values()) / model)


def test_layers_carry_their_own_bytes(tmp_path):
    layers = {layer.linear.module: layer for layer in planned(write(tmp_path), format="int4").layers}
    down = layers["model.layers.0.mlp.down_proj"]
    # 64 rows of 172: 22 words, the last block's 12 codes in 2 of them, 2 scales, and 16 bytes of shape.
    assert down.output_bytes == 64 * (22 * 4 + 2 * 2) + 16
    assert (down.weights, down.source_bytes) == (64 * 172, 2 * 64 * 172)
    assert layers["lm_head"].scheme is None and layers["lm_head"].output_bytes == 2 * 96 * 64


def test_shards_are_filled_in_order_up_to_the_limit(tmp_path):
    source = write(tmp_path)
    whole, limit = planned(source), 30_000
    split = planned(source, max_shard_bytes=limit)
    assert [shard.filename for shard in whole.shards] == ["model.safetensors"]
    assert [task for shard in split.shards for task in shard.tasks] == list(whole.shards[0].tasks)
    count = len(split.shards)
    assert [s.filename for s in split.shards] == [
        f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)
    ]
    sizes = [sum(task.nbytes for task in shard.tasks) for shard in split.shards]
    assert all(size <= limit for size in sizes)
    for size, following in zip(sizes, split.shards[1:], strict=False):
        assert size + following.tasks[0].nbytes > limit


def test_a_tensor_larger_than_a_shard_gets_its_own(tmp_path):
    split = planned(write(tmp_path), max_shard_bytes=1)
    assert all(len(shard.tasks) == 1 for shard in split.shards)


@pytest.mark.parametrize(
    ("options", "container"),
    [
        ({"format": "int4", "group_size": 32}, "quantkit"),
        ({"format": "int4", "group_size": 4}, "compressed-tensors"),
        ({"format": "int8"}, "compressed-tensors"),
        ({"format": "int8", "rules": ("*.q_proj=fp6",)}, "quantkit"),
        ({"format": "fp6", "rules": ("model.layers.*=int8",), "lm_head": "int8"}, "compressed-tensors"),
    ],
    ids=str,
)
def test_the_container_is_compressed_tensors_where_that_can_say_it_all(tmp_path, options, container):
    found = planned(write(tmp_path), **options)
    assert found.config.container == container
    assert bool(found.not_portable) is (container == "quantkit")


def test_reasons_why_other_tools_cannot_read_it(tmp_path):
    found = planned(write(tmp_path), format="int8", rules=("*.0.*.q_proj=fp6", "*.1.*.down_proj=int4:128"))
    assert found.not_portable == (
        "model.layers.0.self_attn.q_proj: compressed-tensors has no fp6-e2m3",
        "model.layers.1.mlp.down_proj: compressed-tensors needs groups that divide 172, not 128; "
        "--group-size channel does",
    )


def test_the_config_is_the_sources_own_and_says_how_to_read_the_weights(tmp_path):
    source = write(tmp_path)
    found = planned(source, format="int8")
    written = dict(found.model_config)
    config = QuantizationConfig.from_dict(written.pop("quantization_config"))
    assert written == json.loads((source / "config.json").read_text())
    assert config.scheme_of("model.layers.0.mlp.up_proj") == found.config.default
    assert config.scheme_of("lm_head") is None


@pytest.mark.parametrize("lm_head", [None, "keep", "int8"])
def test_a_packed_head_unties_the_config(tmp_path, lm_head):
    source = write(tmp_path, "tied")
    found = planned(source, lm_head=lm_head)
    untied = lm_head == "int8"
    assert found.model_config["tie_word_embeddings"] is not untied
    names = found.weight_map
    assert "model.embed_tokens.weight" in names
    assert any(name.startswith("lm_head.") for name in names) is untied
    if untied:
        quantize(source, tmp_path / "out", lm_head=lm_head, method="rtn")
        tensors = {k: v for file in files_of(tmp_path / "out").values() for k, v in file.items()}
        original = files_of(source)["model.safetensors"]
        assert_equal(tensors["model.embed_tokens.weight"], original["model.embed_tokens.weight"])
        assert tensors["lm_head.weight_shape"].tolist() == [96, 64]


@pytest.mark.parametrize("container", ["compressed-tensors", "quantkit"])
def test_linears_that_no_recipe_packs_are_named_dense_in_the_config(tmp_path, container):
    found = planned(write(tmp_path, "qwen2_moe"), format="int8" if container[0] == "c" else "fp6")
    config = found.model_config["quantization_config"]
    # The router is a linear in vLLM, not in transformers.
    for gate in "model.layers.0.mlp.shared_expert_gate", "model.layers.0.mlp.gate":
        assert QuantizationConfig.from_dict(config).scheme_of(gate) is None
        assert container == "quantkit" or gate in config["ignore"]


def test_experts_stored_in_two_ways_are_noted(tmp_path):
    source = write(tmp_path, "qwen3_moe")
    assert planned(source, format="int4", group_size=4).notes == ()
    layer = planned(source, format="int4", group_size=4, rules=("*.layers.0.mlp.experts.*=int8",))
    (note,) = layer.notes
    assert note.startswith(
        "transformers without quantkit cannot load this: it takes all experts to be stored"
    )
    half = planned(source, format="int4", group_size=4, rules=("*.experts.down_proj=int8",))
    vllm, also = half.notes
    assert vllm.startswith(
        "vLLM and SGLang cannot load this: they take gate, up and down of the experts of a layer to be"
    )
    assert "those of model.layers.0.mlp.experts and 1 more are not. Give them one with a rule, such" in vllm
    assert also == note


@pytest.mark.parametrize(
    ("format", "readers"), [("nvfp4", ("vLLM", "SGLang")), ("mxfp8", ("vLLM",)), ("fp8", ("transformers",))]
)
def test_experts_name_who_reads_them(tmp_path, format, readers):
    source = write(tmp_path, "qwen3_moe")
    kept = ("*.self_attn.*=keep",)
    found = planned(source, format=format, rules=kept)
    assert (found.config.container, found.readers) == ("compressed-tensors", readers)
    unread = [engine for engine in ENGINES if engine.name not in readers]
    assert len(found.notes) == len(unread)
    assert all(any(note.startswith(f"{engine} cannot load ") for note in found.notes) for engine in unread)


@pytest.mark.parametrize("rule", ["*.layers.0.*.experts.*=int8", "*.layers.0.*.experts.*=keep"])
def test_experts_that_some_engines_do_not_find_are_noted(tmp_path, rule):
    source = write(tmp_path, "mixtral")
    options = {"format": "int4", "group_size": 4}
    assert planned(source, **options).notes == ()
    found = planned(source, **options, rules=(rule,))
    assert found.readers == ("vLLM", "transformers") if rule.endswith("keep") else ("vLLM",)
    (note,) = (note for note in found.notes if "look for experts by the names" in note)
    assert note.startswith(f"{SGLANG} and vLLM 0.26.0 cannot load this: ") and "such as w" in note


def test_formats_that_decode_slowly_on_a_gpu_are_noted(tmp_path):
    source = write(tmp_path, "llama")
    note = planned(source, format="book4", group_size=4).notes[-1]
    assert note.startswith("on a GPU, model.layers.0.mlp.down_proj and 13 more linears will take longer")
    note = planned(source, format="int4", group_size=4, rules=("*.0.*up_proj=book4:4",)).notes[-1]
    assert note.startswith("on a GPU, model.layers.0.mlp.up_proj will take longer than int4")


def test_experts_that_no_engine_reads_need_quantkit(tmp_path):
    found = planned(write(tmp_path, "qwen3_moe"), format="fp8", group_size=4)
    assert found.config.container == "quantkit"
    assert (
        "model.layers.0.mlp.experts.gate_up_proj: "
        "compressed-tensors has fp8-e4m3 g4 with bfloat16 scales for experts, which none of vLLM, SGLang, "
        "transformers reads; give the experts int8, mxfp8 or nvfp4, such as --rule '*.experts.*=int8'"
    ) in found.not_portable


@pytest.mark.parametrize("rule", ["*.gate_up_proj=keep", "*.experts.down_proj=keep"])
def test_half_packed_experts_are_refused(tmp_path, rule):
    source = write(tmp_path, "qwen3_moe")
    with pytest.raises(UsageError, match=r"Match all of 'model.layers.0.mlp.experts.\*' with one rule"):
        planned(source, rules=(rule,))
    kept = planned(source, rules=("*.experts.*=keep",))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in kept.weight_map


def test_the_halves_of_experts_may_have_different_formats(tmp_path):
    found = planned(write(tmp_path, "qwen3_moe"), format="int4", rules=("*.experts.down_proj=int8",))
    schemes = {layer.linear.module: layer.scheme for layer in found.layers}
    down = schemes["model.layers.0.mlp.experts.down_proj"]
    up = schemes["model.layers.0.mlp.experts.gate_up_proj"]
    assert down is not None and up is not None and (down.format.name, up.format.name) == ("int8", "int4")


def test_float8_weights_without_scales_are_refused_by_every_rule(tmp_path):
    source = write(tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = load_file(source / "model.safetensors")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for rules in ((), ("model.layers.0.mlp.up_proj=keep",)):
        with pytest.raises(CheckpointError, match=f"'{name}' is F8_E4M3 and has no scales"):
            planned(source, rules=rules)


def test_a_plan_reads_no_weights(tmp_path, monkeypatch):
    source = write(tmp_path)
    expected = planned(source)
    monkeypatch.delattr(Checkpoint, "read")
    assert planned(source) == expected
