"""Every tensor of a checkpoint is a linear, fused experts, the head, or dense for a stated reason."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.structure import Structure, read_structure
from quantkit.model.weight_reads import reads_weight
from quantkit.quantization.plan import make_plan
from quantkit.recipes.recipe import Choice, Recipe, Rule

from ..tiny.sizes import SIZES

MODEL_SIZES = {**SIZES, "intermediate_size": 96}
QWEN_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
GEMMA = {"query_pre_attn_scalar": 16, "sliding_window": 32, "tie_word_embeddings": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2Config", {}),
    "mistral": ("MistralConfig", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": ("Qwen3MoeConfig", {**QWEN_MOE, "decoder_sparse_step": 1}),
    "qwen2_moe": ("Qwen2MoeConfig", {**QWEN_MOE, "shared_expert_intermediate_size": 48}),
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """`write(family, **changes)` saves a random model and returns its directory."""

    def save(family: str, **changes: Any) -> Path:
        name, fields = FAMILIES[family]
        config = getattr(transformers, name)(**{**MODEL_SIZES, **fields, **changes})
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family)
        return tmp_path / family

    return save


def structure(directory: Path) -> Structure:
    return read_structure(Checkpoint.open(directory))


def edit_tensors(directory: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(directory / "model.safetensors")
    edit(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def expected_linears(mlp: tuple[str, ...] = MLP) -> set[str]:
    return {
        f"model.layers.{i}.{name}"
        for i in range(2)
        for name in [*(f"self_attn.{m}" for m in ATTENTION), *(f"mlp.{m}" for m in mlp)]
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_tensor_is_accounted_for_once(write, family):
    directory = write(family)
    found = structure(directory)
    owned = [f"{one}.weight" for linear in found.linears.values() for one in linear.stored]
    stored = set(load_file(directory / "model.safetensors"))
    assert len(owned) == len(set(owned))
    assert {*owned, *found.dense} - stored == ({"lm_head.weight"} if found.tied else set())
    assert stored <= {*owned, *found.dense}
    assert not set(owned) & set(found.dense)


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "mistral", "qwen3", "gemma2", "gemma3"])
def test_linears_of_dense_decoders(write, family):
    found = structure(write(family))
    assert set(found.linears) == expected_linears() | {"lm_head"}
    assert {linear.kind for name, linear in found.linears.items() if name != "lm_head"} == {"linear"}
    assert found.linears["model.layers.1.mlp.down_proj"].shape == (64, 96)
    assert found.linears["model.layers.0.self_attn.k_proj"].shape == (32, 64)
    assert not found.unpackable


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("llama-tied", True), ("gemma2", True)])
def test_the_head_is_the_embedding_where_it_is_tied(write, family, tied):
    found = structure(write(family))
    assert found.tied is tied
    assert found.embedding == "model.embed_tokens.weight"
    head = found.linears["lm_head"]
    assert (head.kind, head.stored, head.shape) == ("lm_head", ("lm_head",), (96, 64))
    assert ("lm_head.weight" in found.dense) is False


def test_reasons_of_dense_tensors(write):
    dense = structure(write("qwen2")).dense
    assert dense["model.embed_tokens.weight"] == "an embedding"
    assert dense["model.norm.weight"] == "a norm"
    assert dense["model.layers.0.self_attn.q_proj.bias"] == "a bias"


def test_norms_inside_the_attention_are_norms(write):
    assert structure(write("qwen3")).dense["model.layers.0.self_attn.q_norm.weight"] == "a norm"


def test_tensors_the_model_does_not_have_are_dense(write):
    directory = write("llama")
    edit_tensors(directory, lambda tensors: tensors.update(extra=torch.ones(3)))
    assert structure(directory).dense["extra"] == "not a parameter of the model"


@pytest.mark.parametrize(
    ("family", "names", "router"),
    [
        ("mixtral", ("block_sparse_moe.experts", "w1", "w3", "w2"), "block_sparse_moe.gate.weight"),
        ("qwen3_moe", ("mlp.experts", *MLP), "mlp.gate.weight"),
        ("qwen2_moe", ("mlp.experts", *MLP), "mlp.gate.weight"),
    ],
)
def test_experts_go_by_the_name_of_the_fused_parameter(write, family, names, router):
    found = structure(write(family))
    experts, gate, up, down = names
    fused = found.linears["model.layers.0.mlp.experts.gate_up_proj"]
    intermediate = 96 if family == "mixtral" else 32
    assert (fused.kind, fused.shape) == ("experts", (intermediate, 64))
    assert set(fused.stored) == {f"model.layers.0.{experts}.{e}.{m}" for e in range(4) for m in (gate, up)}
    fused = found.linears["model.layers.0.mlp.experts.down_proj"]
    assert set(fused.stored) == {f"model.layers.0.{experts}.{e}.{down}" for e in range(4)}
    assert "router" in found.dense[f"model.layers.0.{router}"]


def test_gates_of_shared_experts_are_dense_and_known_to_be(write):
    found = structure(write("qwen2_moe"))
    gate = "model.layers.0.mlp.shared_expert_gate"
    assert "one output" in found.dense[f"{gate}.weight"]
    assert found.unpackable[gate] == (gate,)
    assert "model.layers.0.mlp.shared_expert.up_proj" in found.linears


def test_linears_whose_weights_the_model_reads_stay_dense_with_a_reason(tmp_path):
    config = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = structure(tmp_path)
    mixer = "backbone.layers.0.mixer"
    assert {f"{mixer}.{name}" for name in ("in_proj", "x_proj", "out_proj")} == set(found.linears)
    assert "reads its weight" in found.dense[f"{mixer}.dt_proj.weight"]
    assert found.unpackable[f"{mixer}.dt_proj"] == (f"{mixer}.dt_proj",)


@pytest.mark.parametrize("tied", [True, False])
def test_a_head_whose_weight_the_model_reads_stays_dense(tmp_path, tied):
    config = transformers.MambaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=1, tie_word_embeddings=tied
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = structure(tmp_path)
    assert "lm_head" not in found.linears and "lm_head" in found.unpackable
    assert tied or "reads its weight" in found.dense["lm_head.weight"]
    recipe = Recipe(Choice("int4"), (Rule("*lm_head", Choice("int8")),))
    reason = "its weights are the embedding's, and" if tied else "the model reads its weight itself,"
    with pytest.raises(UsageError, match=f"'lm_head' stays dense: {reason} .* Drop the rule"):
        make_plan(Checkpoint.open(tmp_path), found, recipe)


def test_what_reads_a_weight_is_found_in_its_source():
    mamba, llama = transformers.MambaForCausalLM, transformers.LlamaForCausalLM
    assert reads_weight(mamba.forward, "lm_head") and not reads_weight(llama.forward, "lm_head")
    assert reads_weight(mamba._init_weights, "backbone.layers.0.mixer.out_proj")
    assert not reads_weight(mamba._init_weights, "in_proj")
    assert not reads_weight(llama._init_weights, "model.layers.0.self_attn.o_proj")
    assert not reads_weight(len, "weight"), "which has no source"


def test_layers_that_are_no_linears_stay_dense_with_a_reason(tmp_path):
    config = transformers.MambaConfig(vocab_size=96, hidden_size=64, num_hidden_layers=1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = structure(tmp_path)
    convolution = "backbone.layers.0.mixer.conv1d.weight"
    assert found.dense[convolution] == "'weight' of a Conv1d, which is not a linear"


def test_floats_that_json_cannot_write_are_read_as_transformers_writes_them(tmp_path):
    config = transformers.Mamba2Config(
        vocab_size=96,
        hidden_size=64,
        num_hidden_layers=1,
        num_heads=4,
        head_dim=32,
        n_groups=1,
        state_size=16,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["time_step_limit"][1] == {
        "__float__": "Infinity"
    }
    assert "backbone.layers.0.mixer.in_proj" in structure(tmp_path).linears


def test_a_file_of_the_bare_decoder_is_read(write, tmp_path):
    directory = write("llama-tied")
    strip = "model."
    tensors = load_file(directory / "model.safetensors")
    bare = {name.removeprefix(strip): tensor for name, tensor in tensors.items()}
    save_file(bare, directory / "model.safetensors", metadata={"format": "pt"})
    found = structure(directory)
    assert set(found.linears) == expected_linears() | {"lm_head"}
    assert found.linears["model.layers.0.mlp.up_proj"].stored == ("layers.0.mlp.up_proj",)
    assert found.embedding == "embed_tokens.weight"


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("llama", "lm_head.weight"),
        ("qwen2", "model.layers.0.self_attn.q_proj.bias"),
    ],
)
def test_a_missing_tensor_is_refused(write, family, name):
    directory = write(family)
    edit_tensors(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(
        CheckpointError, match=f"has no tensor for '{name}' .* of [A-Z].*[Dd]ownload the checkpoint again"
    ):
        structure(directory)


@pytest.mark.parametrize("leaf", ["gate_proj", "down_proj"])
def test_a_missing_expert_is_refused(write, leaf):
    directory = write("qwen3_moe")
    edit_tensors(directory, lambda tensors: tensors.pop(f"model.layers.1.mlp.experts.2.{leaf}.weight"))
    with pytest.raises(
        CheckpointError, match=r"has (7|3) matrices of 'model.layers.1.*config.json says (8|4)"
    ):
        structure(directory)


def test_a_missing_set_of_experts_is_refused(write):
    directory = write("qwen3_moe")

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1.mlp.experts." in name]:
            del tensors[name]

    edit_tensors(directory, drop)
    with pytest.raises(
        CheckpointError,
        match=r"no tensor for .*layers.1.mlp.experts.* and 1 more parameters of Qwen3MoeForCausalLM",
    ):
        structure(directory)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.mlp.up_proj.weight"),
        ("llama", "model.norm.weight"),
        ("llama", "model.embed_tokens.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
    ],
)
def test_a_tensor_of_another_shape_than_the_config_says_is_refused(write, family, name):
    directory = write(family)
    edit_tensors(directory, lambda tensors: tensors.update({name: torch.zeros(7, 3)}))
    with pytest.raises(CheckpointError, match=rf"tensor '{name}' has the shape \(7, 3\); config.json says"):
        structure(directory)


@pytest.mark.fault(8)
def test_a_transposed_weight_is_refused(write):
    directory = write("llama")
    name = "model.layers.1.mlp.up_proj.weight"
    edit_tensors(directory, lambda tensors: tensors.update({name: tensors[name].T.contiguous()}))
    with pytest.raises(CheckpointError, match=r"has the shape \(64, 96\); config.json says \(96, 64\)"):
        structure(directory)


def test_a_config_of_another_model_is_refused(write):
    directory = write("llama")
    edit_config(directory, num_hidden_layers=3)
    with pytest.raises(
        CheckpointError, match=r"no tensor for 'model.layers.2.* and 8 more .* It has 'model.layers.0"
    ):
        structure(directory)


@pytest.mark.fault(29)
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "no_such_model"}, "'model_type' is 'no_such_model'; expected an architecture"),
        ({"model_type": None}, "'model_type' is None; expected an architecture"),
        ({"hidden_size": "wide"}, "transformers cannot read it as the config of a 'llama' .*'hidden_size'"),
        ({"head_dim": -4}, "transformers cannot build a LlamaForCausalLM from it"),
    ],
)
def test_a_config_that_transformers_cannot_build_is_refused(write, changes, text):
    directory = write("llama")
    edit_config(directory, **changes)
    with pytest.raises(CheckpointError, match=rf"config.json: {text}"):
        structure(directory)


def test_a_tied_model_may_hold_its_matrix_as_the_head_only(tmp_path):
    from safetensors.torch import load_file, save_file

    stories = Path(__file__).parents[2] / "examples" / "stories260K"
    directory = tmp_path / "model"
    shutil.copytree(stories, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    checkpoint = Checkpoint.open(directory)
    structure = read_structure(checkpoint)
    assert structure.tied and structure.embedding is None
    assert structure.tied_head == ("lm_head.weight", "model.embed_tokens.weight")
