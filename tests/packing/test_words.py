"""Words: the storage layout against its slow twin and compressed-tensors."""

import importlib.util
import sys

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import FormatError
from quantkit.packing import bitpack as words_module
from quantkit.packing.bitpack import pack, part_widths, unpack, words_per_row

from ..support.compare import assert_equal
from . import references

WIDTHS = range(1, 9)
each_width = pytest.mark.parametrize("bits", WIDTHS)


def random_codes(*shape: int, bits: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2**bits, shape, generator=generator, dtype=torch.uint8)


def unsigned(words: torch.Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in words.flatten().tolist()]


shapes = st.tuples(
    st.lists(st.integers(0, 3), max_size=3),
    st.integers(0, 300),
    st.sampled_from(WIDTHS),
    st.integers(0, 2**32 - 1),
)


@settings(max_examples=150, deadline=None)
@given(shapes)
def test_pack_and_unpack_equal_their_twins(case: tuple[list[int], int, int, int]) -> None:
    lead, columns, bits, seed = case
    codes = random_codes(*lead, columns, bits=bits, seed=seed)
    words = pack(codes, bits)
    assert words.dtype == torch.int32 and words.shape == (*lead, words_per_row(columns, bits))
    assert_equal(unpack(words, bits, columns), codes)
    if columns:
        for row, packed in zip(codes.reshape(-1, columns), words.reshape(-1, words.shape[-1]), strict=True):
            assert unsigned(packed) == references.pack_bits(row.tolist(), bits)
            assert references.unpack_bits(unsigned(packed), bits, columns) == row.tolist()


@each_width
def test_a_row_takes_the_fewest_whole_words_per_part(bits: int) -> None:
    for columns in range(300):
        assert words_per_row(columns, bits) == len(references.pack_bits([0] * columns, bits))
    assert words_per_row(4096, bits) * 32 == 4096 * bits
    assert sum(part_widths(bits)) == bits


@each_width
def test_strided_codes_and_words_pack_like_contiguous_ones(bits: int) -> None:
    codes = random_codes(70, 6, bits=bits).T[::2, 3:]  # strided in both dimensions, at an odd address
    words = pack(codes, bits)
    assert_equal(words, pack(codes.contiguous(), bits))
    assert_equal(unpack(words.T.contiguous().T, bits, codes.shape[1]), codes)


@each_width
def test_a_single_strided_column_packs(bits: int) -> None:
    codes = random_codes(32, 3, bits=bits)[:, 1:2].T
    assert_equal(unpack(pack(codes, bits), bits, 32), codes)


@each_width
def test_a_slice_of_columns_at_blocks_is_a_slice_of_words(bits: int) -> None:
    codes = random_codes(3, 32 * 5 + 13, bits=bits)
    words = pack(codes, bits)
    for start in range(6):
        assert_equal(words[:, start * bits :], pack(codes[:, 32 * start :], bits))
        for stop in range(start + 1, 6):
            part = pack(codes[:, 32 * start : 32 * stop], bits)
            assert_equal(words[:, start * bits : stop * bits], part)


@each_width
def test_padding_bits_are_zero(bits: int) -> None:
    ones = torch.full((1, 37), 2**bits - 1, dtype=torch.uint8)
    assert sum(word.bit_count() for word in unsigned(pack(ones, bits))) == 37 * bits


@each_width
def test_pack_owns_its_memory(bits: int) -> None:
    codes = random_codes(2, 64, bits=bits)
    before = codes.clone()
    pack(codes, bits).zero_()
    assert_equal(codes, before)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("columns", [1, 7, 8, 31, 32, 33, 64, 129, 300])
def test_dense_widths_equal_compressed_tensors(bits: int, columns: int) -> None:
    codes = random_codes(3, columns, bits=bits)
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    assert_equal(pack(codes, bits), pack_to_int32(signed, bits))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("rows", [1, 5, 8, 40, 64])
def test_zero_points_packed_along_rows_equal_compressed_tensors(bits: int, rows: int) -> None:
    codes = random_codes(rows, 3, bits=bits)
    signed = (codes.int() - 2 ** (bits - 1)).to(torch.int8)
    assert_equal(pack(codes.T, bits).T, pack_to_int32(signed, bits, packed_dim=0))


def test_words_drawn_by_hand() -> None:
    nibbles = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 9], dtype=torch.uint8)
    assert unsigned(pack(nibbles, 4)) == [0x87654321, 0x9]
    six = torch.tensor([0x21, 0x32, 0x03], dtype=torch.uint8)  # low nibbles 1, 2, 3; high pairs 2, 3, 0
    assert unsigned(pack(six, 6)) == [0x321, 0b00_11_10]
    assert unsigned(pack(torch.tensor([0x7F, 0, 0x40], dtype=torch.uint8), 7)) == [0x00F, 0b11, 0b101]


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_widths_out_of_range_are_refused(bits: int) -> None:
    with pytest.raises(FormatError, match=f"codes have 1 to 8 bits, got {bits}"):
        part_widths(bits)
    with pytest.raises(FormatError, match=f"got {bits}"):
        pack(torch.zeros(32, dtype=torch.uint8), bits)


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_code_too_wide_is_refused(bits: int) -> None:
    codes = torch.zeros(40, dtype=torch.uint8)
    codes[39] = 2**bits
    with pytest.raises(FormatError, match=f"a code of {bits} bits is below {2**bits}, got {2**bits}"):
        pack(codes, bits)


def test_codes_of_another_dtype_are_refused() -> None:
    with pytest.raises(FormatError, match=r"codes are torch\.uint8, got torch\.int64"):
        pack(torch.zeros(32, dtype=torch.int64), 4)


@pytest.mark.parametrize(
    "words", [torch.zeros(2, 4, dtype=torch.int32), torch.zeros(2, 5, dtype=torch.int64)]
)
def test_words_of_another_width_or_dtype_are_refused(words: torch.Tensor) -> None:
    with pytest.raises(FormatError, match="40 codes of 4 bits take 5 int32 words a row; got"):
        unpack(words, 4, 40)


@pytest.mark.fault(14)
def test_a_big_endian_machine_is_refused_at_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "byteorder", "big")
    spec = importlib.util.spec_from_file_location("words_elsewhere", words_module.__file__)
    assert spec is not None and spec.loader is not None
    with pytest.raises(FormatError, match="this machine is big-endian"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))
