"""Number formats: every code point, every rounding boundary."""

import dataclasses
import itertools
import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from quantkit.errors import FormatError
from quantkit.packing.formats import (
    ALIASES,
    FORMATS,
    CodebookFormat,
    FloatFormat,
    IntFormat,
    NumberFormat,
    number_format,
)

# A new format is a new row of FORMATS, so the classes have to be right beyond the rows there are today.
UNLISTED = (
    IntFormat("int2", 2),
    IntFormat("int3", 3),
    FloatFormat("e2m1", 4, exponent_bits=2, mantissa_bits=1, bias=1),
    FloatFormat("e4m3", 8, exponent_bits=4, mantissa_bits=3, bias=7),
    CodebookFormat("thirds", 2, book=tuple(float(np.float32(v)) for v in (-1 / 3, 0.1, 2 / 3, 1e20))),
    CodebookFormat("apart", 1, book=(2.0**-100, 1.0)),
)
ALL = (*FORMATS.values(), *UNLISTED)
ML_DTYPES = {"fp6-e2m3": ml_dtypes.float6_e2m3fn, "fp6-e3m2": ml_dtypes.float6_e3m2fn}

each_format = pytest.mark.parametrize("fmt", ALL, ids=lambda fmt: fmt.name)


def every_code(fmt: NumberFormat) -> torch.Tensor:
    return torch.arange(2**fmt.bits, dtype=torch.uint8)


def boundary_inputs(fmt: NumberFormat) -> torch.Tensor:
    """All values and midpoints with a float32 on either side, random numbers, and the ends of float32."""
    ordered = sorted(set(fmt.values))
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


@each_format
def test_every_code_survives_decode_then_encode(fmt: NumberFormat) -> None:
    codes = every_code(fmt)
    assert torch.equal(fmt.encode(fmt.decode(codes)), codes)


@each_format
def test_encode_is_the_nearest_value_in_exact_arithmetic(fmt: NumberFormat) -> None:
    x = boundary_inputs(fmt)
    codes = fmt.encode(x)
    assert codes.dtype == torch.uint8
    for number, code in zip(x.tolist(), codes.tolist(), strict=True):
        assert code == fmt.encode_reference(number), f"{number!r} ({number.hex()})"


@each_format
def test_round_is_decode_of_encode(fmt: NumberFormat) -> None:
    x = boundary_inputs(fmt)
    assert torch.equal(fmt.round(x), fmt.decode(fmt.encode(x)))


@each_format
def test_encode_takes_strided_input_and_leaves_it_unchanged(fmt: NumberFormat) -> None:
    x = torch.linspace(-9, 9, 60).reshape(6, 10)
    before = x.clone()
    assert torch.equal(fmt.encode(x.T[::3]), fmt.encode(x.T[::3].contiguous()))
    assert torch.equal(x, before)


@each_format
def test_limits_follow_from_the_values(fmt: NumberFormat) -> None:
    values = fmt.decode(every_code(fmt))
    assert values.tolist() == list(fmt.values)
    assert (fmt.max, fmt.min) == (values.max().item(), values.min().item())
    assert fmt.has_zero == bool((values == 0).any())


@pytest.mark.parametrize(
    ("name", "smallest", "largest", "absmax", "has_zero"),
    [
        ("int8", -128.0, 127.0, 127.0, True),
        ("int4", -8.0, 7.0, 7.0, True),
        ("fp6-e2m3", -7.5, 7.5, 7.5, True),
        ("fp6-e3m2", -28.0, 28.0, 28.0, True),
        ("binary", -1.0, 1.0, 1.0, False),
    ],
)
def test_published_limits(name: str, smallest: float, largest: float, absmax: float, has_zero: bool) -> None:
    fmt = FORMATS[name]
    assert (fmt.min, fmt.max, fmt.absmax, fmt.has_zero) == (smallest, largest, absmax, has_zero)
    assert fmt.rounding_statistic == ("absmax" if has_zero else "absmean")


@pytest.mark.parametrize("name", ML_DTYPES)
def test_fp6_equals_ml_dtypes_bit_for_bit(name: str) -> None:
    fmt, peer = FORMATS[name], ML_DTYPES[name]
    table = np.arange(64, dtype=np.uint8).view(peer).astype(np.float32)
    ours = np.array(fmt.values, dtype=np.float32)
    assert ours.tobytes() == table.tobytes()
    x = torch.cat([boundary_inputs(fmt), torch.randn(20000, generator=torch.Generator().manual_seed(1)) * 6])
    x = x[x.abs() <= fmt.max]  # beyond the largest value the peer may wrap; saturation is tested above
    assert np.array_equal(fmt.encode(x).numpy(), x.numpy().astype(peer).view(np.uint8))


@pytest.mark.parametrize("bits", range(2, 9))
def test_int_is_round_clamp_offset(bits: int) -> None:
    fmt = IntFormat(f"int{bits}", bits)
    half = 2 ** (bits - 1)
    x = torch.linspace(-1.5 * half, 1.5 * half, 4001)
    assert torch.equal(fmt.encode(x).int(), x.round().clamp(-half, half - 1).int() + half)
    assert fmt.decode(torch.tensor([fmt.offset], dtype=torch.uint8)).item() == 0.0


def test_affine_codes_saturate_about_any_zero_point() -> None:
    fmt = IntFormat("int4", 4)
    x = torch.linspace(-20, 20, 801).repeat(16, 1)
    zero_point = torch.arange(16, dtype=torch.uint8)[:, None]
    expected = (x.round() + zero_point).clamp(0, 15).to(torch.uint8)
    assert torch.equal(fmt.quantize_affine(x, zero_point.float())[0], expected)


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
    with pytest.raises(FormatError, match=r"unknown number format 'int17'; known are int8, int4, .*fp6"):
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
            "'x' needs 4 strictly increasing values for 2 bits; got 2",
        ),
        (lambda: CodebookFormat("x", 1, (1.0, 1.0)), "needs 2 strictly increasing values"),
        (lambda: CodebookFormat("x", 1, (0.0, math.nan)), "needs 2 strictly increasing values"),
        (lambda: CodebookFormat("x", 1, (0.0, math.inf)), "no finite float32: .inf"),
        (lambda: CodebookFormat("x", 1, (0.0, 1e39)), r"no finite float32: .1e\+39"),
        (lambda: CodebookFormat("x", 1, (0.0, 0.1)), "no finite float32: .0.1"),
    ],
)
def test_invalid_records_are_refused(build: object, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        build()  # type: ignore[operator]
