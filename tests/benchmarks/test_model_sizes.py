"""Sizes are those of a whole checkpoint of the same shapes."""

from pathlib import Path
from types import ModuleType

import pytest
import transformers

import quantkit
from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.gpu_memory import gpu_memory
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.recipes.recipe_options import RecipeOptions


@pytest.mark.parametrize("tied", [False, True])
def test_headers_alone_have_the_size_of_the_real_checkpoint(
    benchmark: ModuleType, tmp_path: Path, tied: bool
) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=3, num_experts_per_tok=2,
        tie_word_embeddings=tied,
    )  # fmt: skip
    found = benchmark.measure(config)
    benchmark.write_headers(config, tmp_path / "headers")
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path / "real")
    shards = {name: (tmp_path / name / "model.safetensors").stat().st_size for name in ("headers", "real")}
    assert found["bf16"] == shards["headers"]
    assert abs(shards["headers"] - shards["real"]) < 1000  # their headers differ
    out = quantkit.quantize(tmp_path / "real", tmp_path / "out", format="int4")
    assert found["int4"] == out.plan.output_bytes
    assert found["kv_cache_per_token"] == 2 * 2 * (2 * 16) * 2


def test_an_8b_trains_on_one_gpu_of_80_gb(benchmark: ModuleType, tmp_path: Path) -> None:
    benchmark.write_headers(benchmark.MODELS["meta-llama/Llama-3.1-8B-Instruct"], tmp_path)
    recipe = RecipeOptions(format="int2", group_size=64, scale_dtype="e4m3", method="distill")
    checkpoint, planned = plan(tmp_path, QuantizeOptions(recipe, device="cuda"))
    calibration = CalibrationOptions()
    least = gpu_memory(checkpoint, planned, calibration)
    # The original, the student and its gradients take 44 GB.
    assert 45e9 < least.quantizing < 50e9
    assert least.fastest is not None and least.fastest > 116e9
    assert 50e9 < gpu_memory(checkpoint, planned, calibration, 80 * 10**9).quantizing < 70e9
