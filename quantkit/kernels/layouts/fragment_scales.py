"""Scales in the fragment layout: their dtypes, and 8-bit scales that include a power of two.

Scales keep their dtype; 8-bit scales are stored as int8 with the same bits. 8-bit scales that multiply
weights become bfloat16. There is an exception: where kernels leave `Geometry.folded_factor` (2^126 for e2m1)
out of dequantized weights, scales stay 8 bits. They are then multiplied by a power of two that moves them to
the top of the range of bfloat16. A shift and an addition make a bfloat16 of byte b or, 16 places to the left,
a float32:

    e8m0            b << 7       0 bbbbbbbb 0000000    an exponent, as stored; 0 is zero
    e5m3   0x7010 + (b << 4)     0 111..... ...0000    5 bits of the exponent and 3 of the mantissa,
                                                       plus 0x10, so that byte 255 gives -0

e5m3 is an e4m3 times 2^117: positive e4m3, bytes 87 to 229, are then 1.m times a power of two. e5m3 has no
sign. Codes take the sign of a negative scale.
"""

from dataclasses import dataclass

import torch

from quantkit.packing.schemes import Scheme

#: Encodings of 8-bit scales for `dequant_blocks.scale_value`: as stored, and with a folded factor. Other
#: scales are floats that Triton knows.
_AS_STORED = {torch.float8_e4m3fn: "e4m3", torch.float8_e8m0fnu: "e8m0"}
_FOLDED = {torch.float8_e4m3fn: "e5m3", torch.float8_e8m0fnu: "e8m0"}
#: Least exponent of the largest e8m0 scale, so that products with weights are finite and normal. Scales more
#: than 2^120 smaller than the largest give zero.
_LARGEST = 252
#: Exponent of the factor of e5m3, bits of the bfloat16 of byte 0, and byte of zero.
_UNIT, _BASE, _ZERO = 117, 0x7010, 255
#: Dtypes with exponents of 8 bits.
_WIDE = torch.bfloat16, torch.float32
#: Most powers of two by which bytes of e5m3 can be lowered: 8 bytes are a power of two, the least byte is 87.
_ROOM = 10


def scale_kind(dtype: torch.dtype, on_weights: bool, is_folded: bool) -> str:
    """Return how scales stored as `dtype` are encoded in a layout: "e4m3", "e8m0" or "e5m3"; "" for floats.

    on_weights   True if scales multiply weights, False if they multiply sums of products
    is_folded    True if scales include a power of two that weights lack (`Geometry.folded_factor`)
    """
    if is_folded:
        return _FOLDED[dtype]
    return "" if on_weights else _AS_STORED.get(dtype, "")


@dataclass(frozen=True, eq=False)
class FoldedScales:
    """8-bit scales of weights, multiplied by a power of two: `scale` int8 [weights, rows, groups].

    The powers are `unit`, float64 [weights].
    """

    scale: torch.Tensor
    unit: torch.Tensor


def fold_scales(scale: torch.Tensor) -> FoldedScales:
    """Encode 8-bit scales [weights, rows, groups] as unsigned bytes, times a power of two per weight.

    `scale` is e8m0, or e4m3 without NaN; signs of e4m3 are dropped. The power of two moves scales to the top
    of the range of bfloat16, because dequantized weights lack a large factor (`Geometry.folded_factor`).
    """
    if scale.dtype == torch.float8_e8m0fnu:
        exponents = scale.view(torch.uint8).int()
        more = (_LARGEST - exponents.amax((1, 2), keepdim=True)).clamp(min=0)
        return FoldedScales(_bytes(exponents + more), _power(more.flatten()))
    values = scale.float().abs()
    bits = (values * 2.0**_UNIT).to(torch.bfloat16).view(torch.int16).int()
    stored = torch.where(values == 0, _ZERO, (bits - _BASE) >> 4)
    return FoldedScales(_bytes(stored), _power(torch.full((len(scale),), _UNIT, device=scale.device)))


def signs_of(scale: torch.Tensor, scheme: Scheme, k: int) -> torch.Tensor:
    """Return the signs of scales as bits of codes, uint8 [rows, K].

    A value is the highest bit of a code if its scale is negative, else 0. Codes XOR these values, times the
    magnitudes of the scales, are the same weights. `scale` [rows, groups] are the stored scales, `k` is K.
    """
    negative = (scale.float() < 0).to(torch.uint8) << scheme.format.bits - 1
    return negative.repeat_interleave(scheme.group_columns(k), dim=1)[:, :k]


def padding(kind: str) -> int:
    """Return the byte, as a signed number, that means a scale of 0 in the encoding `kind`.

    It fills rows and groups of padding.
    """
    return _ZERO - 256 if kind == "e5m3" else 0


def lowered(scale: torch.Tensor, kind: str, binades: int) -> torch.Tensor | None:
    """Return scales [...] times 2^-`binades`, encoded as before; None if the encoding lacks the range.

    `scale` is as stored in a layout, encoded as `kind`, a result of `scale_kind`. e4m3 always lacks it.
    """
    if kind == "e8m0":
        return _bytes((scale.view(torch.uint8).int() - binades).clamp(min=0))
    if kind == "e5m3" and binades <= _ROOM:
        stored = scale.view(torch.uint8).int()
        return _bytes(torch.where(stored == _ZERO, _ZERO, stored - 8 * binades))
    return scale * 2.0**-binades if scale.dtype in _WIDE else None


def _bytes(numbers: torch.Tensor) -> torch.Tensor:
    """Convert integers 0 to 255 [...] to int8 with the same bits."""
    return numbers.to(torch.uint8).view(torch.int8)


def _power(exponent: torch.Tensor) -> torch.Tensor:
    """Return 2^exponent, float64, for integers [...]; exact on every device."""
    return ((exponent.long() + 1023) << 52).view(torch.float64)
