"""GGUF files for llama.cpp's own quantizer, and their weights."""

import json
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

import quantkit
from quantkit.checkpoint.open_source import open_source


def test_a_dense_file_has_every_weight(benchmark: ModuleType, stories: Path, tmp_path: Path) -> None:
    benchmark.write_dense(stories, tmp_path / "dense.gguf")
    bits, _ = benchmark.dequantize(tmp_path / "dense.gguf", stories, tmp_path / "out")
    source = open_source(stories)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == set(source.tensors)
    for name, tensor in found.items():
        assert tensor.dtype == torch.float32 and torch.equal(tensor, source.read(name).float()), name
    linear = source.tensors["model.layers.0.mlp.up_proj.weight"]
    assert bits == 8 * linear.nbytes / linear.elements
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").exists()


def test_bits_are_those_of_the_linears_in_the_file(
    benchmark: ModuleType, stories: Path, tmp_path: Path
) -> None:
    packed = tmp_path / "packed"
    given = {"format": "int4", "group_size": 32, "scale_dtype": "float16", "method": "rtn"}
    # Rows of 172 are no whole blocks.
    quantkit.quantize(stories, packed, **given, rules=["*.q_proj=int8:32", "*.down_proj=keep"])
    quantkit.export(packed, tmp_path / "exported", "gguf")
    bits, kinds = benchmark.dequantize(tmp_path / "exported" / "model.gguf", stories, tmp_path / "out")
    source = open_source(stories)
    linears = {name: one for name, one in source.tensors.items() if "_proj" in name}
    eights = sum(one.elements for name, one in linears.items() if "q_proj" in name)
    dense = [one for name, one in linears.items() if "down_proj" in name]
    elements, others = (sum(one.elements for one in some) for some in (linears.values(), dense))
    expected = 4.5 * (elements - eights - others) + 8.5 * eights + 8 * sum(one.nbytes for one in dense)
    assert bits == pytest.approx(expected / elements)
    assert set(kinds.split(" and ")) == {"25 Q4_0", "5 Q8_0", f"5 {dense[0].dtype}"}


def test_llama_cpp_quantizes_the_file(benchmark: ModuleType, stories: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    benchmark.write_dense(stories, tmp_path / "dense.gguf")
    benchmark.quantize_file(tmp_path / "dense.gguf", tmp_path / "small.gguf", "Q8_0")
    _, kinds = benchmark.dequantize(tmp_path / "small.gguf", stories, tmp_path / "out")
    # Rows of 172 are no whole blocks.
    assert kinds == "30 Q8_0 and 5 F16"
    source, found = open_source(stories), load_file(tmp_path / "out" / "model.safetensors")
    for name in ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"):
        weight = source.read(name).float()
        same = torch.equal(found[name], weight)
        assert same == ("embed" in name) and (found[name] - weight).abs().max() < weight.abs().max() / 200
    with pytest.raises(RuntimeError, match=r"llama.cpp made no Q4_0 of small.gguf: code 1"):
        benchmark.quantize_file(tmp_path / "small.gguf", tmp_path / "tiny.gguf", "Q4_0")


def test_an_importance_matrix_is_the_mean_square_of_inputs(benchmark: ModuleType, stories: Path) -> None:
    sequences = [list(range(3, 19)), list(range(40, 56))]
    found = benchmark.importance(stories, sequences)
    assert len(found) == 36 and found["blk.4.ffn_down.weight"].shape == (172,)
    assert found["blk.0.attn_q.weight"].equal(found["blk.0.attn_v.weight"])
    # The slow way, for the first linear: its inputs are the normed embeddings.
    source = open_source(stories)
    rows = source.read("model.embed_tokens.weight").float()[torch.tensor(sequences)]
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + source.config["rms_norm_eps"])
    normed = rows * source.read("model.layers.0.input_layernorm.weight").float()
    torch.testing.assert_close(found["blk.0.attn_q.weight"], normed.square().mean(dim=(0, 1)))


def test_llama_cpp_takes_the_importance_matrix(benchmark: ModuleType, stories: Path, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    benchmark.write_dense(stories, tmp_path / "dense.gguf")
    weights = benchmark.importance(stories, [list(range(3, 67))])
    name, files = "model.layers.0.self_attn.q_proj.weight", {}
    for label, given in (("plain", {}), ("weighted", weights)):
        benchmark.quantize_file(tmp_path / "dense.gguf", tmp_path / f"{label}.gguf", "Q4_0", given)
        benchmark.dequantize(tmp_path / f"{label}.gguf", stories, tmp_path / label)
        files[label] = load_file(tmp_path / label / "model.safetensors")[name]
    error = {label: (one - open_source(stories).read(name).float()).square() for label, one in files.items()}
    of_columns = weights["blk.0.attn_q.weight"]
    assert (error["weighted"] * of_columns).sum() < (error["plain"] * of_columns).sum()
