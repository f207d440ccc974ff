"""Codes as a dense stream of bits, against the slow twin and compressed-tensors."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32
from hypothesis import given, settings
from hypothesis import strategies as st

from quantkit.errors import FormatError
from quantkit.packing import bitpack
from quantkit.packing.formats import FORMATS
from quantkit.packing.packings import PACKINGS
from quantkit.packing.schemes import Scheme
from quantkit.packing.stream import (
    codes_per_cut,
    pack,
    straddles,
    unpack,
    words_per_row,
)

from ..support.compare import assert_equal
from . import references
from .test_words import unsigned

WIDTHS = range(1, 9)


def random_codes(*shape: int, bits: int) -> torch.Tensor:
    return torch.randint(0, 2**bits, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(WIDTHS), st.data())
def test_pack_and_unpack_equal_their_slow_twins(bits: int, data: st.DataObject) -> None:
    row = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=90))
    packed = pack(torch.tensor(row, dtype=torch.uint8), bits)
    assert packed.dtype == torch.int32 and packed.shape == (words_per_row(len(row), bits),)
    assert unsigned(packed) == references.pack_stream(row, bits)
    assert (
        unpack(packed, bits, len(row)).tolist()
        == row
        == references.unpack_stream(unsigned(packed), bits, len(row))
    )


@pytest.mark.parametrize("columns", [1, 11, 32, 33, 70, 128])
@pytest.mark.parametrize("bits", WIDTHS)
def test_words_are_those_of_compressed_tensors(bits: int, columns: int) -> None:
    codes = random_codes(3, columns, bits=bits)
    signed = (codes.to(torch.int16) - 2 ** (bits - 1)).to(torch.int8)
    packed = pack(codes, bits)
    assert_equal(packed, pack_to_int32(signed, bits))
    assert_equal(unpack_from_int32(packed, bits, torch.Size((3, columns))), signed)


@pytest.mark.parametrize("bits", WIDTHS)
def test_matrices_of_any_strides_survive(bits: int) -> None:
    codes = random_codes(3, 2, 70, bits=bits)
    packed = pack(codes, bits)
    assert_equal(unpack(packed, bits, 70), codes)
    assert_equal(pack(codes.transpose(0, 1), bits), packed.transpose(0, 1))
    assert_equal(unpack(packed.mT.contiguous().mT, bits, 70), codes)
    assert unpack(packed[:0], bits, 70).shape == (*pack(codes[:0], bits).shape[:2], 70)


@pytest.mark.parametrize("bits", WIDTHS)
def test_a_slice_at_whole_words_is_a_slice_of_the_words(bits: int) -> None:
    codes, cut = random_codes(2, 128, bits=bits), codes_per_cut(bits)
    packed = pack(codes, bits)
    for at in range(cut, 128, cut):
        assert_equal(pack(codes[:, :at], bits), packed[:, : at * bits // 32])
        assert_equal(pack(codes[:, at:], bits), packed[:, at * bits // 32 :])


def test_bits_past_the_last_code_are_zero_and_ignored() -> None:
    packed = pack(random_codes(1, 11, bits=3), 3)
    assert unsigned(packed)[1] >> 1 == 0
    noisy = packed.clone()
    noisy[0, 1] |= -2
    assert_equal(unpack(noisy, 3, 11), unpack(packed, 3, 11))


def test_wrong_codes_and_words_are_refused() -> None:
    with pytest.raises(FormatError, match=r"codes are torch\.uint8, got torch\.int64"):
        pack(torch.zeros(1, 4, dtype=torch.int64), 3)
    with pytest.raises(FormatError, match="a code of 3 bits is below 8, got 8"):
        pack(torch.full((1, 4), 8, dtype=torch.uint8), 3)
    with pytest.raises(
        FormatError, match=r"40 codes of 3 bits take 4 int32 words a row; got 3 of torch\.int32"
    ):
        unpack(torch.zeros(1, 3, dtype=torch.int32), 3, 40)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_for_integers_whose_codes_straddle_words(name: str) -> None:
    fmt = FORMATS[name]
    reason = PACKINGS["stream"].why_not(fmt, 1)
    assert (reason is None) is (name in ("int3", "int5", "int6", "int7"))
    if reason is not None:
        with pytest.raises(FormatError, match=f"packing 'stream' is not for '{name}': .*; pack it as 'bits'"):
            Scheme(fmt, 32, packing="stream")
    elif straddles(fmt.bits):
        codes = random_codes(2, 64, bits=fmt.bits)
        assert not torch.equal(pack(codes, fmt.bits), bitpack.pack(codes, fmt.bits))
