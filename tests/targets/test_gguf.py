"""`export --to gguf`: the values of a packed directory in a file that other readers of GGUF take."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import quantkit
from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES
from quantkit.checkpoint.gguf.rows import halves_of_pairs, pairs_of_halves
from quantkit.checkpoint.manifest import read_manifest, verify_files
from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.verification.against_source import compare_with_source

from ..checkpoint.gguf_files import permuted, tiny_model, tokenizer_metadata, write_gguf
from ..conftest import Run
from ..support.compare import assert_equal
from .conftest import Pack

#: Options of `quantize`, and the type that linears get.
HELD = {
    "Q4_0": {"format": "int4"},
    "Q4_0 of int3, in groups of 64": {"format": "int3", "group_size": 64},
    "Q5_0": {"format": "int5"},
    "Q8_0": {"format": "int8", "group_size": "channel"},
    "Q8_0 of blocks": {"format": "int8", "group_size": "16x32"},
    "Q8_0 of one scale": {"format": "int8", "group_size": "tensor"},
    "MXFP4": {"format": "mxfp4", "scale_dtype": None},
}
REFUSED = {
    "it has integer zero-points": {"format": "int4", "zero_point": "integer"},
    "it has float zero-points": {"format": "int4", "zero_point": "float"},
    "its values are those of nf4": {"format": "nf4"},
    "its values are those of fp8-e4m3": {"format": "fp8"},
    "its groups of 16 in rows of 96 are of no whole groups of 32": {"format": "int4", "group_size": 16},
    "its weights are sums of several values": {"format": "binary-residual"},
    "its code book is fitted to it": {"format": "book4", "scale_dtype": None},
    r"its scale \S+ is no float8_e8m0fnu": {"format": "fp4"},
}
#: Types that `convert` keeps.
GRIDS = sorted(row.name for row in BLOCK_TYPES.values() if row.grid)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def tensors(path: Path) -> dict[str, Any]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("name", GRIDS)
def test_blocks_are_joined_as_they_were(name: str) -> None:
    row = next(row for row in BLOCK_TYPES.values() if row.name == name)
    blocks = torch.randint(0, 256, (64, row.nbytes), dtype=torch.uint8)
    assert row.grid is not None
    assert_equal(row.grid.join(row.grid.split(blocks)), blocks)


def test_heads_are_permuted_as_llama_cpp_does() -> None:
    rows = torch.arange(24 * 5).view(24, 5)
    assert_equal(pairs_of_halves(rows, 8), permuted(rows, 3))
    assert_equal(halves_of_pairs(pairs_of_halves(rows, 8), 8), rows)


@pytest.mark.parametrize("name", HELD)
def test_every_format_that_a_type_holds(pack: Pack, tmp_path: Path, name: str) -> None:
    packed = pack(**HELD[name])
    result = quantkit.export(packed, tmp_path / "out", "gguf")
    assert result.stored["model.layers.0.self_attn.q_proj.weight"] == name.partition(" ")[0]
    assert result.stored["model.norm.weight"] == "F32"
    assert compare_with_source(packed, tmp_path / "out").problems == ()


@pytest.mark.fault(72)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_no_type_holds_is_refused_before_anything_is_written(
    pack: Pack, tmp_path: Path, reason: str
) -> None:
    packed = pack(**REFUSED[reason])
    text = (
        r"'model.layers.0.mlp.down_proj' and 13 more cannot be exported to gguf with the same values: it is"
    )
    with pytest.raises(
        CheckpointError, match=rf"{text} .*, and {reason}; gguf holds .*Q8_0 .* --format int4"
    ):
        quantkit.export(packed, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_without_the_package_the_error_says_what_takes_it(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(format="int4")
    made = quantkit.export(packed, tmp_path / "made", "gguf").directory / "model.gguf"
    monkeypatch.setitem(sys.modules, "gguf", None)
    for use, call in (
        ("writing", lambda: quantkit.export(packed, tmp_path / "out", "gguf")),
        ("reading", lambda: quantkit.convert(made, tmp_path / "back")),
    ):
        with pytest.raises(EnvironmentProblem, match=rf"^{use} GGUF files takes the package gguf, which is"):
            call()
    assert not (tmp_path / "out").exists()


def test_rows_without_whole_groups_are_refused_with_what_can_be_done(pack: Pack, tmp_path: Path) -> None:
    """Whatever the groups: rows of 80 have none of 32. Left dense, the rest is exported."""
    made: dict[str, Any] = {"model": {"intermediate_size": 80}, "format": "int4"}
    for groups in ({}, {"group_size": "channel"}):
        with pytest.raises(CheckpointError) as e:
            quantkit.export(pack(**made, **groups), tmp_path / "out", "gguf")
        assert str(e.value) == (
            "'model.layers.0.mlp.down_proj' and 1 more cannot be exported to gguf with the same values: rows "
            "of 80 have no whole groups of 32, so they cannot be exported as they are. Quantize with --rule "
            "'*.down_proj=keep', which leaves such linears dense, or export to another target."
        )
    result = quantkit.export(pack(**made, rules=("*.down_proj=keep",)), tmp_path / "out", "gguf")
    assert sum(kind.startswith("Q4_0") for kind in result.stored.values()) == 12


@pytest.mark.parametrize(
    "arch, model, options",
    [
        ("llama", {"tie_word_embeddings": True}, {"embeddings": "int8:32"}),
        ("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 8}, {"lm_head": "int8"}),
        ("qwen2", {}, {}),
        ("qwen3", {}, {}),
        ("qwen2moe", {}, {"format": "int8"}),
        ("qwen3moe", {"norm_topk_prob": True}, {"format": "int8"}),
    ],
)
def test_transformers_reads_the_same_weights(
    pack: Pack, tmp_path: Path, arch: str, model: dict[str, Any], options: dict[str, Any]
) -> None:
    """By the package gguf, dequantized; logits are those of quantkit."""
    packed = pack(arch, model, **{"format": "int4", **options})
    result = quantkit.export(packed, tmp_path / "out", "gguf")
    assert set(result.stored.values()) == {"Q4_0" if "format" not in options else "Q8_0", "F32"} | (
        {"Q8_0"} if options else set()
    )
    own = quantkit.load(packed, device="cpu", dtype=torch.float32).dequantize()
    # Of the size of heads and experts transformers takes the default, whatever the file says.
    dense = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", gguf_file="model.gguf", dtype=torch.float32, config=own.config
    ).eval()
    state = own.state_dict()
    for name, weights in dense.state_dict().items():
        assert_equal(weights, state[name], name)
    ids = torch.arange(40).view(2, 20)
    with torch.inference_mode():
        expected, found = own(ids).logits, dense(ids).logits
    assert float((found - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize("arch, found", [("qwen2moe", True), ("qwen3moe", False)])
def test_what_llama_cpp_computes_otherwise_is_refused(
    pack: Pack, tmp_path: Path, arch: str, found: bool
) -> None:
    """llama.cpp normalizes the weights of experts by the architecture; its logits were another model's."""
    packed = pack(arch, {"norm_topk_prob": found}, format="int8")
    with pytest.raises(
        CheckpointError, match=rf"norm_topk_prob is {found}; .* {arch[:5]}_moe with {not found}"
    ):
        quantkit.export(packed, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "arch, model, text",
    [
        ("qwen3", {"attention_bias": True}, "no tensor for 'model.layers.0.self_attn.k_proj.bias'"),
        ("qwen2", {"head_dim": 8}, "head_dim is 8; llama.cpp computes qwen2 with 16, hidden_size /"),
        (
            "qwen2",
            {"rope_parameters": LLAMA3},
            "rope_type is 'llama3'; quantkit exports qwen2 with default to",
        ),
        (
            "llama",
            {"rope_parameters": {**LLAMA3, "low_freq_factor": 2.0}},
            "low_freq_factor of the rotary embedding is 2.0; quantkit exports 1.0 to GGUF",
        ),
        ("llama", {"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp computes llama with 'silu'"),
    ],
)
def test_what_llama_cpp_does_not_load_is_refused(
    pack: Pack, tmp_path: Path, arch: str, model: dict[str, Any], text: str
) -> None:
    with pytest.raises(CheckpointError, match=re.escape(text)):
        quantkit.export(pack(arch, model, format="int8"), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_the_context_of_a_file_is_the_sliding_window(pack: Pack, tmp_path: Path) -> None:
    """A base of rotary embeddings without a point is a float32, as llama.cpp takes no other."""
    packed = pack(format="int4")
    config = json.loads((packed / "config.json").read_text())
    rope = {"rope_type": "default", "rope_theta": 500}
    changed = {**config, "model_type": "mistral", "sliding_window": 16, "rope_parameters": rope}
    (packed / "config.json").write_text(json.dumps(changed))
    result = quantkit.export(packed, tmp_path / "out", "gguf")
    assert "the file's context is the window, 16 tokens" in " ".join(result.notes)
    fields = gguf.GGUFReader(tmp_path / "out/model.gguf").fields
    assert fields["llama.context_length"].contents() == 16
    assert fields["llama.rope.freq_base"].types == [gguf.GGUFValueType.FLOAT32]


@pytest.mark.parametrize("name, written", [("my-Phi-3", False), ("mine", True)])
def test_a_name_by_which_llama_cpp_chooses_rules_is_left_out(
    pack: Pack, tmp_path: Path, name: str, written: bool
) -> None:
    """llama.cpp looks for tokens of Phi-3 by it, and does not load a vocabulary without them."""
    packed = pack(format="int8").rename(tmp_path / name)
    quantkit.export(packed, tmp_path / "out", "gguf")
    assert ("general.name" in gguf.GGUFReader(tmp_path / "out/model.gguf").fields) == written


def test_a_file_that_was_converted_is_written_again(tmp_path: Path, run: Run) -> None:
    """Block by block, with its tokenizer and template."""
    types = {"token_embd.weight": "Q8_0"}
    source = write_gguf(
        tmp_path / "tiny.gguf",
        "llama",
        tiny_model("llama", vocab_size=264, tie_word_embeddings=True),
        lambda name, shape: types.get(name, "Q4_1" if len(shape) == 2 else "F32"),
        **tokenizer_metadata(),
    )
    quantkit.convert(source, tmp_path / "packed")
    done = run("export", tmp_path / "packed", tmp_path / "out", "--to", "gguf", "--json")
    assert done.code == 0, done.err
    assert json.loads(done.out)["stored"]["model.embed_tokens.weight"] == "Q8_0"
    stored, written = tensors(source), tensors(tmp_path / "out/model.gguf")
    assert stored.keys() == written.keys()
    for name, tensor in stored.items():
        assert tensor.tensor_type == written[name].tensor_type, name
        assert np.array_equal(tensor.data, written[name].data), name
    fields = [gguf.GGUFReader(path).fields for path in (source, tmp_path / "out/model.gguf")]
    for key in fields[0]:
        if key.startswith(("tokenizer", "llama")) and not key.endswith("eot_token_id"):
            before, after = (one[key].contents() for one in fields)
            # transformers gives the last row of the embedding a token.
            assert (after[: len(before)] if isinstance(before, list) else after) == before, key
    words = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        words("hello")["input_ids"]
        == AutoTokenizer.from_pretrained(tmp_path / "packed")("hello")["input_ids"]
    )
    assert words.chat_template and (tmp_path / "out/generation_config.json").is_file()
    manifest = read_manifest(tmp_path / "out")
    assert manifest["export"]["to"] == "gguf" and not verify_files(tmp_path / "out", manifest)
    assert "quantization_config" not in json.loads((tmp_path / "out/config.json").read_text())


@pytest.mark.parametrize("name", GRIDS)
def test_every_type_that_convert_keeps_is_written_again(tmp_path: Path, name: str) -> None:
    # Blocks of TQ2_0 have 256 weights.
    model = tiny_model("llama", hidden_size=256, intermediate_size=256, head_dim=64)
    source = write_gguf(
        *(tmp_path / "tiny.gguf", "llama", model),
        lambda tensor, shape: name if tensor.startswith("blk") and len(shape) == 2 else "F32",
    )
    quantkit.convert(source, tmp_path / "packed")
    quantkit.export(tmp_path / "packed", tmp_path / "out", "gguf")
    stored, written = tensors(source), tensors(tmp_path / "out/model.gguf")
    assert stored["blk.1.attn_q.weight"].tensor_type.name == name
    for tensor, found in stored.items():
        assert found.tensor_type == written[tensor].tensor_type, tensor
        assert np.array_equal(found.data, written[tensor].data), tensor


def test_rotary_scaling_of_llama_3_is_a_tensor(pack: Pack, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    packed = pack(format="int4")
    config = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**config, "rope_parameters": scaling, "head_dim": 16}))
    quantkit.export(packed, tmp_path / "out", "gguf")
    found = quantkit.convert(tmp_path / "out/model.gguf", tmp_path / "again").plan.model_config
    assert found["rope_parameters"] == scaling
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    (packed / "config.json").write_text(json.dumps({**config, "rope_parameters": yarn}))
    with pytest.raises(
        CheckpointError, match="rope_type is 'yarn'; quantkit exports llama with default and llama3"
    ):
        quantkit.export(packed, tmp_path / "other", "gguf")


def test_what_is_no_packed_directory_of_a_known_model(
    pack: Pack, sources: Any, tmp_path: Path, run: Run
) -> None:
    done = run("export", sources("llama"), tmp_path / "out", "--to", "gguf")
    assert done.code == 3 and "is no packed directory of quantkit" in done.err
    done = run("export", sources("llama"), tmp_path / "out", "--to", "onnx")
    assert done.code == 2 and "unknown target 'onnx'; known are gptq, awq, gguf, mlx" in done.err
    done = run("export", pack("gemma2", format="int8"), tmp_path / "out", "--to", "gguf")
    assert done.code == 3 and "model_type is 'gemma2'; quantkit exports llama, mistral, qwen2" in done.err
    assert not (tmp_path / "out").exists()


@pytest.mark.fault(72)
def test_a_value_that_differs_leaves_the_export_unfinished(
    pack: Pack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = pack(format="int4")
    monkeypatch.setattr("quantkit.targets.gguf.pairs_of_halves", lambda rows, size: rows)
    with pytest.raises(
        CheckpointError, match=r"tensor 'model.layers.0.self_attn.k_proj.weight' has at \[1, 0"
    ):
        quantkit.export(packed, tmp_path / "out", "gguf")
    assert not (tmp_path / "out/config.json").exists()
