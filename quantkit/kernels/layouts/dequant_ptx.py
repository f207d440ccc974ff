"""Dequantization expressions as inline PTX, for both halfwords (16 bits) of a register at a time.

Each halfword becomes a 16-bit float, by the steps that `layouts.dequant_expressions` describes. Two kinds of
formats need other steps.

8-bit integers do not fit the mantissa of a bfloat16. In tables of up to 32 values, each lane of a warp holds
one value, and a warp shuffle fetches it.

4-bit tables may also lie in shared memory, if there is room. The table then has both values for each byte of
two codes. There are 32 copies, so that no two lanes of a warp access the same bank:

    word    7 6 5 4 3 2 1 0      address = 128 * byte + 4 * warp lane      values of codes 2 i and 2 i + 1
            upper    lower       of byte i = codes 2 i + 1, 2 i            in the halves of what is loaded
            halfwords

A shuffle takes two cycles of a multiprocessor for 32 values. A load from shared memory takes one cycle for 64
values, or two cycles with 16 copies of the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from quantkit.kernels.layouts.dequant_expressions import (
    BFLOAT16,
    FLOAT16,
    CodeToFloat,
    FloatKind,
    arithmetic,
    code_moves,
    fragments_per_span,
    placement,
    registers,
)
from quantkit.kernels.layouts.shared_memory import COPIES, SHARED_BITS, shared_bytes
from quantkit.packing.formats import NumberFormat

#: Per dtype of activations: the floats that codes become, and PTX's type of two of them.
FLOAT_KINDS: dict[str, tuple[FloatKind, str]] = {
    "bfloat16": (BFLOAT16, "bf16x2"),
    "float16": (FLOAT16, "f16x2"),
}
#: Most bits of codes whose values the 32 lanes of a warp can hold.
TABLE_BITS = 5


@dataclass(frozen=True)
class Expression:
    """Inline PTX `asm` that dequantizes the codes of a span, without scales.

    A span is the fragments (16 columns each) whose codes are stored in the same registers. Inputs are these
    registers. There is an output register per fragment, with two 16-bit floats; for int8 products, four bytes
    of two fragments.

    constraints   constraints of the operands of `asm`: outputs, then inputs
    table         for formats that look values up: PTX that loads a lane's value, twice, from an address
                  of float32 values; its result is one more operand of `asm`. Else None.
    fill          PTX that copies the values to a table in shared memory and returns its address, or
                  None. `table` then returns the address of the lane's copies.
    """

    asm: str
    constraints: str
    table: str | None = None
    fill: str | None = None


class Writer:
    """Writer of PTX for codes of `bits` bits and `outputs` output registers; `expression` returns the text.

    Methods add lines to `lines`. Shifted registers and constants are reused. Inputs are the registers in
    which codes are stored.
    """

    def __init__(self, bits: int, outputs: int) -> None:
        self.bits, self.outputs = bits, outputs
        self.lines: list[str] = []
        self.shifted: dict[tuple[int, int], str] = {}
        self.constants: dict[int, str] = {}
        self.temporaries = 0

    def temporary(self) -> str:
        """Return the name of a new PTX register."""
        self.temporaries += 1
        return f"t{self.temporaries - 1}"

    def shift(self, register: int, right: int) -> str:
        """Return the PTX register that has input `register` shifted right by `right` bits, left if negative.

        Bits cross from one halfword (16 bits) to the other; a mask must remove them.
        """
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
        """Return the name of a PTX register that holds the 32 bits `bits`; equal constants share one."""
        return self.constants.setdefault(bits, f"c{len(self.constants)}")

    def expression(self, table: str | None = None, fill: str | None = None) -> Expression:
        """Return all lines so far as an `Expression`, with the fields `table` and `fill` as given."""
        names = (("s", self.shifted), ("c", self.constants), ("t", range(self.temporaries)))
        head = f".reg .b32 {', '.join(f'{name}<{len(used) + 1}>' for name, used in names)};"
        moves = [f"mov.b32 {name}, 0x{value:08X};" for value, name in self.constants.items()]
        body = "\n".join([head, *moves, *self.lines])
        outputs = ["=&r"] * self.outputs
        inputs = ["r"] * (registers(self.bits) + (0 if table is None else 2))
        return Expression(f"{{{body}}}", ",".join([*outputs, *inputs]), table, fill)


@lru_cache(maxsize=256)
def expression(
    number_format: NumberFormat,
    dtype: str,
    *,
    is_folded: bool = False,
    fragments: tuple[int, int] | None = None,
) -> Expression | None:
    """Return PTX that dequantizes codes of a format to `dtype`, "bfloat16" or "float16", without scales.

        is_folded   True if float formats leave out the factor `bias_factor`, because scales include it
        fragments   (first, end): compute only these fragments (16 columns each); None for all of a span

    A span is the fragments whose codes are stored in the same registers. There is one output register per
    fragment. Returns None for another dtype, and for formats whose values need a table in memory.
    """
    if dtype not in FLOAT_KINDS:
        return None
    kind, name = FLOAT_KINDS[dtype]
    selected = slice(*fragments or (0, fragments_per_span(number_format.bits)))
    found = arithmetic(number_format, kind, is_folded=is_folded)
    if found is not None:
        return _arithmetic(number_format.bits, found[selected], kind, name)
    if number_format.values == tuple(range(-(2**kind.mantissa_bits), 2**kind.mantissa_bits)):
        return _wide_integers(number_format, kind, name, selected)
    return _table(number_format, name, selected) if number_format.bits <= TABLE_BITS else None


def _twice(bits: int | None) -> int:
    """Return a 32-bit integer that has the 16-bit pattern `bits`, which is not None, in both halfwords."""
    assert bits is not None
    return bits * 0x10001


def _arithmetic(bits: int, found: Sequence[CodeToFloat], kind: FloatKind, name: str) -> Expression:
    """Write PTX for the instructions `found`, one output each: and/lop3 for bit moves, then one fma.

    Codes have `bits` bits. An output is two floats of `kind`, whose PTX type is `name`, such as "bf16x2".
    """
    writer = Writer(bits, len(found))
    for i, fragment in enumerate(found):
        rest = f"0x{_twice(fragment.base):08X}" if fragment.base else None
        for move in fragment.moves:
            source, mask = writer.shift(move.register, move.right), f"0x{_twice(move.mask):08X}"
            line = f"and.b32 ${i}, {source}, {mask};"
            if rest is not None:
                line = f"lop3.b32 ${i}, {source}, {mask}, {rest}, 0xEA;"
            writer.lines.append(line)
            rest = f"${i}"
        if (fragment.factor, fragment.addend) != (1.0, 0.0):
            numbers = (writer.constant(_twice(kind.bits(x))) for x in (fragment.factor, fragment.addend))
            writer.lines.append(f"fma.rn.{name} ${i}, ${i}, {', '.join(numbers)};")
    return writer.expression()


def _wide_integers(number_format: NumberFormat, kind: FloatKind, name: str, selected: slice) -> Expression:
    """Write PTX that dequantizes integers with one bit more than the mantissa of `kind` floats, such as int8.

    The value of a code is code - P, with P = 2^mantissa bits. First the low bits of a code give P + (code mod
    P). Then -2 P is added if the highest bit of the code is 0, -P if it is 1. `name` is the PTX type of two
    floats, such as "bf16x2". There is an output for each fragment (16 columns) of `selected`.
    """
    fields = placement(number_format)[selected]
    writer = Writer(number_format.bits, len(fields))
    unit = 2.0**kind.mantissa_bits
    magic, negative, one = (_twice(kind.bits(x)) for x in (unit, -unit, 1.0))
    top, low = _twice(1 << kind.mantissa_bits), _twice((1 << kind.mantissa_bits) - 1)
    for fragment, (field,) in enumerate(fields):
        source = writer.shift(field.register, field.at)
        writer.lines.append(f"lop3.b32 ${fragment}, {source}, 0x{low:08X}, 0x{magic:08X}, 0xEA;")
        # (~source & top) | -P: the bit above the mantissa of P doubles it.
        added = writer.temporary()
        writer.lines.append(f"lop3.b32 {added}, {source}, 0x{top:08X}, 0x{negative:08X}, 0xAE;")
        writer.lines.append(f"fma.rn.{name} ${fragment}, ${fragment}, {writer.constant(one)}, {added};")
    return writer.expression()


def _table(number_format: NumberFormat, name: str, selected: slice) -> Expression:
    """Write PTX that looks values up by warp shuffles: lane i holds the value of code i mod the code count.

    A shuffle reads the low five bits of a lane index only, so bits above a code may stay. `name` is the PTX
    type of two floats, such as "bf16x2". There is an output for each fragment (16 columns) of `selected`.
    """
    bits = number_format.bits
    found = code_moves(number_format)[selected]
    writer = Writer(bits, len(found))
    lane_value = f"${writer.outputs + registers(bits)}"
    for fragment, moves in enumerate(found):
        values = []
        for half in (0, 16):
            code = writer.shift(moves[0].register, moves[0].right + half)
            for move in moves[1:]:
                source, both = writer.shift(move.register, move.right + half), writer.temporary()
                # Select the bits of `move` from `source` and the others from `code`.
                writer.lines.append(f"lop3.b32 {both}, {source}, 0x{move.mask:X}, {code}, 0xE2;")
                code = both
            values.append(writer.temporary())
            writer.lines.append(f"shfl.sync.idx.b32 {values[-1]}, {lane_value}, {code}, 31, 0xFFFFFFFF;")
        writer.lines.append(f"prmt.b32 ${fragment}, {values[0]}, {values[1]}, 0x5410;")
    return writer.expression(
        "{.reg .b32 lane;\n.reg .b64 at;\n.reg .f32 value;\nmov.u32 lane, %laneid;\n"
        f"and.b32 lane, lane, {2**bits - 1};\nmad.wide.u32 at, lane, 4, $1;\n"
        f"ld.global.f32 value, [at];\ncvt.rn.{name}.f32 $0, value, value;}}",
    )


@lru_cache(maxsize=256)
def shared_table(
    number_format: NumberFormat, dtype: str, warps: int, copies: int = COPIES, *, of_fragments: bool = False
) -> Expression | None:
    """Return PTX that looks values of 4-bit codes up in shared memory; None if `has_shared_table` is false.

        warps          warps that write the table once, by the result's PTX `fill`, and wait for each other
        copies         16 or 32, how often each entry of the table is stored

    Two codes are looked up at once. A byte of two codes is the index of an entry, which is both of their
    values as 16-bit floats (`dtype`).

    The register of codes has two halfwords, each with one code of four fragments (16 columns). There are four
    output registers of two 16-bit floats. By default, register f has fragment f of both halfwords. If
    `of_fragments`, a register has two fragments of one halfword:

        register     0                   1                    2                   3
        fragments    0, 1 of low half    0, 1 of high half    2, 3 of low half    2, 3 of high half
    """
    if not has_shared_table(number_format, dtype):
        return None
    writer = Writer(SHARED_BITS, fragments_per_span(SHARED_BITS))
    word, lane_table = (f"${writer.outputs + i}" for i in range(2))
    # Fragments 0 and 1, then 2 and 3; of each the byte of the lower halfword, then of the upper one.
    for first, pair in ((0, (0, 2)), (2, (1, 3))):
        to = [f"${first}", f"${first + 1}"]
        loaded = to if of_fragments else [writer.temporary(), writer.temporary()]
        for byte, one in zip(pair, loaded, strict=True):
            codes, at = writer.temporary(), writer.temporary()
            writer.lines += [
                f"prmt.b32 {codes}, {word}, 0, 0x444{byte};",
                f"mad.lo.u32 {at}, {codes}, {4 * copies}, {lane_table};",
                f"ld.shared.b32 {one}, [{at}];",
            ]
        if not of_fragments:
            low, high = loaded
            writer.lines += [f"prmt.b32 {to[0]}, {low}, {high}, 0x5410;"]
            writer.lines += [f"prmt.b32 {to[1]}, {low}, {high}, 0x7632;"]
    return writer.expression(_of_lane(copies), _fill_table(FLOAT_KINDS[dtype][1], warps, copies))


def has_shared_table(number_format: NumberFormat, dtype: str) -> bool:
    """Return True if codes of the format have 4 bits and their values must be looked up in a table.

    `dtype` is the dtype of activations: "bfloat16" or "float16".
    """
    found = expression(number_format, dtype)
    return found is not None and found.table is not None and number_format.bits == SHARED_BITS


def _of_lane(copies: int) -> str:
    """Return PTX that maps the address of the table in shared memory to the first copy that a lane reads.

    The `copies` of a value are adjacent, and each lane reads its own, so that lanes meet no bank conflict.
    """
    return (
        "{.reg .b32 lane, at;\nmov.u32 lane, %laneid;\n"
        f"and.b32 lane, lane, {copies - 1};\ncvt.u32.u64 at, $1;\nmad.lo.u32 $0, lane, 4, at;}}"
    )


def _fill_table(name: str, warps: int, copies: int) -> str:
    """Return PTX with which the threads of `warps` warps fill the table in shared memory, 16 bytes at a time.

    `name` is the PTX type of two floats, such as "bf16x2". Each entry of the table is stored `copies` times.
    """
    threads, size = 32 * warps, shared_bytes(copies)
    # First bit of the byte of two codes in the number of a 16-byte store.
    byte = (copies // 4).bit_length() - 1
    lines = ["mov.u32 thread, %tid.x;", "mov.u32 first, shared_table;"]
    for turn in range(size // 16 // threads):
        lines += [
            f"add.u32 number, thread, {turn * threads};",
            f"bfe.u32 code, number, {byte}, {SHARED_BITS};",
            "mad.wide.u32 at, code, 4, $1;",
            "ld.global.f32 low, [at];",
            f"bfe.u32 code, number, {byte + SHARED_BITS}, {SHARED_BITS};",
            "mad.wide.u32 at, code, 4, $1;",
            "ld.global.f32 high, [at];",
            f"cvt.rn.{name}.f32 both, high, low;",
            "mad.lo.u32 to, number, 16, first;",
            "st.shared.v4.b32 [to], {both, both, both, both};",
        ]
    # A barrier of these warps only: other warps of the program may wait for them at another barrier.
    lines += [f"bar.sync 0, {threads};", "cvt.u64.u32 $0, first;"]
    body = "\n".join(lines)
    return (
        f".shared .align 128 .b8 shared_table[{size}];\n"
        "{.reg .b32 thread, first, number, code, both, to;\n.reg .b64 at;\n.reg .f32 low, high;\n"
        f"{body}}}"
    )
