"""Dequantization expressions: the bit operations and the fma that turn packed codes into floats.

A 32-bit register has two halfwords of 16 bits, one per column of a pair. A fragment is 16 columns; a span is
the fragments whose codes are stored in the same registers. The same halfword of these registers holds one
code of each fragment. Each register has as many whole codes as fit, and the last codes lie in the bits left
over. For 3 bits, three registers hold the codes of 16 fragments:

    register 0   p 4 4 4 3 3 3 2 2 2 1 1 1 0 0 0        p: lowest bit of the code of fragment 15
    register 1   q 9 9 9 8 8 8 7 7 7 6 6 6 5 5 5        q: its next bit

An expression takes the registers and returns a float for each fragment. Codes of e2m1 are interleaved
instead. One shift then brings more bits to their places in a bfloat16 (s sign, e exponent, m mantissa):

    bit of halfword   15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    fragment           0  2  3  1  3  3  3  0  0  0  1  1  1  2  2  2
    bit of code        s  s  s  s  e  e  m  e  e  m  e  e  m  e  e  m    wanted: s at 15, e at 8 and 7, m at 6

Two families of number formats need arithmetic only:

    even spacing   The code goes into the mantissa of a power of two P, where it counts 2^q last places:
                       0 1 0 0 0 0 1 1 0 . . . c c c c        128 + code as bfloat16 (q = 0)
                   One fma subtracts P and multiplies with the spacing.
    floats         Sign, exponent and mantissa go where a float has them. A product with a power of two
                   corrects the exponent bias; subnormals are exact too.

`arithmetic` describes both as bit moves, for any kind of float. `layouts.dequant_ptx` writes them as PTX for
two 16-bit floats. Without PTX, `dequant_codes` of `layouts.dequant_blocks` computes them in float32. Every
step is exact, so both give the same values. Other formats look values up.
"""

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from quantkit.packing.formats import FloatFormat, NumberFormat


@dataclass(frozen=True)
class FloatKind:
    """Float format that codes are dequantized to, such as bfloat16.

    width           number of bits
    mantissa_bits   number of stored mantissa bits
    bias            exponent bias
    """

    width: int
    mantissa_bits: int
    bias: int

    def bits(self, x: float) -> int | None:
        """Return the bit pattern of `x`; None if this float cannot represent it."""
        # A bfloat16 is the upper half of a float32.
        kind, cut = ("<e", 0) if self == FLOAT16 else ("<f", 32 - self.width)
        try:
            packed = struct.pack(kind, x)
        except OverflowError:
            return None
        pattern = int.from_bytes(packed, "little")
        exact = struct.unpack(kind, packed)[0] == x and pattern % (1 << cut) == 0
        return pattern >> cut if exact else None


#: Bits of a half of a register, in which codes lie.
HALFWORD_BITS = 16
BFLOAT16, FLOAT16, FLOAT32 = FloatKind(16, 7, 127), FloatKind(16, 10, 15), FloatKind(32, 23, 127)


@dataclass(frozen=True)
class Field:
    """Bits `first` to `first + width - 1` of a code, which are stored together at bit `at` of a halfword.

    The halfword (16 bits) is in the register of index `register`. A code that does not fit in one register
    has several fields.
    """

    register: int
    at: int
    first: int
    width: int

    @property
    def mask(self) -> int:
        """Return a mask of `width` one bits."""
        return (1 << self.width) - 1


def fragments_per_span(bits: int) -> int:
    """Return the number of fragments (16 columns) of a span: those whose codes are in the same registers.

    The result is the smallest power of two of codes that fills whole halfwords of 16 bits: 16 / gcd(16,
    bits). For 4 bits it is 4, for 3 bits 16.
    """
    return HALFWORD_BITS // math.gcd(HALFWORD_BITS, bits)


def registers(bits: int) -> int:
    """Return the number of registers in which the codes of a span are stored: 1 for 4 bits, 3 for 3 bits.

    A span is `fragments_per_span(bits)` fragments of 16 columns. The same halfword of these registers has a
    code of each fragment.
    """
    return bits * fragments_per_span(bits) // HALFWORD_BITS


#: First bit of exponent and mantissa, and bit of the sign, of each fragment of e2m1.
_INTERLEAVED = ((6, 15), (3, 12), (0, 14), (9, 13))


@lru_cache(maxsize=256)
def placement(number_format: NumberFormat) -> tuple[tuple[Field, ...], ...]:
    """Return where the code of each fragment (16 columns) is stored: its bit fields, lowest bits first.

    For int4, all in register 0: fragment 0 at bit 0, 1 at bit 4, 2 at bit 8, 3 at bit 12.
    """
    if isinstance(number_format, FloatFormat) and (number_format.bits, number_format.mantissa_bits) == (4, 1):
        return tuple((Field(0, low, 0, 3), Field(0, sign, 3, 1)) for low, sign in _INTERLEAVED)
    bits, count = number_format.bits, registers(number_format.bits)
    whole = HALFWORD_BITS // bits
    found: list[tuple[Field, ...]] = [
        (Field(register, i * bits, 0, bits),) for register in range(count) for i in range(whole)
    ]
    spare = [(register, at) for register in range(count) for at in range(whole * bits, HALFWORD_BITS)]
    for start in range(0, len(spare), bits):
        code = enumerate(spare[start : start + bits])
        pieces = [list(piece) for _, piece in groupby(code, key=lambda bit: bit[1][0])]
        found.append(tuple(Field(*piece[0][1], piece[0][0], len(piece)) for piece in pieces))
    return tuple(found)


@dataclass(frozen=True)
class Move:
    """Bit move: shift register `register` right by `right` bits (left if negative), AND with `mask`."""

    register: int
    right: int
    mask: int


@dataclass(frozen=True)
class CodeToFloat:
    """Instructions that turn the codes of one fragment (16 columns of K) into floats.

        value = bitcast_float(moved bits | base) * factor + addend

    `moves` first shift the bits of each code from registers to their places in the float. If `looked_up`, the
    moves only extract the code, which is the index of its value in a table.
    """

    moves: tuple[Move, ...]
    base: int = 0
    factor: float = 1.0
    #: Adding -0.0 keeps the sign of a zero.
    addend: float = -0.0
    looked_up: bool = False

    def __hash__(self) -> int:
        # A fast hash: Triton hashes it at every launch.
        return hash((self.base, self.factor, self.addend))


@lru_cache(maxsize=256)
def arithmetic(
    number_format: NumberFormat, kind: FloatKind, *, is_folded: bool = False
) -> tuple[CodeToFloat, ...] | None:
    """Return the instructions that turn codes into `kind` floats, for each fragment (16 columns) of a span.

    None if arithmetic cannot compute the values exactly. If `is_folded`, float formats leave out the factor
    `bias_factor(number_format, kind)`, because scales include it.
    """
    if isinstance(number_format, FloatFormat):
        return _float(number_format, kind, is_folded)
    spacing = _spacing(number_format)
    return None if spacing is None else _even(number_format, spacing, kind)


@lru_cache(maxsize=256)
def portable(number_format: NumberFormat, *, is_folded: bool = False) -> tuple[CodeToFloat, ...]:
    """Return the instructions that dequantize codes without PTX, for each fragment (16 columns) of a span.

    They compute in float32 if a bfloat16 holds each value, so that float32 can be truncated to bfloat16.
    Otherwise they look values up. If `is_folded`, float formats leave out the factor `bias_factor`, because
    scales include it.
    """
    exact = all(BFLOAT16.bits(value) is not None for value in number_format.numbers)
    found = arithmetic(number_format, FLOAT32, is_folded=is_folded) if exact else None
    if found is not None:
        return found
    return tuple(CodeToFloat(moves, looked_up=True) for moves in code_moves(number_format))


def code_moves(number_format: NumberFormat) -> tuple[tuple[Move, ...], ...]:
    """Return the bit moves that make an integer of a code, for each fragment (16 columns) of a span.

    A register holds, in each half, one code of every fragment, at bits that depend on the fragment.
    """
    return tuple(bit_moves(fields, int) for fields in placement(number_format))


def bias_factor(number_format: FloatFormat, kind: FloatKind) -> float:
    """Return the factor, a power of two, that corrects the exponent bias of a code as a `kind` float.

    The float has the sign, exponent and mantissa bits of the code; the value of the code is float * factor.
    """
    return 2.0 ** (kind.bias - number_format.bias)


def _spacing(number_format: NumberFormat) -> float | None:
    """Return the distance of the values of neighbouring codes, if it is one power of two for all; else None.

    None is also returned if values are not in the order of codes.
    """
    values = number_format.numbers
    steps = {b - a for a, b in pairwise(values)}
    ordered = number_format.values[: len(values)] == values
    if len(steps) != 1 or not ordered:
        return None
    (step,) = steps
    return step if step.hex().startswith("0x1.0000000000000p") else None


def _even(number_format: NumberFormat, spacing: float, kind: FloatKind) -> tuple[CodeToFloat, ...] | None:
    """Return the instructions for value = lowest + spacing * code, one per fragment (16 columns).

    Codes are put into the mantissa of a power of two, shifted left by q bits. None if no q gives exact values
    in `kind` floats.
    """
    lowest, unit = number_format.values[0], 2.0**kind.mantissa_bits
    magic = kind.bits(unit)
    assert magic is not None
    # Shift q of the code in the mantissa, with the factor and addend of the fma that is exact for it.
    exact_fmas = {}
    for q in range(kind.mantissa_bits - number_format.bits + 1):
        factor, addend = spacing * 2.0**-q, lowest - unit * spacing * 2.0**-q
        if kind.bits(factor) is not None and kind.bits(addend) is not None:
            exact_fmas[q] = (factor, addend)
    if not exact_fmas:
        return None
    shifted = {(register, 0) for register in range(registers(number_format.bits))}
    found = []
    for fields in placement(number_format):
        moves = {q: bit_moves(fields, q.__add__) for q in exact_fmas}
        # Choose the shift that needs the fewest new shift instructions.
        q = min(exact_fmas, key=lambda q: sum((m.register, m.right) not in shifted for m in moves[q]))
        shifted.update((move.register, move.right) for move in moves[q])
        found.append(CodeToFloat(moves[q], magic, *exact_fmas[q]))
    return tuple(found)


def _float(number_format: FloatFormat, kind: FloatKind, is_folded: bool) -> tuple[CodeToFloat, ...] | None:
    """Return the instructions for codes that are small floats, one for each fragment (16 columns) of a span.

    The sign goes to the highest bit of a `kind` float, exponent and mantissa to theirs. The float is then
    multiplied by `bias_factor`, unless `is_folded`: scales then include that factor. None if `kind` floats
    have too few bits.
    """
    factor, sign = bias_factor(number_format, kind), number_format.bits - 1
    lift = kind.mantissa_bits - number_format.mantissa_bits
    if kind.bits(factor) is None or lift < 0 or lift + sign >= kind.width:
        return None
    return tuple(
        CodeToFloat(
            bit_moves(fields, lambda bit: kind.width - 1 if bit == sign else bit + lift),
            factor=1.0 if is_folded else factor,
        )
        for fields in placement(number_format)
    )


def bit_moves(fields: Sequence[Field], to: Callable[[int], int]) -> tuple[Move, ...]:
    """Return the bit moves that bring each bit b of a code, stored in `fields`, to bit `to(b)` of a register.

    Bits of one register that move by the same distance are one move.
    """
    masks: dict[tuple[int, int], int] = {}
    for field in fields:
        for bit in range(field.first, field.first + field.width):
            key = (field.register, field.at + bit - field.first - to(bit))
            masks[key] = masks.get(key, 0) | 1 << to(bit)
    return tuple(Move(register, right, mask) for (register, right), mask in masks.items())
