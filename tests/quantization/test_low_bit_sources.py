"""Sources that are low-bit already: quantizing one gives what quantizing its dequantized weights gives."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.open_source import exactly
from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.eval.evaluate import evaluate
from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.allocate.budget import BitsPerWeight, Budget
from quantkit.quantization.nesting import kept_rows, nested_scheme, why_not_nested
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantizing import quantize
from quantkit.recipes.recipe_options import RecipeOptions
from quantkit.runtime.load import load
from quantkit.verification.verify import verify

from ..checkpoint.low_bit.makers import CASES, opened
from ..support.compare import assert_equal
from ..tiny.calibrated import data, interrupted_at, write

FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 32]}
MXFP4: dict[str, Any] = {"quant_method": "mxfp4"}


def rewritten(source: Path, suffixes: tuple[str, ...], pack: Any, section: dict[str, Any]) -> Path:
    """`source` with the tensors whose names end so as the parts that `pack` makes of them, by suffix."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        if name.endswith(suffixes) and "lm_head" not in name:
            tensors |= {name + suffix: part.contiguous() for suffix, part in pack(tensor.float()).items()}
        else:
            tensors[name] = tensor
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return source


def fp8_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """FP8 in blocks of 32x32, the last ones cut."""
    rows, columns = weight.shape
    grid = -(-rows // 32), -(-columns // 32)
    padded = torch.nn.functional.pad(weight, (0, -columns % 32, 0, -rows % 32))
    blocks = padded.view(grid[0], 32, grid[1], 32)
    scale = blocks.abs().amax((1, 3)) / 448
    codes = (blocks / scale[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return {"": codes.to(torch.float8_e4m3fn), "_scale_inv": scale}


def mxfp4_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """Random blocks of as many weights as the parameter [E, K, N] has."""
    experts, columns, rows = weight.shape
    generator = torch.Generator().manual_seed(columns + rows)
    blocks = torch.randint(0, 256, (experts, rows, columns // 32, 16), generator=generator)
    scales = torch.randint(120, 124, (experts, rows, columns // 32), generator=generator)
    return {"_blocks": blocks.to(torch.uint8), "_scales": scales.to(torch.uint8)}


def fused_fp8_parts(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """`fp8_parts` of each expert."""
    parts = [fp8_parts(one) for one in weight]
    return {suffix: torch.stack([one[suffix] for one in parts]) for suffix in parts[0]}


def fp8_source(directory: Path, family: str = "llama", **changes: Any) -> Path:
    return rewritten(write(directory, family, **changes), ("_proj.weight",), fp8_parts, FP8)


def gpt_oss_source(directory: Path, parts: Any = mxfp4_parts, section: Any = None) -> Path:
    """gpt-oss, by default as it is released: its experts in MXFP4."""
    directory.mkdir()
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=16,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    model.save_pretrained(directory)
    return rewritten(directory, ("experts.gate_up_proj", "experts.down_proj"), parts, section or MXFP4)


def dense(source: Path, directory: Path) -> Path:
    """The same checkpoint with plain weights."""
    directory.mkdir()
    checkpoint = dequantized(Checkpoint.open(source))
    tensors = {name: checkpoint.read(name) for name in checkpoint.tensors}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for path in checkpoint.side_files:
        (directory / path.name).write_bytes(path.read_bytes())
    (directory / "config.json").write_text(json.dumps(checkpoint.config))
    return directory


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor
        for name, tensor in load_file(directory / "model.safetensors").items()
    }


def configured(directory: Path) -> Any:
    def ordered(value: Any) -> Any:
        if isinstance(value, list):
            return sorted(map(ordered, value), key=str)
        return {key: ordered(one) for key, one in value.items()} if isinstance(value, dict) else value

    return ordered(json.loads((directory / "config.json").read_text()))


def assert_same(one: Path, other: Path) -> None:
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    # The files have their tensors in another order.
    assert configured(one) == configured(other)


def logits(directory: Path) -> torch.Tensor:
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    tokens = torch.randint(0, 96, (2, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=tokens).logits
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"format": "int8", "method": "rtn"},
        {"format": "int4", "method": "gptq", "group_size": 32},
        {"format": "int4", "method": "mse", "rotate": True},
    ],
    ids=lambda options: " ".join(map(str, options.values())),
)
def test_a_low_bit_source_gives_what_its_dense_weights_give(
    tmp_path: Path, text: Path, options: dict[str, Any]
) -> None:
    source = fp8_source(tmp_path)
    plain = dense(source, tmp_path / "dense")
    for directory, out in ((source, "one"), (plain, "other")):
        more = {"calibration": data(text)} if options.get("method") == "gptq" else {}
        quantize(directory, tmp_path / out, **options, **more)
    assert_same(tmp_path / "one", tmp_path / "other")
    assert not any(check.problems for check in verify(tmp_path / "one", reload=False))


def test_a_budget_is_allocated_alike(tmp_path: Path, text: Path) -> None:
    source = fp8_source(tmp_path)
    plain = dense(source, tmp_path / "dense")
    budget = Budget(BitsPerWeight(4.5), ("int4", "int8"))
    for directory, out in ((source, "one"), (plain, "other")):
        quantize(directory, tmp_path / out, method="rtn", budget=budget, calibration=data(text))
    assert_same(tmp_path / "one", tmp_path / "other")


def test_transformers_dequantizes_the_source_alike(tmp_path: Path) -> None:
    source = rewritten(
        write(tmp_path, intermediate_size=96), ("_proj.weight",), fp8_parts, {**FP8, "dequantize": True}
    )
    assert_equal(logits(source), logits(dense(source, tmp_path / "dense")))


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_moe"])
def test_experts_of_a_low_bit_source_are_packed(tmp_path: Path, family: str) -> None:
    source = fp8_source(tmp_path, family)
    quantize(source, tmp_path / "one", format="int8", method="rtn")
    quantize(dense(source, tmp_path / "dense"), tmp_path / "other", format="int8", method="rtn")
    assert_same(tmp_path / "one", tmp_path / "other")
    assert torch.isfinite(load(tmp_path / "one")(torch.tensor([[1, 2, 3]])).logits).all()


@pytest.mark.parametrize(("parts", "section"), [(mxfp4_parts, MXFP4), (fused_fp8_parts, FP8)])
def test_experts_of_one_tensor_are_packed(tmp_path: Path, parts: Any, section: dict[str, Any]) -> None:
    source = gpt_oss_source(tmp_path / "source", parts, section)
    plain = dense(source, tmp_path / "dense")
    quantize(source, tmp_path / "one", format="int4", method="rtn")
    quantize(plain, tmp_path / "other", format="int4", method="rtn")
    assert_same(tmp_path / "one", tmp_path / "other")
    assert "model.layers.0.mlp.experts.3.up_proj.weight_scale" in weights(tmp_path / "one")
    assert torch.isfinite(load(tmp_path / "one")(torch.tensor([[1, 2, 3]])).logits).all()


def test_a_low_bit_source_is_a_reference_of_eval(tmp_path: Path, text: Path) -> None:
    """Its blocks have 32 rows and 84 columns end within one, which transformers refuses to dequantize."""
    source = fp8_source(tmp_path)
    plain = dense(source, tmp_path / "dense")
    quantize(source, tmp_path / "out", format="int8", method="rtn")
    texts = (tmp_path / "text.txt",)
    texts[0].write_text(text.read_text()[:600])
    found, expected = (
        evaluate(tmp_path / "out", against=directory, texts=texts, window=32, max_windows=2, device="cpu")
        for directory in (source, plain)
    )
    assert found.texts == expected.texts
    assert found.reference_sizes is not None and found.reference_sizes.model < 16
    assert found.reference_sizes.format == "FP8 with block scales"
    assert any("is low-bit already, and its weights are dequantized" in note for note in found.notes)


def test_weights_that_stay_dense_have_the_dtype_of_the_model(tmp_path: Path) -> None:
    source = fp8_source(tmp_path)
    quantize(source, tmp_path / "out", format="int8", method="rtn", rules=("*.q_proj=keep",))
    name = "model.layers.0.self_attn.q_proj.weight"
    kept = weights(tmp_path / "out")[name]
    assert kept.dtype == torch.bfloat16
    assert_equal(kept, dequantized(Checkpoint.open(source)).read(name))


def test_the_plan_says_what_is_read(tmp_path: Path) -> None:
    options = QuantizeOptions(recipe=RecipeOptions(format="int4"))
    checkpoint, planned = plan(fp8_source(tmp_path), options)
    note = (
        "the source is low-bit already: of its weights 21 are FP8 with block scales, dequantized as they are"
    )
    assert planned.notes[0].startswith(note)
    assert (
        planned.source_bytes
        == checkpoint.nbytes
        == sum(tensor.nbytes for tensor in Checkpoint.open(checkpoint.directory).tensors.values())
    )


def test_a_run_is_resumed(tmp_path: Path) -> None:
    source, options = fp8_source(tmp_path), {"format": "int4", "method": "rtn", "max_shard_bytes": 20_000}
    quantize(source, tmp_path / "whole", **options)
    with pytest.raises(KeyboardInterrupt):
        quantize(source, tmp_path / "out", **options, progress=interrupted_at(12))
    quantize(source, tmp_path / "out", **options, resume=True)
    names = sorted(path.name for path in (tmp_path / "whole").glob("*.safetensors"))
    assert len(names) > 3
    assert all(
        (tmp_path / "out" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes() for name in names
    )


#: Why no scheme has the values of a format.
NOT_NESTED = {
    "pack-quantized 1": "which is for int formats of 2 to 8 bits",
    "pack-quantized g_idx": "its groups are not consecutive columns (desc_act)",
    "gptq desc_act": "its groups are not consecutive columns (desc_act)",
    "gptq 3 desc_act": "its groups are not consecutive columns (desc_act)",
    "bitsandbytes nf4 odd": "its scales are of blocks that do not end where rows do",
    "bitsandbytes int8": "its weights are multiplied by 0.00787402 last",
    "mlx 1": "which is for int formats of 2 to 8 bits",
}


@pytest.mark.parametrize("name", CASES)
def test_every_format_is_kept_exactly_or_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    made = CASES[name]()
    checkpoint = exactly(opened(tmp_path, made.parts, made.section))
    source = checkpoint.tensors["m.weight"]
    assert source.grid_spec is not None
    if name in NOT_NESTED:
        assert NOT_NESTED[name] in str(why_not_nested(source.grid_spec))
        return
    packed, _ = kept_rows(checkpoint, source, nested_scheme(source.grid_spec), 0, made.shape[0])
    assert_equal(packed.dequantize(), made.expected())


def test_float8_that_lost_its_scales_writes_nothing(tmp_path: Path) -> None:
    source = rewritten(write(tmp_path), ("up_proj.weight",), lambda w: {"": fp8_parts(w)[""]}, FP8)
    for section in (FP8, None):
        config = json.loads((source / "config.json").read_text())
        (source / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
        with pytest.raises(
            CheckpointError, match="has no scales, without which its numbers are not the weights"
        ):
            quantize(source, tmp_path / "out")
        assert not (tmp_path / "out").exists()


def test_a_scale_that_is_no_number_is_found_while_reading(tmp_path: Path) -> None:
    def broken(weight: torch.Tensor) -> dict[str, torch.Tensor]:
        return {
            **fp8_parts(weight),
            "_scale_inv": torch.full_like(fp8_parts(weight)["_scale_inv"], torch.nan),
        }

    source = rewritten(write(tmp_path), ("layers.1.mlp.up_proj.weight",), broken, FP8)
    with pytest.raises(
        CheckpointError, match=r"layers\.1\.mlp\.up_proj\.weight_scale_inv' is F32 .*NaN or inf"
    ):
        quantize(source, tmp_path / "out")
