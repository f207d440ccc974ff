"""Tiny models of transformers' classes are packed, load as their class and compute what their files say."""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers

import quantkit
from quantkit.errors import QuantkitError
from quantkit.model.names import model_names
from quantkit.model.parts import packed_parts, why_no_tokens
from quantkit.quantization.blockwise.block_output import NOT_RUN

from . import matrix, tiny

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
    # A cache without layers, a config without their number, needed boxes, a class for decoders beside it,
    # a table in the dtype of a linear, a convolution for a table, and a head that asks for an end of text.
    *("xLSTMForCausalLM", "ParakeetForCTC", "UdopForConditionalGeneration", "ReformerForMaskedLM"),
    *("Swinv2ForImageClassification", "SiglipForImageClassification", "BartForSequenceClassification"),
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


def test_linears_that_are_rows_of_one_tensor_are_packed_one_by_one(tmp_path: Path) -> None:
    name, rules = "NomicBertForMaskedLM", ("*.0.*.k_proj=keep",)
    tiny.save_source(tiny.tiny_model(name), tmp_path / "source")
    found = matrix.check(name, tmp_path, "int8", format="int8", rules=rules)
    assert (found["result"], found["matrices"], found["readers"]) == ("right", 13, ["transformers"]), found
    model = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "int8")
    model.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "again")
    assert torch.equal(matrix.outputs(model.eval()), matrix.outputs(again.eval()))


@pytest.mark.slow
def test_no_class_is_wrong(tmp_path: Path) -> None:
    found = {name: matrix.attempt(name, tmp_path / name, matrix.COLUMNS) for name in tiny.names()}
    for column in matrix.COLUMNS:
        assert not {name: one[column] for name, one in found.items() if one[column]["result"] == "WRONG"}
        assert sum(one[column]["result"] == "right" for one in found.values()) >= 140


def test_linears_that_do_not_run_are_quantized_without_data(tmp_path: Path) -> None:
    """Longformer's linears for global attention, of which no token of a text has any."""
    source = tmp_path / "source"
    tiny.save_source(tiny.tiny_model("LongformerForMaskedLM"), source)
    plain = quantkit.quantize(source, tmp_path / "plain", **matrix.INT4)
    found = quantkit.quantize(source, tmp_path / "out", **matrix.COLUMNS["gptq"])
    idle = {name for name, one in found.measured.items() if one.note == NOT_RUN}
    assert idle == {name for name in found.measured if name.endswith("_global")} != set()
    for name, one in found.measured.items():
        assert (one.output_error is None) == (name in idle)
        assert (one.relative_error == plain.measured[name].relative_error) == (name in idle)


def test_the_stored_results_are_those_of_the_page() -> None:
    """None is wrong, each refusal gives a reason and a remedy, and all columns reach what is promised."""
    text = matrix.PAGE.read_text()
    assert text == matrix.with_summary(text), "run python -m tests.quantization.matrix summary"
    classes = json.loads(matrix.STORED.read_text())["classes"]
    for column in matrix.COLUMNS:
        assert not [name for name, one in classes.items() if one[column]["result"] == "WRONG"]
        assert sum(one[column]["result"] == "right" for one in classes.values()) >= 140
    refused = [one[column] for one in classes.values() for column in matrix.COLUMNS if "late" in one[column]]
    assert not [one for one in refused if one["late"] or not re.search(r"Take|Use|--rule", one["why"])]


def test_a_decoder_made_of_models_has_its_blocks_packed() -> None:
    with torch.device("meta"):
        model = transformers.BltForCausalLM(tiny.tiny_config(transformers.BltConfig))
    parts = packed_parts(model)
    assert "model.global_transformer.layers.0.mlp.up_proj" in parts and "lm_head" not in parts


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("MusicgenForCausalLM", "it embeds tokens by a ModuleList"),
        ("ParakeetForCTC", "it runs on input_features, not on tokens"),
        ("PerceiverForMaskedLM", "it runs on inputs, not on tokens"),
    ],
)
def test_why_a_model_has_no_tokens(name: str, reason: str) -> None:
    cls = getattr(transformers, name)
    with torch.device("meta"):
        assert why_no_tokens(cls(tiny.tiny_config(cls.config_class))) == reason


def test_a_run_goes_on_at_the_same_commit_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix, "names", lambda: ["A", "B", "C"])
    results, head = tmp_path / "results.json", {"versions": {"torch": "2"}, "commit": "commit 1"}
    assert matrix.run(results, [], head, jobs=1, seconds=0) == 3
    results.write_text(json.dumps({**head, "classes": {"A": {}, "C": {}}}))
    assert matrix.run(results, [], head, jobs=1, seconds=0) == 1
    for other in ({**head, "commit": "commit 2"}, {**head, "versions": {"torch": "3"}}):
        with pytest.raises(SystemExit, match=r"results of commit 1 with .*remove this one"):
            matrix.run(results, [], other, jobs=1, seconds=0)


def test_an_embedding_model_is_taken_for_its_base(tmp_path: Path) -> None:
    tiny.tiny_model("LlamaForCausalLM").model.save_pretrained(tmp_path / "source")
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


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_of_text_models_is_declared_for_a_class_without(tmp_path: Path, tied: bool) -> None:
    """vLLM, compressed-tensors and transformers make a Qwen3ForCausalLM of these files too."""
    source, out = tmp_path / "source", tmp_path / "out"
    config = tiny.tiny_config(transformers.Qwen3Config)
    config.tie_word_embeddings = tied
    transformers.Qwen3Model(config).save_pretrained(source)
    result = quantkit.quantize(source, out, format="int8", device="cpu", check=True)
    section = result.plan.model_config["quantization_config"]
    assert section["ignore"] == ["lm_head"] and section["config_groups"]["group_0"]["targets"] == ["Linear"]
    assert result.plan.readers == ("vLLM", "SGLang", "transformers") and not result.plan.notes
    _, info = transformers.AutoModel.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    model, info = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    # Without a tie the head is new, as it is with the source.
    assert info["missing_keys"] == (set() if tied else {"lm_head.weight"})
    assert type(model.lm_head) is torch.nn.Linear
    with pytest.raises(QuantkitError, match="'lm_head' stays dense: the class of the model has no head"):
        quantkit.quantize(source, tmp_path / "head", lm_head="int8", device="cpu")


def test_rules_pack_vision_towers(tmp_path: Path) -> None:
    source, out, dense = tmp_path / "source", tmp_path / "out", tmp_path / "dense"
    # SigLIP initializes its linears by their weights, in a function that is not the whole model's.
    tiny.tiny_model("Gemma3ForConditionalGeneration").save_pretrained(source)
    result = quantkit.quantize(
        source, out, format="int8", rules=("*vision_tower*=int8",), device="cpu", check=True
    )
    packed = [layer for layer in result.plan.layers if "vision_tower" in layer.linear.module]
    # torch's MultiheadAttention reads the weight of this one itself.
    assert not any("head.attention.out_proj" in layer.linear.module for layer in packed)
    assert packed and all(layer.scheme and layer.scheme.format.name == "int8" for layer in packed)
    matrix.rounded(source, out, dense)
    cls = transformers.Gemma3ForConditionalGeneration
    pixels = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(0))
    found, expected = (
        cls.from_pretrained(path, dtype=torch.float32).model.vision_tower(pixels).last_hidden_state
        for path in (out, dense)
    )
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def with_further_tokens(directory: Path) -> dict[str, torch.Tensor]:
    """Write a model with heads of further tokens, which its class lacks; return their matrices."""
    from safetensors.torch import load_file, save_file

    tiny.tiny_model("Qwen3ForCausalLM").save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    stem = tensors["model.layers.1.mlp.up_proj.weight"]
    added = (
        "mtp.fc",
        "mtp.layers.0.mlp.up_proj",
        "model.layers.2.mlp.up_proj",
        "model.layers.2.shared_head.head",
    )
    found = {f"{name}.weight": stem.clone() for name in added} | {
        "mtp.layers.0.mlp.gate.weight": stem[:4].clone()
    }
    save_file({**tensors, **found}, directory / "model.safetensors", metadata={"format": "pt"})
    return found


def test_heads_of_further_tokens_are_kept_and_declared(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, out = tmp_path / "source", tmp_path / "out"
    added = with_further_tokens(source)
    result = quantkit.quantize(source, out, format="int8", device="cpu", check=True)
    ignored = set(result.plan.model_config["quantization_config"]["ignore"])
    assert {name.removesuffix(".weight") for name in added} <= ignored
    assert any("5 tensors" in note and "up_proj=int8' packs some of" in note for note in result.plan.notes)
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in added.items())


@pytest.mark.parametrize("format", ["int8", "nf4"])
def test_rules_pack_heads_of_further_tokens(tmp_path: Path, format: str) -> None:
    from safetensors.torch import load_file

    from quantkit.runtime.replace import packed_modules
    from quantkit.verification.verify import verify

    source, out = tmp_path / "source", tmp_path / "out"
    added = with_further_tokens(source)
    rules = ("mtp.*=int8:channel", "model.layers.2.*=int4:32")
    result = quantkit.quantize(source, out, format=format, rules=rules, device="cpu", check=True)
    formats = {layer.linear.module: layer.scheme and layer.scheme.format.name for layer in result.plan.layers}
    assert {name: formats[name] for name in formats if name.startswith(("mtp", "model.layers.2."))} == {
        "mtp.fc": "int8",
        "mtp.layers.0.mlp.up_proj": "int8",
        "model.layers.2.mlp.up_proj": "int4",
    }
    assert any("3 packed linears, such as" in note for note in result.plan.notes)
    written = load_file(out / "model.safetensors")
    dense = ("mtp.layers.0.mlp.gate.weight", "model.layers.2.shared_head.head.weight")
    assert all(torch.equal(written[name], added[name]) for name in dense)
    assert not any(check.problems for check in verify(out, reload=False))
    values = verify(out, reload=False, against=source)[-1]
    assert values.detail.startswith("30 tensors, 17 of them packed")
    model = quantkit.load(out)
    assert len(list(packed_modules(model))) == 14
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    if format == "int8":
        targets = {name for group in config["config_groups"].values() for name in group["targets"]}
        assert "model.layers.2.mlp.up_proj" in targets and "mtp.fc" not in config["ignore"]


def test_rules_pack_experts_of_blocks_beyond_the_last(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    source, out = tmp_path / "source", tmp_path / "out"
    tiny.tiny_model("Qwen3MoeForCausalLM").save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    last = "model.layers.1."
    beyond = {n.replace(last, "model.layers.2."): t.clone() for n, t in tensors.items() if n.startswith(last)}
    save_file({**tensors, **beyond}, source / "model.safetensors", metadata={"format": "pt"})
    result = quantkit.quantize(source, out, format="int8", rules=("model.layers.2.*=int4:32",), device="cpu")
    packed = {layer.linear.module for layer in result.plan.layers if layer.fate.reason.startswith("rule")}
    assert {f"model.layers.2.mlp.experts.3.{one}_proj" for one in ("gate", "up", "down")} <= packed
    assert "model.layers.2.mlp.gate" not in packed
    quantkit.load(out, device="cpu")


def with_further_experts(directory: Path, name: str, turn: bool = False) -> dict[str, torch.Tensor]:
    """Write a mixture, and for a head of further tokens its first experts in one tensor for all."""
    from safetensors.torch import load_file, save_file

    model = tiny.tiny_model(name)
    model.save_pretrained(directory)
    experts = model.model.layers[0].mlp.experts
    added = {
        f"mtp.layers.0.mlp.experts.{leaf}": (one.mT if turn else one).detach().contiguous()
        for leaf, one in experts.named_parameters()
    }
    tensors = {**load_file(directory / "model.safetensors"), **added}
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return added


#: Mixtures whose files have each matrix of its own, and one tensor [E, K, N] for all experts.
@pytest.mark.parametrize("name", ["Qwen3_5MoeForCausalLM", "GptOssForCausalLM"])
def test_rules_pack_experts_in_one_tensor_of_heads_of_further_tokens(tmp_path: Path, name: str) -> None:
    from safetensors.torch import load_file

    from quantkit.verification.verify import verify

    source, out = tmp_path / "source", tmp_path / "out"
    added = with_further_experts(source, name)
    rules = ("mtp.*=int8:channel", "model.layers.1.*=keep")
    result = quantkit.quantize(source, out, format="int8", rules=rules, device="cpu", check=True)
    schemes = {layer.linear.module: str(layer.scheme) for layer in result.plan.layers}
    of = {one: one.replace("mtp", "model") for one in schemes if one.startswith("mtp")}
    assert len(of) == 2 and all(schemes[one] == schemes[main] != "None" for one, main in of.items())
    written = load_file(out / "model.safetensors")
    mine = {one: part for one, part in written.items() if one.startswith("mtp") and one not in added}
    assert len([one for one in mine if one.endswith("_scale")]) == 12
    assert all(torch.equal(part, written[one.replace("mtp", "model")]) for one, part in mine.items())
    assert not any(check.problems for check in verify(out, reload=False))
    # Experts that a rule keeps are found in the tensor that they keep.
    problems = verify(out, reload=False, against=source)[-1].problems
    assert problems and not any("is not there" in one or ".layers.1." in one for one in problems)
    quantkit.load(out, device="cpu")


def test_experts_of_heads_of_further_tokens_stay_in_one_tensor_without_a_rule(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    source, out = tmp_path / "source", tmp_path / "out"
    added = with_further_experts(source, "Qwen3_5MoeForCausalLM")
    result = quantkit.quantize(source, out, format="int8", device="cpu", check=True)
    written = load_file(out / "model.safetensors")
    assert all(torch.equal(written[name], tensor) for name, tensor in added.items())
    assert set(added) <= set(result.plan.model_config["quantization_config"]["ignore"])
    (note,) = (note for note in result.plan.notes if "2 tensors, such as mtp" in note)
    assert note.endswith("--rule 'mtp.layers.0.mlp.experts.*=int8' packs some of them.")
    with pytest.raises(QuantkitError, match="packs some and keeps some of the matrices of 'mtp"):
        quantkit.quantize(source, tmp_path / "half", rules=("mtp*down_proj=int8",), device="cpu")


def test_experts_of_a_head_that_are_stored_otherwise_stay_dense(tmp_path: Path) -> None:
    with_further_experts(tmp_path / "source", "Qwen3_5MoeForCausalLM", turn=True)
    with pytest.raises(QuantkitError, match=r"'mtp.*_proj' stays dense.*no experts of the model are stored"):
        quantkit.quantize(tmp_path / "source", tmp_path / "out", rules=("mtp.*=int8",), device="cpu")


def test_methods_with_data_have_no_inputs_for_heads_of_further_tokens(tmp_path: Path) -> None:
    with_further_tokens(tmp_path / "source")
    with pytest.raises(QuantkitError, match=r"'mtp\.fc=int8::mse'"):
        quantkit.quantize(
            tmp_path / "source", tmp_path / "out", method="gptq", rules=("mtp.fc=int8",), device="cpu"
        )
    assert not (tmp_path / "out").exists()


def test_a_model_without_next_tokens_is_refused_by_what_needs_them(tmp_path: Path) -> None:
    from quantkit.runtime.load import load_language_model

    tiny.tiny_model("BertForMaskedLM").save_pretrained(tmp_path)
    with pytest.raises(QuantkitError, match="BertForMaskedLM, which does not continue a text"):
        load_language_model(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("IBertModel", "'weight' of a QuantLinear, which is not a linear"),
        ("SqueezeBertModel", "'weight' of a Conv1d, which is not a linear"),
    ],
)
def test_a_class_without_linears_is_refused_with_the_reason(name: str, reason: str, tmp_path: Path) -> None:
    tiny.tiny_model(name).save_pretrained(tmp_path / "source")
    text = f"{name} has no linear that quantkit packs, and ..% of its weights are .*{reason}. Use the model"
    with pytest.raises(QuantkitError, match=text):
        quantkit.quantize(tmp_path / "source", tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("JetMoeForCausalLM", "JetMoeParallelExperts, which has several matrices in one tensor"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "transformers divides its list of experts among modules"),
    ],
)
def test_experts_that_stay_dense_have_a_warning_that_says_why(name: str, reason: str, tmp_path: Path) -> None:
    tiny.tiny_model(name).save_pretrained(tmp_path / "source")
    result = quantkit.quantize(tmp_path / "source", tmp_path / "out", format="int8", device="cpu")
    assert any("experts" in one.lower() and reason in one for one in result.plan.warnings)


def test_a_rename_that_fits_no_parameter_is_not_done() -> None:
    """As transformers loads DeepSeek-V4: a rule for the norms of its blocks matches the last norm too."""
    with torch.device("meta"):
        cls = transformers.DeepseekV4ForCausalLM
        model = cls(tiny.tiny_config(cls.config_class))
    assert model_names(model, ["model.norm.weight"]) == {"model.norm.weight": ("model.norm.weight", False)}


@pytest.mark.parametrize(
    "name",
    [
        "BartForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "T5GemmaForConditionalGeneration",  # only the whole config says that it has an encoder
    ],
)
def test_classes_with_more_than_a_decoder_generate(name: str, tmp_path: Path) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    tiny.tiny_model(name).save_pretrained(source)
    quantkit.quantize(source, out, format="int8")
    ours = quantkit.load(out, dtype="float32")
    matrix.rounded(source, out, tmp_path / "dense")
    theirs = getattr(transformers, name).from_pretrained(tmp_path / "dense").to(ours.device).eval()
    prompt = torch.randint(3, 200, (1, 9), generator=torch.Generator().manual_seed(2)).to(ours.device)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1}
    found, expected = (model.generate(prompt, **options) for model in (ours, theirs))
    assert torch.equal(found, expected)
