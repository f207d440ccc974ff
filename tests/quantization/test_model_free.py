"""`--model-free` packs what the class would, and checkpoints that transformers does not know."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.model_free import read_tensors
from quantkit.model.prefixes import read_names
from quantkit.planning import plan_checkpoint
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.verification.readers import check_written, readers_of
from quantkit.verification.verify import verify

from ..support.compare import assert_equal
from ..tiny.sizes import SIZES
from .matrix import tiny_model
from .test_low_bit_sources import fp8_source

WEIGHTS, CONFIG = "model.safetensors", "config.json"
UNKNOWN_CLASS = f"transformers {transformers.__version__} has no MartianForCausalLM for model_type 'martian'"
QUICK: dict[str, Any] = {"format": "int4", "method": "rtn", "group_size": 32}


def save(directory: Path, config: str, **sizes: Any) -> Path:
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **sizes})
    transformers.AutoModelForCausalLM.from_config(made).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig", intermediate_size=96)


@pytest.fixture
def martian(llama, tmp_path) -> Path:
    """The same files, of an architecture that transformers does not know and whose code must not run."""
    directory = tmp_path / "martian"
    shutil.copytree(llama, directory)
    edit_config(
        directory,
        model_type="martian",
        architectures=["MartianForCausalLM"],
        auto_map={"AutoModelForCausalLM": "evil.Model"},
    )
    (directory / "evil.py").write_text("raise SystemExit('was run')")
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    path = directory / CONFIG
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_tensors(directory: Path, **tensors: torch.Tensor) -> None:
    found = load_file(directory / WEIGHTS)
    save_file({**found, **tensors}, directory / WEIGHTS, metadata={"format": "pt"})


def plan(directory: Path, **options: Any) -> Any:
    given = QuantizeOptions(recipe=RecipeOptions(**{**QUICK, **options}, model_free=True))
    return plan_checkpoint(directory, given)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ("LlamaConfig", {"intermediate_size": 96}),
        ("LlamaConfig", {"intermediate_size": 96, "tie_word_embeddings": True}),
        ("MixtralConfig", {"intermediate_size": 96, "num_local_experts": 4}),
    ],
    ids=["llama", "tied", "mixtral"],
)
def test_the_bytes_are_those_that_the_class_gives(tmp_path, config, sizes):
    source = save(tmp_path / "source", config, **sizes)
    free, known = tmp_path / "free", tmp_path / "class"
    result = quantkit.quantize(source, free, **QUICK, model_free=True, check=True)
    quantkit.quantize(source, known, **QUICK)
    assert result.unchecked is None and result.plan.readers == ()
    found, expected = load_file(free / WEIGHTS), load_file(known / WEIGHTS)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_equal(found[name], tensor)
    ids = torch.arange(12)[None]
    with torch.inference_mode():
        logits = [quantkit.load(one, device="cpu")(ids).logits for one in (free, known)]
    assert_equal(*logits)
    assert not [problem for check in verify(free, reload=False) for problem in check.problems]


@pytest.mark.parametrize(
    "name",
    [
        *("DeepseekV3ForCausalLM", "Qwen3NextForCausalLM", "NemotronHForCausalLM", "MambaForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Blip2ForConditionalGeneration", "ViTForImageClassification"),
    ],
)
@pytest.mark.sampled(2)
def test_names_and_shapes_tell_the_linears_of_the_class(name, tmp_path):
    tiny_model(name).save_pretrained(tmp_path)
    checkpoint = Checkpoint.open(tmp_path)
    known, free = read_names(checkpoint)[1], read_tensors(checkpoint, None)[1]
    default = [linear for name, linear in known.linears.items() if name not in known.kept]
    expected = {one for linear in default if linear.kind != "lm_head" for one in linear.stored}
    packed = [linear for name, linear in free.linears.items() if name not in free.kept]
    assert {one for linear in packed if linear.kind != "lm_head" for one in linear.stored} == expected


def test_an_architecture_that_transformers_does_not_know(martian, tmp_path, llama):
    out, known = tmp_path / "out", tmp_path / "class"
    result = quantkit.quantize(martian, out, **QUICK, model_free=True, check=True)
    quantkit.quantize(llama, known, **QUICK)
    assert result.unchecked == UNKNOWN_CLASS
    assert f"{UNKNOWN_CLASS}: it is not known who can run the result." in result.plan.notes
    expected = load_file(known / WEIGHTS)
    for name, tensor in load_file(out / WEIGHTS).items():
        assert_equal(tensor, expected[name])
    assert not (out / "evil.py").exists()
    unknown = f"{UNKNOWN_CLASS}: it is not known who can run this."
    assert readers_of(Checkpoint.open(out), {}) == ((), (unknown,))
    checks = {check.name: check for check in verify(out)}
    assert not any(check.problems for check in checks.values())
    assert checks["reload"].skipped and checks["reload"].detail == UNKNOWN_CLASS
    with pytest.raises(CheckpointError, match=r"'model_type' is 'martian'.*knows the architecture.$"):
        quantkit.load(out)
    before = (out / WEIGHTS).stat().st_mtime_ns
    assert quantkit.quantize(martian, out, **QUICK, model_free=True, check=True, resume=True)
    assert (out / WEIGHTS).stat().st_mtime_ns == before


def test_a_low_bit_source_without_a_class(tmp_path):
    source = fp8_source(tmp_path, intermediate_size=96)
    quantkit.quantize(source, tmp_path / "class", **QUICK)
    edit_config(source, model_type="martian", architectures=["MartianForCausalLM"])
    quantkit.quantize(source, tmp_path / "free", **QUICK, model_free=True)
    found, expected = (load_file(tmp_path / name / WEIGHTS) for name in ("free", "class"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_equal(found[name], tensor)


@pytest.mark.parametrize("change", [{"model_type": ["martian"]}, {"model_type": None, "architectures": None}])
def test_config_need_not_name_a_class(martian, change):
    edit_config(martian, **change)
    _, planned = plan(martian)
    assert any("it is not known who can run the result" in note for note in planned.notes)


def test_formats_of_quantkit_only_have_a_note(martian):
    _, planned = plan(martian, format="nf4")
    assert any("other tools do not know its formats" in note for note in planned.notes)


@pytest.mark.parametrize(
    ("config", "remedy"),
    [
        ({"model_type": "martian"}, "or quantize it with --model-free."),
        ({"model_type": "martian", "auto_map": {"AutoModel": "m.M"}}, "quantize it with --model-free."),
        ({"architectures": ["NoSuchModel"], "model_type": "clip_vision_model_x"}, "with --model-free."),
    ],
)
def test_without_the_option_the_error_names_it(llama, tmp_path, config, remedy):
    shutil.copytree(llama, tmp_path / "m")
    edit_config(tmp_path / "m", **config)
    with pytest.raises(CheckpointError) as caught:
        quantkit.quantize(tmp_path / "m", tmp_path / "out", **QUICK)
    assert str(caught.value).endswith(remedy)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"method": "gptq"},
            "--model-free runs no model, and method 'gptq' takes data of a run; use one of rtn",
        ),
        ({"rules": ("*.q_proj=int4::awq",)}, "method 'awq' takes data of a run"),
        ({"rotate": True}, "--model-free does not go with --rotate"),
    ],
)
def test_what_takes_a_model_is_refused_before_the_source_is_opened(tmp_path, options, text):
    with pytest.raises(UsageError, match=text):
        quantkit.quantize(tmp_path / "missing", tmp_path / "out", **options, model_free=True)


def test_a_budget_is_refused(tmp_path):
    with pytest.raises(UsageError, match="--model-free runs no model, and --bits-per-weight measures one"):
        RecipeOptions(model_free=True).to_recipe("--bits-per-weight")


def test_a_rule_packs_what_is_likely_no_linear(martian):
    edit_tensors(
        martian, **{"mtp.fc.weight": torch.ones(64, 64), "visual.pos_embed.weight": torch.ones(8, 64)}
    )
    _, planned = plan(martian, rules=("mtp.*=int8",))
    fates = {layer.linear.module: layer.fate for layer in planned.layers}
    assert fates["mtp.fc"].scheme is not None and fates["mtp.fc"].reason == "rule 'mtp.*'"
    _, planned = plan(martian)
    assert planned.dense["visual.pos_embed.weight"] == "an embedding"
    assert "mtp.fc" in planned.model_config["quantization_config"]["ignore"]
    with pytest.raises(UsageError, match=r"'visual\.pos_embed' stays dense: an embedding"):
        plan(martian, rules=("visual.*=int8",))


def test_much_that_stays_dense_is_a_warning(martian):
    edit_tensors(martian, **{"visual.blocks.0.fc.weight": torch.ones(512, 512)})
    _, planned = plan(martian)
    (warning,) = planned.warnings
    assert warning.endswith("visual.blocks.0.fc.weight: of a part beside that for text, by its name.")


@pytest.mark.parametrize("spoil", ["missing", "unexpected", "shape"])
def test_the_output_is_compared_with_the_source(martian, spoil):
    checkpoint, planned = plan(martian)
    tensors: dict[str, Any] = {spec.name: spec for shard in planned.shards for spec in shard.specs}
    check_written(planned, checkpoint, tensors)
    name = "model.layers.1.mlp.up_proj.weight_scale"
    other = tensors["model.norm.weight"]
    changed = {"missing": {}, "unexpected": {name: tensors[name], "x": other}, "shape": {name: other}}[spoil]
    rest = {one: spec for one, spec in tensors.items() if one != name}
    found = {"missing": "nothing", "unexpected": r"\(64,\)", "shape": r"\(64,\)"}[spoil]
    with pytest.raises(CheckpointError, match=f"the output has {found} for .* a fault of quantkit"):
        check_written(planned, checkpoint, {**rest, **changed})


def test_a_class_that_would_not_load_the_output_is_an_error(tmp_path):
    source = save(tmp_path / "gpt2", "GPT2Config", n_embd=64, n_layer=1, n_head=2)
    with pytest.raises(CheckpointError, match=r"names and shapes do not tell .* Leave out --model-free"):
        plan(source)
