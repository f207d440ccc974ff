"""Weights of low-bit checkpoints are bit for bit what independent readers make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors import safe_open
from transformers.integrations.bitnet import unpack_weights
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from quantkit.checkpoint.low_bit import weight as low_bit_weight
from quantkit.checkpoint.low_bit.weight import LowBitTensor

from ...support.compare import assert_equal
from .makers import CASES, bitnet, every, float8, opened

GOLDEN = Path(__file__).parents[2] / "golden" / "low_bit.safetensors"


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_slow_reading(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    made = CASES[name]()
    checkpoint = opened(tmp_path, made.parts, made.section, dtype="float32")
    assert list(checkpoint.tensors) == ["m.weight"]
    tensor = checkpoint.tensors["m.weight"]
    assert isinstance(tensor, LowBitTensor)
    assert (tensor.dtype, tensor.shape) == ("F32", made.shape)
    expected = made.expected()
    assert_equal(checkpoint.read("m.weight"), expected)
    rows = made.shape[0]
    for start, stop in ((rows // 3, rows - 1), (rows - 1, rows), (0, 1), (2, 2)):
        assert_equal(checkpoint.read("m.weight", start, stop), expected[start:stop])
    grid = tensor.weight.grid(checkpoint.read_stored, 1, rows)
    assert_equal(grid.values(), expected[1:])
    assert int(grid.codes.max()) < 1 << grid.spec.format.bits


@pytest.mark.parametrize("name", ["fp8 channel", "gptq v2", "bitsandbytes nf4 odd", "nvfp4"])
def test_values_are_rounded_once_to_the_dtype_of_the_model(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    made = CASES[name]()
    checkpoint = opened(tmp_path, made.parts, made.section, torch_dtype="float16")
    assert_equal(checkpoint.read("m.weight"), made.expected().half())
    plain = opened(tmp_path, made.parts, made.section)
    assert_equal(plain.read("m.weight"), made.expected().bfloat16())


def test_pieces_give_the_same_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for i, name in enumerate(("fp8 blocks", "bitnet", "pack-quantized 3", "gptq 3", "awq")):
        made = CASES[name]()
        checkpoint = opened(tmp_path / str(i), made.parts, made.section)
        whole = checkpoint.read("m.weight")
        with monkeypatch.context() as patch:
            patch.setattr("quantkit.checkpoint.low_bit.weight._PIECE", 3 * made.shape[1])
            assert_equal(checkpoint.read("m.weight"), whole, name)


def _compressed(name: str, weights: dict[str, Any], state: dict[str, torch.Tensor]) -> Any:
    """The parts that compressed-tensors makes of a weight, and what it dequantizes them to."""
    arguments = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights))
    compressor: Any = BaseCompressor.get_value_from_registry(name)
    parts = compressor.compress(state, arguments)
    return parts, compressor.decompress(parts, arguments)["weight"]


_FLOAT4 = {"num_bits": 4, "type": "float"}
_FLOAT8 = {"num_bits": 8, "type": "float"}
_POWERS = 2.0 ** torch.arange(-9, 0).float()
_COMPRESSED: dict[str, tuple[dict[str, Any], torch.Tensor]] = {
    "nvfp4-pack-quantized": (
        {**_FLOAT4, "strategy": "tensor_group", "group_size": 16, "scale_dtype": torch.float8_e4m3fn},
        torch.linspace(1, 440, 9 * 6).view(9, 6),
    ),
    "mxfp4-pack-quantized": (
        {**_FLOAT4, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        _POWERS[:, None].repeat(1, 3),
    ),
    "mxfp8-quantized": (
        {**_FLOAT8, "strategy": "group", "group_size": 32, "scale_dtype": torch.uint8},
        _POWERS[:, None].repeat(1, 3),
    ),
    "float-quantized": ({**_FLOAT8, "strategy": "channel"}, torch.linspace(0.1, 1, 9)[:, None].bfloat16()),
    "naive-quantized": ({**_FLOAT8, "strategy": "tensor"}, torch.tensor([0.3]).bfloat16()),
    "int-quantized": (
        {"num_bits": 8, "type": "int", "strategy": "channel"},
        torch.linspace(0.01, 0.1, 9)[:, None].bfloat16(),
    ),
}


@pytest.mark.parametrize("name", _COMPRESSED)
def test_values_are_those_of_compressed_tensors(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    weights, scale = _COMPRESSED[name]
    state = {"weight": torch.randn(9, 96), "weight_scale": scale}
    if name.startswith("nvfp4"):
        state["weight_global_scale"] = torch.tensor([337.3])
    parts, expected = _compressed(name, weights, state)
    section = {"quant_method": "compressed-tensors", "format": name}
    checkpoint = opened(tmp_path, {f"m.{part}": tensor for part, tensor in parts.items()}, section)
    assert_equal(checkpoint.read("m.weight"), expected.bfloat16())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(1, 9))
def test_packed_integers_are_those_of_compressed_tensors(tmp_path: Path, bits: int, symmetric: bool) -> None:
    torch.manual_seed(0)
    for i, (rows, columns, size) in enumerate(((37, 160, 32), (64, 96, None), (33, 96, 96))):
        groups = 1 if size is None else columns // size
        strategy = "channel" if size is None else "group"
        weights = {"num_bits": bits, "type": "int", "symmetric": symmetric}
        weights |= {"strategy": strategy, "group_size": size}
        state = {"weight": torch.randn(rows, columns), "weight_scale": torch.rand(rows, groups).bfloat16()}
        if not symmetric:
            half = 1 << (bits - 1)
            state["weight_zero_point"] = torch.randint(-half, half, (rows, groups)).to(torch.int8)
        parts, expected = _compressed("pack-quantized", weights, state)
        section = {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": weights}}}
        named = {f"m.{part}": tensor for part, tensor in parts.items()}
        checkpoint = opened(tmp_path / str(i), named, section)
        assert_equal(checkpoint.read("m.weight"), expected)
        assert_equal(checkpoint.read("m.weight", 5, 33), expected[5:33])


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8])
def test_blocks_are_those_of_transformers(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    codes = float8(every(256, 384, 256))
    if scale_dtype.itemsize > 1:
        scale = torch.rand(2, 3).to(scale_dtype)
    else:
        scale = torch.randint(100, 130, (2, 3), dtype=torch.uint8).view(scale_dtype)
    expected = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    checkpoint = opened(tmp_path, {"m.weight": codes, "m.weight_scale_inv": scale}, {"quant_method": "fp8"})
    assert_equal(checkpoint.read("m.weight"), expected)
    assert_equal(checkpoint.read("m.weight", 100, 201), expected[100:201])


def test_blocks_of_fused_experts_are_those_of_each_expert(tmp_path: Path) -> None:
    torch.manual_seed(0)
    codes, scale = float8(every(3 * 192, 256, 256)).view(3, 192, 256), torch.rand(3, 2, 2)
    parts = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    checkpoint = opened(tmp_path, parts, {"quant_method": "fp8"}, dtype="float32")
    large = scale.repeat_interleave(128, 1)[:, :192].repeat_interleave(128, 2)
    assert_equal(checkpoint.read("experts.gate_up_proj"), codes.float() * large)
    assert_equal(checkpoint.read("experts.gate_up_proj", 1, 2), (codes.float() * large)[1:2])


def test_experts_of_gpt_oss_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (3, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(0, 255, (3, 40, 5), dtype=torch.uint8)
    scales[0, 0] = torch.tensor([0, 1, 127, 250, 254])
    name = "model.layers.0.mlp.experts.gate_up_proj"
    parts = {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": torch.ones(3, 40)}
    checkpoint = opened(tmp_path, parts, {"quant_method": "mxfp4"})
    expected = convert_moe_packed_tensors(blocks, scales)
    assert checkpoint.tensors[name].shape == tuple(expected.shape) == (3, 160, 40)
    assert_equal(checkpoint.read(name), expected)
    assert_equal(checkpoint.read(name, 1, 3), expected[1:])
    weight = checkpoint.tensors[name].weight  # type: ignore[attr-defined]
    assert (weight.spec.matrices, weight.spec.shape, weight.spec.transposed) == (3, (40, 160), True)


@pytest.mark.parametrize("kept", [1, 160, 16 * 160, 80 * 160, 10**6])
def test_experts_are_the_same_in_pieces_of_any_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (5, 40, 5, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (5, 40, 5), dtype=torch.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    checkpoint = opened(
        tmp_path, {f"{name}_blocks": blocks, f"{name}_scales": scales}, {"quant_method": "mxfp4"}
    )
    monkeypatch.setattr(low_bit_weight, "_PIECE", kept)
    assert_equal(checkpoint.read(name), convert_moe_packed_tensors(blocks, scales))


def test_small_matrices_are_read_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    codes, scale = float8(every(5000, 8, 256)).view(5000, 1, 8), torch.rand(5000, 1, 1)
    parts = {"experts.gate_up_proj": codes, "experts.gate_up_proj_scale_inv": scale}
    checkpoint = opened(tmp_path, parts, {"quant_method": "fp8"}, dtype="float32")
    pieces: list[tuple[int, int]] = []
    grid = low_bit_weight.LowBitWeight.grid

    def counted(weight: Any, read: Any, start: int, stop: int) -> Any:
        pieces.append((start, stop))
        return grid(weight, read, start, stop)

    monkeypatch.setattr(low_bit_weight.LowBitWeight, "grid", counted)
    assert_equal(checkpoint.read("experts.gate_up_proj"), codes.float() * scale)
    assert pieces == [(0, 5000)]


def test_ternary_codes_are_those_of_transformers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = bitnet(44, 37, "autobitlinear")
    # The function below the one that torch compiles.
    codes = unpack_weights._torchdynamo_orig_callable(made.parts["m.weight"], torch.float32)
    checkpoint = opened(tmp_path, made.parts, made.section, dtype="float32")
    assert_equal(checkpoint.read("m.weight"), codes * made.parts["m.weight_scale"].float())


def _golden_names() -> list[str]:
    with safe_open(GOLDEN, "pt") as file:
        return sorted(file.metadata() or {})


@pytest.mark.parametrize("name", _golden_names())
def test_values_are_those_that_the_libraries_gave(tmp_path: Path, name: str) -> None:
    with safe_open(GOLDEN, "pt") as file:
        section = json.loads(file.metadata()[name])
        parts = {
            key.removeprefix(f"{name}/"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if key.startswith(f"{name}/")
        }
    expected = parts.pop("expected")
    dtype = str(expected.dtype).removeprefix("torch.")
    checkpoint = opened(tmp_path, parts, section, dtype=dtype)
    assert_equal(checkpoint.read("m.weight"), expected)
