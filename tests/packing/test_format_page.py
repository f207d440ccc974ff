"""`docs/format.md` says what the code does."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from quantkit.checkpoint.quantization_config import QuantizationConfig
from quantkit.packing.formats import FORMATS
from quantkit.packing.schemes import MAX_GROUP_SIZE, SCALE_DTYPES, Scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.packing.words import parts

PAGE = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def blocks(language: str) -> list[Any]:
    return [json.loads(text) for text in re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.M | re.S)]


EXAMPLES = blocks("json example")


def from_hex(rows: list[list[str]], dtype: torch.dtype) -> torch.Tensor:
    data = b"".join(bytes.fromhex(element)[::-1] for row in rows for element in row)
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(len(rows), -1)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example["scheme"]["format"])
def test_the_worked_examples_are_what_the_code_does(example: dict[str, Any]) -> None:
    scheme, shape = Scheme.from_dict(example["scheme"]), tuple(example["shape"])
    stored = {
        part: from_hex(example[part], dtype)
        for part, (dtype, _) in scheme.storage_shapes(shape).items()
        if part in example and part != "shape"
    }
    packed = PackedTensor(stored["packed"], stored["scale"], stored.get("zero_point"), scheme, shape)
    assert packed.codes().tolist() == example["codes"]
    assert packed.dequantize().tolist() == example["weights"]
    codes = torch.tensor(example["codes"], dtype=torch.uint8)
    again = PackedTensor.from_codes(codes, stored["scale"], packed.zero_point_codes(), scheme)
    assert all(torch.equal(part, stored[name]) for name, part in again.parts())


def test_there_is_an_example_of_each_kind() -> None:
    assert [(e["scheme"]["format"], "zero_point" in e) for e in EXAMPLES] == [
        ("int4", True),
        ("fp6-e2m3", False),
    ]


def test_the_example_configuration_is_read_and_written_as_shown() -> None:
    (shown,) = blocks("json")
    assert QuantizationConfig.from_dict(shown).to_dict() == shown


def test_the_page_lists_every_format_part_and_scale_dtype() -> None:
    section = PAGE.split("## 4. Codes")[1].split("## 5.")[0]
    listed = re.findall(r"^\| (`.*?) \|", section, re.M)
    assert set(re.findall(r"`(.*?)`", " ".join(listed))) == set(FORMATS)
    assert all(f'`"{name}"`' in PAGE for name in SCALE_DTYPES)
    assert f"from 1 to {MAX_GROUP_SIZE}," in PAGE
    widths = re.findall(r"^\| (\d) \| ([\d+ ]+) \|", PAGE, re.M)
    assert {int(bits): tuple(map(int, split.split("+"))) for bits, split in widths} == {
        bits: parts(bits) for bits in (3, 5, 6, 7)
    }
