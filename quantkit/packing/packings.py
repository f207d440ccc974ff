"""Packings: the ways to lay out codes in words, as rows of a table."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.packing import bitpack, radix, stream
from quantkit.packing.formats import FittedFormat, IntFormat, NumberFormat

PackingName = Literal["bits", "radix", "stream", "bytes"]


@dataclass(frozen=True)
class Packing:
    """Conversion between the codes of a row and int32 words.

    planes                             number of terms whose sum is a weight; a code holds the codes of all
    why_not(format, planes)            reason if such codes cannot be packed, else None
    pack(codes, format, planes)        words (int32 [..., W]) of codes (uint8 [..., K])
    unpack(words, format, planes, K)   the codes
    words_per_row(K, format, planes)   W
    codes_per_cut(format, planes)      columns, at whose multiples a row can be cut between words
    """

    name: PackingName
    summary: str
    why_not: Callable[[NumberFormat, int], str | None]
    words_per_row: Callable[[int, NumberFormat, int], int]
    codes_per_cut: Callable[[NumberFormat, int], int]
    pack: Callable[[torch.Tensor, NumberFormat, int], torch.Tensor]
    unpack: Callable[[torch.Tensor, NumberFormat, int, int], torch.Tensor]


def base(number_format: NumberFormat) -> int:
    """Return the base of a format's codes as digits: its number of values, with -0 and +0 as two."""
    if isinstance(number_format, FittedFormat):
        return int(2**number_format.bits)
    return sum(not math.isnan(value) for value in number_format.values)


def _why_not_radix(number_format: NumberFormat, planes: int) -> str | None:
    if planes > 1:
        return f"a digit is the code of one value, not of the {planes} of as many planes; pack it as 'bits'"
    count = base(number_format)
    if count == 2**number_format.bits:
        return f"its {count} values fill {number_format.bits} bits; pack it as 'bits'"
    if not math.isnan(number_format.values[count]):
        return "its codes without a value are not the last; pack it as 'bits'"
    digits = radix.digits_per_byte(count)
    if digits * number_format.bits <= 8:
        return f"a byte holds {digits} digits to base {count}, no more than its bits do; pack it as 'bits'"
    return None


def _why_not_stream(number_format: NumberFormat, planes: int) -> str | None:
    if not isinstance(number_format, IntFormat) or planes > 1:
        return "it is the layout in which other engines read integers; pack it as 'bits'"
    if not stream.straddles(number_format.bits):
        return f"codes of {number_format.bits} bits have the same words in both; pack it as 'bits'"
    return None


def _why_not_bytes(number_format: NumberFormat, planes: int) -> str | None:
    if not isinstance(number_format, IntFormat) or number_format.bits * planes != 8:
        return "a byte in two's complement holds an integer of 8 bits; pack it as 'bits'"
    return None


PACKINGS: dict[str, Packing] = {
    packing.name: packing
    for packing in (
        Packing(
            "bits",
            "every code takes its bits, in parts of 8, 4, 2 and 1 bits: what kernels want",
            why_not=lambda form, planes: None,
            words_per_row=lambda columns, form, planes: bitpack.words_per_row(columns, planes * form.bits),
            codes_per_cut=lambda form, planes: bitpack.codes_per_cut(planes * form.bits),
            pack=lambda codes, form, planes: bitpack.pack(codes, planes * form.bits),
            unpack=lambda packed, form, planes, columns: bitpack.unpack(packed, planes * form.bits, columns),
        ),
        Packing(
            "radix",
            "codes are the digits of a byte, for formats whose values do not fill their bits: ternary in 1.6",
            why_not=_why_not_radix,
            words_per_row=lambda columns, form, planes: radix.words_per_row(columns, base(form)),
            codes_per_cut=lambda form, planes: radix.WORD_BYTES * radix.digits_per_byte(base(form)),
            pack=lambda codes, form, planes: radix.pack(codes, base(form)),
            unpack=lambda packed, form, planes, columns: radix.unpack(packed, base(form), columns),
        ),
        Packing(
            "stream",
            "codes of 3, 5, 6 and 7 bits straddle words: compressed-tensors' layout of integers, for vLLM",
            why_not=_why_not_stream,
            words_per_row=lambda columns, form, planes: stream.words_per_row(columns, form.bits),
            codes_per_cut=lambda form, planes: stream.codes_per_cut(form.bits),
            pack=lambda codes, form, planes: stream.pack(codes, form.bits),
            unpack=lambda packed, form, planes, columns: stream.unpack(packed, form.bits, columns),
        ),
        Packing(
            "bytes",
            "integers of 8 bits in two's complement: how engines read int8 weights of rounded inputs",
            why_not=_why_not_bytes,
            words_per_row=lambda columns, form, planes: bitpack.words_per_row(columns, 8),
            codes_per_cut=lambda form, planes: bitpack.codes_per_cut(8),
            # Offset binary and two's complement differ in the highest bit.
            pack=lambda codes, form, planes: bitpack.pack(codes ^ 0x80, 8),
            unpack=lambda packed, form, planes, columns: bitpack.unpack(packed, 8, columns) ^ 0x80,
        ),
    )
}
