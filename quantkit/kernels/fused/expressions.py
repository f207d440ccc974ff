"""Unpack expressions: how codes in the lanes of a register become 16-bit floats, as inline PTX.

A 32-bit register holds two lanes of 16 bits. A lane holds 16 / c fields of a part of c bits; the fields of
all parts with one index, a plane, are one code. An expression takes the registers of all parts and gives one
register of two 16-bit floats for each plane. The four codes of an e2m1 lie interleaved instead, so that a
shift brings more of a code's bits to their places in a bfloat16 (s sign, e exponent, m mantissa):

    lane          15 14 13 12 11 10  9  8  7  6  5  4  3  2  1  0
    plane          0  2  3  1  3  3  3  0  0  0  1  1  1  2  2  2
    bit            s  s  s  s  e  e  m  e  e  m  e  e  m  e  e  m      wanted: s at 15, e at 8 and 7, m at 6

Two families of number formats need arithmetic only:

    even spacing   the code goes into the mantissa of a power of two P, where it counts 2^q last places:
                       lane  0 1 0 0 0 0 1 1 0 . . . c c c c      128 + code as bfloat16 (q = 0)
                   and one fma takes P away, and multiplies with the spacing.
    floats         sign, exponent and mantissa go where a 16-bit float has them; a product with a power of two
                   makes up for the difference of the biases and is exact for subnormals too.

Every other format looks its values up; see `decode` in `quantkit.kernels.fused.unpack`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise

import torch

from quantkit.packing.formats import CodebookFormat, FloatFormat, NumberFormat
from quantkit.packing.words import parts


@dataclass(frozen=True)
class Lane:
    """A 16-bit float: its PTX name, mantissa bits and exponent bias."""

    ptx: str
    mantissa_bits: int
    bias: int

    def bits(self, x: float) -> int | None:
        """The pattern of `x` twice in 32 bits; None if `x` is not one of these floats."""
        if self.ptx == "f16x2":
            try:
                (pattern,) = struct.unpack("<H", struct.pack("<e", x))
            except OverflowError:
                return None
            exact = struct.unpack("<e", struct.pack("<e", x))[0] == x
        else:
            (wide,) = struct.unpack("<I", struct.pack("<f", x))
            pattern, exact = wide >> 16, wide & 0xFFFF == 0
        return pattern * 0x10001 if exact else None


LANES: dict[str, Lane] = {"bfloat16": Lane("bf16x2", 7, 127), "float16": Lane("f16x2", 10, 15)}


@dataclass(frozen=True)
class Expression:
    """Inline PTX: `planes` outputs from the registers of all parts, with its operand constraints.

    The values are `factor` times the outputs.
    """

    asm: str
    constraints: str
    factor: float = 1.0


@dataclass(frozen=True)
class Field:
    """Bits `first` to `first + width` of a code: their register, and from which bit of a lane on."""

    register: int
    at: int
    first: int
    width: int

    @property
    def mask(self) -> int:
        return (1 << self.width) - 1


def planes(bits: int) -> int:
    """Planes of a code of `bits`: as many as its narrowest part has fields in a lane."""
    return 16 // parts(bits)[-1]


def registers(bits: int) -> int:
    """Registers that hold two lanes of all planes of a code of `bits`."""
    return bits * planes(bits) // 16


#: Where exponent and mantissa, and the sign, of an e2m1 of each plane begin in their lane.
_INTERLEAVED = ((6, 15), (3, 12), (0, 14), (9, 13))


@lru_cache(maxsize=256)
def placement(number_format: NumberFormat) -> tuple[tuple[Field, ...], ...]:
    """Where the bits of a code are, for each plane: its fields, lowest bits first."""
    if isinstance(number_format, FloatFormat) and (number_format.bits, number_format.mantissa_bits) == (4, 1):
        return tuple((Field(0, low, 0, 3), Field(0, sign, 3, 1)) for low, sign in _INTERLEAVED)
    bits = number_format.bits
    found: list[list[Field]] = [[] for _ in range(planes(bits))]
    register = first = 0
    for width in parts(bits):
        per_lane = 16 // width
        for plane, fields in enumerate(found):
            fields.append(Field(register + plane // per_lane, plane % per_lane * width, first, width))
        register += planes(bits) // per_lane
        first += width
    return tuple(map(tuple, found))


def field_numbers(number_format: NumberFormat) -> tuple[int, ...]:
    """For each plane and field: register, position in its lane, first bit in the code, mask."""
    return tuple(
        number
        for fields in placement(number_format)
        for f in fields
        for number in (f.register, f.at, f.first, f.mask)
    )


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

    def missing(self, register: int, right: int) -> bool:
        return right != 0 and (register, right) not in self.shifted

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
    lane = LANES.get(dtype)
    if lane is None:
        return None
    if isinstance(number_format, FloatFormat):
        return _float(number_format, lane, bare)
    spacing = _spacing(number_format)
    if spacing is not None:
        return _even(number_format, spacing, lane)
    if isinstance(number_format, CodebookFormat) and number_format.bits == 4:
        return _book(number_format, lane)
    return None


def _spacing(number_format: NumberFormat) -> float | None:
    """The distance between a format's values in the order of their codes, if it is the same power of two."""
    values = number_format.numbers
    steps = {b - a for a, b in pairwise(values)}
    ordered = number_format.values[: len(values)] == values
    if len(steps) != 1 or not ordered:
        return None
    (step,) = steps
    return step if step.hex().startswith("0x1.0000000000000p") else None


def _even(number_format: NumberFormat, spacing: float, lane: Lane) -> Expression | None:
    """value = lowest + spacing * code."""
    bits, lowest = number_format.bits, number_format.values[0]
    writer = _Writer(bits)
    unit = 2.0**lane.mantissa_bits
    magic = lane.bits(unit)
    assert magic is not None
    # Where a code may stand in the mantissa, with the fma that takes it out exactly.
    places = {}
    for q in range(lane.mantissa_bits - bits + 1):
        factor, addend = lane.bits(spacing * 2.0**-q), lane.bits(lowest - unit * spacing * 2.0**-q)
        if factor is not None and addend is not None:
            places[q] = (factor, addend)
    if not places:
        return _even_wide(number_format, spacing, lane) if bits == lane.mantissa_bits + 1 else None
    for plane, in_plane in enumerate(placement(number_format)):

        def cost(q: int, in_plane: tuple[Field, ...] = in_plane) -> int:
            return sum(writer.missing(f.register, f.at - q - f.first) for f in in_plane)

        q = min(places, key=cost)
        for i, field in enumerate(in_plane):
            mask = field.mask << (q + field.first)
            source = writer.shift(field.register, field.at - q - field.first)
            rest = f"0x{magic:08X}" if i == 0 else f"${plane}"
            writer.lines.append(f"lop3.b32 ${plane}, {source}, 0x{mask * 0x10001:08X}, {rest}, 0xEA;")
        multiply, add = (writer.constant(value) for value in places[q])
        writer.lines.append(f"fma.rn.{lane.ptx} ${plane}, ${plane}, {multiply}, {add};")
    return writer.expression(bits)


def _even_wide(number_format: NumberFormat, spacing: float, lane: Lane) -> Expression | None:
    """The same for codes one bit wider than the mantissa: their highest bit chooses what is added.

    With P = 2^mantissa: P + (code mod P) comes from the low bits, and -2 P or -P as the highest is 0 or 1.
    """
    unit = 2.0**lane.mantissa_bits
    if spacing != 1.0 or number_format.values[0] != -unit:
        return None
    bits = number_format.bits
    writer = _Writer(bits)
    magic, negative, one = lane.bits(unit), lane.bits(-unit), lane.bits(1.0)
    assert magic is not None and negative is not None and one is not None
    top, low = 0x10001 << lane.mantissa_bits, ((1 << lane.mantissa_bits) - 1) * 0x10001
    for plane, (field,) in enumerate(placement(number_format)):
        source = writer.shift(field.register, field.at)
        # (~source & top) | -P: the bit above the mantissa of P doubles it.
        writer.lines.append(f"lop3.b32 ${plane}, {source}, 0x{low:08X}, 0x{magic:08X}, 0xEA;")
        added = writer.temporary()
        writer.lines.append(f"lop3.b32 {added}, {source}, 0x{top:08X}, 0x{negative:08X}, 0xAE;")
        writer.lines.append(f"fma.rn.{lane.ptx} ${plane}, ${plane}, {writer.constant(one)}, {added};")
    return writer.expression(bits)


def _float(number_format: FloatFormat, lane: Lane, bare: bool) -> Expression | None:
    """Sign to bit 15, the rest to just above the missing mantissa bits, times 2^(difference of biases)."""
    factor = lane.bits(2.0 ** (lane.bias - number_format.bias))
    lift = lane.mantissa_bits - number_format.mantissa_bits
    if factor is None or lift < 0 or lift + number_format.bits - 1 > 15:
        return None
    negative_zero = lane.bits(-0.0)
    assert negative_zero is not None
    bits = number_format.bits
    writer = _Writer(bits)
    for plane, fields in enumerate(placement(number_format)):
        first = True
        for register, right, mask in _moves(bits, fields, lift):
            source = writer.shift(register, right)
            text = f"0x{mask * 0x10001:08X}"
            writer.lines.append(
                f"and.b32 ${plane}, {source}, {text};"
                if first
                else f"lop3.b32 ${plane}, {source}, {text}, ${plane}, 0xEA;"
            )
            first = False
        if factor != lane.bits(1.0) and not bare:
            # Adding -0 keeps the sign of a zero.
            constants = writer.constant(factor), writer.constant(negative_zero)
            writer.lines.append(f"fma.rn.{lane.ptx} ${plane}, ${plane}, {', '.join(constants)};")
    found = writer.expression(bits)
    return replace(found, factor=2.0 ** (lane.bias - number_format.bias)) if bare else found


def _moves(bits: int, fields: Sequence[Field], lift: int) -> list[tuple[int, int, int]]:
    """What brings a float's bits to their places: (register, shift to the right, mask after it)."""
    moves: dict[tuple[int, int], int] = {}
    for field in fields:
        for bit in range(field.first, field.first + field.width):
            to = 15 if bit == bits - 1 else bit + lift
            key = (field.register, field.at + bit - field.first - to)
            moves[key] = moves.get(key, 0) | 1 << to
    return [(register, right, mask) for (register, right), mask in moves.items()]


def _book(book: CodebookFormat, lane: Lane) -> Expression:
    """Sixteen values by byte permutation: `prmt` picks four bytes of eight by four selectors of four bits.

    A lane of four codes is such a selector, less the bit that tells the halves of the table apart; low and
    high bytes of the values are picked on their own, then put together.
    """
    writer = _Writer(4)
    dtype = torch.bfloat16 if lane.ptx == "bf16x2" else torch.float16
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
