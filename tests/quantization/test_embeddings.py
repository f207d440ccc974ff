"""A packed embedding, from quantizing to saving the loaded model again; tied, the head has the same table."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig

from quantkit.calibrate.methods import quantize_tensor
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError, UsageError
from quantkit.eval.evaluate import evaluate
from quantkit.eval.sizes import measure
from quantkit.packing.tensor import PackedTensor
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.recipes.recipe import Choice, Recipe, read_recipe
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.cpu_steps.flat_forward import FlatForward
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.load import load
from quantkit.runtime.packed_embedding import PackedEmbedding
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.saved_model import read_record
from quantkit.runtime.weights import packed_weights
from quantkit.verification.verify import verify

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import assert_same_checkpoint

STORIES = Path(__file__).resolve().parents[2] / "examples" / "stories260K"
TABLE = "model.embed_tokens"
IDS = torch.tensor([[1, 5, 5, 511], [403, 0, 77, 2]])


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stories260K, whose head is tied, with an int8 table."""
    out = tmp_path_factory.mktemp("packed") / "out"
    quantize(STORIES, out, embeddings="int8:32", device="cpu")
    return out


def original_table() -> torch.Tensor:
    return load_file(STORIES / "model.safetensors")[f"{TABLE}.weight"]


def expected_table() -> PackedTensor:
    return quantize_tensor(original_table(), "int8", group_size=32)


def test_one_stored_table_serves_the_embedding_and_the_head(packed: Path) -> None:
    stored = load_file(packed / "model.safetensors")
    assert not [name for name in stored if name.startswith("lm_head")]
    assert_equal(stored[f"{TABLE}.weight"], expected_table().words)
    config = json.loads((packed / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert config["quantization_config"]["quant_method"] == "quantkit"

    model = load(packed, device="cpu")
    table, head = model.get_input_embeddings(), model.lm_head
    assert isinstance(table, PackedEmbedding) and isinstance(head, PackedLinear)
    assert head.weight is table.weight and head.weight_scale is table.weight_scale
    assert_equal(head.packed.dequantize(), expected_table().dequantize())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_and_logits_are_those_of_the_dequantized_model(packed: Path, dtype: torch.dtype) -> None:
    model = load(packed, device="cpu", dtype=dtype)
    assert model.dtype == dtype
    rows = model.get_input_embeddings()(IDS)
    assert rows.dtype == dtype
    assert_equal(rows, expected_table().dequantize(dtype)[IDS])
    with torch.no_grad():
        found = model(IDS).logits
        model.dequantize()
        assert model.lm_head.weight is model.get_input_embeddings().weight
        limit = 1e-5 if dtype == torch.float32 else 2e-2
        assert_close(found, model(IDS).logits, rtol=0, atol=limit * float(found.abs().max()))


def test_a_cast_of_the_model_casts_rows(packed: Path) -> None:
    model = load(packed, device="cpu", dtype=torch.float32).to(torch.bfloat16)
    assert model.dtype == model.get_input_embeddings()(IDS).dtype == torch.bfloat16


def test_tokens_are_those_of_the_dense_table(packed: Path) -> None:
    model = load(packed, device="cpu", dtype=torch.float32)
    options = {"max_new_tokens": 12, "do_sample": False}
    found = model.generate(IDS[:1, :1], **options)
    steps = graphs_of(model)
    assert isinstance(steps, FlatForward) and not steps.refused
    assert_equal(found, model.dequantize().generate(IDS[:1, :1], **options))


def test_it_is_saved_as_it_was(packed: Path, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(packed)
    with torch.no_grad():
        model(IDS)
    model.save_pretrained(tmp_path / "again")
    assert_same_checkpoint(tmp_path / "again", packed)
    layers = read_record(tmp_path / "again").layers
    assert (layers[TABLE].kind, layers[TABLE].bits_per_weight) == ("embedding", pytest.approx(8.5, abs=0.01))
    assert (layers["lm_head"].kind, layers["lm_head"].bits_per_weight) == ("lm_head", None)


def test_the_plan_the_manifest_and_the_files_agree(packed: Path) -> None:
    _, planned = plan(STORIES, QuantizeOptions(recipe=RecipeOptions(embeddings="int8:32")))
    _, dense = plan(STORIES, QuantizeOptions(recipe=RecipeOptions()))
    rows, columns = original_table().shape
    saved = original_table().nbytes - (rows * columns + rows * columns // 32 * 2 + 16)
    assert dense.output_bytes - planned.output_bytes == saved
    record = read_record(packed)
    assert record.bits_per_weight == planned.bits_per_weight
    assert record.layers[TABLE].method == "mse" and f"{TABLE}.weight" not in record.dense
    assert record.layers["lm_head"].reason == f"the table of {TABLE}"
    assert "take embeddings to be dense" in record.needs_quantkit[0]
    assert measure(Checkpoint.open(packed)).model == pytest.approx(planned.bits_per_weight["model"])
    # The head is multiplied, once; a table is not.
    shapes = [shape for _, shape in packed_weights(packed)]
    assert shapes.count((rows, columns)) == 1
    for check in verify(packed, reload=False):
        assert not check.problems


def test_another_class_loads_the_table(packed: Path) -> None:
    model = AutoModel.from_pretrained(packed)
    assert_equal(
        model.get_input_embeddings()(IDS), expected_table().dequantize(model.embed_tokens.dtype)[IDS]
    )


def test_a_head_in_a_scheme_of_its_own_is_stored_apart(tmp_path: Path) -> None:
    quantize(STORIES, tmp_path / "out", embeddings="int4:32", lm_head="int8", device="cpu")
    model = load(tmp_path / "out", device="cpu", dtype=torch.float32)
    assert model.config.tie_word_embeddings is False
    assert_equal(model.lm_head.packed.dequantize(), quantize_tensor(original_table(), "int8").dequantize())
    table = quantize_tensor(original_table(), "int4", group_size=32)
    assert_equal(model.get_input_embeddings().packed.dequantize(), table.dequantize())


def test_an_embedding_is_packed_beside_an_untied_head(tmp_path: Path) -> None:
    source = tmp_path / "untied"
    source.mkdir()
    for path in STORIES.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    config = json.loads((STORIES / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(STORIES / "model.safetensors")
    tensors["lm_head.weight"] = tensors[f"{TABLE}.weight"] * 2
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    quantize(source, tmp_path / "out", embeddings="int8:32", device="cpu")
    model = load(tmp_path / "out", device="cpu")
    assert isinstance(model.get_input_embeddings(), PackedEmbedding)
    assert_equal(model.lm_head.weight, tensors["lm_head.weight"])
    # With a head in the file, a config that ties it leaves open which of both is meant.
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"config.json ties lm_head.weight to it, and the files have both"):
        plan(source, QuantizeOptions(recipe=RecipeOptions(embeddings="int8")))


def test_what_cannot_be_is_refused(packed: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'gptq' takes calibration data, and an embedding has no inputs"):
        RecipeOptions(embeddings="int4::gptq").to_recipe()
    with pytest.raises(UsageError, match=r"lm_head is kept by rule 'lm_head', but has the weights of"):
        plan(STORIES, QuantizeOptions(recipe=RecipeOptions(embeddings="int8", rules=("lm_head=keep",))))
    with pytest.raises(UsageError, match=r"matches no linear; 'model.embed_tokens' stays dense"):
        plan(STORIES, QuantizeOptions(recipe=RecipeOptions(rules=(f"{TABLE}=int8",))))
    model = load(packed, device="cpu")
    with pytest.raises(TypeError, match="PackedEmbedding"):
        model.resize_token_embeddings(600)
    changed = tmp_path / "changed"
    changed.mkdir()
    for path in packed.iterdir():
        (changed / path.name).write_bytes(path.read_bytes())
    config = json.loads((packed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(CheckpointError, match=r"lm_head"):
        load(changed, device="cpu")


def test_blocks_are_compared_only_with_the_same_embedding(packed: Path, text: Path) -> None:
    found = evaluate(
        packed, against=STORIES, texts=[text], window=64, max_windows=2, device="cpu", per_block=True
    )
    assert found.per_block is None
    assert any(note.endswith("as after --rotate and with --embeddings") for note in found.notes)


def test_a_recipe_file_packs_embeddings(tmp_path: Path) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text('[embeddings]\nformat = "int8"\ngroup_size = 32\n')
    recipe = read_recipe(path, Choice())
    assert recipe.embeddings == Choice("int8", 32)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert RecipeOptions(recipe=path, embeddings="int4").to_recipe().embeddings == Choice("int4")
    assert "embeddings" not in Recipe().to_dict()


def test_rows_are_multiplied_as_the_class_does(tmp_path: Path) -> None:
    """Gemma multiplies rows by a factor in their dtype, the head does not."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "head_dim": 32}
    config = Gemma3TextConfig(vocab_size=96, num_attention_heads=2, num_key_value_heads=1, **sizes)
    source = Gemma3ForCausalLM(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path / "gemma")
    rules = ("*.layers.*=keep",)
    quantize(tmp_path / "gemma", tmp_path / "out", embeddings="int4:32", rules=rules, device="cpu")
    model = load(tmp_path / "out", device="cpu", dtype=torch.bfloat16)
    ids = torch.tensor([[3, 95, 0, 3]])
    table = quantize_tensor(source.get_input_embeddings().weight.detach(), "int4", group_size=32)
    with torch.no_grad():
        source.get_input_embeddings().weight.copy_(table.dequantize(torch.bfloat16))
        expected, logits = source.get_input_embeddings()(ids), source(ids).logits
        assert_equal(model.get_input_embeddings()(ids), expected)
        assert_close(model(ids).logits, logits, rtol=2e-2, atol=2e-2)
        model.dequantize()
        assert_equal(model.get_input_embeddings()(ids), expected)
        assert_close(model(ids).logits, logits, rtol=2e-2, atol=2e-2)
