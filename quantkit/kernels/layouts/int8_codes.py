"""Codes as signed bytes, for `mma.m16n8k32` of 8-bit integers.

A register of codes has two halfwords; each holds one code of every fragment (16 columns) stored in that
register. Two codes of each halfword become the four bytes of another register. The code of one fragment goes
to the low byte of its halfword, that of a later fragment to the high byte. Codes of integers are
offset-binary. At the top of a byte, with its highest bit flipped, a code is its signed value times a power of
two:

    halfword, int4     d d d d c c c c b b b b a a a a        a to d: codes of fragments 0 to 3
    fragments 0, 2     C c c c 0 0 0 0 A a a a 0 0 0 0        16 times the values; A and C are flipped bits
    fragments 1, 3     D d d d 0 0 0 0 B b b b 0 0 0 0        one lop3, and a shift for fragments 0 and 2

Binary codes become -1 and 1 by flipping two bits. Ternary codes need a subtraction of 1 in each byte. The
highest bit of each byte is set meanwhile, so that no byte borrows from the next.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from quantkit.kernels.layouts.dequant_expressions import bit_moves, fragments_per_span, placement
from quantkit.kernels.layouts.dequant_ptx import Expression, Writer
from quantkit.kernels.layouts.shared_memory import low_fragments
from quantkit.packing.formats import NumberFormat


@dataclass(frozen=True)
class Bytes:
    """Conversion of codes to signed bytes, for int8 products: byte = ((code << `lift`) - `less`) ^ `flip`.

    The value of a code is its byte * `byte_scale`.
    """

    lift: int
    flip: int
    less: int
    byte_scale: float

    def of(self, code: int) -> int:
        """Return the signed byte of a code, -128 to 127."""
        byte = code << self.lift
        byte = ((byte | 0x80) - self.less if self.less else byte) ^ self.flip
        return byte - 256 if byte >= 128 else byte


@lru_cache(maxsize=256)
def as_bytes(number_format: NumberFormat) -> Bytes | None:
    """Return how a format's codes become signed bytes in proportion to their values; None if they cannot.

    For example, an int4 code becomes 16 times its value. NaN codes must be the last ones.
    """
    values = number_format.numbers
    if not values or number_format.values[: len(values)] != values:
        return None
    return next(
        (
            way
            for way in _ways(number_format)
            if all(way.of(code) * way.byte_scale == value for code, value in enumerate(values))
        ),
        None,
    )


def _ways(number_format: NumberFormat) -> Iterator[Bytes]:
    """Yield candidate conversions of codes to signed bytes, fewest instructions first.

    Each has the `byte_scale` with which code 0 gets its value; `as_bytes` checks the other codes.
    """
    bits, lowest = number_format.bits, number_format.values[0]
    top = 8 - bits
    ways = [(top, 0x80, 0), (top, 0xC0, 0)]
    # Below the highest bit, which is set temporarily.
    ways += [(top - 1, 0x80, 1 << (top - 1))] if top else []
    for lift, flip, less in ways:
        first = Bytes(lift, flip, less, 1.0).of(0)
        if first:
            yield Bytes(lift, flip, less, lowest / first)


@lru_cache(maxsize=256)
def byte_expression(number_format: NumberFormat, distance: int) -> Expression:
    """Return PTX that converts registers of codes to registers of four signed bytes, for int8 products.

    There is an output register for each fragment f (16 columns) that `low_fragments` returns for `distance`,
    a number of fragments:

        bits 31..24             23..16       15..8                   7..0
        code of f + distance    code of f    code of f + distance    code of f
        high halfword of codes               low halfword of codes
    """
    way, fields = as_bytes(number_format), placement(number_format)
    assert way is not None
    lows = low_fragments(fragments_per_span(number_format.bits), distance)
    writer = Writer(number_format.bits, len(lows))
    for i, low in enumerate(lows):
        masks: dict[tuple[int, int], int] = {}
        for fragment, lift in ((low, way.lift), (low + distance, way.lift + 8)):
            for move in bit_moves(fields[fragment], lift.__add__):
                key = move.register, move.right
                masks[key] = masks.get(key, 0) | move.mask
        # Moved bits do not overlap, so XOR both combines and flips them.

        rest = f"0x{(0x80 if way.less else way.flip) * 0x01010101:08X}"
        for (register, right), mask in masks.items():
            source = writer.shift(register, right)
            writer.lines.append(f"lop3.b32 ${i}, {source}, 0x{mask * 0x10001:08X}, {rest}, 0x6A;")
            rest = f"${i}"
        if way.less:
            writer.lines.append(f"sub.u32 ${i}, ${i}, 0x{way.less * 0x01010101:08X};")
            writer.lines.append(f"xor.b32 ${i}, ${i}, 0x{way.flip * 0x01010101:08X};")
    return writer.expression()
