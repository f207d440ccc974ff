"""Configs, recipes and what they ask for: rows 28 to 38."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.errors import CheckpointError, FormatError, UsageError
from quantkit.recipes.recipe import Choice, Recipe, Rule

from ..conftest import Run
from ..support.compare import assert_equal
from .faults import CONFIG, QUICK, SOURCE, WEIGHTS, Message, edit_json, edit_tensors, refused

HEAD = "lm_head"


@pytest.mark.fault(28)
@pytest.mark.parametrize(
    ("content", "found", "expected", "remedy"),
    [
        (None, "No such file or directory", "expected a readable JSON file", "Check that it exists"),
        (b"", "the file is empty", "expected a JSON object", "Download the file again"),
        (b"{", "the file is invalid (", "expected a JSON object", "Download the file again"),
        (b'"llama"', "the file is 'llama'", "expected a JSON object", "Download the file again"),
        (b"[" * 100_000, "nested too deeply", "expected a few levels of JSON", "Download the file again"),
        (b'{"a": 1, "a": 2}', "key 'a' occurs twice", "expected once", "Write the file again"),
    ],
    ids=["missing", "empty", "cut", "string", "deep", "duplicate"],
)
@pytest.mark.parametrize("command", ["quantize", "generate"])
def test_a_config_that_is_no_config(
    run: Run,
    source: Path,
    out: Path,
    command: str,
    content: bytes | None,
    found: str,
    expected: str,
    remedy: str,
) -> None:
    path = source / CONFIG
    path.unlink() if content is None else path.write_bytes(content)
    rest = out if command == "quantize" else "hello"
    refused(
        run,
        (command, source, rest),
        CheckpointError,
        Message(path, found, expected, remedy),
        source.parent,
    )


@pytest.mark.fault(29)
@pytest.mark.parametrize("model_type", ["martian", None, 3, ["llama"]])
def test_an_unknown_architecture(run: Run, source: Path, out: Path, model_type: object) -> None:
    edit_json(source / CONFIG, lambda config: config.update(model_type=model_type))
    message = Message(
        source / CONFIG,
        f"'model_type' is {model_type!r}",
        "expected an architecture of transformers",
        "install a transformers that knows the architecture",
    )
    refused(run, ("quantize", source, out), CheckpointError, message, source.parent)


@pytest.mark.fault(30)
@pytest.mark.parametrize("command", ["quantize", "generate"])
def test_code_of_a_repository_is_never_run(run: Run, source: Path, out: Path, command: str) -> None:
    ran = source.parent / "ran"
    (source / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    remote = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    edit_json(source / CONFIG, lambda config: config.update(auto_map=remote))
    message = Message(
        source / CONFIG,
        f"auto_map is {remote}",
        "expected an architecture of transformers",
        "use --allow-auto-map to ignore it",
    )
    rest = out if command == "quantize" else "hello"
    refused(run, (command, source, rest), CheckpointError, message, source.parent)
    if command == "quantize":
        done = run("quantize", source, out, *QUICK, "--allow-auto-map")
        assert done.code == 0
        assert f"note: {source / CONFIG}: auto_map is ignored; the code that it names is not run" in done.err
        assert "auto_map" not in json.loads((out / CONFIG).read_text())
        assert not (out / "evil.py").exists()
    assert not ran.exists()


@pytest.mark.fault(31)
@pytest.mark.parametrize(
    ("config", "tensor", "found"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, None, "has quant_method 'awq'"),
        ({"quantization_config": {"quant_method": "gptq"}}, None, "has quant_method 'gptq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, None, "has quant_method 'fp8'"),
        ({"text_config": {"quantization_config": {"quant_method": "x"}}}, None, "has quant_method 'x'"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "'compressed-tensors'"),
        ({"compression_config": "x"}, None, "compression_config of config.json is 'x'"),
        ({}, "model.layers.0.mlp.up_proj.qweight", "up_proj.qweight' is F32 [2] with ["),
        ({}, "model.layers.0.mlp.up_proj.weight", "up_proj.weight' is U8 [2] alone"),
    ],
)
def test_a_source_that_is_quantized_in_an_unknown_way(
    run: Run, source: Path, out: Path, config: dict[str, Any], tensor: str | None, found: str
) -> None:
    edit_json(source / CONFIG, lambda known: known.update(config))
    if tensor is not None:
        codes = torch.ones(2, dtype=torch.uint8 if tensor.endswith(".weight") else torch.float32)
        edit_tensors(source / WEIGHTS, lambda tensors: tensors.update({tensor: codes}))
    message = Message(source, found, "expected plain weights", "Start from the original checkpoint")
    refused(run, ("quantize", source, out), CheckpointError, message, source.parent)


@pytest.mark.fault(31)
def test_the_output_of_quantkit_is_quantized_already(run: Run, out: Path) -> None:
    assert run("quantize", SOURCE, out, *QUICK).code == 0
    message = Message(out, "quant_method 'quantkit'", "expected plain weights", "Start from the original")
    refused(run, ("quantize", out, out.with_name("again")), CheckpointError, message, out.parent)


@pytest.mark.fault(32)
def test_a_group_size_that_does_not_divide_a_row_is_stored_and_said(run: Run, out: Path) -> None:
    done = run("quantize", SOURCE, out, "-g", "64", *QUICK)
    assert done.code == 0
    assert (
        "note: only quantkit can load this: model.layers.0.mlp.down_proj: compressed-tensors needs groups "
        "that divide 172, not 64; --group-size channel does (one of 5 linears)."
    ) in done.err
    scale = load_file(out / WEIGHTS)["model.layers.0.mlp.down_proj.weight_scale"]
    assert scale.shape == (64, 3)
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(33)
@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        (
            ("-f", "int9"),
            FormatError,
            Message("unknown format", "'int9'", "known are int8, int7", "int4, int3"),
        ),
        *(
            (
                ("-g", size),
                UsageError,
                Message("group size", repr(size), "a positive integer, 'channel' or 'tensor'", "'channel'"),
            )
            for size in ("0", "-5", "2147483648", "1048577", "1.5", "many")
        ),
    ],
)
def test_formats_and_group_sizes_that_do_not_exist(
    run: Run, out: Path, options: tuple[str, ...], kind: type[UsageError | FormatError], message: Message
) -> None:
    for command in (("quantize", SOURCE, out), ("plan", SOURCE)):
        refused(run, (*command, *options), kind, message, out.parent)


@pytest.mark.fault(33)
@pytest.mark.parametrize("size", [0, -5, 2**31])
def test_group_sizes_in_python(out: Path, size: int) -> None:
    with pytest.raises(FormatError, match=rf"group size {size} is out of range; use 1 to \d+, 'channel'"):
        quantkit.quantize(SOURCE, out, group_size=size)
    assert not out.exists()


@pytest.mark.fault(34)
def test_patterns_are_globs_that_cannot_take_forever() -> None:
    """Translated to a backtracking expression, this pattern would take longer than the universe has."""
    names = {f"model.{'a' * 500}.{i}": torch.float32 for i in range(50)}
    recipe = Recipe(rules=(Rule("*a" * 60 + "*b", Choice("int8")),))
    with pytest.raises(UsageError, match="matches no linear"):
        recipe.fates(names, {}, {})


@pytest.mark.fault(34)
@pytest.mark.parametrize("pattern", ["(a+)+$", "[", "*.nothing", "(?P<x>"])
def test_patterns_that_match_nothing(run: Run, out: Path, pattern: str) -> None:
    message = Message(
        f"rule {pattern!r}",
        "matches no linear of the model",
        "Names look like 'model.layers.0.mlp.down_proj'",
        "correct the pattern",
    )
    refused(run, ("quantize", SOURCE, out, "--rule", f"{pattern}=int8"), UsageError, message, out.parent)


@pytest.mark.fault(35)
def test_a_rule_that_never_applies(run: Run, out: Path) -> None:
    rules = ("--rule", "*proj=int8", "--rule", "*.q_proj=int4")
    message = Message(
        "rule '*.q_proj'", "never applies", "earlier rules match all it matches", "Move it up or drop it"
    )
    refused(run, ("quantize", SOURCE, out, *rules), UsageError, message, out.parent)


@pytest.mark.fault(35)
def test_the_first_rule_that_matches_decides_and_the_plan_says_which(run: Run) -> None:
    layers = json.loads(
        run("plan", SOURCE, "--rule", "*.0.*.q_proj=int8", "--rule", "*.q_proj=int6", "--json").out
    )["layers"]
    first, second = (layers[f"model.layers.{i}.self_attn.q_proj"] for i in (0, 1))
    assert first["scheme"].startswith("int8") and first["reason"] == "rule '*.0.*.q_proj'"
    assert second["scheme"].startswith("int6") and second["reason"] == "rule '*.q_proj'"


@pytest.mark.fault(36)
@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (
            "*.k_proj=int8",
            "model.layers.0.self_attn.q_proj int4 g4 bfloat16, model.layers.0.self_attn.k_proj int8",
        ),
        ("*.up_proj=keep", "model.layers.0.mlp.gate_proj int4 g4 bfloat16, model.layers.0.mlp.up_proj dense"),
    ],
)
def test_linears_that_engines_fuse_in_different_schemes_are_said(
    run: Run, out: Path, rule: str, found: str
) -> None:
    done = run("quantize", SOURCE, out, "-g", "4", "--rule", rule, *QUICK)
    assert done.code == 0
    assert (
        "note: vLLM and SGLang cannot load this: they fuse these linears, which then need one scheme: "
        in done.err
    )
    assert found in done.err
    assert run("verify", out, "--no-reload").code == 0


@pytest.mark.fault(37)
def test_a_packed_head_is_untied_and_said(run: Run, out: Path) -> None:
    done = run("quantize", SOURCE, out, "-g", "4", "--lm-head", "int8", *QUICK)
    assert done.code == 0
    assert (
        "note: lm_head and the embedding are stored apart: packed, it can no longer be tied to it."
        in done.err
    )
    assert json.loads((SOURCE / CONFIG).read_text())["tie_word_embeddings"] is True
    assert json.loads((out / CONFIG).read_text())["tie_word_embeddings"] is False
    model = quantkit.load(out, device="cpu")
    embedding = load_file(SOURCE / WEIGHTS)["model.embed_tokens.weight"]
    assert_equal(model.get_input_embeddings().weight, embedding)
    # Packed from the embedding, and no longer it.
    assert "packed" in "".join(dict(model.lm_head.named_parameters()))


@pytest.mark.fault(37)
def test_a_packed_head_that_the_config_ties_is_refused(run: Run, out: Path) -> None:
    assert run("quantize", SOURCE, out, "-g", "4", "--lm-head", "int8", *QUICK).code == 0
    edit_json(out / CONFIG, lambda config: config.update(tie_word_embeddings=True))
    message = Message(
        "'lm_head'",
        "is packed",
        "config.json ties its weight to the embedding",
        '"tie_word_embeddings": false',
    )
    refused(run, ("generate", out, "hello"), CheckpointError, message, out.parent)


@pytest.mark.fault(38)
def test_a_tied_weight_is_stored_once_and_one_again_when_loaded(run: Run, out: Path) -> None:
    assert run("quantize", SOURCE, out, *QUICK).code == 0
    assert "lm_head.weight" not in load_file(out / WEIGHTS)
    model = quantkit.load(out, device="cpu")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()


@pytest.mark.fault(38)
def test_a_tied_weight_that_the_file_has_twice(run: Run, source: Path, out: Path) -> None:
    edit_tensors(
        source / WEIGHTS,
        lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}),
    )
    assert run("quantize", source, out, *QUICK).code == 0
    model = quantkit.load(out, device="cpu")
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
