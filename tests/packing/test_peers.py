"""Code points, scales and whole tensors against packages that have the same numbers.

Beside `ml_dtypes` and torch (`test_formats.py`): gfloat's models of the OCP formats, the blocks of gguf, and
the compressors of compressed-tensors.
"""

import itertools
import math
from typing import Any

import gfloat
import gguf
import numpy as np
import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from gfloat import formats as ocp
from gguf import GGMLQuantizationType as Ggml

from quantkit.checkpoint.compressed_tensors import FORMATS_OF_COMPRESSED_TENSORS, compressed_tensors_format
from quantkit.packing.formats import FORMATS, FloatFormat
from quantkit.packing.scale_types import SCALE_TYPES
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_equal

E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
GFLOAT = {
    "fp8-e4m3": ocp.format_info_ocp_e4m3,
    "fp8-e5m2": ocp.format_info_ocp_e5m2,
    "fp6-e2m3": ocp.format_info_ocp_e2m3,
    "fp6-e3m2": ocp.format_info_ocp_e3m2,
    "fp4-e2m1": ocp.format_info_ocp_e2m1,
}


def test_every_float_format_has_a_peer() -> None:
    assert set(GFLOAT) == {name for name, fmt in FORMATS.items() if isinstance(fmt, FloatFormat)}


@pytest.mark.parametrize("name", GFLOAT)
def test_every_code_point_equals_gfloat(name: str) -> None:
    fmt, peer = FORMATS[name], GFLOAT[name]
    for code, value in enumerate(fmt.values):
        expected = gfloat.decode_float(peer, code).fval
        if math.isfinite(expected):
            assert value == expected and math.copysign(1.0, value) == math.copysign(1.0, expected)
        else:
            assert math.isnan(value), f"code {code:#x} is reserved"


@pytest.mark.parametrize("name", GFLOAT)
def test_every_rounding_boundary_equals_gfloat(name: str) -> None:
    fmt, peer = FORMATS[name], GFLOAT[name]
    numbers = torch.tensor(fmt.numbers, dtype=torch.float32)
    middles = (numbers[1:] + numbers[:-1]) / 2
    at = torch.cat([numbers, middles])
    infinity = torch.tensor(math.inf)
    x = torch.cat([at, torch.nextafter(at, infinity), torch.nextafter(at, -infinity), 1e4 * numbers])
    saturating = [gfloat.round_float(peer, v, sat=True) for v in x.tolist()]
    codes = torch.tensor([gfloat.encode_float(peer, v) for v in saturating], dtype=torch.uint8)
    assert_equal(fmt.encode(x), codes)


def test_every_e8m0_scale_equals_gfloat() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(E8M0).float()
    peer = [gfloat.decode_float(ocp.format_info_ocp_e8m0, code).fval for code in range(256)]
    assert stored[:255].tolist() == peer[:255]
    assert math.isnan(stored[255]) and math.isnan(peer[255])


def test_every_e4m3_scale_equals_gfloat() -> None:
    stored = torch.arange(256, dtype=torch.uint8).view(E4M3).float().tolist()
    peer = [gfloat.decode_float(ocp.format_info_ocp_e4m3, code).fval for code in range(256)]
    assert all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in zip(stored, peer, strict=True))
    assert SCALE_TYPES[E4M3].max == ocp.format_info_ocp_e4m3.max


@pytest.mark.parametrize("bits", range(2, 9))
def test_every_int_code_equals_two_s_complement(bits: int) -> None:
    # Offset binary is two's complement with its sign bit turned over.
    codes = np.arange(2**bits, dtype=np.uint8)
    flipped = (codes ^ np.uint8(1 << (bits - 1))) << np.uint8(8 - bits)
    assert list(FORMATS[f"int{bits}"].values) == (flipped.view(np.int8) >> (8 - bits)).tolist()


# gguf


def every_code(name: str, columns: int, rows: int = 4) -> torch.Tensor:
    """uint8 [rows, columns] with every code that has a value, in another order in each row."""
    codes = [code for code, value in enumerate(FORMATS[name].values) if not math.isnan(value)]
    cycle = itertools.islice(itertools.cycle(codes), rows * columns)
    shuffled = torch.tensor(list(cycle), dtype=torch.uint8)
    return shuffled[torch.randperm(rows * columns, generator=torch.Generator().manual_seed(0))].view(rows, -1)


def split_nibbles(codes: np.ndarray[Any, Any], block: int) -> np.ndarray[Any, Any]:
    """Blocks of gguf's 4-bit types: the first half of the codes in low nibbles, the second in high ones."""
    halves = codes.reshape(-1, 2, block // 2)
    return halves[:, 0] | halves[:, 1] << 4


def blocks_of(scales: torch.Tensor, data: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """[blocks, bytes]: the scale of each block, [blocks], before its data."""
    return np.concatenate([scales.view(-1, 1).view(torch.uint8).numpy(), data.view(np.uint8)], axis=1)


def test_int4_equals_the_blocks_of_gguf_q4_0() -> None:
    codes = every_code("int4", 128)
    scale = torch.linspace(0.01, 3, 16).half().view(4, 4)
    packed = PackedTensor.from_codes(
        codes, scale, None, scheme("int4", group_size=32, scale_dtype=torch.float16)
    )
    data = blocks_of(scale, split_nibbles(codes.numpy(), 32))
    expected = gguf.quants.dequantize(data.reshape(4, -1), Ggml.Q4_0)
    assert np.array_equal(packed.dequantize().numpy(), expected)


def test_int8_equals_the_blocks_of_gguf_q8_0() -> None:
    codes = every_code("int8", 128)
    scale = torch.linspace(0.01, 3, 16).half().view(4, 4)
    chosen = scheme("int8", group_size=32, scale_dtype=torch.float16)
    packed = PackedTensor.from_codes(codes, scale, None, chosen)
    data = blocks_of(scale, (codes.numpy() ^ 128).reshape(-1, 32))
    expected = gguf.quants.dequantize(data.reshape(4, -1), Ggml.Q8_0)
    assert np.array_equal(packed.dequantize().numpy(), expected)


def test_mxfp4_equals_the_blocks_of_gguf() -> None:
    codes = every_code("fp4-e2m1", 2048)
    scale = torch.exp2(torch.arange(256) % 251 - 127.0).to(E8M0).view(4, 64)
    packed = PackedTensor.from_codes(codes, scale.float(), None, scheme("mxfp4"))
    data = blocks_of(scale.view(torch.uint8), split_nibbles(codes.numpy(), 32))
    expected = gguf.quants.dequantize(data.reshape(4, -1), Ggml.MXFP4)
    assert np.array_equal(packed.dequantize().numpy(), expected)


def test_nvfp4_equals_the_blocks_of_gguf() -> None:
    codes = every_code("fp4-e2m1", 512)
    scale = torch.arange(128, dtype=torch.uint8).clamp(max=126).view(E4M3).view(4, 32)
    packed = PackedTensor.from_codes(codes, scale.float(), None, scheme("nvfp4"), torch.tensor([1.0]))
    # Four scales, then their four groups.
    groups = split_nibbles(codes.numpy(), 16).reshape(-1, 32)
    data = np.concatenate([scale.view(torch.uint8).view(-1, 4).numpy(), groups], axis=1)
    expected = gguf.quants.dequantize(data.reshape(4, -1), Ggml.NVFP4)
    assert np.array_equal(packed.dequantize().numpy(), expected)


@pytest.mark.parametrize("peer", [Ggml.TQ1_0, Ggml.TQ2_0])
@pytest.mark.parametrize("packing", ["bits", "radix"])
def test_ternary_equals_the_blocks_of_gguf(peer: Any, packing: Any) -> None:
    codes = every_code("ternary", 512)
    scale = torch.linspace(0.01, 3, 8).half().view(4, 2)
    chosen = scheme("ternary", group_size=256, scale_dtype=torch.float16, packing=packing)
    weights = PackedTensor.from_codes(codes, scale, None, chosen).dequantize().numpy()
    assert np.array_equal(gguf.quants.dequantize(gguf.quants.quantize(weights, peer), peer), weights)


# compressed-tensors


CASES: dict[str, Scheme] = {
    "fp8": scheme("fp8"),
    "fp8 float16": scheme("fp8", scale_dtype=torch.float16),
    "fp8 float32": scheme("fp8", scale_dtype=torch.float32),
    "fp8 groups": scheme("fp8", group_size=64),
    "fp8 tensor": scheme("fp8", group_size="tensor"),
    "fp8 tensor float32": scheme("fp8", group_size="tensor", scale_dtype=torch.float32),
    # Of six rows the second block has two.
    "fp8 blocks": Scheme(FORMATS["fp8-e4m3"], 64, scale_dtype=torch.float32, group_rows=4),
    "mxfp8": scheme("mxfp8"),
    "mxfp4": scheme("mxfp4"),
    "nvfp4": scheme("nvfp4"),
    "int4": scheme("int4", group_size=32, scale_dtype=torch.float32),
    "int8": scheme("int8", scale_dtype=torch.float32),
    "int8 bytes": scheme("int8", scale_dtype=torch.float32, packing="bytes"),
    "int2": scheme("int2", group_size=64, scale_dtype=torch.float32),
    **{
        f"int{bits}": scheme(f"int{bits}", group_size=32, scale_dtype=torch.float32, packing="stream")
        for bits in (3, 5, 6, 7)
    },
    "int5 channel": scheme("int5", group_size="channel", scale_dtype=torch.float16, packing="stream"),
    "int3 tensor": scheme("int3", group_size="tensor", scale_dtype=torch.float32, packing="stream"),
    "int4 tensor": scheme("int4", group_size="tensor", scale_dtype=torch.float32),
    "int8 tensor": scheme("int8", group_size="tensor", scale_dtype=torch.float16),
}


def example(chosen: Scheme, columns: int) -> PackedTensor:
    codes = every_code(chosen.format.name, columns, rows=6)
    assert len(codes.unique()) == sum(not math.isnan(value) for value in chosen.format.values)
    _, size = chosen.for_columns(columns).storage_shapes((6, columns))["scale"]
    scale = chosen.scale_type.round(torch.exp2(torch.arange(math.prod(size)).view(size) % 13 - 6.0))
    factor = torch.tensor([3.0]) if chosen.global_scale else None
    return PackedTensor.from_codes(codes, scale, None, chosen.for_columns(columns), factor)


def peer_of(packed: PackedTensor) -> tuple[Any, QuantizationScheme]:
    row = compressed_tensors_format(packed.scheme, packed.shape[1])
    arguments = QuantizationArgs(**row.arguments(packed.scheme, packed.shape[1]))
    peer = QuantizationScheme(targets=["Linear"], weights=arguments, format=row.stored.name)
    return BaseCompressor.get_value_from_registry(row.stored.name), peer


def in_file(packed: PackedTensor) -> dict[str, torch.Tensor]:
    stored = compressed_tensors_format(packed.scheme, packed.shape[1]).stored
    parts = {**dict(packed.parts()), "shape": torch.tensor(packed.shape)}
    shapes = stored.shapes(packed.scheme.storage_shapes(packed.shape))
    found = {part: stored.to_file(part, parts[part]) for part in shapes}
    assert {part: (t.dtype, tuple(t.shape)) for part, t in found.items()} == shapes
    return {stored.part_name("weight", part): tensor for part, tensor in found.items()}


def test_every_format_of_compressed_tensors_is_compared() -> None:
    names = {compressed_tensors_format(chosen, 256).stored.name for chosen in CASES.values()}
    assert names == {row.stored.name for row in FORMATS_OF_COMPRESSED_TENSORS}


@pytest.mark.parametrize("columns", [64, 192, 256])
@pytest.mark.parametrize("name", CASES)
def test_our_bytes_are_those_that_compressed_tensors_writes(name: str, columns: int) -> None:
    packed = example(CASES[name], columns)
    if packed.scheme.format.name == "fp4-e2m1":
        # Its own rounding to fp4 never gives -0, which its packing has a code for: see the next test.
        codes = torch.where(packed.codes() == 8, 0, packed.codes())
        parts = (packed.scale, None, packed.scheme, packed.part("global_scale"))
        packed = PackedTensor.from_codes(codes, *parts)
    compressor, peer = peer_of(packed)
    state = {"weight": packed.dequantize(), "weight_scale": packed.scale.float()}
    if packed.part("global_scale") is not None:
        state["weight_global_scale"] = packed.part("global_scale")
    written = compressor.compress(state, peer)
    ours = in_file(packed)
    assert set(written) == set(ours)
    # Scales that are in the model's dtype it leaves as they are given.
    assert {k: t.dtype for k, t in written.items() if k != "weight_scale"} == {
        k: t.dtype for k, t in ours.items() if k != "weight_scale"
    }
    for part, tensor in ours.items():
        found = written[part].to(tensor.dtype) if part == "weight_scale" else written[part]
        assert_equal(found.view(torch.uint8), tensor.view(torch.uint8), part)


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_every_fp4_code_is_packed_as_compressed_tensors_packs_it(name: str) -> None:
    packed = example(CASES[name], 192)
    values = packed.scheme.format.decode(packed.codes())
    assert_equal(pack_fp4_to_uint8(values), in_file(packed)["weight_packed"])


@pytest.mark.parametrize("columns", [64, 192, 256])
@pytest.mark.parametrize("name", CASES)
def test_compressed_tensors_reads_our_numbers(name: str, columns: int) -> None:
    packed = example(CASES[name], columns)
    compressor, peer = peer_of(packed)
    read = compressor.decompress(in_file(packed), peer)["weight"]
    # It rounds products to the dtype of the scales, or to bfloat16 where these have 8 bits.
    assert_equal(read, packed.dequantize(read.dtype))
    row = compressed_tensors_format(packed.scheme, columns)
    assert read.dtype == (torch.bfloat16 if row.bfloat16 else packed.scheme.scale_dtype)
