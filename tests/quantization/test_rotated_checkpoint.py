"""Rotated models: they compute what the original does, and are quantized like any other."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.calibrate.hadamard import Rotation
from quantkit.checkpoint.manifest import read_manifest
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, OutputError, UsageError
from quantkit.model.architectures import LLAMA_LIKE
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization import rotated_checkpoint as rotating
from quantkit.quantization import stream
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantization.allocate.sensitivity_cache import cache_key
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.rotated_checkpoint import rotated
from quantkit.quantizing import quantize
from quantkit.recipes.recipe import Choice, Recipe, read_recipe
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ..support.compare import assert_equal
from ..tiny.calibrated import FAMILIES as CONFIGS
from ..tiny.calibrated import data, files_of, interrupted_at, write

FAMILIES = (
    *("llama", "llama-biases", "tied", "mistral", "qwen2", "qwen2-window", "qwen3", "granite", "smollm3"),
    *("phi3", "glm", "mixtral", "qwen2_moe", "qwen3_moe"),
)


def logits(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    return found


def save(checkpoint: Checkpoint, directory: Path) -> Path:
    """A dense checkpoint with the tensors that `checkpoint` reads."""
    directory.mkdir()
    tensors = {
        name: checkpoint.read(name).to(tensor.torch_dtype) for name, tensor in checkpoint.tensors.items()
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    return directory


def test_every_family_that_is_rotated_is_tested():
    types = {getattr(transformers, CONFIGS[family][0]).model_type for family in FAMILIES}
    assert types == LLAMA_LIKE


@pytest.mark.parametrize("family", FAMILIES)
def test_a_rotated_model_computes_what_the_original_does(tmp_path, family):
    """With biases, tied embeddings, norms of q and k, windows, routers, shared experts, multipliers."""
    source = write(tmp_path, family, torch.float32)
    original = Checkpoint.open(source)
    found = rotated(original)
    expected, got = logits(source), logits(save(found, tmp_path / "rotated"))
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()
    for name, tensor in original.tensors.items():
        moved = not torch.equal(found.read(name), original.read(name))
        dense = name.endswith(
            ("q_proj.bias", "k_proj.bias", "gate_proj.bias", "up_proj.bias", "q_norm.weight")
        )
        assert moved != (dense or name.endswith("k_norm.weight")), name
        assert found.tensors[name].shape == tensor.shape


@pytest.mark.parametrize("changes", [{"hidden_size": 96, "head_dim": 24}, {"head_dim": None}])
def test_other_sizes_and_old_configs(tmp_path, changes):
    source = write(tmp_path, "llama", torch.float32, **changes)
    if changes["head_dim"] is None:
        config = json.loads((source / "config.json").read_text())
        del config["head_dim"]
        (source / "config.json").write_text(json.dumps(config))
    expected, got = logits(source), logits(save(rotated(Checkpoint.open(source)), tmp_path / "rotated"))
    assert (got - expected).abs().max() <= 2e-5 * expected.abs().max()


def test_tensors_are_those_of_matrix_products(tmp_path):
    source = write(tmp_path, "tied")
    found, stored = rotated(Checkpoint.open(source)), load_file(source / "model.safetensors")

    def matrix(size: int) -> torch.Tensor:
        rotation = Rotation.of(size)
        assert rotation is not None
        return rotation.apply(torch.eye(size, dtype=torch.float64))

    q, r = matrix(64), matrix(16)
    layer, weight = "model.layers.1.", {name: tensor.double() for name, tensor in stored.items()}
    attention, mlp = (
        weight[f"{layer}{name}.weight"].diag() for name in ("input_layernorm", "post_attention_layernorm")
    )
    embedding = weight["model.embed_tokens.weight"]
    expected = {
        "model.embed_tokens.weight": embedding @ q,
        "lm_head.weight": embedding @ weight["model.norm.weight"].diag() @ q,
        f"{layer}self_attn.q_proj.weight": weight[f"{layer}self_attn.q_proj.weight"] @ attention @ q,
        f"{layer}self_attn.v_proj.weight": torch.block_diag(r, r).T
        @ weight[f"{layer}self_attn.v_proj.weight"]
        @ attention
        @ q,
        f"{layer}self_attn.v_proj.bias": weight[f"{layer}self_attn.v_proj.bias"] @ torch.block_diag(r, r),
        f"{layer}self_attn.o_proj.weight": q.T
        @ weight[f"{layer}self_attn.o_proj.weight"]
        @ torch.block_diag(r, r, r, r),
        f"{layer}mlp.up_proj.weight": weight[f"{layer}mlp.up_proj.weight"] @ mlp @ q,
        f"{layer}mlp.down_proj.weight": q.T @ weight[f"{layer}mlp.down_proj.weight"],
        f"{layer}input_layernorm.weight": torch.ones(64, dtype=torch.float64),
    }
    for name, tensor in expected.items():
        got = found.read(name)
        assert got.dtype == (torch.float32 if got.dim() == 2 else torch.bfloat16)
        assert (got - tensor).abs().max() <= (1e-6 if got.dim() == 2 else 4e-3) * tensor.abs().max()
        assert_equal(found.read(name, 3, 11), got[3:11])
    assert_equal(found.read(f"{layer}self_attn.q_proj.bias"), stored[f"{layer}self_attn.q_proj.bias"])


@pytest.mark.parametrize(
    ("family", "method"),
    [("tied", "mse"), ("tied", "awq"), ("phi3", "gptq"), ("qwen2_moe", "mse"), ("qwen3_moe", "best")],
)
def test_quantized_it_is_close_to_the_original_and_verified(tmp_path, text, few_scales, family, method):
    source, out = write(tmp_path, family), tmp_path / "out"
    calibration = None if method == "mse" else data(text)
    quantize(source, out, format="int8", method=method, rotate=True, calibration=calibration)
    assert not any(check.problems for check in verify(out, reload=False))
    assert read_manifest(out)["recipe"]["rotate"] is True
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False
    model = load(out, dtype=torch.float32, device="cpu")
    tokens = torch.arange(24)[None]
    exact = transformers.AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    with torch.no_grad():
        expected, got = (one(input_ids=tokens).logits for one in (exact, model))
    assert (got - expected).square().mean() < 2e-3 * expected.square().mean()


@pytest.mark.parametrize("method", ["mse", "gptq"])
@pytest.mark.sampled(2)
def test_interrupted_and_resumed_it_is_the_same_directory(tmp_path, text, monkeypatch, method):
    source = write(tmp_path, "tied")
    options: dict[str, Any] = {
        **{"method": method, "group_size": 32, "max_shard_bytes": 20_000},
        **({} if method == "mse" else {"calibration": data(text)}),
    }
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1)
    quantize(source, tmp_path / "whole", rotate=True, **options)
    expected = files_of(tmp_path / "whole")
    for stop in (1, 30):
        out = tmp_path / f"out{stop}"
        with pytest.raises(KeyboardInterrupt):
            quantize(source, out, rotate=True, progress=interrupted_at(stop), **options)
        with pytest.raises(OutputError, match=r"recipe.rotate: true -> false"):
            quantize(source, out, resume=True, **options)
        quantize(source, out, rotate=True, resume=True, **options)
        assert files_of(out) == expected


def test_rows_that_depend_on_each_other_are_read_once(tmp_path, monkeypatch):
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1)
    source, reads = write(tmp_path), []
    read = Checkpoint.read

    def counted(checkpoint: Checkpoint, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        reads.append(name.split(".", 3)[-1])
        return read(checkpoint, name, start, stop)

    monkeypatch.setattr(Checkpoint, "read", counted)
    quantize(source, tmp_path / "out", rotate=True)
    assert [reads.count(f"self_attn.{name}_proj.weight") for name in "vo"] == [3, 3]
    assert reads.count("mlp.down_proj.weight") == 3
    assert reads.count("self_attn.q_proj.weight") == 3 * 64 // 32


def test_the_plan_says_what_a_tied_head_costs(tmp_path):
    source = write(tmp_path, "tied")
    plain, turned = (
        plan(source, QuantizeOptions(RecipeOptions(rotate=rotate)))[1] for rotate in (False, True)
    )
    assert turned.output_bytes == plain.output_bytes + 96 * 64 * 2
    assert turned.source_bytes == plain.source_bytes and turned.model_weights == plain.model_weights
    rotation, head = (note for note in turned.notes if note not in plain.notes)
    assert "a Hadamard matrix of 64, the values of heads by one of 16" in rotation
    assert head.startswith("lm_head and the embedding are stored apart, 0.01 MB more")
    packed = plan(source, QuantizeOptions(RecipeOptions(rotate=True, lm_head="int8")))[1]
    assert plain.output_bytes < packed.output_bytes < turned.output_bytes
    untied = plan(write(tmp_path), QuantizeOptions(Recipe(rotate=True)))[1]
    assert len([note for note in untied.notes if "stored apart" in note]) == 0


def test_a_recipe_file_rotates(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('rotate = true\n[default]\nformat = "int8"\n')
    assert read_recipe(path, Choice()) == Recipe(Choice("int8"), rotate=True)
    assert RecipeOptions(recipe=path).to_recipe().rotate and not RecipeOptions().to_recipe().rotate
    assert Recipe.from_dict(Recipe(rotate=True).to_dict()) == Recipe(rotate=True)
    path.write_text("rotate = 1\n")
    with pytest.raises(UsageError, match="'rotate' is 1; expected true or false"):
        read_recipe(path, Choice())


def test_an_allocated_recipe_rotates_and_sensitivities_are_its_own(tmp_path, text, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path)
    budget = Budget(BitsPerWeight(5.0), ("int4:32", "int8"))
    result = quantize(source, tmp_path / "out", rotate=True, budget=budget, calibration=data(text))
    assert result.plan.allocation is not None
    assert read_manifest(tmp_path / "out")["recipe"]["rotate"] is True
    original = Checkpoint.open(source)
    keys = {cache_key(one, "", "mse", "cpu", {}) for one in (original, rotated(original))}
    assert len(keys) == 2


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {}, "model_type is 'gemma2', of which it does not know"),
        ("llama", {"hidden_size": 52, "head_dim": 16}, "the hidden size is 52, for which it has no Hadamard"),
        ("llama", {"head_dim": 10}, "the size of a head is 10"),
    ],
)
def test_models_that_cannot_be_rotated_are_refused_before_any_work(tmp_path, family, changes, message):
    source = write(tmp_path, family, **changes)
    with pytest.raises(CheckpointError, match=f"cannot rotate this model: .*{message}.* Leave out --rotate"):
        quantize(source, tmp_path / "out", rotate=True)
    assert not (tmp_path / "out").exists()


def test_what_is_no_parameter_is_copied(tmp_path):
    source = write(tmp_path)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.arange(3.0)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    found = rotated(Checkpoint.open(source)).read("model.layers.0.self_attn.rotary_emb.inv_freq")
    assert_equal(found, torch.arange(3.0))


def test_tensors_that_cannot_be_rotated_are_refused(tmp_path, monkeypatch):
    source = write(tmp_path, "tied")
    tensors = load_file(source / "model.safetensors")

    def refused(message: str) -> None:
        with pytest.raises(CheckpointError, match=f"cannot rotate this model: {message}.*Leave out --rotate"):
            checkpoint = Checkpoint.open(source)
            rotated(checkpoint)

    with monkeypatch.context() as patch:
        patch.setattr(rotating, "PLACES", rotating.PLACES[1:])
        refused("the place of tensor 'model.embed_tokens.weight' in the residual stream is unknown")
    name = "model.layers.0.mlp.up_proj.weight"
    eight = {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}
    save_file(eight, source / "model.safetensors", metadata={"format": "pt"})
    refused(f"tensor '{name}' is F8_E4M3; expected BF16, F16, F32, F64")
