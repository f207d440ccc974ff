"""Types in which scales are stored."""

import math
from dataclasses import dataclass

import torch

#: Most weights of a row, or inputs of a token, that share a scale.
MAX_GROUP_SIZE = 1 << 20


@dataclass(frozen=True)
class ScaleType:
    """Type in which scales may be stored.

    max        largest scale
    digits     bits of the significand
    signed     True if a scale may be negative
    relative   True if scales are divided by one float32 per tensor, as the dtype's range is small
    """

    name: str
    dtype: torch.dtype
    max: float
    digits: int
    signed: bool = True
    relative: bool = False

    def round(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the nearest scales of this type, float32 of the shape of `scale`; infinite on overflow."""
        # Casts to 8-bit dtypes saturate in some versions of torch and overflow in others.
        limit = self.max + 2.0 ** (math.floor(math.log2(self.max)) - self.digits)
        exact = scale.to(torch.float32)
        return torch.where(exact.abs() > limit, math.inf, exact.to(self.dtype).to(torch.float32))


#: Scale types by dtype. To add one, add a row.
SCALE_TYPES: dict[torch.dtype, ScaleType] = {
    scale.dtype: scale
    for scale in (
        ScaleType("float32", torch.float32, torch.finfo(torch.float32).max, 24),
        ScaleType("float16", torch.float16, torch.finfo(torch.float16).max, 11),
        ScaleType("bfloat16", torch.bfloat16, torch.finfo(torch.bfloat16).max, 8),
        ScaleType("e4m3", torch.float8_e4m3fn, 448.0, 4, relative=True),
        ScaleType("e8m0", torch.float8_e8m0fnu, 2.0**127, 1, signed=False),
    )
}

#: Scale dtypes by their names in files.
SCALE_DTYPES: dict[str, torch.dtype] = {scale.name: scale.dtype for scale in SCALE_TYPES.values()}
