"""Golden bytes: what is on disk today stays readable.

The files in `golden/` are the format. When the format changes on purpose, raise the version
(`quantkit.checkpoint.quantization_config.VERSION`), then write them again from the repository root:

    python -m tests.packing.test_golden
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.packing.bitpack import pack, unpack
from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat
from quantkit.packing.presets import PRESETS
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

GOLDEN = Path(__file__).parent / "golden"
ROWS, COLUMNS = 5, 140  # odd rows; a ragged last group of 12 and a ragged last block
SCHEMES: dict[str, Scheme] = {
    **{name: scheme(name) for name in PRESETS},
    "int4-asymmetric": scheme("int4", group_size=28, zero_point="integer"),
    "int8-asymmetric": scheme("int8", zero_point="integer", scale_dtype=torch.float32),
    "int3-e4m3": scheme("int3", group_size=32, scale_dtype=torch.float8_e4m3fn),
    "int2-float-zero": scheme("int2", group_size=28, zero_point="float"),
    "ternary-planes": Scheme(FORMATS["ternary"], 28, planes=3),
    "int4-columns": Scheme(FORMATS["int4"], 32, scale_dtype=torch.float16, column_scale=True),
    "book3-e4m3": Scheme(FittedFormat("book3", 3), 28, scale_dtype=torch.float8_e4m3fn, global_scale=True),
    "ternary-radix": scheme("ternary", packing="radix"),
    "int3-stream": scheme("int3", packing="stream"),
    "fp8-tensor": scheme("fp8", group_size="tensor"),
    "fp8-blocks": Scheme(FORMATS["fp8-e4m3"], 32, scale_dtype=torch.float32, group_rows=4),
    "ternary-radix-tensor": scheme("ternary", group_size="tensor", packing="radix"),
    "custom-radix": Scheme(CodebookFormat("five", 3, book=(-4.0, -1.0, 0.0, 1.0, 4.0)), 32, packing="radix"),
    "custom": Scheme(CodebookFormat("five", 3, book=(-4.0, -1.0, 0.0, 1.0, 4.0)), 32),
}


def example(scheme: Scheme) -> PackedTensor:
    """Integer arithmetic only, so that it is the same under every version of torch."""
    top = 2**scheme.format.bits
    numbers = list(range(top)) if scheme.is_fitted else numbers_of(scheme)
    groups = scheme.groups(COLUMNS) * scheme.planes
    codes = [
        [numbers[(37 * n + 11 * k + k * k // 7) % len(numbers)] for k in range(COLUMNS)] for n in range(ROWS)
    ]
    scale = [[_scale(3 * n + g, scheme.scale_type.digits) for g in range(groups)] for n in range(ROWS)]
    zero = [[(5 * n + 3 * g + 1) % top for g in range(groups)] for n in range(ROWS)]
    between = torch.tensor(zero) + 0.375
    return PackedTensor.from_codes(
        torch.tensor(codes, dtype=torch.uint8),
        torch.tensor(scale).flatten()[-1:]
        if scheme.per_tensor
        else torch.tensor(scale)[:: scheme.group_rows],
        {"none": None, "integer": torch.tensor(zero, dtype=torch.uint8), "float": between}[scheme.zero_point],
        scheme,
        torch.tensor([512.0]) if scheme.global_scale else None,
        column_scale=_column_scale(scheme),
        codebook=torch.arange(-top // 2, top // 2) / (top // 2) if scheme.is_fitted else None,
    )


def numbers_of(scheme: Scheme) -> list[int]:
    """The codes all of whose planes are numbers."""
    bits, values = scheme.format.bits, scheme.format.values
    planes = [[code >> (bits * p) & (2**bits - 1) for p in range(scheme.planes)] for code in range(256)]
    below = 2 ** (bits * scheme.planes)
    return [code for code in range(below) if not any(math.isnan(values[part]) for part in planes[code])]


def _column_scale(scheme: Scheme) -> torch.Tensor | None:
    if not scheme.column_scale:
        return None
    return torch.tensor([(k % 128 + 64) / 128 for k in range(COLUMNS)]).to(scheme.column_scale_dtype)


def _scale(i: int, digits: int) -> float:
    """A scale that needs no rounding."""
    return 2.0 ** (i % 15 - 7) if digits == 1 else (i % 2**digits + 1) / 64


def little_endian(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def described(packed: PackedTensor) -> dict[str, Any]:
    """Codes as hex digits, each stored part as the hex of its bytes, one string per row."""
    parts = dict(packed.parts())
    digest = hashlib.sha256(b"".join(little_endian(part) for part in parts.values()))
    return {
        "scheme": packed.scheme.to_dict(),
        "shape": list(packed.shape),
        "codes": [bytes(row).hex() for row in packed.codes().tolist()],
        "parts": {
            name: [little_endian(row.reshape(-1)).hex() for row in part] for name, part in parts.items()
        },
        "sha256": digest.hexdigest(),
        "weights_sha256": hashlib.sha256(little_endian(packed.dequantize())).hexdigest(),
    }


def words_of_every_width() -> dict[str, Any]:
    def row(bits: int) -> dict[str, str]:
        codes = [(11 * k + k * k // 7) % 2**bits for k in range(45)]
        words = pack(torch.tensor(codes, dtype=torch.uint8), bits)
        return {"codes": bytes(codes).hex(), "words": little_endian(words).hex()}

    return {str(bits): row(bits) for bits in range(1, 9)}


def files() -> dict[str, Any]:
    return {"words": words_of_every_width(), **{name: described(example(s)) for name, s in SCHEMES.items()}}


def read(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["words", *SCHEMES])
def test_the_bytes_written_today_are_the_golden_bytes(name: str) -> None:
    assert files()[name] == read(name)


@pytest.mark.parametrize("name", SCHEMES)
def test_the_golden_bytes_read_back_as_the_golden_codes(name: str) -> None:
    golden = read(name)
    scheme = Scheme.from_dict(golden["scheme"])
    parts = {
        part: torch.frombuffer(bytearray.fromhex("".join(rows)), dtype=dtype).reshape(shape)
        for part, (dtype, shape) in scheme.storage_shapes(tuple(golden["shape"])).items()
        if (rows := golden["parts"].get(part))
    }
    packed = PackedTensor.from_parts(parts, scheme, tuple(golden["shape"]))
    assert [bytes(row).hex() for row in packed.codes().tolist()] == golden["codes"]
    assert hashlib.sha256(little_endian(packed.dequantize())).hexdigest() == golden["weights_sha256"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_golden_words_of_every_width_read_back(bits: int) -> None:
    golden = read("words")[str(bits)]
    words = torch.frombuffer(bytearray.fromhex(golden["words"]), dtype=torch.int32)
    assert bytes(unpack(words, bits, 45).tolist()).hex() == golden["codes"]


def test_every_preset_has_a_golden_file_and_no_file_is_an_orphan() -> None:
    assert {path.stem for path in GOLDEN.glob("*.json")} == {"words", *SCHEMES}


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name, content in files().items():
        (GOLDEN / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n")
