"""`docs/format.md` says what the code does."""

import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.compressed_tensors import FORMATS_OF_COMPRESSED_TENSORS
from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.packing.bitpack import part_widths
from quantkit.packing.format_json import format_from_json, format_to_json
from quantkit.packing.formats import FORMATS, FittedFormat
from quantkit.packing.packings import PACKINGS
from quantkit.packing.presets import PRESETS
from quantkit.packing.scale_types import SCALE_DTYPES
from quantkit.packing.schemes import MAX_GROUP_SIZE, Scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_equal

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def blocks(language: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)]


EXAMPLES = blocks("json example")


def from_hex(rows: list[Any], dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    elements = [element for row in rows for element in (row if isinstance(row, list) else [row])]
    data = b"".join(bytes.fromhex(element)[::-1] for element in elements)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["scheme"]["format"])
def test_the_worked_examples_are_what_the_code_does(example: dict[str, Any]) -> None:
    scheme, shape = Scheme.from_dict(example["scheme"]), tuple(example["shape"])
    stored = {
        part: from_hex(example[part], dtype, size)
        for part, (dtype, size) in scheme.storage_shapes(shape).items()
        if part in example and part != "shape"
    }
    packed = PackedTensor.from_parts(stored, scheme, shape)
    assert packed.codes().tolist() == example["codes"]
    assert packed.dequantize().tolist() == example["weights"]
    codes = torch.tensor(example["codes"], dtype=torch.uint8)
    again = PackedTensor.from_codes(
        codes,
        stored["scale"],
        packed.zero_points(),
        scheme,
        stored.get("global_scale"),
        column_scale=stored.get("column_scale"),
        codebook=stored.get("codebook"),
    )
    for name, part in again.parts():
        assert_equal(part.view(torch.uint8), stored[name].view(torch.uint8), name)


def test_there_is_an_example_of_each_kind() -> None:
    beyond = ("zero_point", "global_scale", "column_scale", "codebook")
    schemes = [(e["scheme"]["format"], e["scheme"]["planes"], e["scheme"]["packing"]) for e in EXAMPLES]
    assert [
        (*scheme, [p for p in beyond if p in e]) for scheme, e in zip(schemes, EXAMPLES, strict=True)
    ] == [
        ("int4", 1, "bits", ["zero_point"]),
        ("fp6-e2m3", 1, "bits", []),
        ("ternary", 1, "radix", []),
        ("int2", 1, "bits", ["zero_point", "global_scale"]),
        ("binary", 2, "bits", ["column_scale"]),
        ({"kind": "fitted", "name": "book2", "bits": 2}, 1, "bits", ["codebook"]),
        ("fp8-e4m3", 1, "bits", []),
    ]
    assert EXAMPLES[-1]["scheme"]["group_size"] == "tensor"


def test_the_page_lists_every_format_of_compressed_tensors() -> None:
    section = PAGE.split("## 7.")[1].split("## 8.")[0]
    listed = re.findall(r"^\| `(\S+)` \| (`.*?) \| (`.*?) \| (.*?) \|", section, re.M)
    assert [
        (row[0], tuple(re.findall("`(.*?)`", row[1])), tuple(re.findall("`(.*?)`", row[2]))) for row in listed
    ] == [(row.stored.name, row.formats, row.scales) for row in FORMATS_OF_COMPRESSED_TENSORS]
    assert [row[3] for row in listed] == [
        str(row.group_size or "that divide K, the row, the matrix") for row in FORMATS_OF_COMPRESSED_TENSORS
    ]
    lines = [line for line in section.splitlines() if line.startswith("| `") and "blocks of rows" in line]
    assert len(lines) == sum(row.blocks for row in FORMATS_OF_COMPRESSED_TENSORS) == 1
    # Each row once, and each name in the table of section 2.
    names = Counter(row.stored.name for row in FORMATS_OF_COMPRESSED_TENSORS)
    assert {name: PAGE.count(f"| `{name}` |") - 1 for name in names} == names
    assert all(f'`"{name}"`' in section for name in PACKINGS)


def test_the_custom_format_is_read_and_written_as_shown() -> None:
    (shown,) = blocks("json format")
    assert format_to_json(format_from_json(shown)) == shown


def test_the_example_configuration_is_read_and_written_as_shown() -> None:
    (shown,) = blocks("json")
    assert QuantizationConfig.from_dict(shown).to_dict() == shown


def test_the_page_lists_every_format_part_and_scale_dtype() -> None:
    section = PAGE.split("## 4. Codes")[1].split("## 5.")[0]
    listed = re.findall(r"^\| (`[a-z].*?) \|", section, re.M)
    assert set(re.findall(r"`(.*?)`", " ".join(listed))) == set(FORMATS)
    assert all(repr(value) in section for value in FORMATS["nf4"].values)
    for name, fmt in FORMATS.items():
        nan = enumerate(() if isinstance(fmt, FittedFormat) else fmt.values)
        reserved = [f"`{code:x}`" for code, value in nan if math.isnan(value)]
        (row,) = re.findall(rf"^\|.*`{name}`.*\|$", section, re.M)
        assert ("reserved" in row) is bool(reserved)
        assert all(code in row for code in reserved[:1] + reserved[-1:])
    assert all(f'`"{name}"`' in PAGE for name in SCALE_DTYPES)
    assert f"from 1 to {MAX_GROUP_SIZE}," in PAGE
    presets = re.findall(r"^\| `(\S+)` \| `(\S+)` \| (\S+) \| (.+?) \|$", PAGE, re.M)
    assert {row[0]: row[1:] for row in presets if row[0] in PRESETS} == {
        name: (
            preset.format,
            str(preset.group_size or "channel"),
            preset.scale_dtype or "16 bits",
        )
        for name, preset in PRESETS.items()
    }
    widths = re.findall(r"^\| (\d) \| ([\d+ ]+) \|", PAGE, re.M)
    assert {int(bits): tuple(map(int, split.split("+"))) for bits, split in widths} == {
        bits: part_widths(bits) for bits in (3, 5, 6, 7)
    }
