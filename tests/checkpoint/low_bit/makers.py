"""Tiny low-bit checkpoints of every format, of random parts, and what the slow obvious reading makes of each.

A maker returns the stored parts of the weight `m.weight`, the config, and a function of (n, k) that gives the
weight in Python's exact arithmetic, rounded to float32 where the format's reference rounds.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.source import Checkpoint
from quantkit.packing.formats import number_format

Value = Callable[[int, int], float]
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
BITSANDBYTES_FP4 = (0.0, 0.005208333333, 2 / 3, 1.0, 1 / 3, 0.5, 1 / 6, 0.25)
FP8_CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass(frozen=True)
class Made:
    """A weight as stored, and what it is worth."""

    parts: dict[str, torch.Tensor]
    section: dict[str, Any] | None
    shape: tuple[int, int]
    value: Value
    name: str = "m.weight"

    def expected(self) -> torch.Tensor:
        """Every weight by itself, float32."""
        rows, columns = self.shape
        found = [[float(np.float32(self.value(n, k))) for k in range(columns)] for n in range(rows)]
        return torch.tensor(found, dtype=torch.float32)


def write(directory: Path, parts: dict[str, torch.Tensor], section: Any, **config: Any) -> Path:
    """A checkpoint of one file; `section` is its quantization_config, None for none."""
    directory.mkdir(exist_ok=True)
    save_file(
        {name: part.clone().contiguous() for name, part in parts.items()}, directory / "model.safetensors"
    )
    if section is not None:
        config["quantization_config"] = section
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def opened(directory: Path, parts: dict[str, torch.Tensor], section: Any, **config: Any) -> Checkpoint:
    """The checkpoint of `write`, with its weights decoded."""
    return dequantized(Checkpoint.open(write(directory, parts, section, **config)))


def float8(codes: torch.Tensor, kind: torch.dtype = torch.float8_e4m3fn) -> torch.Tensor:
    """Codes [N, K] as FP8, those of NaN and infinity made 1."""
    found = codes.to(torch.uint8).view(kind)
    return torch.where(torch.isfinite(found.float()), found.float(), 1.0).to(kind)


def every(rows: int, columns: int, codes: int) -> torch.Tensor:
    """Codes [N, K] in which each occurs where there is room, shuffled."""
    numbers = torch.arange(rows * columns) % codes
    return numbers[torch.randperm(rows * columns)].view(rows, columns)


def bits_of(words: list[int], start: int, bits: int, word: int = 32) -> int:
    """The integer of so many bits from bit `start` of a stream of words, the lowest first."""
    stream = sum((value % (1 << word)) << (word * i) for i, value in enumerate(words))
    return (stream >> start) & ((1 << bits) - 1)


def _f32(value: float) -> float:
    return float(np.float32(value))


def fp8_blocks(rows: int, columns: int, suffix: str = "_scale_inv", kind: Any = torch.float8_e4m3fn) -> Made:
    codes = float8(every(rows, columns, 256), kind)
    scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.01
    return Made(
        {"m.weight": codes, f"m.weight{suffix}": scale},
        FP8_CONFIG,
        (rows, columns),
        lambda n, k: float(codes[n, k]) * float(scale[n // 128, k // 128]),
    )


def deepseek_fp8(rows: int, columns: int) -> Made:
    made = fp8_blocks(rows, columns)
    return Made(
        dict(zip(("m.weight", "m.scale"), made.parts.values(), strict=True)), None, made.shape, made.value
    )


def fp8_scaled(rows: int, columns: int, scale: torch.Tensor) -> Made:
    codes = float8(every(rows, columns, 256))
    flat = scale.flatten()
    return Made(
        {"m.weight": codes, "m.weight_scale": scale},
        {"quant_method": "modelopt"},
        (rows, columns),
        lambda n, k: float(codes[n, k]) * float(flat[n % len(flat)]),
    )


def mxfp8(rows: int, columns: int, kind: torch.dtype = torch.uint8) -> Made:
    codes = float8(every(rows, columns, 256))
    powers = torch.randint(110, 140, (rows, columns // 32), dtype=torch.uint8)
    return Made(
        {"m.weight": codes, "m.weight_scale": powers.view(kind)},
        {"quant_method": "compressed-tensors"},
        (rows, columns),
        lambda n, k: float(codes[n, k]) * 2.0 ** (int(powers[n, k // 32]) - 127),
    )


def _nibble(packed: torch.Tensor, n: int, k: int) -> int:
    return int(packed[n, k // 2]) >> 4 * (k % 2) & 15


def _fp4(code: int) -> float:
    return FP4[code % 8] * (-1 if code >= 8 else 1)


def mxfp4(rows: int, columns: int) -> Made:
    packed = every(rows, columns // 2, 256).to(torch.uint8)
    powers = torch.randint(0, 255, (rows, columns // 32), dtype=torch.uint8)
    return Made(
        {"m.weight_packed": packed, "m.weight_scale": powers},
        {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"},
        (rows, columns),
        lambda n, k: _fp4(_nibble(packed, n, k)) * 2.0 ** (int(powers[n, k // 32]) - 127),
    )


def deepseek_fp4(rows: int, columns: int) -> Made:
    made = mxfp4(rows, columns)
    packed, powers = made.parts.values()
    parts = {"m.weight": packed.view(torch.int8), "m.scale": powers.view(torch.float8_e8m0fnu)}
    return Made(parts, FP8_CONFIG, made.shape, made.value)


def nvfp4(rows: int, columns: int, modelopt: bool = False) -> Made:
    packed = every(rows, columns // 2, 256).to(torch.uint8)
    scale = float8(torch.randint(1, 126, (rows, columns // 16)))
    factor = torch.tensor([0.00731]) if modelopt else torch.tensor([337.3])

    def value(n: int, k: int) -> float:
        number, one = float(scale[n, k // 16]), float(factor)
        whole = number * one if modelopt else number / one
        return _fp4(_nibble(packed, n, k)) * _f32(whole)

    names = ("m.weight", "m.weight_scale_2") if modelopt else ("m.weight_packed", "m.weight_global_scale")
    parts = {names[0]: packed, "m.weight_scale": scale, names[1]: factor}
    method = "modelopt" if modelopt else "compressed-tensors"
    return Made(parts, {"quant_method": method}, (rows, columns), value)


def int8(rows: int, columns: int) -> Made:
    codes = (every(rows, columns, 256) - 128).to(torch.int8)
    scale, zero = torch.rand(rows, 1), torch.randint(-128, 128, (rows, 1)).to(torch.int8)
    return Made(
        {"m.weight": codes, "m.weight_scale": scale, "m.weight_zero_point": zero},
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        (rows, columns),
        lambda n, k: (int(codes[n, k]) - int(zero[n])) * float(scale[n]),
    )


def pack_quantized(
    bits: int, rows: int, columns: int, group: int, *, fields: bool = False, permuted: bool = False
) -> Made:
    """`fields`: the layout in which no code straddles words, `permuted`: group numbers in disorder."""
    groups = columns // group
    per_word = 32 // bits

    def packed(codes: torch.Tensor) -> torch.Tensor:
        lines = []
        for line in codes.tolist():
            stream = 0
            for i, code in enumerate(line):
                at = i // per_word * 32 + i % per_word * bits if fields else i * bits
                stream |= code << at
            count = -(-len(line) // per_word) if fields else -(-len(line) * bits // 32)
            lines.append([(stream >> 32 * i) % (1 << 32) for i in range(count)])
        return torch.tensor(lines, dtype=torch.int64).to(torch.int32)

    codes, zeros = every(rows, columns, 1 << bits), torch.randint(1 << bits, (rows, groups))
    scale = (torch.rand(rows, groups) + 0.1).bfloat16()
    numbers = torch.arange(columns) // group
    parts = {
        "m.weight_packed": packed(codes),
        "m.weight_scale": scale,
        "m.weight_shape": torch.tensor([rows, columns]),
        "m.weight_zero_point": packed(zeros.T).T.contiguous(),
    }
    if permuted:
        numbers = numbers[torch.randperm(columns)]
        parts["m.weight_g_idx"] = numbers.int()
    section = {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {"weights": {"num_bits": bits, "type": "int"}}},
    }

    def value(n: int, k: int) -> float:
        g = int(numbers[k])
        return (int(codes[n, k]) - int(zeros[n, g])) * float(scale[n, g])

    return Made(parts, section, (rows, columns), value)


def gptq(
    bits: int, rows: int, columns: int, group: int, form: str = "gptq", *, permuted: bool = False
) -> Made:
    """Versions 1 and 2, whose codes are a stream of bits."""
    groups = -(-columns // group)
    words = torch.randint(-(2**31), 2**31, (columns * bits // 32, rows)).to(torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (groups, -(-rows * bits // 32))).to(torch.int32)
    scale = (torch.rand(groups, rows) + 0.01).half()
    numbers = torch.arange(columns) // group
    if permuted:
        numbers = numbers[torch.randperm(columns)]
    parts = {"m.qweight": words, "m.qzeros": zeros, "m.scales": scale, "m.g_idx": numbers.int()}
    section = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    added = 1 if form == "gptq" else 0

    def value(n: int, k: int) -> float:
        g = int(numbers[k])
        zero = (bits_of(zeros[g].tolist(), n * bits, bits) + added) % (1 << bits)
        return (bits_of(words[:, n].tolist(), k * bits, bits) - zero) * float(scale[g, n])

    return Made(parts, section, (rows, columns), value)


def awq(rows: int, columns: int, group: int) -> Made:
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    words = torch.randint(-(2**31), 2**31, (columns, rows // 8)).to(torch.int32)
    zeros = torch.randint(-(2**31), 2**31, (columns // group, rows // 8)).to(torch.int32)
    scale = (torch.rand(columns // group, rows) + 0.01).half()

    def code(word: torch.Tensor, n: int) -> int:
        return bits_of([int(word)], 4 * order.index(n % 8), 4)

    return Made(
        {"m.qweight": words, "m.qzeros": zeros, "m.scales": scale},
        {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm"},
        (rows, columns),
        lambda n, k: (
            (code(words[k, n // 8], n) - code(zeros[k // group, n // 8], n)) * float(scale[k // group, n])
        ),
    )


def llm_int8(rows: int, columns: int) -> Made:
    codes = (every(rows, columns, 256) - 128).to(torch.int8)
    scale = torch.rand(rows) + 0.1
    parts = {"m.weight": codes, "m.SCB": scale, "m.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(
        parts,
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        (rows, columns),
        lambda n, k: _f32(int(codes[n, k]) * float(scale[n])) * _f32(7.874015718698502e-3),
    )


def bitsandbytes4(
    kind: str, rows: int, columns: int, block: int, *, storage: torch.dtype = torch.uint8
) -> Made:
    """Without 8-bit scales; those are in the golden file."""
    count = -(-rows * columns // 2)
    packed = every(count, 1, 256).to(torch.uint8)
    scale = torch.rand(-(-rows * columns // block)) + 0.01
    state = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": [rows, columns]}
    table = number_format("nf4").values
    if kind == "fp4":
        table = tuple(_f32(v * sign) for sign in (1, -1) for v in BITSANDBYTES_FP4)
    parts = {
        "m.weight": packed.flatten().view(storage)[:, None],
        "m.weight.absmax": scale,
        "m.weight.quant_map": torch.tensor(table),
        f"m.weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).encode()), dtype=torch.uint8
        ),
    }

    def value(n: int, k: int) -> float:
        at = n * columns + k
        byte = int(packed[at // 2])
        return table[byte & 15 if at % 2 else byte >> 4] * float(scale[at // block])

    return Made(parts, {"quant_method": "bitsandbytes"}, (rows, columns), value)


def bitnet(rows: int, columns: int, linear_class: str) -> Made:
    ternary = every(rows, columns, 3)
    packed = torch.zeros(rows // 4, columns, dtype=torch.uint8)
    for n in range(rows):
        packed[n % (rows // 4)] |= ternary[n].to(torch.uint8) << 2 * (n // (rows // 4))
    scale = torch.tensor([1.21875]).bfloat16()
    factor = float(scale) if linear_class == "autobitlinear" else 1 / float(scale)
    section = {"quant_method": "bitnet", "linear_class": linear_class}
    return Made(
        {"m.weight": packed, "m.weight_scale": scale},
        section,
        (rows, columns),
        lambda n, k: (int(ternary[n, k]) - 1) * factor,
    )


def mlx(bits: int, rows: int, columns: int, group: int, *, binary: bool = False) -> Made:
    words = torch.randint(-(2**31), 2**31, (rows, columns * bits // 32)).to(torch.int32)
    scale = (torch.rand(rows, columns // group) + 0.1).half()
    bias = -scale / 2 if binary else torch.randn(rows, columns // group).half()

    def value(n: int, k: int) -> float:
        code = bits_of(words[n].tolist(), k * bits, bits)
        return code * float(scale[n, k // group]) + float(bias[n, k // group])

    parts = {"m.weight": words.view(torch.uint32), "m.scales": scale, "m.biases": bias}
    return Made(parts, {"group_size": group, "bits": bits}, (rows, columns), value)


#: Every format, at odd shapes, by a name.
CASES: dict[str, Callable[[], Made]] = {
    "fp8 blocks": lambda: fp8_blocks(130, 140),
    "fp8 e5m2 blocks": lambda: fp8_blocks(5, 129, kind=torch.float8_e5m2),
    "fp8 blocks of deepseek v4": lambda: deepseek_fp8(130, 60),
    "fp8 tensor": lambda: fp8_scaled(7, 37, torch.tensor(0.37)),
    "fp8 tensor of one": lambda: fp8_scaled(7, 37, torch.tensor([0.37])),
    "fp8 channel": lambda: fp8_scaled(13, 37, torch.rand(13, 1).bfloat16()),
    "fp8 channel flat": lambda: fp8_scaled(13, 37, torch.rand(13)),
    "mxfp8": lambda: mxfp8(9, 96),
    "mxfp8 e8m0": lambda: mxfp8(9, 96, torch.float8_e8m0fnu),
    "mxfp4": lambda: mxfp4(9, 96),
    "fp4 of deepseek v4": lambda: deepseek_fp4(9, 96),
    "nvfp4": lambda: nvfp4(9, 80),
    "nvfp4 modelopt": lambda: nvfp4(9, 80, modelopt=True),
    "int8": lambda: int8(11, 33),
    **{
        f"pack-quantized {bits}": lambda bits=bits: pack_quantized(bits, 37, 96, 32)  # type: ignore[misc]
        for bits in range(1, 9)
    },
    "pack-quantized g_idx": lambda: pack_quantized(4, 11, 64, 16, permuted=True),
    "pack-quantized fields 3": lambda: pack_quantized(3, 35, 96, 96, fields=True),
    "pack-quantized fields 6": lambda: pack_quantized(6, 12, 64, 32, fields=True),
    **{
        f"gptq {bits}": lambda bits=bits: gptq(bits, 64, 96, 32)  # type: ignore[misc]
        for bits in (2, 3, 4, 8)
    },
    "gptq v2": lambda: gptq(4, 40, 64, 16, "gptq_v2"),
    "gptq desc_act": lambda: gptq(4, 40, 64, 16, permuted=True),
    "gptq 3 desc_act": lambda: gptq(3, 64, 96, 40, permuted=True),
    "awq": lambda: awq(40, 48, 16),
    "bitsandbytes int8": lambda: llm_int8(11, 33),
    "bitsandbytes nf4": lambda: bitsandbytes4("nf4", 33, 64, 64),
    "bitsandbytes nf4 odd": lambda: bitsandbytes4("nf4", 7, 13, 64),
    "bitsandbytes nf4 stored as bfloat16": lambda: bitsandbytes4("nf4", 8, 96, 64, storage=torch.bfloat16),
    "bitsandbytes fp4": lambda: bitsandbytes4("fp4", 33, 96, 64),
    "bitnet": lambda: bitnet(44, 37, "autobitlinear"),
    "bitnet divides": lambda: bitnet(44, 37, "bitlinear"),
    **{
        f"mlx {bits}": lambda bits=bits: mlx(bits, 5, 128, 64)  # type: ignore[misc]
        for bits in (1, 2, 3, 4, 5, 6, 8)
    },
    "bonsai": lambda: mlx(1, 7, 256, 128, binary=True),
}
