"""Codes as digits of bytes, against the slow twin, and what becomes of bytes that are no codes."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.calibrate.methods import quantize_tensor
from quantkit.errors import FormatError
from quantkit.kernels.linear import linear
from quantkit.packing import bitpack
from quantkit.packing.formats import FORMATS, CodebookFormat, NumberFormat
from quantkit.packing.packings import PACKINGS, PackingName, base
from quantkit.packing.radix import (
    digits_per_byte,
    pack,
    unpack,
    words_per_row,
)
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

from ..support.compare import assert_equal
from . import references
from .test_words import unsigned

FIVE = CodebookFormat("five", 3, book=(-4.0, -1.0, 0.0, 1.0, 4.0))
BASES = [2, 3, 5, 6, 7, 16, 200, 256]


def random_codes(*shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_digits_per_byte() -> None:
    assert {n: digits_per_byte(n) for n in (2, 3, 4, 5, 6, 7, 16, 17, 256)} == {
        **{2: 8, 3: 5, 4: 4, 5: 3, 6: 3, 7: 2, 16: 2, 17: 1, 256: 1}
    }
    assert all(n ** digits_per_byte(n) <= 256 < n ** (digits_per_byte(n) + 1) for n in range(2, 257))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BASES), st.data())
def test_pack_and_unpack_equal_their_slow_twins(n: int, data: st.DataObject) -> None:
    row = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=90))
    packed = pack(torch.tensor(row, dtype=torch.uint8), n)
    assert packed.dtype == torch.int32 and packed.shape == (words_per_row(len(row), n),)
    assert unsigned(packed) == references.pack_radix(row, n)
    assert (
        unpack(packed, n, len(row)).tolist() == row == references.unpack_radix(unsigned(packed), n, len(row))
    )


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(BASES), st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=4), st.data())
def test_any_words_unpack_as_the_slow_twin_says(n: int, row: list[int], data: st.DataObject) -> None:
    most = len(row) * 4 * digits_per_byte(n)
    columns = data.draw(st.integers(most - 4 * digits_per_byte(n) + 1, most))
    signed = torch.tensor([word - (word >> 31 << 32) for word in row], dtype=torch.int32)
    assert unpack(signed, n, columns).tolist() == references.unpack_radix(row, n, columns)


@pytest.mark.parametrize("n", BASES)
@pytest.mark.parametrize("columns", [1, 4, 5, 6, 19, 20, 21, 33, 127, 300])
def test_matrices_of_any_strides_survive(n: int, columns: int) -> None:
    codes = random_codes(3, 2, columns, below=n)
    packed = pack(codes, n)
    assert_equal(unpack(packed, n, columns), codes)
    assert_equal(pack(codes.transpose(0, 1), n), packed.transpose(0, 1))
    assert_equal(unpack(packed.mT.contiguous().mT, n, columns), codes)
    assert unpack(packed[:0], n, columns).shape == (0, 2, columns)
    assert_equal(pack(codes[1:], n), packed[1:])


def test_ternary_bits_by_hand() -> None:
    codes = [2, 1, 0, 1, 2, 1, 2, 2, 2, 2, 0, 1]
    first, second, third = 2 + 1 * 3 + 0 * 9 + 1 * 27 + 2 * 81, 1 + 2 * 3 + 2 * 9 + 2 * 27 + 2 * 81, 0 + 1 * 3
    packed = pack(torch.tensor(codes, dtype=torch.uint8), 3)
    assert unsigned(packed) == [first | second << 8 | third << 16]


def test_bytes_that_are_no_digits_read_as_a_code_without_a_value() -> None:
    values = torch.arange(256, dtype=torch.uint8).view(torch.int32)
    codes = unpack(values, 3, 5 * 256).view(256, 5)
    assert_equal((codes == 3).all(1), torch.arange(256) >= 243)
    assert int(codes[:243].max()) == 2
    assert len({tuple(row) for row in codes[:243].tolist()}) == 243
    assert math.isnan(FORMATS["ternary"].values[base(FORMATS["ternary"])])


def test_a_damaged_byte_becomes_nan_and_not_a_wrong_number() -> None:
    packed = quantize_tensor(torch.randn(2, 40), "ternary", packing="radix", group_size=20)
    damaged = packed.words.clone()
    damaged.view(torch.uint8)[1, 3] = 250
    broken = PackedTensor((damaged, packed.scale), packed.scheme, packed.shape)
    weights = broken.dequantize()
    assert weights[1, 15:20].isnan().all()
    assert int(weights.isnan().sum()) == 5
    assert linear(torch.randn(1, 40), broken).isnan().tolist() == [[False, True]]


@pytest.mark.parametrize("packing", ["bits", "radix"])
@pytest.mark.parametrize("row", ["unpack", "int-digits"])
def test_every_kernel_gives_nan_for_codes_without_a_value(
    row: str, packing: PackingName, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = quantize_tensor(torch.randn(7, 600), "ternary", packing=packing)
    damaged = packed.words.clone()
    damaged.view(torch.uint8)[4, 30] = 255
    broken = PackedTensor((damaged, packed.scale), packed.scheme, packed.shape)
    monkeypatch.setenv("QUANTKIT_KERNEL", row)
    x = torch.randn(2, 600)
    found, expected = linear(x, broken), linear(x, packed)
    assert found[:, 4].isnan().all()
    sound = [0, 1, 2, 3, 5, 6]
    assert_equal(found[:, sound], expected[:, sound])


def test_digits_past_the_last_column_are_zero_and_ignored() -> None:
    packed = pack(random_codes(1, 21, below=3), 3)
    assert packed.view(torch.uint8)[0, 5:].tolist() == [0, 0, 0]
    noisy = packed.clone()
    noisy.view(torch.uint8)[0, 5:] = 255
    assert_equal(unpack(noisy, 3, 21), unpack(packed, 3, 21))


@pytest.mark.parametrize("name", [*FORMATS, "five"])
def test_radix_is_for_formats_whose_values_leave_codes_over(name: str) -> None:
    fmt: NumberFormat = FORMATS.get(name, FIVE)
    reason = PACKINGS["radix"].why_not(fmt, 1)
    assert (reason is None) is (name in ("ternary", "five"))
    assert PACKINGS["bits"].why_not(fmt, 1) is None
    if reason is not None:
        with pytest.raises(FormatError, match=f"packing 'radix' is not for '{name}': .*; pack it as 'bits'"):
            Scheme(fmt, 32, packing="radix")


@pytest.mark.parametrize("planes", [2, 3, 4])
def test_planes_are_not_digits(planes: int) -> None:
    with pytest.raises(
        FormatError, match=f"packing 'radix' is not for 'ternary': .* not of the {planes} of .*'bits'"
    ):
        Scheme(FORMATS["ternary"], 32, planes=planes, packing="radix")


def test_column_scales_and_digits_go_together() -> None:
    weight = torch.randn(24, 60) * torch.linspace(0.2, 3, 60)
    one, other = (
        quantize_tensor(weight, Scheme(FORMATS["ternary"], 20, column_scale=True, packing=name))
        for name in ("bits", "radix")
    )
    assert [part for part, _ in other.parts()] == ["packed", "scale", "column_scale"]
    assert_equal(one.dequantize(), other.dequantize())
    x = torch.randn(3, 60)
    assert_equal(linear(x, one), linear(x, other))


def test_a_book_that_digits_do_not_shrink_is_refused() -> None:
    book = CodebookFormat("nine", 4, book=tuple(float(i) for i in range(9)))
    with pytest.raises(FormatError, match="a byte holds 2 digits to base 9, no more than its bits do"):
        Scheme(book, 32, packing="radix")


@pytest.mark.parametrize(
    ("chosen", "columns", "bits"),
    [
        (scheme("ternary", packing="radix"), 1280, 1.6 + 16 / 128),
        (scheme("ternary", packing="radix"), 128, 7 * 32 / 128 + 16 / 128),  # 6.4 words take 7
        (scheme("ternary"), 1280, 2 + 16 / 128),
        (Scheme(FIVE, 128, packing="radix"), 1536, 8 / 3 + 16 / 128),
        (scheme("ternary", packing="radix", group_size=20), 20, 32 / 20 + 16 / 20),
        (
            scheme("ternary", packing="radix", group_size=16, scale_dtype=torch.float8_e4m3fn),
            1280,
            2.1 + 32 / (64 * 1280),
        ),
    ],
)
def test_bits_per_weight_are_counted_honestly(chosen: Scheme, columns: int, bits: float) -> None:
    packed = quantize_tensor(torch.randn(64, columns), chosen)
    assert packed.bits_per_weight == pytest.approx(bits + 128 / (64 * columns))
    assert packed.words.shape == chosen.storage_shapes((64, columns))["packed"][1]


@pytest.mark.parametrize("columns", [7, 20, 64, 130])
def test_both_packings_hold_the_same_numbers(columns: int) -> None:
    weight = torch.randn(9, columns)
    one, other = (
        quantize_tensor(weight, "ternary", group_size=16, packing=name) for name in ("bits", "radix")
    )
    assert_equal(one.codes(), other.codes())
    assert_equal(one.codes(2, 5), other.codes(2, 5))
    assert_equal(one.dequantize(), other.dequantize())
    x = torch.randn(3, columns)
    for row in ("unpack", "int-digits"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("QUANTKIT_KERNEL", row)
            assert_equal(linear(x, one), linear(x, other))


def test_the_scheme_says_its_packing() -> None:
    usual, radix = scheme("ternary"), scheme("ternary", packing="radix")
    assert (usual.to_dict()["packing"], radix.to_dict()["packing"]) == ("bits", "radix")
    assert (str(usual), str(radix)) == ("ternary g128 bfloat16", "ternary g128 radix bfloat16")
    without = {key: value for key, value in usual.to_dict().items() if key != "packing"}
    with pytest.raises(FormatError, match="a scheme has the fields"):
        Scheme.from_dict(without)


@pytest.mark.parametrize("packing", ["trits", None, 3, []])
def test_an_unknown_packing_is_refused(packing: Any) -> None:
    with pytest.raises(FormatError, match=r"scheme field 'packing' is .*; it is one of bits, radix, stream"):
        Scheme.from_dict({**scheme("ternary").to_dict(), "packing": packing})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: pack(torch.tensor([3], dtype=torch.uint8), 3), "a digit to base 3 is below 3, got 3"),
        (lambda: pack(torch.zeros(3, dtype=torch.int64), 3), "codes are torch.uint8, got torch.int64"),
        (lambda: digits_per_byte(1), "to base 2 to 256, got 1"),
        (lambda: unpack(torch.zeros(2, dtype=torch.int32), 3, 20), "take 1 int32 words a row; got 2"),
        (lambda: unpack(torch.zeros(1), 3, 20), "got 1 of torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(call: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        call()


def test_powers_of_two_are_the_same_bytes_as_bits() -> None:
    codes = random_codes(4, 64, below=16)
    assert_equal(pack(codes, 16), bitpack.pack(codes, 4))
