"""Schemes: what they say, what they refuse, and that they survive a file."""

import itertools
import json
from typing import Any

import pytest
import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS
from quantkit.packing.schemes import (
    MAX_GROUP_SIZE,
    PRESETS,
    SCALE_DTYPES,
    Scheme,
    default_scale_dtype,
    parse_token,
    scheme,
)

INT4 = FORMATS["int4"]
VALID = {"format": "int4", "group_size": 128, "zero_point": "none", "scale_dtype": "bfloat16"}
EVERY = [
    scheme(name, group_size=size, scale_dtype=dtype, zero_point="integer" if asymmetric else "none")
    for name, size, dtype, asymmetric in itertools.product(
        PRESETS, (None, "channel", 1, 48), SCALE_DTYPES.values(), (False, True)
    )
    if not (asymmetric and not name.startswith("int"))
]


def test_every_scheme_survives_a_dict_through_json_and_a_token() -> None:
    for original in EVERY:
        assert Scheme.from_dict(json.loads(json.dumps(original.to_dict()))) == original
        assert parse_token(original.token) == original


def test_different_schemes_have_different_tokens() -> None:
    assert len({s.token for s in EVERY}) == len(set(EVERY)) == len({str(s) for s in set(EVERY)})


def test_presets_give_format_and_granularity() -> None:
    for name, preset in PRESETS.items():
        built = scheme(name)
        assert (built.format.name, built.group_size) == (preset.format, preset.group_size)
        assert (built.zero_point, built.scale_dtype) == ("none", torch.bfloat16)


def test_arguments_override_the_preset() -> None:
    assert scheme("int4", group_size=32).group_size == 32
    assert scheme("int4", group_size="channel").group_size is None
    assert scheme("int8", group_size=64, zero_point="integer").zero_point == "integer"


def test_a_group_as_long_as_the_row_is_the_row() -> None:
    grouped = scheme("int4", group_size=128)
    assert grouped.for_columns(129) is grouped
    assert grouped.for_columns(128) == grouped.for_columns(1) == scheme("int4", group_size="channel")
    assert grouped.groups(128) == grouped.for_columns(128).groups(128) == 1


@pytest.mark.parametrize(
    ("columns", "groups"), [(1, 1), (127, 1), (128, 1), (129, 2), (256, 2), (300, 3), (4096, 32)]
)
def test_the_ragged_last_group_counts(columns: int, groups: int) -> None:
    assert scheme("int4").groups(columns) == groups
    assert scheme("int8").groups(columns) == 1


def test_storage_shapes_of_an_asymmetric_weight() -> None:
    assert scheme("int4", zero_point="integer").storage_shapes((9, 300)) == {
        "packed": (torch.int32, (9, 38)),
        "scale": (torch.bfloat16, (9, 3)),
        "zero_point": (torch.int32, (2, 3)),
        "shape": (torch.int64, (2,)),
    }
    assert "zero_point" not in scheme("int4").storage_shapes((9, 300))


def test_scale_dtype_follows_fp16_weights_only() -> None:
    assert default_scale_dtype(torch.float16) == torch.float16
    assert {default_scale_dtype(d) for d in (torch.float32, torch.bfloat16)} == {torch.bfloat16}


@pytest.mark.parametrize("size", [0, -5, MAX_GROUP_SIZE + 1])
def test_group_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(
        FormatError, match=f"group size {size} is out of range; use 1 to {MAX_GROUP_SIZE}, or"
    ):
        scheme("int4", group_size=size)


@pytest.mark.parametrize("name", ["fp6", "binary"])
def test_only_int_formats_have_an_integer_zero_point(name: str) -> None:
    with pytest.raises(
        FormatError, match=r"has no integer zero-point; asymmetric schemes need an int format"
    ):
        scheme(name, zero_point="integer")


def test_an_unsupported_scale_dtype_is_refused() -> None:
    with pytest.raises(FormatError, match=r"scale dtype torch\.float64 is not supported; use one of float32"):
        Scheme(INT4, 128, scale_dtype=torch.float64)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match="unknown format 'int17'; known are int8, int4"):
        scheme("int17")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int17"}, "unknown number format 'int17'"),
        ({"format": None}, "scheme field 'format' is None; it is a name"),
        ({"format": ["int4"]}, "scheme field 'format' is ..int4..; it is a name"),
        ({"group_size": True}, "scheme field 'group_size' is True; it is an integer or null"),
        ({"group_size": 128.0}, "scheme field 'group_size' is 128.0; it is an integer or null"),
        ({"group_size": "channel"}, "scheme field 'group_size' is 'channel'"),
        ({"group_size": 0}, "group size 0 is out of range"),
        ({"zero_point": "float"}, "scheme field 'zero_point' is 'float'; it is 'none' or 'integer'"),
        ({"zero_point": []}, r"scheme field 'zero_point' is \[\]"),
        ({"zero_point": "integer", "format": "fp6-e2m3"}, "format 'fp6-e2m3' has no integer zero-point"),
        ({"scale_dtype": "float64"}, "scheme field 'scale_dtype' is 'float64'; it is one of float32"),
        ({"scale_dtype": []}, r"scheme field 'scale_dtype' is \[\]"),
        ({"version": 2}, "a scheme has the fields .*; found .*'version'"),
    ],
)
def test_a_wrong_field_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        Scheme.from_dict({**VALID, **change})


@pytest.mark.parametrize("field", VALID)
def test_a_missing_field_is_refused(field: str) -> None:
    with pytest.raises(FormatError, match=r"a scheme has the fields \['format', 'group_size', "):
        Scheme.from_dict({key: value for key, value in VALID.items() if key != field})


@pytest.mark.parametrize(("data", "found"), [([], "list"), ("int4", "str"), (None, "NoneType")])
def test_a_scheme_that_is_no_object_is_refused(data: Any, found: str) -> None:
    with pytest.raises(FormatError, match=f"a scheme has the fields .*; found {found}"):
        Scheme.from_dict(data)


def test_a_token_that_is_not_json_is_refused() -> None:
    with pytest.raises(FormatError, match="scheme token 'int4' is not JSON"):
        parse_token("int4")
