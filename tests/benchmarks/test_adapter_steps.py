"""The benchmark of steps of LoRA, on a small model on a CPU."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="PEFT is not installed")
SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def test_both_models_take_steps(
    benchmark: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(benchmark, "SIZES", SMALL)
    out = tmp_path / "steps.json"
    sizes = ["--layers", "1", "--batch", "1,2", "--length", "16", "--steps", "4"]
    benchmark.main([*sizes, "--device", "cpu", "--work", str(tmp_path / "work"), "--json", str(out)])
    found = json.loads(out.read_text())
    assert found["rows"].keys() == {"dense", "packed"} and "torch" in found["machine"]
    for rows in found["rows"].values():
        assert rows.keys() == {"1", "2"}
        assert all(one["seconds_per_step"] > 0 for one in rows.values())
