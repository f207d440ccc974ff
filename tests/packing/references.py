"""Slow, obvious twins of the packings and of encoding, in plain Python.

A row is a list of codes, its words are unsigned 32-bit integers.
"""

import math
from collections.abc import Collection
from fractions import Fraction
from functools import lru_cache

from quantkit.packing import bitpack, radix, stream
from quantkit.packing.formats import CodebookFormat, FloatFormat, IntFormat, NumberFormat


def pack_bits(codes: list[int], bits: int) -> list[int]:
    """Pack one row one bit at a time, to unsigned words, as `bitpack.pack`."""
    words: list[int] = []
    for start in range(0, len(codes), bitpack.BLOCK):
        block = codes[start : start + bitpack.BLOCK]
        shift = 0
        for p in bitpack.part_widths(bits):
            part = [0] * (-(-len(block) * p // bitpack.BLOCK))
            for i, code in enumerate(block):
                for bit in range(p):
                    if code >> (shift + bit) & 1:
                        at = p * i + bit
                        part[at // 32] |= 1 << (at % 32)
            words += part
            shift += p
    return words


def unpack_bits(words: list[int], bits: int, columns: int) -> list[int]:
    """Unpack one row as `bitpack.unpack`."""
    codes: list[int] = []
    position = 0
    while len(codes) < columns:
        size = min(bitpack.BLOCK, columns - len(codes))
        block = [0] * size
        shift = 0
        for p in bitpack.part_widths(bits):
            for i in range(size):
                for bit in range(p):
                    at = p * i + bit
                    block[i] |= (words[position + at // 32] >> (at % 32) & 1) << (shift + bit)
            position += -(-size * p // bitpack.BLOCK)
            shift += p
        codes += block
    return codes


def pack_radix(codes: list[int], base: int) -> list[int]:
    """Pack one row one code at a time, to unsigned words, as `radix.pack`."""
    digits = radix.digits_per_byte(base)
    words = [0] * radix.words_per_row(len(codes), base)
    for column, code in enumerate(codes):
        byte, place = divmod(column, digits)
        words[byte // radix.WORD_BYTES] += code * base**place << 8 * (byte % radix.WORD_BYTES)
    return words


def unpack_radix(words: list[int], base: int, columns: int) -> list[int]:
    """Unpack one row as `radix.unpack`."""
    digits = radix.digits_per_byte(base)
    codes = []
    for column in range(columns):
        byte, place = divmod(column, digits)
        value = words[byte // radix.WORD_BYTES] >> 8 * (byte % radix.WORD_BYTES) & 0xFF
        codes.append(base if value >= base**digits else value // base**place % base)
    return codes


def pack_stream(codes: list[int], bits: int) -> list[int]:
    """Pack one row to unsigned words, as `stream.pack`."""
    whole = sum(code << (bits * i) for i, code in enumerate(codes))
    return [whole >> (32 * i) & 0xFFFFFFFF for i in range(stream.words_per_row(len(codes), bits))]


def unpack_stream(words: list[int], bits: int, columns: int) -> list[int]:
    """Unpack one row as `stream.unpack`."""
    whole = sum(word << (32 * i) for i, word in enumerate(words))
    return [whole >> (bits * i) & ((1 << bits) - 1) for i in range(columns)]


@lru_cache(maxsize=64)
def exact_values(number_format: NumberFormat) -> dict[int, Fraction]:
    """Return the exact value of every code whose value is a number."""
    values = enumerate(number_format.values)
    return {code: Fraction(value) for code, value in values if not math.isnan(value)}


def encode(number_format: NumberFormat, x: float, codes: Collection[int] | None = None) -> int:
    """Encode one number by exact distances to every value, or to those of `codes`."""
    exact, values = Fraction(x), exact_values(number_format)

    def rank(code: int) -> tuple[Fraction, tuple[float, ...]]:
        return abs(values[code] - exact), _tie_break(number_format, code, x)

    return min(values if codes is None else codes, key=rank)


def _tie_break(number_format: NumberFormat, code: int, x: float) -> tuple[float, ...]:
    """Return the sort key by which one of the codes nearest to `x` is chosen: the smallest."""
    if isinstance(number_format, IntFormat):
        return ((code - number_format.offset) % 2,)
    if isinstance(number_format, FloatFormat):
        # The sign comes first in the key: it distinguishes the two zeros.
        return math.copysign(1.0, x) != math.copysign(1.0, number_format.values[code]), code % 2
    assert isinstance(number_format, CodebookFormat)
    return (-number_format.book[code],)
