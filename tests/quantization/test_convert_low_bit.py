"""Converting models that other tools packed: every value stays, in files, in a module and in its logits."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import quantkit
from quantkit.checkpoint.manifest import read_manifest
from quantkit.errors import CheckpointError
from quantkit.recipes.recipe import Recipe
from quantkit.verification.against_source import compare_with_source

from ..checkpoint.low_bit.makers import Made, awq, gptq, mlx, nvfp4, pack_quantized
from ..support.compare import assert_close, assert_equal
from ..tiny.calibrated import write
from .test_low_bit_sources import fp8_source, gpt_oss_source


def source_of(directory: Path, make: Callable[[int, int], Made]) -> Path:
    """A llama whose linears are random in the format of a maker."""
    source = write(directory, intermediate_size=96)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            torch.manual_seed(len(tensors))
            made = make(*tensor.shape)
            tensors |= {name.removesuffix("weight") + part[2:]: value for part, value in made.parts.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": made.section}))
    return source


MAKERS = {
    "int4 g32 asym float16": lambda rows, columns: gptq(4, rows, columns, 32),
    "int4 g16 asym float16": lambda rows, columns: awq(rows, columns, 16),
    "int4 g32 asym bfloat16": lambda rows, columns: pack_quantized(4, rows, columns, 32),
    "fp4-e2m1 g16 e4m3": nvfp4,
    "int4 g32 asym-min float16": lambda rows, columns: mlx(4, rows, columns, 32),
}


@pytest.mark.parametrize("scheme", MAKERS)
def test_models_of_other_tools_keep_their_values(scheme: str, tmp_path: Path) -> None:
    source = source_of(tmp_path, MAKERS[scheme])
    result = quantkit.convert(source, tmp_path / "out")
    assert {str(layer.scheme) for layer in result.plan.layers if layer.scheme} == {scheme}
    compared = compare_with_source(tmp_path / "out", source)
    assert (compared.packed, compared.problems) == (21, ())


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_fp8_blocks_keep_one_scale_each(family: str, tmp_path: Path) -> None:
    """Also where the last block of a matrix has fewer rows or columns, and in experts."""
    source = fp8_source(tmp_path, family, **({"intermediate_size": 80} if family == "llama" else {}))
    result = quantkit.convert(source, tmp_path / "out")
    layers = [layer for layer in result.plan.layers if layer.scheme]
    assert {layer.fate.scheme.format.name for layer in layers if layer.fate.scheme} == {"fp8-e4m3"}
    before, after = load_file(source / "model.safetensors"), load_file(tmp_path / "out/model.safetensors")
    for layer in layers:
        rows, columns = layer.linear.shape
        assert layer.scheme is not None
        if rows > 32 or columns > 32:
            assert layer.scheme.granularity == ("32x32" if columns > 32 else "32xK")
        for name in layer.linear.stored:
            scale = before[f"{name}.weight_scale_inv"].flatten()
            assert_equal(after[f"{name}.weight_scale"].flatten(), scale)
    compared = compare_with_source(tmp_path / "out", source)
    assert compared.packed == sum(len(one.linear.stored) for one in layers)
    assert compared.problems == ()


def test_fp8_blocks_are_a_block_strategy_that_loads_and_is_saved(tmp_path: Path) -> None:
    source = fp8_source(tmp_path, intermediate_size=96)
    result = quantkit.convert(source, tmp_path / "out")
    assert result.plan.readers == ("transformers",)
    section = json.loads((tmp_path / "out/config.json").read_text())["quantization_config"]
    (group,) = section["config_groups"].values()
    assert (group["weights"]["strategy"], group["weights"]["group_size"]) == ("block", None)
    assert group["weights"]["block_structure"] == [32, 32]
    model = quantkit.load(tmp_path / "out", device="cpu", dtype=torch.float32)
    model.save_pretrained(tmp_path / "saved")
    first, again = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "saved"))
    assert first.keys() == again.keys()
    for name, tensor in first.items():
        if "_proj.weight" in name:
            assert_equal(again[name].view(torch.uint8), tensor.view(torch.uint8), name)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        packed, dense = model(ids).logits, model.dequantize()(ids).logits
    assert_close(packed, dense, rtol=1e-4, atol=1e-4)


def test_weights_are_quantized_to_blocks(tmp_path: Path) -> None:
    """In the command line's spelling, with a rule. vLLM reads blocks of 128x128 only."""
    source = write(tmp_path, intermediate_size=96)
    result = quantkit.quantize(
        *(source, tmp_path / "out"),
        format="fp8",
        group_size="32x32",
        rules=("*.o_proj=fp8:16x64",),
        check=True,
    )
    granularities = {layer.scheme.granularity for layer in result.plan.layers if layer.scheme}
    assert granularities == {"32x32", "16xK"}
    assert result.plan.readers == ("transformers",)
    assert Recipe.from_dict(read_manifest(tmp_path / "out")["recipe"]).default.group_size == "32x32"
    assert max(result.relative_errors.values()) < 2e-3
    tensors = load_file(tmp_path / "out/model.safetensors")
    scale = tensors["model.layers.0.mlp.down_proj.weight_scale"]
    weight = load_file(source / "model.safetensors")["model.layers.0.mlp.down_proj.weight"]
    assert_equal(scale, quantkit.quantize_tensor(weight, "fp8", group_size="32x32").scale)
    assert scale.shape == (2, 3)


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """They are in one tensor for all, with rows of gate and up in turn."""
    source = gpt_oss_source(tmp_path / "source")
    result = quantkit.convert(source, tmp_path / "out")
    schemes = {str(layer.scheme) for layer in result.plan.layers if layer.linear.kind == "experts"}
    assert schemes == {"fp4-e2m1 g32 e8m0"}
    compared = compare_with_source(tmp_path / "out", source)
    assert compared.problems == ()
    assert compared.packed == 2 * 4 * 3


def test_what_has_no_scheme_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    source = source_of(tmp_path, lambda rows, columns: gptq(4, rows, columns, 32, permuted=True))
    with pytest.raises(
        CheckpointError, match=r"and 20 more cannot be converted exactly: tensor '.*' is GPTQ: its"
    ):
        quantkit.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    quantkit.quantize(source, tmp_path / "out", format="int8", method="rtn")
