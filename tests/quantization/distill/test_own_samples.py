"""Samples that the original writes: how many at a time, and models without keys and values."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from quantkit.checkpoint.manifest import read_manifest
from quantkit.quantization.distill.distill_options import DistillOptions
from quantkit.quantization.distill.own_samples import UNKNOWN_BYTES, at_a_time, row_bytes
from quantkit.quantizing import quantize

from ...tiny.calibrated import data, write


def model_of(config: Any) -> Any:
    """A stand-in for a model in bfloat16."""
    return SimpleNamespace(config=config, parameters=lambda: iter([torch.zeros(1, dtype=torch.bfloat16)]))


def test_samples_at_a_time_fit_their_keys_and_values() -> None:
    llama = transformers.LlamaConfig(
        num_hidden_layers=32, hidden_size=4096, num_attention_heads=32, num_key_value_heads=8
    )
    assert row_bytes(model_of(llama)) == UNKNOWN_BYTES == 2 * 32 * 8 * 128 * 2
    assert at_a_time("cuda", 512, UNKNOWN_BYTES) == 256
    assert at_a_time("cuda", 512, 8192) == 2048 and at_a_time("cuda", 1 << 20, UNKNOWN_BYTES) == 1


@pytest.mark.parametrize("name", ["Rwkv", "Mamba", "DeepseekV3"])
def test_configs_that_do_not_tell(name: str) -> None:
    assert row_bytes(model_of(getattr(transformers, f"{name}Config")())) == UNKNOWN_BYTES


def test_a_model_without_attention_writes_samples(tmp_path: Path) -> None:
    source = write(tmp_path / "in", "rwkv")
    options = DistillOptions(steps=2, batch=2)
    given = {"format": "int2", "group_size": 16, "method": "mse,distill", "device": "cpu", "check": False}
    quantize(source, tmp_path / "out", calibration=data(None), distillation=options, **given)
    assert read_manifest(tmp_path / "out")["distillation"]["sequences"]["own"] > 0
