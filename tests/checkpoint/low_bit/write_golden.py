"""Writes `tests/golden/low_bit.safetensors`: weights as bitsandbytes and GPTQModel pack and dequantize them.

    python -m tests.checkpoint.low_bit.write_golden

It needs bitsandbytes 0.50 and GPTQModel 7.7, which no test needs.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import bitsandbytes
import torch
from bitsandbytes.backends.default import ops
from bitsandbytes.backends.utils import _get_4bit_code
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm, pack_awq
from gptqmodel.utils.model_dequant import convert_gptq_file, pack_cols
from safetensors.torch import save_file

GOLDEN = Path(__file__).parents[2] / "golden" / "low_bit.safetensors"

Case = tuple[dict[str, Any], dict[str, torch.Tensor]]


def gptq(bits: int, form: str, *, permuted: bool = False) -> Case:
    rows, columns, group = 32, 64, 32
    planar = form == "gptq_p" or bits in (5, 6, 7)
    codes = torch.randint(0, 1 << bits, (rows, columns))
    zeros = torch.randint(0, 1 << bits, (columns // group, rows))
    numbers = torch.arange(columns) // group
    if permuted:
        numbers = numbers[torch.randperm(columns)]
    parts = {
        "m.qweight": pack_cols(codes, bits, pack_dtype=torch.int32, planar=planar).T.contiguous(),
        "m.qzeros": pack_cols(zeros, bits, pack_dtype=torch.int32, planar=planar),
        "m.scales": (torch.rand(columns // group, rows) / 8 + 0.01).half(),
        "m.g_idx": numbers.int(),
    }
    section = {"quant_method": "gptq", "bits": bits, "group_size": group, "checkpoint_format": form}
    with tempfile.TemporaryDirectory() as place:
        save_file(parts, Path(place, "model.safetensors"))
        found = convert_gptq_file(Path(place, "model.safetensors"), torch.float32, section, "cpu")
    return section, {**parts, "expected": found["m.weight"]}


def awq() -> Case:
    codes, zeros = torch.randint(0, 16, (64, 32)), torch.randint(0, 16, (2, 32))
    scales = (torch.rand(2, 32) / 8).half()
    words, packed_zeros = pack_awq(codes, zeros, 4)
    expected = dequantize_gemm(words, packed_zeros, scales.float(), 4, 32).T.contiguous()
    section = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    parts = {"m.qweight": words, "m.qzeros": packed_zeros, "m.scales": scales, "expected": expected}
    return section, parts


def bits4(kind: str, rows: int, columns: int, block: int, dtype: torch.dtype, *, nested: bool) -> Case:
    weight = torch.randn(rows, columns).to(dtype)
    packed, state = bitsandbytes.functional.quantize_4bit(
        weight, quant_type=kind, compress_statistics=nested, blocksize=block
    )
    scales = state.absmax
    if nested:
        scales = bitsandbytes.functional.dequantize_blockwise(state.absmax, state.state2) + state.offset
    # The operator in torch, as CUDA computes it: that of 0.50 for CPUs is wrong where blocks end within rows.
    expected = ops._dequantize_4bit_compute(
        packed.flatten(), scales, _get_4bit_code(kind, packed.device), block, (rows, columns), dtype
    )
    parts = {f"m.weight.{name}": part for name, part in state.as_dict(packed=True).items()}
    section = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    return section, {"m.weight": packed, **parts, "expected": expected}


def int8() -> Case:
    codes, scales, _ = bitsandbytes.functional.int8_vectorwise_quant(torch.randn(12, 33).half())
    expected = bitsandbytes.functional.int8_vectorwise_dequant(codes, scales)
    section = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    return section, {"m.weight": codes, "m.SCB": scales, "expected": expected}


def cases() -> dict[str, Case]:
    found = {f"gptq {bits}": gptq(bits, "gptq") for bits in range(2, 9)}
    found |= {f"gptq_p {bits}": gptq(bits, "gptq_p") for bits in (2, 3, 4, 8)}
    found["gptq_v2 3"] = gptq(3, "gptq_v2")
    found["gptq 4 desc_act"] = gptq(4, "gptq", permuted=True)
    found["awq"] = awq()
    found["int8"] = int8()
    for kind in ("nf4", "fp4"):
        found[f"{kind} nested"] = bits4(kind, 66, 128, 32, torch.bfloat16, nested=True)
        found[f"{kind} nested odd"] = bits4(kind, 7, 13, 64, torch.float32, nested=True)
        found[f"{kind} plain"] = bits4(kind, 24, 100, 128, torch.float16, nested=False)
    return found


def main() -> None:
    torch.manual_seed(0)
    made = cases()
    tensors = {f"{name}/{key}": part for name, (_, parts) in made.items() for key, part in parts.items()}
    save_file(
        {key: part.clone().contiguous() for key, part in tensors.items()},
        GOLDEN,
        {name: json.dumps(section) for name, (section, _) in made.items()},
    )
    print(f"{GOLDEN}: {len(made)} weights, {GOLDEN.stat().st_size} bytes")


if __name__ == "__main__":
    main()
