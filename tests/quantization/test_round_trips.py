"""Every kind of format, scale and zero-point goes from a checkpoint into a model and back."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from quantkit.calibrate.methods import quantize_tensor
from quantkit.packing.scale_types import SCALE_DTYPES
from quantkit.quantization import stream
from quantkit.quantizing import quantize
from quantkit.runtime.replace import packed_modules

from ..support.compare import assert_close, assert_equal
from ..tiny.packed import VOCAB, config_of, logits_of, together
from ..tiny.sizes import made_once

KINDS: dict[str, dict[str, Any]] = {
    "nvfp4": {"format": "nvfp4"},
    "mxfp4": {"format": "mxfp4"},
    "int3 e4m3": {"format": "int3", "group_size": 32, "scale_dtype": "e4m3"},
    "int2 float": {"format": "int2", "group_size": 32, "zero_point": "float"},
    "int5 stream": {"format": "int5", "group_size": 32, "packing": "stream"},
    "int4 float e4m3": {"format": "int4", "group_size": 32, "zero_point": "float", "scale_dtype": "e4m3"},
    "ternary": {"format": "ternary"},
    "nf4": {"format": "nf4"},
    "ternary radix": {"format": "ternary", "packing": "radix"},
    "ternary radix e4m3": {"format": "ternary", "packing": "radix", "group_size": 16, "scale_dtype": "e4m3"},
    "fp8": {"format": "fp8"},
    "fp8 tensor": {"format": "fp8", "group_size": "tensor"},
    "int8 tensor": {"format": "int8", "group_size": "tensor"},
    "ternary tensor": {"format": "ternary", "packing": "radix", "group_size": "tensor"},
    "mxfp8": {"format": "mxfp8"},
    "binary-residual": {"format": "binary-residual", "group_size": 32},
    "binary-rank1": {"format": "binary-rank1"},
    "book4": {"format": "book4"},
}
CASES = [("llama", kind) for kind in KINDS]
MIXTURE = (
    *("nvfp4", "int2 float", "ternary radix", "fp8", "mxfp4"),
    *("fp8 tensor", "int8 tensor", "ternary tensor"),
    *("binary-residual", "binary-rank1", "book4"),
)
CASES += [("qwen3_moe", kind) for kind in MIXTURE]
#: The others are in quantkit's own container.
COMPRESSED_TENSORS = {("llama", kind) for kind in ("mxfp8", "int5 stream")} | {
    (family, kind)
    for family in ("llama", "qwen3_moe")
    for kind in ("nvfp4", "fp8", "mxfp4", "fp8 tensor", "int8 tensor")
}
#: In these, what engines fuse has one global scale, or one scale.
SHARED = {(family, kind) for family in ("llama", "qwen3_moe") for kind in ("nvfp4", "fp8 tensor")} | {
    ("llama", kind) for kind in ("int3 e4m3", "int4 float e4m3", "ternary radix e4m3")
}


def write(directory: Path, family: str, **changes: Any) -> Path:
    source = directory / "source"

    def make() -> None:
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config_of(family, **changes)).float()
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        model.save_pretrained(source)

    made_once(source, ("formats", family, changes), make)
    return source


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    return {name: t for path in directory.glob("*.safetensors") for name, t in load_file(path).items()}


def dequantized(source: Path, packed: Path, shared: bool, **options: Any) -> Path:
    """A dense checkpoint of the weights that the packed one stands for."""
    scale_dtype = SCALE_DTYPES.get(options.pop("scale_dtype", None))
    tensors = tensors_of(source)
    weights = [name.removesuffix("_scale") for name in tensors_of(packed) if name.endswith("weight_scale")]
    for members in together(weights) if shared else [[name] for name in weights]:
        # What is fused by engines is quantized as if it were one matrix.
        fused = torch.cat([tensors[name] for name in members])
        stored = quantize_tensor(fused, scale_dtype=scale_dtype, **options).dequantize()
        for name, rows in zip(members, stored.split([len(tensors[n]) for n in members]), strict=True):
            tensors[name] = rows.contiguous()
    return write_dense(source, tensors)


def write_dense(source: Path, tensors: dict[str, torch.Tensor]) -> Path:
    dense = source.parent / "dense"
    dense.mkdir()
    save_file(tensors, dense / "model.safetensors", metadata={"format": "pt"})
    (dense / "config.json").write_bytes((source / "config.json").read_bytes())
    return dense


def as_bytes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[torch.dtype, bytes]]:
    return {name: (t.dtype, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


@pytest.mark.parametrize(("family", "kind"), CASES)
@pytest.mark.sampled(3)
def test_quantize_load_compute_save(tmp_path, prompt, monkeypatch, family, kind):
    monkeypatch.setitem(stream.CHUNK_BYTES, "cpu", 1)  # several chunks per tensor share what is per tensor
    source, out, options = write(tmp_path, family, num_hidden_layers=1), tmp_path / "out", KINDS[kind]
    quantize(source, out, device="cpu", **options)
    method = json.loads((out / "config.json").read_text())["quantization_config"]["quant_method"]
    assert method == ("compressed-tensors" if (family, kind) in COMPRESSED_TENSORS else "quantkit")

    model = AutoModelForCausalLM.from_pretrained(out)
    reference = dequantized(source, out, (family, kind) in SHARED, **options)
    dense = AutoModelForCausalLM.from_pretrained(reference)
    assert_close(logits_of(model, prompt), logits_of(dense, prompt), rtol=1e-5, atol=1e-5)

    model.save_pretrained(tmp_path / "again")
    assert as_bytes(tensors_of(tmp_path / "again")) == as_bytes(tensors_of(out))
    section = [
        json.loads((d / "config.json").read_text())["quantization_config"] for d in (out, tmp_path / "again")
    ]
    assert section[0] == section[1]


RECIPE = """
[default]
format = "fp8"
[[rule]]
match = "*.q_proj"
format = "book4"
[[rule]]
match = "*.o_proj"
format = "binary-rank1"
[[rule]]
match = "*.gate_proj"
format = "binary-residual"
group_size = 32
[[rule]]
match = "*.down_proj"
format = "ternary"
group_size = 16
scale_dtype = "e4m3"
packing = "radix"
"""
MIXED = {
    "q_proj": ["packed", "scale", "global_scale", "codebook"],
    "k_proj": ["packed", "scale"],
    "o_proj": ["packed", "scale", "column_scale"],
    "gate_proj": ["packed", "scale"],
    "down_proj": ["packed", "scale", "global_scale"],
}


def test_one_recipe_mixes_all_kinds(tmp_path, prompt):
    source, out = write(tmp_path, "llama"), tmp_path / "out"
    (tmp_path / "recipe.toml").write_text(RECIPE)
    quantize(source, out, device="cpu", recipe=tmp_path / "recipe.toml")
    section = json.loads((out / "config.json").read_text())["quantization_config"]
    assert section["quant_method"] == "quantkit" and len(section["quantkit"]["schemes"]) == 5

    model = AutoModelForCausalLM.from_pretrained(out)
    tensors, found = tensors_of(source), {}
    for name, module in packed_modules(model):
        weight = f"{name}.weight"
        found[name.split(".")[-1]] = [part for part, _ in module.packed.parts()]
        tensors[weight] = quantize_tensor(tensors[weight], module.scheme).dequantize()
        assert_equal(module.packed.dequantize(), tensors[weight])
    assert {leaf: found[leaf] for leaf in MIXED} == MIXED
    dense = AutoModelForCausalLM.from_pretrained(write_dense(source, tensors))
    assert_close(logits_of(model, prompt), logits_of(dense, prompt), rtol=1e-5, atol=1e-5)

    model.save_pretrained(tmp_path / "again")
    assert as_bytes(tensors_of(tmp_path / "again")) == as_bytes(tensors_of(out))
    again = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert again == section


CASTS = (
    *("nvfp4", "mxfp4", "mxfp8", "fp8", "fp8 tensor", "int4 float e4m3", "int2 float"),
    *("binary-residual", "binary-rank1", "book4"),
)


@pytest.mark.parametrize("kind", CASTS)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.sampled(3)
def test_another_dtype_is_that_of_the_activations(tmp_path, prompt, family, kind):
    source, out = write(tmp_path, family, num_hidden_layers=1), tmp_path / "out"
    quantize(source, out, device="cpu", method="rtn", **KINDS[kind])
    expected = logits_of(AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32), prompt)
    for dtype in (torch.bfloat16, torch.float16):
        loaded = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
        cast = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).to(dtype)
        for model in (loaded, cast):
            found = logits_of(model, prompt)
            assert found.shape == (2, 7, VOCAB)
            assert (found - expected).norm() < 0.1 * expected.norm(), dtype
        if kind in ("nvfp4", "mxfp4", "mxfp8", "int4 float e4m3", "book4"):
            again = tmp_path / str(dtype)
            cast.save_pretrained(again)
            before, after = as_bytes(tensors_of(out)), as_bytes(tensors_of(again))
            parts = ("_scale", "_packed", "zero_point", "_codebook", "proj.weight")
            packed = [name for name in before if name.endswith(parts)]
            assert packed and all(after[name] == before[name] for name in packed)


@pytest.mark.parametrize(
    ("options", "absmax"),
    [({"format": "nvfp4"}, 6), ({"format": "int2", "group_size": 16, "scale_dtype": "e4m3"}, 1)],
    ids=["nvfp4", "int2 e4m3"],
)
def test_linears_that_are_multiplied_at_once_have_one_global_scale(tmp_path, monkeypatch, options, absmax):
    source = write(tmp_path, "llama")
    largest = {name: float(t.abs().max()) for name, t in tensors_of(source).items()}
    written = []
    # However the model is cut into files, and whoever works.
    for shard, workers in ((1 << 10, 1), (1 << 30, 4)):
        monkeypatch.setattr(stream, "worker_count", lambda _, count=workers: count)
        quantize(source, tmp_path / str(shard), **options, max_shard_bytes=shard)
        written.append(tensors_of(tmp_path / str(shard)))
    few, one = written
    assert few.keys() == one.keys() and as_bytes(few) == as_bytes(one)
    layer, top = "model.layers.0.", 448 * absmax
    for members in (
        ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        ("mlp.gate_proj", "mlp.up_proj"),
    ):
        expected = top / max(largest[f"{layer}{member}.weight"] for member in members)
        for member in members:
            found = one[f"{layer}{member}.weight_global_scale"]
            assert found.item() == pytest.approx(expected, rel=1e-6)
    alone = one[f"{layer}mlp.down_proj.weight_global_scale"].item()
    assert alone == pytest.approx(top / largest[f"{layer}mlp.down_proj.weight"], rel=1e-6)


@pytest.mark.parametrize(
    ("family", "options", "members"),
    [
        ("llama", {"format": "book4"}, "self_attn.{}_proj"),
        ("llama", {"format": "binary-rank1", "scale_dtype": "e4m3"}, "self_attn.{}_proj"),
        ("qwen3_moe", {"format": "int2", "group_size": 16, "scale_dtype": "e4m3"}, "mlp.experts.{}.up_proj"),
    ],
    ids=["code books", "column scales", "experts"],
)
def test_matrices_that_are_not_joined_have_global_scales_of_their_own(tmp_path, family, options, members):
    source = write(tmp_path, family)
    quantize(source, tmp_path / "out", **options)
    found, layer = tensors_of(tmp_path / "out"), "model.layers.0."
    names = [members.format(one) for one in ("qkv" if family == "llama" else "01")]
    names += [one.replace("up_proj", "gate_proj") for one in names if "experts" in one]
    scales = {found[f"{layer}{name}.weight_global_scale"].item() for name in names}
    assert len(scales) == len(names)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "mixtral"])
def test_linears_that_engines_fuse_have_one_scale_where_each_has_one(tmp_path, family):
    source = write(tmp_path, family)
    rule = "*.1.self_attn.k_proj=fp8:channel"
    quantize(source, tmp_path / "out", format="fp8", group_size="tensor", rules=(rule,))
    scales = {n: t for n, t in tensors_of(tmp_path / "out").items() if n.endswith("_scale")}
    attention, other = (f"model.layers.{layer}.self_attn." for layer in (0, 1))
    q, k, v, o = (scales[f"{attention}{leaf}_proj.weight_scale"] for leaf in "qkvo")
    assert q.shape == (1,) and q == k == v != o
    # One of another scheme is not fused with the others.
    assert scales[f"{other}q_proj.weight_scale"] != scales[f"{other}v_proj.weight_scale"]
    names = {
        "llama": ("mlp.gate_proj", "mlp.up_proj"),
        "qwen3_moe": ("mlp.experts.2.gate_proj", "mlp.experts.2.up_proj"),
        "mixtral": ("block_sparse_moe.experts.2.w1", "block_sparse_moe.experts.2.w3"),
    }[family]
    gate, up = (scales[f"model.layers.0.{name}.weight_scale"] for name in names)
    assert gate == up
    assert family == "llama" or gate != scales[f"model.layers.0.{names[0].replace('2', '1', 1)}.weight_scale"]


def test_int8_per_tensor_is_not_fused_by_engines_and_has_scales_of_its_own(tmp_path):
    source = write(tmp_path, "llama")
    quantize(source, tmp_path / "out", format="int8", group_size="tensor")
    tensors, weights = tensors_of(tmp_path / "out"), tensors_of(source)
    for leaf in ("q_proj", "k_proj", "v_proj"):
        name = f"model.layers.0.self_attn.{leaf}.weight"
        expected = quantize_tensor(weights[name], "int8", group_size="tensor").scale
        assert_equal(tensors[f"{name}_scale"], expected)
