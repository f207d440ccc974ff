"""Every unpack expression on every code in every halfword: its PTX emulated, and its twin in Triton."""

from typing import Any

import numpy as np
import pytest
import torch

from quantkit.kernels.layouts.dequant_expressions import (
    CodeToFloat,
    bias_factor,
    fragments_per_span,
    portable,
    registers,
)
from quantkit.kernels.layouts.dequant_ptx import FLOAT_KINDS, expression
from quantkit.packing.formats import FORMATS, CodebookFormat, FloatFormat, IntFormat, NumberFormat

from ...support.compare import assert_equal
from ..ptx import floats, held, run

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
dequant_codes: Any = pytest.importorskip("quantkit.kernels.layouts.dequant_blocks").dequant_codes

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
#: The halfword of four e2m1 as the module draws it, from bit 15 down: fragment and bit of the code.
INTERLEAVED = ["0s", "2s", "3s", "1s", "3e", "3E", "3m", "0e", "0E", "0m", "1e", "1E", "1m", "2e", "2E", "2m"]


def in_registers(codes: np.ndarray, fmt: NumberFormat) -> list[np.ndarray]:
    """Codes [n, 2 halfwords, fragments] in the registers of the fragment layout."""
    bits = fmt.bits
    halfwords = np.zeros((len(codes), 2, registers(bits)), np.uint64)
    if fmt == FORMATS["fp4-e2m1"]:
        for at, (fragment, bit) in enumerate(reversed(INTERLEAVED)):
            halfwords[:, :, 0] |= (codes[:, :, int(fragment)] >> "mEes".index(bit) & 1).astype(
                np.uint64
            ) << np.uint64(at)
        return [halfwords[:, 0, 0] | halfwords[:, 1, 0] << np.uint64(16)]
    # Bit by bit: whole codes in each halfword, and the others in what they leave.
    whole = 16 // bits
    places = [
        (i // whole, i % whole * bits + bit) for i in range(whole * registers(bits)) for bit in range(bits)
    ]
    places += [(register, at) for register in range(registers(bits)) for at in range(whole * bits, 16)]
    for i, (register, at) in enumerate(places):
        bit = (codes[:, :, i // bits] >> i % bits & 1).astype(np.uint64)
        halfwords[:, :, register] |= bit << np.uint64(at)
    return [halfwords[:, 0, i] | halfwords[:, 1, i] << np.uint64(16) for i in range(registers(bits))]


@triton.jit
def decoded(
    words, lut, out, HALFWORDS: tl.constexpr, REGISTERS: tl.constexpr, FIELDS: tl.constexpr,
    FRAGMENTS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, HALFWORDS)
    loaded = ()
    for register in tl.static_range(REGISTERS):
        # Triton knows no starred tuples.
        loaded = loaded + (tl.load(words + register * HALFWORDS + at),)  # noqa: RUF005
    q = tl.reshape(
        dequant_codes(loaded, lut, None, None, None, FIELDS, FRAGMENTS, DTYPE), (HALFWORDS, FRAGMENTS)
    )
    tl.store(out + at[:, None] * FRAGMENTS + tl.arange(0, FRAGMENTS)[None, :], q)


def in_triton(
    found: tuple[CodeToFloat, ...], fmt: NumberFormat, codes: np.ndarray, dtype: str
) -> torch.Tensor:
    """What Triton makes without PTX of codes [n, 2 halfwords, fragments], in their shape."""
    halfwords = 1 << (2 * len(codes) - 1).bit_length()
    words = torch.zeros(registers(fmt.bits), halfwords, dtype=torch.int16)
    for word, both in zip(words, in_registers(codes, fmt), strict=True):
        halves = torch.from_numpy(both.astype(np.uint32)[:, None].view(np.uint16).view(np.int16))
        word[: 2 * len(codes)] = halves.flatten()
    out = torch.empty(halfwords, codes.shape[2], dtype=getattr(torch, dtype), device=DEVICE)
    lut = torch.tensor(fmt.values, device=DEVICE).nan_to_num(0.0)
    decoded[(1,)](
        words.to(DEVICE), lut, out, halfwords, len(words), found, codes.shape[2], getattr(tl, dtype)
    )
    return out[: 2 * len(codes)].view(codes.shape).cpu()


def every_code(fmt: NumberFormat) -> np.ndarray:
    """Codes [n, 2 halfwords, fragments]: every one comes up in each of them; what is beside it is random."""
    width, count = fragments_per_span(fmt.bits), len(fmt.values)
    ordered = np.arange(count).repeat(4)[:, None, None].repeat(2, 1).repeat(width, 2)
    return np.random.default_rng(0).permuted(ordered, axis=0)


NAMES = [name for name, fmt in FORMATS.items() if fmt.numbers]


#: Values that have to be looked up, by bits: in one piece, or several.
BOOKS = {
    f"book{bits}": CodebookFormat(f"book{bits}", bits, tuple(float(i**3) for i in range(2**bits)))
    for bits in (2, 3, 5)
}


@pytest.mark.parametrize("is_folded", [False, True])
@pytest.mark.parametrize("dtype", FLOAT_KINDS)
@pytest.mark.parametrize("name", [*NAMES, *BOOKS])
def test_an_expression_gives_the_value_of_every_code_in_every_lane(
    name: str, dtype: str, is_folded: bool
) -> None:
    fmt = BOOKS[name] if name in BOOKS else FORMATS[name]
    kind, ptx = FLOAT_KINDS[dtype]
    found = expression(fmt, dtype, is_folded=is_folded)
    assert found is not None
    folded_floats = is_folded and isinstance(fmt, FloatFormat)
    assert not folded_floats or "fma" not in found.asm
    factor = bias_factor(fmt, kind) if folded_floats else 1.0
    codes = every_code(fmt)
    values = torch.tensor(fmt.values, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
    table = None if found.table is None else held(found.table, values, ptx)
    outputs = run(found.asm, in_registers(codes, fmt), fragments_per_span(fmt.bits), ptx, table)
    for fragment, output in enumerate(outputs):
        for at, got in enumerate(floats(output, ptx)):
            want = values[codes[:, at, fragment]]
            numbers = np.isfinite(np.asarray(fmt.values)[codes[:, at, fragment]])
            assert (got[numbers] * factor == want[numbers]).all()


@pytest.mark.parametrize("dtype", FLOAT_KINDS)
@pytest.mark.parametrize("name", [*NAMES, *BOOKS])
def test_expressions_of_some_planes_give_what_that_of_all_gives(name: str, dtype: str) -> None:
    fmt, (_, ptx) = BOOKS[name] if name in BOOKS else FORMATS[name], FLOAT_KINDS[dtype]
    values = torch.tensor(fmt.values, dtype=torch.float32).to(getattr(torch, dtype)).double().numpy()
    registers, count = in_registers(every_code(fmt), fmt), fragments_per_span(fmt.bits)

    def outputs(fragments: tuple[int, int] | None, size: int) -> list[np.ndarray]:
        found = expression(fmt, dtype, fragments=fragments)
        assert found is not None
        table = None if found.table is None else held(found.table, values, ptx)
        return list(run(found.asm, registers, size, ptx, table))

    half = count // 2
    parts = [*outputs((0, half), half), *outputs((half, count), count - half)]
    assert all(np.array_equal(one, other) for one, other in zip(parts, outputs(None, count), strict=True))


@pytest.mark.parametrize("dtype", [*FLOAT_KINDS, "float32"])
@pytest.mark.parametrize("name", NAMES)
def test_without_ptx_arithmetic_gives_the_same_bits(name: str, dtype: str) -> None:
    fmt, codes = FORMATS[name], every_code(FORMATS[name])
    number = torch.tensor(fmt.values).isfinite()[codes]
    found = portable(fmt)
    assert found[0].looked_up == (name == "nf4")
    got = in_triton(found, fmt, codes, dtype)
    integers = {2: torch.int16, 4: torch.int32}[got.itemsize]
    want = torch.tensor(fmt.values).to(got.dtype)[codes]
    assert_equal(got.view(integers)[number], want.view(integers)[number])


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", [name for name in NAMES if isinstance(FORMATS[name], FloatFormat)])
def test_without_ptx_folded_floats_have_the_same_bits(name: str, dtype: str) -> None:
    fmt, codes = FORMATS[name], every_code(FORMATS[name])
    assert isinstance(fmt, FloatFormat)
    found, expected = portable(fmt, is_folded=True), expression(fmt, "bfloat16", is_folded=True)
    assert expected is not None
    outputs = run(expected.asm, in_registers(codes, fmt), fragments_per_span(fmt.bits), "bf16x2")
    want = np.stack([np.stack(floats(output, "bf16x2"), axis=1) for output in outputs], axis=2)
    got = in_triton(found, fmt, codes, dtype).double()
    assert np.array_equal(got.numpy(), want, equal_nan=True)
    assert np.array_equal(np.signbit(got.numpy()), np.signbit(want))


def test_formats_without_an_expression_have_none() -> None:
    assert expression(FORMATS["int4"], "float32") is None
    uneven = CodebookFormat("uneven", 6, tuple(float(i**3) for i in range(64)))
    assert expression(uneven, "bfloat16") is None
    # Evenly spaced, but not all of them bfloat16.
    assert portable(CodebookFormat("far", 2, (1000.0, 1001.0, 1002.0, 1003.0)))[0].looked_up
    # A spacing that is no power of two, and floats whose range or mantissa 16 bits do not have.
    thirds = expression(CodebookFormat("thirds", 2, (-3.0, 0.0, 3.0, 6.0)), "bfloat16")
    assert thirds is not None and thirds.table is not None
    wide = FloatFormat("e6m1", 8, exponent_bits=6, mantissa_bits=1, bias=31)
    assert expression(wide, "float16") is None
    assert expression(wide, "bfloat16") is not None and not portable(wide)[0].looked_up
    assert expression(IntFormat("other", 4), "bfloat16") == expression(FORMATS["int4"], "bfloat16")
