"""Unpack expressions as inline PTX, for two lanes at a time.

A 32-bit register holds two lanes of 16 bits, each of which becomes a 16-bit float. What is computed follows
the description in `quantkit.kernels.fused.expressions`, but for 8-bit integers, which do not fit the mantissa
of a bfloat16, and tables of 16 values, picked by byte permutation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.fused.expressions import (
    BFLOAT16,
    FLOAT16,
    Lane,
    Plane,
    arithmetic,
    placement,
    planes,
    registers,
)
from quantkit.packing.formats import CodebookFormat, NumberFormat

#: For activations of a dtype: the floats that codes become, and what PTX calls two of them.
LANES: dict[str, tuple[Lane, str]] = {"bfloat16": (BFLOAT16, "bf16x2"), "float16": (FLOAT16, "f16x2")}


@dataclass(frozen=True)
class Expression:
    """Inline PTX: an output for each plane from the registers of all parts, with its operand constraints."""

    asm: str
    constraints: str


class _Writer:
    """Collects instructions; a register shifted once is not shifted again."""

    def __init__(self, bits: int) -> None:
        self.outputs = planes(bits)
        self.lines: list[str] = []
        self.shifted: dict[tuple[int, int], str] = {}
        self.constants: dict[int, str] = {}
        self.temporaries = 0

    def temporary(self) -> str:
        self.temporaries += 1
        return f"t{self.temporaries - 1}"

    def shift(self, register: int, right: int) -> str:
        """The register with its lanes shifted right, or left, and bits of their neighbours in them."""
        operand = f"${self.outputs + register}"
        if right == 0:
            return operand
        if (register, right) not in self.shifted:
            name = f"s{len(self.shifted)}"
            self.shifted[register, right] = name
            op = "shr.u32" if right > 0 else "shl.b32"
            self.lines.append(f"{op} {name}, {operand}, {abs(right)};")
        return self.shifted[register, right]

    def constant(self, bits: int) -> str:
        return self.constants.setdefault(bits, f"c{len(self.constants)}")

    def expression(self, bits: int) -> Expression:
        names = (("s", self.shifted), ("c", self.constants), ("t", range(self.temporaries)))
        head = f".reg .b32 {', '.join(f'{name}<{len(used) + 1}>' for name, used in names)};"
        moves = [f"mov.b32 {name}, 0x{value:08X};" for value, name in self.constants.items()]
        body = "\n".join([head, *moves, *self.lines])
        outputs = ["=&r"] * self.outputs
        return Expression(f"{{{body}}}", ",".join([*outputs, *["r"] * registers(bits)]))


@lru_cache(maxsize=256)
def expression(number_format: NumberFormat, dtype: str, *, bare: bool = False) -> Expression | None:
    """The expression of a format for activations of `dtype`; None if its values have to be looked up.

    A `bare` one of floats leaves their exponents to whoever multiplies the values next.
    """
    if dtype not in LANES:
        return None
    lane, name = LANES[dtype]
    found = arithmetic(number_format, lane, bare=bare)
    if found is not None:
        return _arithmetic(number_format.bits, found, lane, name)
    if number_format.values == tuple(range(-(2**lane.mantissa_bits), 2**lane.mantissa_bits)):
        return _wide_integers(number_format, lane, name)
    if isinstance(number_format, CodebookFormat) and number_format.bits == 4:
        return _book(number_format, getattr(torch, dtype))
    return None


def _twice(bits: int | None) -> int:
    """A 16-bit pattern in both lanes of a register."""
    assert bits is not None
    return bits * 0x10001


def _arithmetic(bits: int, found: Sequence[Plane], lane: Lane, name: str) -> Expression:
    writer = _Writer(bits)
    for i, plane in enumerate(found):
        rest = f"0x{_twice(plane.base):08X}" if plane.base else None
        for move in plane.moves:
            source, mask = writer.shift(move.register, move.right), f"0x{_twice(move.mask):08X}"
            line = f"and.b32 ${i}, {source}, {mask};"
            if rest is not None:
                line = f"lop3.b32 ${i}, {source}, {mask}, {rest}, 0xEA;"
            writer.lines.append(line)
            rest = f"${i}"
        if (plane.factor, plane.addend) != (1.0, 0.0):
            numbers = (writer.constant(_twice(lane.bits(x))) for x in (plane.factor, plane.addend))
            writer.lines.append(f"fma.rn.{name} ${i}, ${i}, {', '.join(numbers)};")
    return writer.expression(bits)


def _wide_integers(number_format: NumberFormat, lane: Lane, name: str) -> Expression:
    """Integers of one bit more than the mantissa: their highest bit chooses what is added.

    With P = 2^mantissa: P + (code mod P) comes from the low bits, and -2 P or -P as the highest is 0 or 1.
    """
    writer = _Writer(number_format.bits)
    unit = 2.0**lane.mantissa_bits
    magic, negative, one = (_twice(lane.bits(x)) for x in (unit, -unit, 1.0))
    top, low = _twice(1 << lane.mantissa_bits), _twice((1 << lane.mantissa_bits) - 1)
    for plane, (field,) in enumerate(placement(number_format)):
        source = writer.shift(field.register, field.at)
        writer.lines.append(f"lop3.b32 ${plane}, {source}, 0x{low:08X}, 0x{magic:08X}, 0xEA;")
        # (~source & top) | -P: the bit above the mantissa of P doubles it.
        added = writer.temporary()
        writer.lines.append(f"lop3.b32 {added}, {source}, 0x{top:08X}, 0x{negative:08X}, 0xAE;")
        writer.lines.append(f"fma.rn.{name} ${plane}, ${plane}, {writer.constant(one)}, {added};")
    return writer.expression(number_format.bits)


def _book(book: CodebookFormat, dtype: torch.dtype) -> Expression:
    """Sixteen values by byte permutation: `prmt` picks four bytes of eight by four selectors of four bits.

    A lane of four codes is such a selector, less the bit that tells the halves of the table apart; low and
    high bytes of the values are picked on their own, then put together.
    """
    writer = _Writer(4)
    values = torch.tensor(book.values).nan_to_num(0.0).to(dtype).view(torch.int16).tolist()
    tables = [[(value >> shift) & 0xFF for value in values] for shift in (0, 8)]
    halves = []
    for right in (0, 16):
        source = writer.shift(0, right)
        selector, upper = writer.temporary(), writer.temporary()
        writer.lines.append(f"and.b32 {selector}, {source}, 0x7777;")
        writer.lines.append(f"and.b32 {upper}, {writer.shift(0, right + 3)}, 0x1111;")
        # Byte 0 of the operand for codes below 8, byte 1 for the others.
        writer.lines.append(f"prmt.b32 {upper}, {writer.constant(0xFF00)}, 0, {upper};")
        picked = []
        for table in tables:
            words = [
                writer.constant(int.from_bytes(bytes(table[i : i + 4]), "little")) for i in range(0, 16, 4)
            ]
            below, above = writer.temporary(), writer.temporary()
            writer.lines.append(f"prmt.b32 {below}, {words[0]}, {words[1]}, {selector};")
            writer.lines.append(f"prmt.b32 {above}, {words[2]}, {words[3]}, {selector};")
            # upper ? above : below
            writer.lines.append(f"lop3.b32 {below}, {upper}, {above}, {below}, 0xCA;")
            picked.append(below)
        for pair in ("0x5140", "0x7362"):
            halves.append(writer.temporary())
            writer.lines.append(f"prmt.b32 {halves[-1]}, {picked[0]}, {picked[1]}, {pair};")
    for plane in range(4):
        selector = "0x5410" if plane % 2 == 0 else "0x7632"
        writer.lines.append(f"prmt.b32 ${plane}, {halves[plane // 2]}, {halves[2 + plane // 2]}, {selector};")
    return writer.expression(4)
