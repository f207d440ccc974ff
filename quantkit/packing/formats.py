"""Number formats: the value of each code of a format.

A format is a frozen record; its values, limits, rounding and codes follow from its fields. So a new format is
a new row of `FORMATS`, and no other module interprets codes.

Codes are unsigned integers below `2**bits`, one per element, in a uint8 tensor:

    int   offset binary          code = value + 2**(bits-1)        int4: -8 -> 0, 0 -> 8, 7 -> 15
    float sign | exponent | mantissa                               e2m3: s ee mmm
    book  index into the sorted list of values                     binary: -1 -> 0, +1 -> 1

A `FittedFormat` is a code book whose values are stored with each tensor. `bind` makes it a `CodebookFormat`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Literal

import numpy as np
import torch

from quantkit.errors import FormatError, unknown_name
from quantkit.packing.bucketize import codes_between

MAX_BITS = 8
#: Largest exponent: rounding multiplies values of a float format by up to 2**23, in float32.
MAX_EXPONENT = 100


@dataclass(frozen=True)
class NumberFormat(ABC):
    """Finite set of at most 256 real numbers, each with a code. All numbers are in units of the scale."""

    name: str
    bits: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= MAX_BITS:
            raise FormatError(
                f"number format {self.name!r} has {self.bits} bits; a code has 1 to {MAX_BITS}."
            )

    @cached_property
    @abstractmethod
    def values(self) -> tuple[float, ...]:
        """Return the value of every code, indexed by code. Exact: each value is a float32."""

    @abstractmethod
    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes (uint8 [...]) of the values nearest to `x` (float32 [...], finite); saturates.

        Ties go to the even neighbour for int and float formats, and upward for code books.
        """

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the values (float32 [...]) of `codes` (uint8 [...], each below `2**bits`)."""
        # index_select is several times faster than indexing with a tensor.
        return _table(self, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """Return the values nearest to `x`, float32 [...]: `decode(encode(x))`."""
        return self.decode(self.encode(x))

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return `encode(x)` and `round(x)` in one pass."""
        codes = self.encode(x)
        return codes, self.decode(codes)

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """Return the values in ascending order, without the NaN of unused codes."""
        return tuple(sorted({value for value in self.values if not math.isnan(value)}))

    @property
    def max(self) -> float:
        """Return the largest value."""
        return self.numbers[-1]

    @property
    def min(self) -> float:
        """Return the smallest value."""
        return self.numbers[0]

    @cached_property
    def is_symmetric(self) -> bool:
        """Return True if the negative of every value is a value."""
        return all(-value in self.numbers for value in self.numbers)

    @property
    def absmax(self) -> float:
        """Return the largest magnitude with both signs: plain rounding maps a group's absmax to it."""
        return min(self.max, -self.min)

    @cached_property
    def even_step(self) -> float | None:
        """Return the distance of neighbouring values; None if not all are equally far apart."""
        steps = {b - a for a, b in pairwise(self.numbers)}
        return steps.pop() if len(steps) == 1 else None

    @property
    def has_zero(self) -> bool:
        """Return True if 0 is one of the values."""
        return 0.0 in self.values

    @property
    def rounding_statistic(self) -> Literal["absmax", "absmean"]:
        """Return the statistic of a group that plain rounding maps to `absmax`."""
        return "absmean" if len(self.numbers) <= 3 else "absmax"


@lru_cache(maxsize=64)
def _table(number_format: NumberFormat, device: torch.device) -> torch.Tensor:
    return torch.tensor(number_format.values, dtype=torch.float32, device=device)


@dataclass(frozen=True)
class IntFormat(NumberFormat):
    """Integers in `[-2**(bits-1), 2**(bits-1) - 1]`, stored in offset binary."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits < 2:
            raise FormatError(
                f"int format {self.name!r} has 1 bit and so no positive value; use a code book "
                "such as 'binary'."
            )

    @cached_property
    def values(self) -> tuple[float, ...]:
        return tuple(float(code - self.offset) for code in range(2**self.bits))

    @property
    def offset(self) -> int:
        """Return the code of zero."""
        return 1 << (self.bits - 1)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.quantize(x)[0]

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        return codes.to(torch.float32).sub_(self.offset)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        return torch.round(x).clamp_(-self.offset, self.offset - 1)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.round(x)
        # Via int8, to which torch converts seven times faster; the sum wraps around to the code.
        return values.to(torch.int8).view(torch.uint8).add_(self.offset), values

    def round_affine(self, x: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """Return the values nearest to `x` (float32 [...]), if code `zero_point` means zero.

        `zero_point` is float32, of a shape that broadcasts to that of `x`.
        """
        return torch.round(x).clamp_(-zero_point, (2 * self.offset - 1) - zero_point)

    def quantize_affine(self, x: torch.Tensor, zero_point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes (uint8 [...]) and the values (float32 [...]) nearest to `x`, float32 [...].
        `zero_point` is the code that means zero, float32, and broadcasts to the shape of `x`.
        """
        values = self.round_affine(x, zero_point)
        return (values + (zero_point - 128)).to(torch.int8).view(torch.uint8).add_(128), values

    def round_offset(self, x: torch.Tensor, zero_point: torch.Tensor) -> torch.Tensor:
        """Return the values nearest to `x` (float32 [...]), if `zero_point` between codes means zero.

        `zero_point` is float32, of a shape that broadcasts to that of `x`.
        """
        return torch.round(x + zero_point).clamp_(0, 2 * self.offset - 1).sub_(zero_point)

    def quantize_offset(self, x: torch.Tensor, zero_point: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the codes (uint8 [...]) and the values (float32 [...]) nearest to `x`, float32 [...].

        `zero_point` lies between codes and means zero. It is float32, and broadcasts to the shape of `x`.
        """
        codes = torch.round(x + zero_point).clamp_(0, 2 * self.offset - 1)
        return (codes - 128).to(torch.int8).view(torch.uint8).add_(128), codes - zero_point


@dataclass(frozen=True)
class FloatFormat(NumberFormat):
    """Floats of a sign, `exponent_bits` and `mantissa_bits`, with subnormals.

    Follows OCP MX v1.0, 5.3, and OCP OFP8 v1.0 for 8 bits. For each sign, the `reserved` largest codes are
    infinities and NaN: they are never encoded, and decode to NaN.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits != 1 + self.exponent_bits + self.mantissa_bits:
            raise FormatError(
                f"number format {self.name!r} has {self.bits} bits but its fields take "
                f"{1 + self.exponent_bits + self.mantissa_bits}; make them agree."
            )
        if self.exponent_bits < 1 or self.mantissa_bits < 1:
            raise FormatError(
                f"number format {self.name!r} has {self.exponent_bits} exponent and {self.mantissa_bits} "
                "mantissa bits; each is at least 1. Use a code book for powers of two."
            )
        if not 0 <= self.reserved < 1 << (self.bits - 1):
            raise FormatError(
                f"number format {self.name!r} reserves {self.reserved} codes of each sign, which has "
                f"{1 << (self.bits - 1)}; leave at least one."
            )
        exponents = (1 - self.bias - self.mantissa_bits, (1 << self.exponent_bits) - self.bias)
        if not -MAX_EXPONENT <= exponents[0] < exponents[1] <= MAX_EXPONENT:
            raise FormatError(
                f"number format {self.name!r} has values from 2**{exponents[0]} to 2**{exponents[1]}; "
                f"choose a bias that keeps them within 2**-{MAX_EXPONENT} and 2**{MAX_EXPONENT}."
            )

    @cached_property
    def values(self) -> tuple[float, ...]:
        half = 1 << (self.bits - 1)

        def value(code: int) -> float:
            mantissa = code & ((1 << self.mantissa_bits) - 1)
            exponent = (code >> self.mantissa_bits) & ((1 << self.exponent_bits) - 1)
            sign = -1.0 if code >> (self.bits - 1) else 1.0
            significand = mantissa if exponent == 0 else mantissa + (1 << self.mantissa_bits)
            if code & (half - 1) >= half - self.reserved:
                return math.nan
            return sign * significand * 2.0 ** (max(exponent, 1) - self.bias - self.mantissa_bits)

        return tuple(value(code) for code in range(2**self.bits))

    @property
    def _smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.quantize(x)[0]

    def round(self, x: torch.Tensor) -> torch.Tensor:
        # Round to nearest even by float32's own addition: adding 1.5 * 2**23 times the spacing of the values
        # around x leaves no finer digits than that spacing. The spacing is 2**-m times the power of two below
        # x, which is its exponent field alone. Subnormals have the spacing of the smallest normal.
        magnitude = x.abs().clamp_(max=self.max)
        power = magnitude.view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
        shift = power.clamp_(min=self._smallest_normal).mul_(1.5 * 2.0 ** (23 - self.mantissa_bits))
        return magnitude.add_(shift).sub_(shift).copysign_(x)

    def quantize(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values = self.round(x)
        magnitude = values.abs()
        # In a float32 too, the exponent lies above the mantissa: shift both down and change the bias.
        exponent_and_mantissa = magnitude.view(torch.int32) >> (23 - self.mantissa_bits)
        normal = exponent_and_mantissa.sub_((127 - self.bias) << self.mantissa_bits)
        # Subnormals are multiples of their spacing.
        subnormal = (magnitude * (2.0**self.mantissa_bits / self._smallest_normal)).to(torch.int32)
        codes = torch.where(magnitude < self._smallest_normal, subnormal, normal)
        codes.bitwise_or_(torch.signbit(values).int() << (self.bits - 1))
        return codes.to(torch.uint8), values


@dataclass(frozen=True)
class CodebookFormat(NumberFormat):
    """Strictly increasing list of values; the code is the index.

    With fewer than `2**bits` values, the remaining codes decode to NaN.
    """

    book: tuple[float, ...]

    def __post_init__(self) -> None:
        super().__post_init__()
        increasing = all(a < b for a, b in zip(self.book, self.book[1:], strict=False))
        if not 2 ** (self.bits - 1) < len(self.book) <= 2**self.bits or not increasing:
            raise FormatError(
                f"code book {self.name!r} needs {2 ** (self.bits - 1) + 1} to {2**self.bits} strictly "
                f"increasing values for {self.bits} bits; got {len(self.book)}: {self.book}."
            )
        inexact = [value for value in self.book if not math.isfinite(value) or _float32(value) != value]
        if inexact:
            raise FormatError(
                f"code book {self.name!r} has values that are no finite float32: {inexact}; round them first."
            )

    @cached_property
    def values(self) -> tuple[float, ...]:
        return (*self.book, *[math.nan] * (2**self.bits - len(self.book)))

    @cached_property
    def edges(self) -> tuple[float, ...]:
        """Return for each pair of neighbouring values the smallest float32 that rounds to the upper one.

        It is their midpoint, rounded up to float32: rounded down, it would send values below the midpoint
        upward.
        """
        midpoints = [(Fraction(a) + Fraction(b)) / 2 for a, b in zip(self.book, self.book[1:], strict=False)]
        return tuple(_float32_at_least(midpoint) for midpoint in midpoints)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return codes_between(x, self.edges)


@dataclass(frozen=True)
class FittedFormat(NumberFormat):
    """Code book whose values are fitted to each tensor and stored with it; the code is the index.

    The values ascend, and the largest magnitude is 1. Before `bind`, no code has a value.
    """

    def bind(self, book: Sequence[float]) -> CodebookFormat:
        """Return the format with the values `book` of a tensor."""
        return CodebookFormat(self.name, self.bits, tuple(book))

    @cached_property
    def values(self) -> tuple[float, ...]:
        return tuple(math.nan for _ in range(2**self.bits))

    @property
    def max(self) -> float:
        return 1.0

    @property
    def min(self) -> float:
        return -1.0

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        raise self._unbound()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        raise self._unbound()

    def _unbound(self) -> FormatError:
        return FormatError(
            f"the values of {self.name!r} are fitted to each tensor and stored with it; bind them first."
        )


def _float32(x: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.float32(x))


def _float32_at_least(x: Fraction) -> float:
    """Return the smallest float32 that is not below `x`."""
    nearest = np.float32(float(x))
    return float(nearest if Fraction(float(nearest)) >= x else np.nextafter(nearest, np.float32(np.inf)))


#: Quantiles of the normal distribution, from Dettmers et al., QLoRA (arXiv 2305.14314), appendix E.
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

#: All number formats. To add one, add a row.
FORMATS: dict[str, NumberFormat] = {
    number_format.name: number_format
    for number_format in (
        *(IntFormat(f"int{bits}", bits) for bits in (8, 7, 6, 5, 4, 3, 2)),
        FloatFormat("fp8-e4m3", 8, exponent_bits=4, mantissa_bits=3, bias=7, reserved=1),
        FloatFormat("fp8-e5m2", 8, exponent_bits=5, mantissa_bits=2, bias=15, reserved=4),
        FloatFormat("fp6-e2m3", 6, exponent_bits=2, mantissa_bits=3, bias=1),
        FloatFormat("fp6-e3m2", 6, exponent_bits=3, mantissa_bits=2, bias=3),
        FloatFormat("fp4-e2m1", 4, exponent_bits=2, mantissa_bits=1, bias=1),
        CodebookFormat("nf4", 4, book=_NF4),
        CodebookFormat("ternary", 2, book=(-1.0, 0.0, 1.0)),
        CodebookFormat("binary", 1, book=(-1.0, 1.0)),
        FittedFormat("codebook4", 4),
    )
}

#: Short names. `fp6` is the 6-bit float with the smaller measured error (docs/accuracy.md).
ALIASES: dict[str, str] = {"fp8": "fp8-e4m3", "fp6": "fp6-e2m3", "fp4": "fp4-e2m1"}


def number_format(name: str) -> NumberFormat:
    """Return the format for a name or alias; raise `FormatError` with a list of all names if unknown."""
    try:
        return FORMATS[ALIASES.get(name, name)]
    except KeyError:
        raise unknown_name("number format", name, [*FORMATS, *ALIASES], error=FormatError) from None
