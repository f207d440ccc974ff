"""Bits per weight count logical weights, whoever packed them."""

import json
from pathlib import Path

import pytest

from quantkit.checkpoint.manifest import MANIFEST_NAME
from quantkit.checkpoint.source import Checkpoint
from quantkit.eval import eval_model
from quantkit.eval.eval_model import open_evaluated
from quantkit.eval.sizes import measure
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize_checkpoint
from quantkit.recipes.recipe_options import RecipeOptions

from ..quantization.test_plan import write


@pytest.mark.parametrize("format", ["int4", "int8", "fp8", "nvfp4", "mxfp4"])
def test_a_checkpoint_of_another_tool_has_the_bits_of_the_same_bytes(tmp_path: Path, format: str) -> None:
    """Words and pairs of codes count as the weights that they hold: the same as with quantkit's section."""
    out = tmp_path / "out"
    options = RecipeOptions(format=format, group_size=4 if format == "int4" else None, method="rtn")
    rules = ("*.down_proj=fp8",) if format in ("nvfp4", "mxfp4") else ()
    recipe = RecipeOptions(**{**vars(options), "rules": rules})
    quantize_checkpoint(write(tmp_path), out, QuantizeOptions(recipe))
    (out / MANIFEST_NAME).unlink()
    own = measure(Checkpoint.open(out))
    path = out / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]["quantkit"]
    path.write_text(json.dumps(config))
    found = measure(Checkpoint.open(out))
    assert found.model == own.model < 16
    assert found.format.startswith("quant_method compressed-tensors, ")
    assert found.linears == pytest.approx(own.linears, rel=0.02)


@pytest.mark.parametrize(
    ("format", "reads"), [("nvfp4", True), ("mxfp4", True), ("mxfp8", True), ("int4", False), ("fp8", False)]
)
def test_formats_that_transformers_runs_in_bfloat16_alone_are_dequantized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, reads: bool
) -> None:
    out = tmp_path / "out"
    # No group of these divides the rows of down.
    rules = ("*.down_proj=fp8",) if reads else ()
    size = 4 if format == "int4" else None
    recipe = RecipeOptions(format=format, group_size=size, method="rtn", rules=rules)
    quantize_checkpoint(write(tmp_path), out, QuantizeOptions(recipe))
    monkeypatch.setattr(eval_model, "find_spec", lambda _: True)
    # quantkit's own directory runs packed.
    assert not open_evaluated(out).notes
    (out / MANIFEST_NAME).unlink()
    config = json.loads((out / "config.json").read_text())
    del config["quantization_config"]["quantkit"]
    (out / "config.json").write_text(json.dumps(config))
    assert any("low-bit already" in note for note in open_evaluated(out).notes) == reads


def test_a_format_that_is_not_read_is_counted_as_it_is_stored(tmp_path: Path) -> None:
    source = write(tmp_path)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "x"}}))
    found = measure(Checkpoint.open(source))
    assert (found.model, found.format) == (16.0, "quant_method x")
