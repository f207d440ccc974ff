"""Every unpack expression, emulated instruction by instruction, on every code in every lane."""

import re

import numpy as np
import pytest
import torch

from quantkit.kernels.fused.expressions import LANES, expression, planes, registers
from quantkit.packing.formats import FORMATS, CodebookFormat, FloatFormat, IntFormat, NumberFormat
from quantkit.packing.words import parts

WORD = np.uint64(0xFFFFFFFF)


def floats(registers_: np.ndarray, ptx: str) -> list[np.ndarray]:
    """The two 16-bit floats of each register as float64, low half first."""
    halves = [(registers_ >> np.uint64(16 * i) & np.uint64(0xFFFF)).astype(np.uint16) for i in (0, 1)]
    if ptx == "f16x2":
        return [half.view(np.float16).astype(np.float64) for half in halves]
    return [(half.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for half in halves]


def as_register(values: list[np.ndarray], ptx: str) -> np.ndarray:
    dtype = torch.float16 if ptx == "f16x2" else torch.bfloat16
    low, high = (torch.from_numpy(v).to(dtype).view(torch.int16).numpy().view(np.uint16) for v in values)
    return low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(16)


def run(asm: str, inputs: list[np.ndarray], outputs: int, ptx: str) -> list[np.ndarray]:
    """What the PTX of an expression computes: the few instructions there are, each by its definition."""
    known = {f"${outputs + i}": value for i, value in enumerate(inputs)}
    zero = np.zeros_like(inputs[0])

    def value(token: str) -> np.ndarray:
        return known[token] if token in known else zero + np.uint64(int(token, 0))

    for line in re.split(r"[;{}]", asm):
        op, _, rest = line.strip().partition(" ")
        if not op or op == ".reg":
            continue
        to, *operands = (token.strip() for token in rest.split(","))
        a, b, c, *_ = [*map(value, operands), zero, zero]
        if op == "mov.b32":
            known[to] = a
        elif op == "shr.u32":
            known[to] = a >> b
        elif op == "shl.b32":
            known[to] = a << b & WORD
        elif op == "and.b32":
            known[to] = a & b
        elif op == "lop3.b32":
            table = int(operands[3], 0)
            bits = [(table >> i & 1, i) for i in range(8)]
            terms = [
                (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c) for on, i in bits if on
            ]
            known[to] = np.bitwise_or.reduce(terms) & WORD
        elif op == "prmt.b32":
            both = a | b << np.uint64(32)
            known[to] = zero
            for i in range(4):
                selector = c >> np.uint64(4 * i) & np.uint64(15)
                assert (selector < 8).all()
                byte = both >> selector * np.uint64(8) & np.uint64(255)
                known[to] = known[to] | byte << np.uint64(8 * i)
        else:
            assert op == f"fma.rn.{ptx}", line
            x, y, z = (floats(v, ptx) for v in (a, b, c))
            known[to] = as_register([p * q + r for p, q, r in zip(x, y, z, strict=True)], ptx)
    return [known[f"${i}"] for i in range(outputs)]


#: The lane of four e2m1 as the module draws it, from bit 15 down: plane and bit of the code.
INTERLEAVED = ["0s", "2s", "3s", "1s", "3e", "3E", "3m", "0e", "0E", "0m", "1e", "1E", "1m", "2e", "2E", "2m"]


def in_registers(codes: np.ndarray, fmt: NumberFormat) -> list[np.ndarray]:
    """Codes [n, 2 lanes, planes] in the registers of the fragment layout."""
    bits = fmt.bits
    lanes = np.zeros((len(codes), 2, registers(bits)), np.uint64)
    if fmt == FORMATS["fp4-e2m1"]:
        for at, (plane, bit) in enumerate(reversed(INTERLEAVED)):
            lanes[:, :, 0] |= (codes[:, :, int(plane)] >> "mEes".index(bit) & 1).astype(
                np.uint64
            ) << np.uint64(at)
        return [lanes[:, 0, 0] | lanes[:, 1, 0] << np.uint64(16)]
    register, first = 0, 0
    for width in parts(bits):
        per_lane = 16 // width
        for plane in range(planes(bits)):
            field = (codes[:, :, plane] >> first & (1 << width) - 1).astype(np.uint64)
            lanes[:, :, register + plane // per_lane] |= field << np.uint64(plane % per_lane * width)
        register += planes(bits) // per_lane
        first += width
    return [lanes[:, 0, i] | lanes[:, 1, i] << np.uint64(16) for i in range(registers(bits))]


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("dtype", LANES)
@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.numbers])
def test_an_expression_gives_the_value_of_every_code_in_every_lane(name: str, dtype: str, bare: bool) -> None:
    fmt = FORMATS[name]
    found = expression(fmt, dtype, bare=bare)
    assert found is not None
    assert found.factor == 1.0 or (bare and isinstance(fmt, FloatFormat) and "fma" not in found.asm)
    width, count = planes(fmt.bits), len(fmt.values)
    generator = np.random.default_rng(0)
    # Every code comes up in every lane and plane; what is beside it is random.
    codes = generator.permuted(
        np.arange(count).repeat(4)[:, None, None].repeat(2, 1).repeat(width, 2), axis=0
    )
    outputs = run(found.asm, in_registers(codes, fmt), width, LANES[dtype].ptx)
    values = torch.tensor(fmt.values, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
    for plane, output in enumerate(outputs):
        for lane, got in enumerate(floats(output, LANES[dtype].ptx)):
            want = values[codes[:, lane, plane]]
            numbers = np.isfinite(np.asarray(fmt.values)[codes[:, lane, plane]])
            assert (got[numbers] * found.factor == want[numbers]).all()


def test_formats_without_an_expression_have_none() -> None:
    assert expression(FORMATS["int4"], "float32") is None
    assert expression(CodebookFormat("uneven", 2, (-1.0, 0.0, 0.25, 1.0)), "bfloat16") is None
    # A spacing that is no power of two, and floats whose range or mantissa 16 bits do not have.
    assert expression(CodebookFormat("thirds", 2, (-3.0, 0.0, 3.0, 6.0)), "bfloat16") is None
    wide = FloatFormat("e6m1", 8, exponent_bits=6, mantissa_bits=1, bias=31)
    assert expression(wide, "float16") is None
    assert expression(wide, "bfloat16") is not None
    assert expression(IntFormat("other", 4), "bfloat16") == expression(FORMATS["int4"], "bfloat16")
