"""Schemes: what they say, what they refuse, and that they survive a file."""

import itertools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import FORMATS, CodebookFormat, FittedFormat, IntFormat
from quantkit.packing.presets import PRESETS
from quantkit.packing.scale_types import SCALE_DTYPES, SCALE_TYPES
from quantkit.packing.schemes import MAX_GROUP_SIZE, Scheme, default_scale_dtype, parse_token, scheme
from quantkit.packing.zero_points import ZERO_POINTS, ZeroPoint

from ..support.compare import assert_equal

INT4 = FORMATS["int4"]
VALID = {
    "format": "int4",
    "group_size": 128,
    "zero_point": "none",
    "scale_dtype": "bfloat16",
    "global_scale": False,
    "planes": 1,
    "column_scale": False,
    "packing": "bits",
}
THIRDS = CodebookFormat("thirds", 2, book=(-1.0, -0.25, 0.5))
EVERY = [
    *[
        scheme(name, group_size=size, scale_dtype=dtype, zero_point=kind)
        for name, size, dtype, kind in itertools.product(
            PRESETS, (None, "channel", 1, 48), SCALE_DTYPES.values(), ZERO_POINTS
        )
        if kind == "none" or isinstance(scheme(name).format, IntFormat)
    ],
    Scheme(THIRDS, 32),
    Scheme(FittedFormat("book2", 2), 64, column_scale=True),
    Scheme(FORMATS["ternary"], 64, planes=3),
    Scheme(THIRDS, 32, packing="radix"),
    scheme("ternary", packing="radix"),
    *[scheme(f"int{bits}", packing="stream") for bits in (3, 5, 6, 7)],
    *[
        scheme(name, group_size="tensor", scale_dtype=dtype)
        for name, dtype in itertools.product(PRESETS, (torch.float32, torch.float16, torch.bfloat16))
        if not scheme(name).is_fitted and scheme(name).planes == 1 and not scheme(name).column_scale
    ],
    scheme("ternary", group_size="tensor", packing="radix"),
    *[
        Scheme(scheme(name).format, size, scale_dtype=dtype, group_rows=128)
        for name, size, dtype in itertools.product(("fp8", "int8"), (128, None), SCALE_DTYPES.values())
    ],
]
E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def test_every_scheme_survives_a_dict_through_json_and_a_token() -> None:
    for original in EVERY:
        assert Scheme.from_dict(json.loads(json.dumps(original.to_dict()))) == original
        assert parse_token(original.token) == original


def test_different_schemes_have_different_tokens() -> None:
    assert len({s.token for s in EVERY}) == len(set(EVERY)) == len({str(s) for s in set(EVERY)})


@pytest.mark.parametrize(
    ("name", "format_name", "group_size", "scale_dtype"),
    [
        ("int8", "int8", None, torch.bfloat16),
        *[(f"int{bits}", f"int{bits}", 128, torch.bfloat16) for bits in range(2, 8)],
        ("ternary", "ternary", 128, torch.bfloat16),
        ("binary", "binary", 128, torch.bfloat16),
        ("binary-residual", "binary", 128, torch.bfloat16),
        ("binary-rank1", "binary", None, torch.bfloat16),
        ("book4", "codebook4", 32, E4M3),
        ("fp8", "fp8-e4m3", None, torch.bfloat16),
        ("fp8-e4m3", "fp8-e4m3", None, torch.bfloat16),
        ("fp8-e5m2", "fp8-e5m2", None, torch.bfloat16),
        ("fp6", "fp6-e2m3", 128, torch.bfloat16),
        ("fp6-e2m3", "fp6-e2m3", 128, torch.bfloat16),
        ("fp6-e3m2", "fp6-e3m2", 128, torch.bfloat16),
        ("fp4", "fp4-e2m1", 32, torch.bfloat16),
        ("nf4", "nf4", 64, torch.bfloat16),
        ("mxfp8", "fp8-e4m3", 32, E8M0),
        ("mxfp6", "fp6-e2m3", 32, E8M0),
        ("mxfp4", "fp4-e2m1", 32, E8M0),
        ("nvfp4", "fp4-e2m1", 16, E4M3),
    ],
)
def test_presets_are_these_schemes(
    name: str, format_name: str, group_size: int | None, scale_dtype: torch.dtype
) -> None:
    expected = Scheme(FORMATS[format_name], group_size, "none", scale_dtype, scale_dtype == E4M3)
    more = {"binary-residual": {"planes": 2}, "binary-rank1": {"column_scale": True}}
    assert scheme(name) == replace(expected, **more.get(name, {}))


@pytest.mark.parametrize(("shown", "preset"), [("fp4-e2m1", "fp4"), ("codebook4", "book4")])
def test_a_number_format_that_plans_show_is_a_name_too(shown: str, preset: str) -> None:
    assert scheme(shown) == scheme(preset)
    assert scheme(shown, group_size=16) == scheme(preset, group_size=16)


def test_every_preset_is_listed_above() -> None:
    (mark,) = test_presets_are_these_schemes.pytestmark  # type: ignore[attr-defined]
    assert {row[0] for row in mark.args[1]} == set(PRESETS)


@pytest.mark.parametrize("dtype", SCALE_TYPES, ids=str)
def test_scale_types_say_what_their_dtype_can(dtype: torch.dtype) -> None:
    scale, limits = SCALE_TYPES[dtype], torch.finfo(dtype)
    assert scale.max == limits.max
    assert 2.0 ** (1 - scale.digits) == limits.eps
    assert scale.signed == (limits.min < 0)
    assert scale.relative == (limits.max < 1000)


@pytest.mark.parametrize(
    ("dtype", "largest", "overflowing"),
    [
        (E4M3, 464.0, 464.1),
        (E8M0, 2.0**127, 3e38),
        (torch.float16, 65519.0, 65520.0),
        (torch.bfloat16, 3.39e38, 3.4e38),
    ],
)
def test_scales_overflow_instead_of_saturating(
    dtype: torch.dtype, largest: float, overflowing: float
) -> None:
    rounded = SCALE_TYPES[dtype].round(torch.tensor([largest, overflowing, math.inf]))
    assert rounded[0].item() == SCALE_TYPES[dtype].max
    assert not rounded[1:].isfinite().any()


def test_scales_of_a_small_range_are_relative_to_the_tensor() -> None:
    assert scheme("int3", scale_dtype=E4M3).global_scale
    assert not any(scheme("int3", scale_dtype=dtype).global_scale for dtype in SCALE_TYPES if dtype != E4M3)
    assert scheme("nvfp4", scale_dtype=torch.bfloat16) == scheme("fp4", group_size=16)


def test_a_custom_format_travels_with_its_scheme() -> None:
    data = Scheme(THIRDS, 32).to_dict()
    assert data["format"] == {"kind": "codebook", "name": "thirds", "bits": 2, "book": [-1.0, -0.25, 0.5]}


def test_arguments_override_the_preset() -> None:
    assert scheme("int4", group_size=32).group_size == 32
    assert scheme("int4", group_size="channel").group_size is None
    assert scheme("int4", group_size="tensor").group_size == "tensor"
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
    assert scheme("int8").groups(columns) == scheme("int8", group_size="tensor").groups(columns) == 1


@pytest.mark.parametrize(("size", "columns"), [(128, 128), ("channel", 300), ("tensor", 300), (48, 48)])
def test_the_columns_of_a_group_are_a_row_at_most(size: Any, columns: int) -> None:
    assert scheme("int4", group_size=size).group_columns(300) == columns
    assert scheme("int4", group_size=size).group_columns(40) == 40


def test_one_scale_per_tensor_is_one_number_whatever_the_shape() -> None:
    chosen = scheme("fp8", group_size="tensor")
    assert chosen.per_tensor and not scheme("fp8").per_tensor and not scheme("int4").per_tensor
    assert chosen.for_columns(1) is chosen
    assert str(chosen) == "fp8-e4m3 tensor bfloat16"
    assert chosen.storage_shapes((9, 300)) == {
        "packed": (torch.int32, (9, 75)),
        "scale": (torch.bfloat16, (1,)),
        "shape": (torch.int64, (2,)),
    }


@pytest.mark.parametrize(
    ("name", "options", "what"),
    [
        *[(name, {}, "e8m0 scales") for name in ("mxfp8", "mxfp6", "mxfp4")],
        ("nvfp4", {}, "e4m3 scales"),
        ("int4", {"scale_dtype": E4M3}, "e4m3 scales"),
        ("int4", {"zero_point": "integer"}, "integer zero-points"),
        ("int4", {"zero_point": "float"}, "float zero-points"),
        ("binary-residual", {}, "2 planes"),
        ("binary-rank1", {}, "column scales"),
        ("book4", {"scale_dtype": torch.bfloat16}, "the fitted values of 'codebook4'"),
    ],
)
def test_one_scale_per_tensor_is_refused_beside_what_groups_have(
    name: str, options: dict[str, Any], what: str
) -> None:
    with pytest.raises(FormatError, match=rf"group size 'tensor' does not go with {what}: .* or 'channel'\."):
        scheme(name, group_size="tensor", **options)


def test_one_scale_per_tensor_has_no_global_scale() -> None:
    with pytest.raises(FormatError, match="does not go with a global scale"):
        Scheme(INT4, "tensor", global_scale=True)


BLOCKS = Scheme(FORMATS["fp8-e4m3"], 128, scale_dtype=torch.float32, group_rows=128)


def test_a_block_has_one_scale_and_the_last_ones_are_cut() -> None:
    assert str(BLOCKS) == "fp8-e4m3 128x128 float32"
    assert BLOCKS.to_dict()["group_size"] == [128, 128]
    assert BLOCKS.storage_shapes((300, 130))["scale"] == (torch.float32, (3, 2))
    assert BLOCKS.row_units() == {"blocks of 128 rows": 128} and scheme("int8").row_units() == {}


@pytest.mark.parametrize(("start", "stop"), [(0, None), (0, 5), (3, 4), (2, 7), (6, 8), (4, 4), (5, 99)])
@pytest.mark.parametrize("dtype", SCALE_DTYPES.values(), ids=str)
def test_rows_of_a_block_have_its_scale(start: int, stop: int | None, dtype: torch.dtype) -> None:
    chosen = replace(BLOCKS, group_rows=3, scale_dtype=dtype)
    scale = torch.arange(1, 7).view(3, 2).float().to(dtype)
    slow = torch.stack([scale[row // 3].float() for row in range(8)])
    assert_equal(chosen.row_scale(scale, 8, start, stop).float(), slow[start:stop])


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"format": FORMATS["int4"], "zero_point": "integer"}, "integer zero-points"),
        ({"format": FORMATS["binary"], "planes": 2}, "2 planes"),
        ({"column_scale": True}, "column scales"),
        ({"global_scale": True}, "a global scale"),
        ({"format": FittedFormat("book2", 2)}, "the fitted values of 'book2'"),
    ],
)
def test_a_block_is_refused_beside_what_rows_have(change: dict[str, Any], what: str) -> None:
    with pytest.raises(
        FormatError, match=rf"a block of 128 rows does not go with {what}: one scale per block"
    ):
        replace(BLOCKS, **change)


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, 1 << 21])
def test_rows_of_a_block_are_counted(rows: Any) -> None:
    with pytest.raises(FormatError, match=rf"{rows} rows of a block are out of range; use 1 to 1048576"):
        replace(BLOCKS, group_rows=rows)
    with pytest.raises(FormatError, match="group size 'tensor' does not go with blocks of 128 rows"):
        replace(BLOCKS, group_size="tensor")


@pytest.mark.parametrize("size", ["128x", "x128", "0x128", "128x0", "1.5x2", "128x128x1", "12y3", "128X128"])
def test_a_block_is_rows_times_columns(size: str) -> None:
    assert scheme("fp8", group_size="128x128", scale_dtype=torch.float32) == BLOCKS
    assert scheme("int4", group_size="1x64") == scheme("int4", group_size=64)
    with pytest.raises(FormatError, match="use a positive integer"):
        scheme("fp8", group_size=size)


def test_storage_shapes_of_an_asymmetric_weight() -> None:
    assert scheme("int4", zero_point="integer").storage_shapes((9, 300)) == {
        "packed": (torch.int32, (9, 38)),
        "scale": (torch.bfloat16, (9, 3)),
        "zero_point": (torch.int32, (2, 3)),
        "shape": (torch.int64, (2,)),
    }
    assert "zero_point" not in scheme("int4").storage_shapes((9, 300))


@pytest.mark.parametrize(
    ("scale_dtype", "zero_dtype"),
    [(torch.float32,) * 2, (torch.float16,) * 2, (torch.bfloat16,) * 2, (E4M3, torch.bfloat16)],
)
def test_float_zero_points_are_stored_like_scales_of_16_bits_or_more(
    scale_dtype: torch.dtype, zero_dtype: torch.dtype
) -> None:
    parts = scheme("int3", zero_point="float", scale_dtype=scale_dtype).storage_shapes((9, 300))
    assert parts["scale"] == (scale_dtype, (9, 3))
    assert parts["zero_point"] == (zero_dtype, (9, 3))


def test_storage_shapes_of_relative_scales() -> None:
    assert scheme("nvfp4").storage_shapes((9, 300)) == {
        "packed": (torch.int32, (9, 38)),
        "scale": (E4M3, (9, 19)),
        "global_scale": (torch.float32, (1,)),
        "shape": (torch.int64, (2,)),
    }
    assert "global_scale" not in scheme("mxfp4").storage_shapes((9, 300))


def test_scale_dtype_follows_fp16_weights_only() -> None:
    assert default_scale_dtype(torch.float16) == torch.float16
    assert {default_scale_dtype(d) for d in (torch.float32, torch.bfloat16)} == {torch.bfloat16}


@pytest.mark.parametrize("size", [0, -5, MAX_GROUP_SIZE + 1])
def test_group_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(
        FormatError, match=f"group size {size} is out of range; use 1 to {MAX_GROUP_SIZE}, 'channel' for"
    ):
        scheme("int4", group_size=size)


@pytest.mark.parametrize("kind", ["integer", "float"])
@pytest.mark.parametrize("name", ["fp6", "binary", "nf4", "nvfp4"])
def test_only_int_formats_have_a_zero_point(name: str, kind: ZeroPoint) -> None:
    with pytest.raises(FormatError, match=r"has no zero-point; asymmetric schemes need an int format"):
        scheme(name, zero_point=kind)


def test_an_unsupported_scale_dtype_is_refused() -> None:
    with pytest.raises(FormatError, match=r"scale dtype torch\.float64 is not supported; use one of float32"):
        Scheme(INT4, 128, scale_dtype=torch.float64)


def test_an_unknown_preset_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match="unknown format 'int17'; known are int8, int7"):
        scheme("int17")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "int17"}, "unknown number format 'int17'"),
        ({"format": None}, "a number format is a name or an object of kind .*; found None"),
        ({"format": ["int4"]}, "a number format is a name or an object of kind .*; found ..int4.."),
        ({"format": {"kind": "int", "name": "x", "bits": 1}}, "int format 'x' has 1 bit"),
        ({"group_size": True}, "scheme field 'group_size' is True; it is an integer, null or 'tensor'"),
        ({"group_size": 128.0}, "scheme field 'group_size' is 128.0; it is an integer, null or 'tensor'"),
        ({"group_size": "channel"}, "scheme field 'group_size' is 'channel'"),
        ({"group_size": ["tensor"]}, "scheme field 'group_size' is ..tensor.."),
        ({"group_size": "tensor", "planes": 2}, "group size 'tensor' does not go with 2 planes"),
        ({"group_size": 0}, "group size 0 is out of range"),
        *[
            ({"group_size": size}, "it is an integer, null or 'tensor', or the rows and columns of a block")
            for size in ([1, 128], [128], [128, 128, 1], [128, "tensor"], ["a", 1], [True, 4], [2.0, 4], [])
        ],
        ({"group_size": [0, 128]}, "0 rows of a block are out of range"),
        ({"group_size": [128, 0]}, "group size 0 is out of range"),
        ({"zero_point": "half"}, "scheme field 'zero_point' is 'half'; it is one of none, integer, float"),
        ({"zero_point": []}, r"scheme field 'zero_point' is \[\]"),
        ({"zero_point": "integer", "format": "fp6-e2m3"}, "format 'fp6-e2m3' has no zero-point"),
        ({"zero_point": "float", "format": "nf4"}, "format 'nf4' has no zero-point"),
        ({"global_scale": 1}, "scheme field 'global_scale' is 1; it is a boolean"),
        ({"global_scale": None}, "scheme field 'global_scale' is None"),
        ({"column_scale": 0}, "scheme field 'column_scale' is 0; it is a boolean"),
        ({"planes": True}, "scheme field 'planes' is True; it is an integer"),
        ({"planes": 1.0}, "scheme field 'planes' is 1.0; it is an integer"),
        ({"planes": 0}, "0 planes of 'int4' are out of range; a code has at most 8 bits, so use 1 to 2"),
        ({"planes": 3}, "3 planes of 'int4' are out of range"),
        ({"planes": 2, "zero_point": "integer"}, "2 planes have no zero-point; use zero_point 'none', or"),
        (
            {"planes": 2, "format": "codebook4"},
            "values of 'codebook4' are fitted to one plane; use one plane",
        ),
        ({"zero_point": "float", "format": "codebook4"}, "format 'codebook4' has no zero-point"),
        ({"format": {"kind": "fitted", "name": "x", "bits": 9}}, "number format 'x' has 9 bits"),
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
    with pytest.raises(FormatError, match=r"a scheme has the fields \['column_scale', 'format', "):
        Scheme.from_dict({key: value for key, value in VALID.items() if key != field})


@pytest.mark.parametrize(("data", "found"), [([], "list"), ("int4", "str"), (None, "NoneType")])
def test_a_scheme_that_is_no_object_is_refused(data: Any, found: str) -> None:
    with pytest.raises(FormatError, match=f"a scheme has the fields .*; found {found}"):
        Scheme.from_dict(data)


def test_a_token_that_is_not_json_is_refused() -> None:
    with pytest.raises(FormatError, match="scheme token 'int4' is not JSON"):
        parse_token("int4")
