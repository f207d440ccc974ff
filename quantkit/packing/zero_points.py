"""Kinds of zero-points, as rows of a table: how z of `scale * (code - z)` is rounded, stored and searched.

Each group of a matrix [N, K] has one z: [N, G] for G groups in a row. A kind may store z in any way, and
round it to any set of numbers. The kind "minimum" stores -scale * z in place of z, and a weight is `scale *
code + minimum`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch

from quantkit.packing import bitpack
from quantkit.packing.formats import IntFormat, NumberFormat

ZeroPoint = Literal["none", "integer", "float", "minimum"]


def at_least_16_bits(scale_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the scales, or bfloat16 if that has 8 bits."""
    return torch.bfloat16 if scale_dtype.itemsize < 2 else scale_dtype


@dataclass(frozen=True)
class ZeroPointStorage:
    """Storage of the zero-points z [N, G] of a matrix, for codes of `bits` bits.

    values(scale dtype)    dtype of z in memory
    dtype(scale dtype)     dtype of the stored tensor
    rows(N, bits)          R, for a stored tensor [R, G]
    cut(bits)              rows of the matrix, at whose multiples the stored tensor can be cut
    pack(z, scale dtype, bits)    the stored tensor, contiguous
    unpack(stored, N, bits)       z
    take(stored, N, bits, ids)    z of rows `ids`, int64 [n]: [n, G]
    """

    values: Callable[[torch.dtype], torch.dtype]
    dtype: Callable[[torch.dtype], torch.dtype]
    rows: Callable[[int, int], int]
    cut: Callable[[int], int]
    pack: Callable[[torch.Tensor, torch.dtype, int], torch.Tensor]
    unpack: Callable[[torch.Tensor, int, int], torch.Tensor]
    take: Callable[[torch.Tensor, int, int, torch.Tensor], torch.Tensor]


def plain_storage(dtype: Callable[[torch.dtype], torch.dtype]) -> ZeroPointStorage:
    """Return storage that keeps z [N, G] unpacked, in the dtype `dtype(scale dtype)`."""
    return ZeroPointStorage(
        values=dtype,
        dtype=dtype,
        rows=lambda rows, bits: rows,
        cut=lambda bits: 1,
        pack=lambda z, scale_dtype, bits: z.to(dtype(scale_dtype)).clone(
            memory_format=torch.contiguous_format
        ),
        unpack=lambda stored, rows, bits: stored,
        take=lambda stored, rows, bits, ids: stored.index_select(0, ids),
    )


def _pack_codes(z: torch.Tensor, scale_dtype: torch.dtype, bits: int) -> torch.Tensor:
    # `clone`, because `contiguous` leaves a single column with the stride of its matrix.
    return bitpack.pack(z.T.contiguous(), bits).T.clone(memory_format=torch.contiguous_format)


#: z is a code (uint8) as wide as the weights' codes, packed along N as compressed-tensors does.
PACKED_CODES = ZeroPointStorage(
    values=lambda scale_dtype: torch.uint8,
    dtype=lambda scale_dtype: torch.int32,
    rows=bitpack.words_per_row,
    cut=bitpack.codes_per_cut,
    pack=_pack_codes,
    unpack=lambda stored, rows, bits: bitpack.unpack(stored.T.contiguous(), bits, rows).T,
    take=lambda stored, rows, bits, ids: bitpack.take(stored, bits, rows, ids),
)


def _shifted(codes: torch.Tensor, scale: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    return codes.sub_(z).mul_(scale)


def _with_minimum(codes: torch.Tensor, scale: torch.Tensor, minimum: torch.Tensor) -> torch.Tensor:
    return codes.mul_(scale).add_(torch.where(scale == 0, 0.0, minimum))


def _minimum_in_codes(minimum: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 0.0, -minimum.float() / scale)


@dataclass(frozen=True)
class ZeroPointType:
    """Kind of zero-point: a row of `ZERO_POINTS`. z is None if `storage` is None.

    suffix                     part of the name of a scheme
    plural                     what a matrix of this kind has, in messages
    storage                    how z is stored; None without a zero-point
    weights(codes, scale, z)   float32 weights of codes, which are float32 and overwritten
    in_codes(z, scale)         the number subtracted from codes, for scales float32 [N, G]
    is_minimum                 True if z is stored as a minimum: a weight is scale * code + minimum

    Rounding of z and weights, with units = weight / scale, float32:

    round(format, z, scale dtype)   the nearest z that can be stored, float32; takes any float dtype
    nearest(format, units, z)       the values code - z nearest to `units`, float32
    quantize(format, units, z)      their codes, uint8, and the values

    Search of z, for `mse`:

    why_not_searched   reason why no method searches z, else None
    step               distance of candidates, in codes
    refits             number of least-squares refits of the best candidate
    is_continuous      True if z may lie between codes, so that a refit moves it too

    Kernels, which read z as `kernel_dtype`, where it must be exact:

    why_not_fused      reason why no fused GPU kernel supports it, else None
    why_not_int8       reason why code - z does not fit an int8 for codes of up to 7 bits, else None
    """

    name: ZeroPoint
    suffix: str
    plural: str
    storage: ZeroPointStorage | None
    round: Callable[[NumberFormat, torch.Tensor, torch.dtype], torch.Tensor]
    # `Any` is a format that `why_not` accepts, and z, a tensor or None.
    nearest: Callable[[Any, torch.Tensor, Any], torch.Tensor]
    quantize: Callable[[Any, torch.Tensor, Any], tuple[torch.Tensor, torch.Tensor]]
    weights: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] = _shifted
    in_codes: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = lambda z, scale: z
    is_minimum: bool = False
    why_not_searched: str | None = None
    step: float = 1.0
    refits: int = 1
    is_continuous: bool = False
    kernel_dtype: torch.dtype = torch.float32
    why_not_fused: str | None = None
    why_not_int8: str | None = None

    def why_not(self, number_format: NumberFormat) -> str | None:
        """Return why codes of a format cannot have this zero-point; None if they can."""
        if self.storage is None or isinstance(number_format, IntFormat):
            return None
        return f"format {number_format.name!r} has no zero-point; asymmetric schemes need an int format"


def round_to_code(number_format: NumberFormat, z: torch.Tensor, _: torch.dtype) -> torch.Tensor:
    """Return the code nearest to each zero-point `z` [...], float32 [...]."""
    return torch.round(z).clamp_(0, 2**number_format.bits - 1).float()


#: Kinds by their name in files and options. To add one, add a row.
ZERO_POINTS: dict[str, ZeroPointType] = {
    kind.name: kind
    for kind in (
        ZeroPointType(
            "none",
            "",
            "no zero-points",
            storage=None,
            round=lambda number_format, z, scale_dtype: z.float(),
            nearest=lambda number_format, units, z: number_format.round(units),
            quantize=lambda number_format, units, z: number_format.quantize(units),
        ),
        ZeroPointType(
            "integer",
            " asym",
            "integer zero-points",
            PACKED_CODES,
            round=round_to_code,
            nearest=IntFormat.round_affine,
            quantize=IntFormat.quantize_affine,
            # Integers up to 256 are exact.
            kernel_dtype=torch.bfloat16,
        ),
        ZeroPointType(
            "float",
            " asym-float",
            "float zero-points",
            plain_storage(at_least_16_bits),
            round=lambda number_format, z, scale_dtype: z.to(at_least_16_bits(scale_dtype)).float(),
            nearest=IntFormat.round_offset,
            quantize=IntFormat.quantize_offset,
            step=0.125,
            refits=3,
            is_continuous=True,
            why_not_int8="its weights are integers, and a float zero-point makes them fractions; "
            "use an integer one",
        ),
        ZeroPointType(
            "minimum",
            " asym-min",
            "minimums",
            plain_storage(at_least_16_bits),
            round=lambda number_format, z, scale_dtype: z.float(),
            nearest=IntFormat.round_offset,
            quantize=IntFormat.quantize_offset,
            weights=_with_minimum,
            in_codes=_minimum_in_codes,
            is_minimum=True,
            why_not_searched="a minimum is the grid of files that have one, which `convert` keeps; use float",
            is_continuous=True,
            why_not_int8="its weights are integers, and a minimum makes them fractions; use an integer one",
        ),
    )
}


def searched() -> tuple[ZeroPoint, ...]:
    """Return the kinds of zero-points that methods support, "none" included."""
    return tuple(kind.name for kind in ZERO_POINTS.values() if kind.why_not_searched is None)
