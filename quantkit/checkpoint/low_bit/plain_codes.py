"""Read one-byte codes: FP8 and int8, with scales of blocks, rows or the whole tensor."""

from dataclasses import dataclass
from typing import Any

import torch

from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.weight import (
    POWERS_OF_TWO,
    Blocks,
    LowBitWeight,
    Parts,
    Settings,
    as_matrix,
    expect_shape,
    powers_of_two,
    weight_arguments,
    wrong,
)
from quantkit.checkpoint.tensors import Read
from quantkit.packing.formats import number_format

_FORMATS = {"F8_E4M3": "fp8-e4m3", "F8_E5M2": "fp8-e5m2", "I8": "int8"}


def _block_size(settings: Settings) -> Any:
    """Return the block size in the config of transformers or compressed-tensors; None if it has none."""
    found = [weights.get("block_structure") for weights in weight_arguments(settings)]
    return settings.values.get("weight_block_size") or next(filter(None, found), None)


@dataclass(frozen=True)
class PlainCodes(LowBitWeight):
    """One-byte codes [..., N, K], `scale` for each block, and optionally int8 `zero` of the same shape."""

    blocks: Blocks

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None = None) -> "PlainCodes":
        codes, scale, zero = parts["codes"], parts["scale"], parts.get("zero")
        if len(codes.shape) not in (2, 3):
            wrong(codes, "expected a matrix, or one for each expert")
        blocks = Blocks.of(codes, codes.shape, scale, _block_size(settings))
        if zero is not None:
            expect_shape(zero, scale.shape, f"its scale {scale.name!r}")
        powers = scale.dtype in POWERS_OF_TWO
        spec = GridSpec(
            number_format(_FORMATS[codes.dtype]),
            (codes.shape[-2], codes.shape[-1]),
            group_size=blocks.size[1],
            group_rows=blocks.size[0],
            affine="none" if zero is None else "zeros",
            scale_dtype=torch.float8_e8m0fnu if powers else scale.torch_dtype,
            matrices=codes.shape[0] if len(codes.shape) == 3 else None,
        )
        return cls(parts, spec, blocks)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        codes = read(as_matrix(self.parts["codes"]), start, stop)
        signed = codes.dtype == torch.int8
        codes = codes.view(torch.uint8)
        scales = self._by_row(read, "scale", start, stop)
        zeros = None
        if "zero" in self.parts:
            zeros = self._by_row(read, "zero", start, stop).float() + 128
        return StoredGrid(
            self.spec,
            # Two's complement to offset binary: flip the sign bit.
            codes ^ 128 if signed else codes,
            powers_of_two(scales) if self.spec.scale_dtype == torch.float8_e8m0fnu else scales,
            zeros,
        )

    def _by_row(self, read: Read, part: str, start: int, stop: int) -> torch.Tensor:
        return self.blocks.rows(read, self.parts[part], self.spec.shape[0], start, stop)
