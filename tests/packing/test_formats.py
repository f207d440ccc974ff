"""Number formats: every code point, every rounding boundary."""

import dataclasses
import itertools
import json
import math
from bisect import bisect
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.errors import FormatError
from quantkit.packing.format_json import format_from_json, format_to_json
from quantkit.packing.formats import (
    ALIASES,
    FORMATS,
    CodebookFormat,
    FittedFormat,
    FloatFormat,
    IntFormat,
    NumberFormat,
    number_format,
)

from ..support.compare import assert_close, assert_equal
from . import references

# A new format is a new row of FORMATS, so the classes have to be right beyond the rows there are today.
UNLISTED = (
    IntFormat("wide", 8),
    FloatFormat("e3m1", 5, exponent_bits=3, mantissa_bits=1, bias=3, reserved=2),
    FloatFormat("e4m3-full", 8, exponent_bits=4, mantissa_bits=3, bias=7),
    CodebookFormat("five", 3, book=(-4.0, -1.0, 0.0, 1.0, 4.0)),
    CodebookFormat("thirds", 2, book=tuple(float(np.float32(v)) for v in (-1 / 3, 0.1, 2 / 3, 1e20))),
    CodebookFormat("apart", 1, book=(2.0**-100, 1.0)),
    CodebookFormat("near", 2, book=(-1.0, 2.0**-30, 2.0**-29, 3.0)),
    CodebookFormat("far", 2, book=(-(2.0**100), -(2.0**90), 0.0, 2.0**100)),
)
FIXED = {name: fmt for name, fmt in FORMATS.items() if not isinstance(fmt, FittedFormat)}
ALL = (*FIXED.values(), *UNLISTED)
ML_DTYPES: dict[str, Any] = {
    "fp8-e4m3": ml_dtypes.float8_e4m3fn,
    "fp8-e5m2": ml_dtypes.float8_e5m2,
    "fp6-e2m3": ml_dtypes.float6_e2m3fn,
    "fp6-e3m2": ml_dtypes.float6_e3m2fn,
    "fp4-e2m1": ml_dtypes.float4_e2m1fn,
}
TORCH = {"fp8-e4m3": torch.float8_e4m3fn, "fp8-e5m2": torch.float8_e5m2}

each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)


def every_code(fmt: NumberFormat) -> torch.Tensor:
    return torch.arange(2**fmt.bits, dtype=torch.int16).to(torch.uint8)


def number_codes(fmt: NumberFormat) -> torch.Tensor:
    """The codes that stand for a number."""
    codes = every_code(fmt)
    return codes[~torch.tensor(fmt.values).isnan()]


def boundary_inputs(fmt: NumberFormat) -> torch.Tensor:
    """All values and midpoints with a float32 on either side, random numbers, and the ends of float32."""
    ordered = list(fmt.numbers)
    midpoints = [float((Fraction(a) + Fraction(b)) / 2) for a, b in itertools.pairwise(ordered)]
    at = torch.tensor(ordered + midpoints, dtype=torch.float32)
    infinity = torch.tensor(math.inf)
    generator = torch.Generator().manual_seed(0)
    spread = torch.rand(300, generator=generator) * 2.4 - 1.2
    limits = [0.0, -0.0, 1e-45, -1e-45, 1e-39, -1e-39, 1.2e-38, 3.4e38, -3.4e38]
    return torch.cat(
        [
            at,
            torch.nextafter(at, infinity),
            torch.nextafter(at, -infinity),
            spread * min(fmt.max - fmt.min, 1e6),
            spread * 0.01,
            torch.tensor(limits),
        ]
    )


def test_formats_of_even_steps_are_the_ints_ternary_and_binary() -> None:
    steps = {name: fmt.even_step for name, fmt in FORMATS.items() if fmt.even_step is not None}
    ints = {name: 1.0 for name, fmt in FORMATS.items() if isinstance(fmt, IntFormat)}
    assert steps == {**ints, "ternary": 1.0, "binary": 2.0}


@each_format
def test_every_code_survives_decode_then_encode(fmt: NumberFormat) -> None:
    codes = number_codes(fmt)
    assert_equal(fmt.encode(fmt.decode(codes)), codes)


@each_format
def test_encode_is_the_nearest_value_in_exact_arithmetic(fmt: NumberFormat) -> None:
    x = boundary_inputs(fmt)
    codes = fmt.encode(x)
    assert codes.dtype == torch.uint8
    by_value: dict[float, list[int]] = {}
    for code in references.exact_values(fmt):
        by_value.setdefault(fmt.values[code], []).append(code)
    for turn, (number, code) in enumerate(zip(x.tolist(), codes.tolist(), strict=True)):
        near = None
        # Of most numbers only the codes of values next to them are asked about: others are further away.
        if turn % 8:
            at = bisect(fmt.numbers, number)
            near = [code for value in fmt.numbers[max(at - 2, 0) : at + 2] for code in by_value[value]]
        assert code == references.encode(fmt, number, near), f"{number!r} ({number.hex()})"


@each_format
def test_round_is_decode_of_encode(fmt: NumberFormat) -> None:
    x = boundary_inputs(fmt)
    assert_equal(fmt.round(x), fmt.decode(fmt.encode(x)))


@each_format
def test_encode_takes_strided_input_and_leaves_it_unchanged(fmt: NumberFormat) -> None:
    x = torch.linspace(-9, 9, 60).reshape(6, 10)
    before = x.clone()
    assert_equal(fmt.encode(x.T[::3]), fmt.encode(x.T[::3].contiguous()))
    assert_equal(x, before)


@each_format
def test_limits_follow_from_the_values(fmt: NumberFormat) -> None:
    values = fmt.decode(number_codes(fmt))
    assert sorted(set(values.tolist())) == list(fmt.numbers)
    assert (fmt.max, fmt.min) == (values.max().item(), values.min().item())
    assert fmt.has_zero == bool((values == 0).any())


@pytest.mark.parametrize(
    ("name", "smallest", "largest", "absmax", "has_zero"),
    [
        ("int8", -128.0, 127.0, 127.0, True),
        ("int7", -64.0, 63.0, 63.0, True),
        ("int6", -32.0, 31.0, 31.0, True),
        ("int5", -16.0, 15.0, 15.0, True),
        ("int4", -8.0, 7.0, 7.0, True),
        ("int3", -4.0, 3.0, 3.0, True),
        ("int2", -2.0, 1.0, 1.0, True),
        ("fp8-e4m3", -448.0, 448.0, 448.0, True),
        ("fp8-e5m2", -57344.0, 57344.0, 57344.0, True),
        ("fp4-e2m1", -6.0, 6.0, 6.0, True),
        ("nf4", -1.0, 1.0, 1.0, True),
        ("ternary", -1.0, 1.0, 1.0, True),
        ("fp6-e2m3", -7.5, 7.5, 7.5, True),
        ("fp6-e3m2", -28.0, 28.0, 28.0, True),
        ("binary", -1.0, 1.0, 1.0, False),
    ],
)
def test_published_limits(name: str, smallest: float, largest: float, absmax: float, has_zero: bool) -> None:
    fmt = FORMATS[name]
    assert (fmt.min, fmt.max, fmt.absmax, fmt.has_zero) == (smallest, largest, absmax, has_zero)
    assert fmt.rounding_statistic == ("absmean" if name in ("ternary", "binary") else "absmax")


def inputs_in_range(fmt: NumberFormat) -> torch.Tensor:
    # Beyond the largest value peers go to infinity, NaN or wrap around; that we saturate is tested above.
    random = torch.randn(20000, generator=torch.Generator().manual_seed(1)) * fmt.max * 0.8
    small = random * torch.exp2(torch.linspace(-30, 0, 20000))
    x = torch.cat([boundary_inputs(fmt), random, small])
    return x[x.abs() <= fmt.max]


@pytest.mark.parametrize("name", ML_DTYPES)
def test_float_formats_equal_ml_dtypes_bit_for_bit(name: str) -> None:
    fmt, peer = FORMATS[name], ML_DTYPES[name]
    table = every_code(fmt).numpy().view(peer).astype(np.float32)
    ours = np.array(fmt.values, dtype=np.float32)
    numbers = np.isfinite(table)  # where the peer has infinity or NaN, we have NaN
    assert np.array_equal(np.isnan(ours), ~numbers)
    assert ours[numbers].tobytes() == table[numbers].tobytes()
    x = inputs_in_range(fmt)
    assert np.array_equal(fmt.encode(x).numpy(), x.numpy().astype(peer).view(np.uint8))


@pytest.mark.parametrize("name", TORCH)
def test_fp8_equals_the_casts_of_torch_bit_for_bit(name: str) -> None:
    fmt, peer = FORMATS[name], TORCH[name]
    decoded = every_code(fmt).view(peer).float()
    numbers = number_codes(fmt).long()
    assert_equal(fmt.decode(every_code(fmt))[numbers], decoded[numbers])
    x = inputs_in_range(fmt)
    assert_equal(fmt.encode(x), x.to(peer).view(torch.uint8))


@pytest.mark.parametrize(
    ("name", "reserved"),
    [
        ("fp8-e4m3", [0x7F, 0xFF]),
        ("fp8-e5m2", [0x7C, 0x7D, 0x7E, 0x7F, 0xFC, 0xFD, 0xFE, 0xFF]),
        ("ternary", [3]),
    ],
)
def test_reserved_codes_are_nan_and_never_written(name: str, reserved: list[int]) -> None:
    fmt = FORMATS[name]
    assert [code for code, value in enumerate(fmt.values) if math.isnan(value)] == reserved
    assert fmt.decode(torch.tensor(reserved, dtype=torch.uint8)).isnan().all()
    limits = torch.tensor([3.4e38, -3.4e38, fmt.max * 1.01, -fmt.max * 1.01])
    assert fmt.decode(fmt.encode(limits)).tolist() == [fmt.max, fmt.min] * 2
    assert set(fmt.encode(boundary_inputs(fmt)).tolist()).isdisjoint(reserved)


@pytest.mark.parametrize("name", sorted(set(FIXED) - set(TORCH)))
def test_no_other_format_has_a_code_without_a_number(name: str) -> None:
    fmt = FORMATS[name]
    assert len(fmt.numbers) == {"ternary": 3}.get(name, 2**fmt.bits - (name in ML_DTYPES))  # two zeros


@pytest.mark.parametrize("name", ["nf4", "ternary", "binary"])
def test_code_books_take_the_nearest_of_all_values(name: str) -> None:
    fmt = FORMATS[name]
    x = torch.cat([inputs_in_range(fmt), torch.linspace(-3, 3, 5001)]).double()
    book = torch.tensor(fmt.numbers, dtype=torch.float64)
    distances = (x[:, None] - book).abs()
    found = fmt.decode(fmt.encode(x.float())).double()
    assert_equal((found - x).abs(), distances.amin(1))


def test_nf4_is_the_published_code_book() -> None:
    # QLoRA, appendix E, to the digits printed there.
    printed = "-1 -.6962 -.5251 -.3949 -.2844 -.1848 -.0911 0 .0796 .1609 .2461 .3379 .4407 .5626 .7230 1"
    assert FORMATS["nf4"].values == pytest.approx([float(v) for v in printed.split()], abs=5e-5)


@pytest.mark.parametrize("bits", range(2, 9))
def test_int_is_round_clamp_offset(bits: int) -> None:
    fmt = IntFormat(f"int{bits}", bits)
    half = 2 ** (bits - 1)
    x = torch.linspace(-1.5 * half, 1.5 * half, 4001)
    assert_equal(fmt.encode(x).int(), x.round().clamp(-half, half - 1).int() + half)
    assert fmt.decode(torch.tensor([fmt.offset], dtype=torch.uint8)).item() == 0.0


def test_affine_codes_saturate_about_any_zero_point() -> None:
    fmt = IntFormat("int4", 4)
    x = torch.linspace(-20, 20, 801).repeat(16, 1)
    zero_point = torch.arange(16, dtype=torch.uint8)[:, None]
    expected = (x.round() + zero_point).clamp(0, 15).to(torch.uint8)
    assert_equal(fmt.quantize_affine(x, zero_point.float())[0], expected)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_codes_about_a_float_zero_point_are_the_nearest(bits: int) -> None:
    fmt = IntFormat("x", bits)
    zero_point = torch.tensor([[-3.5], [0.0], [0.40625], [2.75], [2.0**bits]])
    x = torch.linspace(-(2.0**bits), 2.0**bits, 801).repeat(5, 1)
    codes, values = fmt.quantize_offset(x, zero_point)
    grid = torch.arange(2**bits) - zero_point
    assert_equal(values, codes.float() - zero_point)
    assert_equal(values, fmt.round_offset(x, zero_point))
    nearest = (x[:, :, None] - grid[:, None]).abs().amin(2)
    assert_close((values - x).abs(), nearest, rtol=0, atol=2.0**-12)


def test_a_tie_between_code_book_values_goes_upward() -> None:
    assert FORMATS["binary"].encode(torch.tensor([0.0, -0.0, -1e-45])).tolist() == [1, 1, 0]


def test_a_midpoint_that_is_no_float32_is_rounded_up() -> None:
    low, high = 1.0, 1.0 + 2.0**-23  # neighbours in float32: the midpoint is between them
    fmt = CodebookFormat("neighbours", 1, book=(low, high))
    assert fmt.encode(torch.tensor([low, high])).tolist() == [0, 1]


def test_negative_zero_keeps_its_sign_in_float_formats() -> None:
    fmt = FORMATS["fp6-e2m3"]
    assert fmt.encode(torch.tensor([0.0, -0.0, -1e-45])).tolist() == [0, 32, 32]
    assert math.copysign(1.0, fmt.decode(torch.tensor([32], dtype=torch.uint8)).item()) == -1.0


def test_formats_are_frozen_and_compare_by_value() -> None:
    fmt = FORMATS["int4"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        fmt.bits = 5  # type: ignore[misc]
    assert fmt == IntFormat("int4", 4) and hash(fmt) == hash(IntFormat("int4", 4))
    assert len(set(ALL)) == len(ALL)


def test_names_resolve_aliases_and_the_table_is_keyed_by_name() -> None:
    assert all(number_format(name) is fmt and fmt.name == name for name, fmt in FORMATS.items())
    assert all(number_format(alias) is FORMATS[name] for alias, name in ALIASES.items())


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(FormatError, match=r"unknown number format 'int17'; known are int8, int7, .*fp6"):
        number_format("int17")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: IntFormat("x", 0), "number format 'x' has 0 bits; a code has 1 to 8"),
        (lambda: IntFormat("x", 9), "number format 'x' has 9 bits; a code has 1 to 8"),
        (lambda: IntFormat("x", 1), "int format 'x' has 1 bit and so no positive value"),
        (lambda: FloatFormat("x", 6, 3, 3, 1), "'x' has 6 bits but its fields take 7"),
        (
            lambda: CodebookFormat("x", 2, (0.0, 1.0)),
            "'x' needs 3 to 4 strictly increasing values for 2 bits; got 2",
        ),
        (lambda: CodebookFormat("x", 2, (0.0, 1.0, 2.0, 3.0, 4.0)), "needs 3 to 4 .* for 2 bits; got 5"),
        (lambda: CodebookFormat("x", 1, (1.0, 1.0)), "needs 2 to 2 strictly increasing values"),
        (lambda: CodebookFormat("x", 1, (0.0, math.nan)), "needs 2 to 2 strictly increasing values"),
        (
            lambda: FloatFormat("x", 4, 2, 1, 1, reserved=8),
            "reserves 8 codes of each sign, which has 8; leave",
        ),
        (lambda: FloatFormat("x", 4, 2, 1, 1, reserved=-1), "reserves -1 codes"),
        (lambda: FloatFormat("x", 4, 2, 1, 200), r"from 2\*\*-200 to 2\*\*-196; choose a bias"),
        (lambda: FloatFormat("x", 4, 2, 1, -200), r"from 2\*\*200 to 2\*\*204"),
        (lambda: FloatFormat("x", 4, 0, 3, 1), "has 0 exponent and 3 mantissa bits; each is at least 1"),
        (lambda: FloatFormat("x", 4, 3, 0, 1), "has 3 exponent and 0 mantissa bits; each is at least 1"),
        (lambda: CodebookFormat("x", 1, (0.0, math.inf)), "no finite float32: .inf"),
        (lambda: CodebookFormat("x", 1, (0.0, 1e39)), r"no finite float32: .1e\+39"),
        (lambda: CodebookFormat("x", 1, (0.0, 0.1)), "no finite float32: .0.1"),
    ],
)
def test_invalid_records_are_refused(build: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build()  # type: ignore[operator]


@each_format
def test_every_format_survives_json(fmt: NumberFormat) -> None:
    written = format_to_json(fmt)
    assert (written == fmt.name) is (fmt.name in FORMATS)
    assert format_from_json(json.loads(json.dumps(written))) == fmt


def test_a_book_of_integers_survives_json() -> None:
    fmt = CodebookFormat("whole", 2, (-8, 0, 1, 8))
    assert format_from_json(json.loads(json.dumps(format_to_json(fmt)))) == fmt


CUSTOM: dict[str, Any] = {"kind": "codebook", "name": "third", "bits": 2, "book": [-1.0, 0.0, 0.25, 1.0]}
MINE: dict[str, Any] = {
    **{"kind": "float", "name": "mine", "bits": 4, "reserved": 0},
    **{"exponent_bits": 2, "mantissa_bits": 1, "bias": 1},
}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("int17", "unknown number format 'int17'"),
        (None, "a name or an object of kind int, float, codebook, fitted; found None"),
        (["int4"], r"a name or an object of kind .*; found \['int4'\]"),
        ({}, "a name or an object of kind"),
        ({**CUSTOM, "kind": "posit"}, "a name or an object of kind .*'posit'"),
        ({**CUSTOM, "kind": []}, "a name or an object of kind"),
        ({**CUSTOM, "surprise": 1}, r"kind 'codebook' has the fields \['bits', 'book', 'name'\]"),
        ({"kind": "int", "name": "x"}, r"kind 'int' has the fields \['bits', 'name'\]"),
        ({**CUSTOM, "name": 3}, "a name of its own"),
        ({**CUSTOM, "name": "int4"}, "a name of its own"),
        ({**CUSTOM, "bits": True}, "'third' has fields of the wrong type"),
        ({**CUSTOM, "bits": 2.0}, "fields of the wrong type"),
        ({**CUSTOM, "book": "abcd"}, "fields of the wrong type"),
        ({**CUSTOM, "book": [0, 1, 2, 3]}, "fields of the wrong type"),
        ({**CUSTOM, "book": [0.0, 1.0]}, "needs 3 to 4 strictly increasing values"),
        ({**CUSTOM, "bits": 9}, "has 9 bits; a code has 1 to 8"),
        ({**MINE, "bias": 10**10}, "choose a bias that keeps them"),
        ({**MINE, "bias": 10**4299}, "has fields of the wrong type or size"),
        ({**MINE, "mantissa_bits": 2}, "has 4 bits but its fields take 5"),
        ({**MINE, "reserved": 8}, "reserves 8 codes"),
    ],
)
def test_json_that_is_no_format_is_refused(data: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        format_from_json(data)
