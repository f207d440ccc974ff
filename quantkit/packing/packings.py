"""Packings: the ways to lay codes into words, as rows of a table."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.packing import radix, words
from quantkit.packing.formats import NumberFormat

PackingName = Literal["bits", "radix"]


@dataclass(frozen=True)
class Packing:
    """How the codes of a row, in any format that `why_not` has no reason against, become int32 words.

    `pack` maps codes (uint8 [..., K]) to words (int32 [..., W]), W being `words_per_row(K, format)`, and
    `unpack` maps words and K back.
    """

    name: PackingName
    summary: str
    why_not: Callable[[NumberFormat], str | None]
    words_per_row: Callable[[int, NumberFormat], int]
    pack: Callable[[torch.Tensor, NumberFormat], torch.Tensor]
    unpack: Callable[[torch.Tensor, NumberFormat, int], torch.Tensor]


def base(number_format: NumberFormat) -> int:
    """What the codes of a format are digits to: the number of its values, -0 and +0 counted apart."""
    return sum(not math.isnan(value) for value in number_format.values)


def _why_not_radix(number_format: NumberFormat) -> str | None:
    count = base(number_format)
    if count == 2**number_format.bits:
        return f"its {count} values fill {number_format.bits} bits; pack it as 'bits'"
    if not math.isnan(number_format.values[count]):
        return "its codes without a value are not the last; pack it as 'bits'"
    digits = radix.digits_per_byte(count)
    if digits * number_format.bits <= 8:
        return f"a byte holds {digits} digits to base {count}, no more than its bits do; pack it as 'bits'"
    return None


PACKINGS: dict[str, Packing] = {
    packing.name: packing
    for packing in (
        Packing(
            "bits",
            "every code takes its bits, in planes of 8, 4, 2 and 1: what kernels want",
            why_not=lambda number_format: None,
            words_per_row=lambda columns, number_format: words.words_per_row(columns, number_format.bits),
            pack=lambda codes, number_format: words.pack(codes, number_format.bits),
            unpack=lambda packed, number_format, columns: words.unpack(packed, number_format.bits, columns),
        ),
        Packing(
            "radix",
            "codes are the digits of a byte, for formats whose values do not fill their bits: ternary in 1.6",
            why_not=_why_not_radix,
            words_per_row=lambda columns, number_format: radix.words_per_row(columns, base(number_format)),
            pack=lambda codes, number_format: radix.pack(codes, base(number_format)),
            unpack=lambda packed, number_format, columns: radix.unpack(packed, base(number_format), columns),
        ),
    )
}
