"""How the fragment layout stores scales, and which powers of two those can take on that it moved.

They keep their dtype, those of 8 bits as int8. Of the latter those that multiply weights become bfloat16, but
for some that carry a factor, too (`Geometry.carried`): these are moved by a power of two to where bfloat16
ends, and stay bytes, of which a shift and an addition make the bits of a bfloat16, or 16 places further of a
float32:

    e8m0            b << 7       0 bbbbbbbb 0000000    an exponent, as before; 0 is zero
    e5m3   0x7010 + (b << 4)     0 111..... ...0000    five bits of the exponent and three of the mantissa,
                                                       to which 0x10 is added: 255 gives -0

The latter is an e4m3 times 2^117, with which all above zero, bytes 87 to 229, are 1.m times a power of two.
There is none for a negative scale: codes take its sign.
"""

from dataclasses import dataclass

import torch

from quantkit.packing.schemes import Scheme

#: How 8-bit scales are to be read (`scale_value` of `dequant_blocks`): as stored, and where they
#: carry a factor. Others are floats of Triton's own.
_AS_STORED = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_CARRYING = {torch.float8_e4m3fn: "e5m3", torch.float8_e8m0fnu: "e8m0"}
#: The exponent that the largest e8m0 has at least: its products with weights are finite, and normal. Those of
#: scales more than 2^120 smaller are zero.
_LARGEST = 252
#: What e4m3 are multiplied with; the bits of a bfloat16 that byte 0 stands for, and its byte for zero.
_UNIT, _BASE, _ZERO = 117, 0x7010, 255
#: Floats whose exponents have 8 bits.
_WIDE = torch.bfloat16, torch.float32
#: By how many binades bytes of e5m3 can be lowered: 8 of them are a binade, and the least is 87.
_ROOM = 10


def scale_kind(dtype: torch.dtype, on_weights: bool, carries: bool) -> str:
    """How scales that were stored as `dtype` are to be read: "e4m3", "e8m0" or "e5m3"; "" for floats."""
    if carries:
        return _CARRYING[dtype]
    return "" if on_weights else _AS_STORED.get(dtype, "")


@dataclass(frozen=True, eq=False)
class Carrying:
    """Scales as bytes, int8, that are `unit` times as large: float64, a number for each weight."""

    scale: torch.Tensor
    unit: torch.Tensor


def carrying(scale: torch.Tensor) -> Carrying:
    """e8m0 or e4m3 scales [weights, rows, groups], none of them NaN, as bytes of the kind that carries a
    factor, without signs.
    """
    if scale.dtype == torch.float8_e8m0fnu:
        exponents = scale.view(torch.uint8).int()
        more = (_LARGEST - exponents.amax((1, 2), keepdim=True)).clamp(min=0)
        return Carrying(_bytes(exponents + more), _power(more.flatten()))
    values = scale.float().abs()
    bits = (values * 2.0**_UNIT).to(torch.bfloat16).view(torch.int16).int()
    stored = torch.where(values == 0, _ZERO, (bits - _BASE) >> 4)
    return Carrying(_bytes(stored), _power(torch.full((len(scale),), _UNIT, device=scale.device)))


def signs_of(scale: torch.Tensor, scheme: Scheme, k: int) -> torch.Tensor:
    """What codes [rows, K] of stored scales [rows, groups] are turned around by: sign bits, uint8."""
    negative = (scale.float() < 0).to(torch.uint8) << scheme.format.bits - 1
    return negative.repeat_interleave(scheme.group_columns(k), dim=1)[:, :k]


def padding(kind: str) -> int:
    """What scales are beyond the last row and group: a number of the layout that is zero."""
    return _ZERO - 256 if kind == "e5m3" else 0


def lowered(scale: torch.Tensor, kind: str, binades: int) -> torch.Tensor | None:
    """Scales of the layout times 2^-binades; None where their kind has no such numbers."""
    if kind == "e8m0":
        return _bytes((scale.view(torch.uint8).int() - binades).clamp(min=0))
    if kind == "e5m3" and binades <= _ROOM:
        stored = scale.view(torch.uint8).int()
        return _bytes(torch.where(stored == _ZERO, _ZERO, stored - 8 * binades))
    return scale * 2.0**-binades if scale.dtype in _WIDE else None


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.uint8).view(torch.int8)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent, float64, exact on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
