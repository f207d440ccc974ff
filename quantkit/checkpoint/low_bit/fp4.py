"""Read FP4, two codes a byte: MXFP4 with a power of two per 32 weights, NVFP4 with an FP8 scale per 16."""

import math
from dataclasses import dataclass, replace

import torch

from quantkit.checkpoint.low_bit.fields import nibbles
from quantkit.checkpoint.low_bit.grid import GridSpec, StoredGrid
from quantkit.checkpoint.low_bit.weight import (
    POWERS_OF_TWO,
    Blocks,
    LowBitWeight,
    Parts,
    Settings,
    as_matrix,
    expect_shape,
    flat,
    powers_of_two,
    wrong,
)
from quantkit.checkpoint.tensors import Read
from quantkit.packing.formats import number_format


@dataclass(frozen=True)
class Fp4(LowBitWeight):
    """Codes [..., N, K / 2] with a scale for each group of a row.

    `global_scale` divides the scales, `multiplier` multiplies them: one float32 per matrix, or for all
    matrices. `blocks` says which scale a weight has.
    """

    blocks: Blocks

    @classmethod
    def of(cls, parts: Parts, settings: Settings, read: Read | None = None) -> "Fp4":
        codes, scale = parts["codes"], parts["scale"]
        if len(codes.shape) not in (2, 3):
            wrong(codes, "expected a matrix, or one for each expert")
        return cls._of(parts, (*codes.shape[:-1], 2 * codes.shape[-1]), scale.torch_dtype)

    @classmethod
    def of_blocks(cls, parts: Parts, settings: Settings, read: Read | None = None) -> "Fp4":
        """Read codes [E, N, G, B] of the parameter [E, 2 * G * B, N], or [N, G, B] of one matrix."""
        codes, scale = parts["codes"], parts["scale"]
        if len(codes.shape) not in (3, 4):
            wrong(codes, "expected blocks [experts, rows, groups, bytes] or [rows, groups, bytes]")
        expect_shape(scale, codes.shape[:-1], f"a scale for each block of {codes.name!r}")
        width = codes.shape[-1] * codes.shape[-2]
        whole = replace(codes, shape=(*codes.shape[:-2], width))
        found = cls._of({**parts, "codes": whole}, (*codes.shape[:-2], 2 * width), torch.uint8)
        return replace(found, spec=replace(found.spec, transposed=len(codes.shape) == 4))

    @classmethod
    def _of(cls, parts: Parts, shape: tuple[int, ...], scale_dtype: torch.dtype) -> "Fp4":
        codes, scale = parts["codes"], parts["scale"]
        blocks = Blocks.of(codes, shape, scale)
        matrices = shape[0] if len(shape) == 3 else None
        if blocks.size[0] != 1 or shape[-1] % blocks.grid[1]:
            wrong(scale, f"expected the scales of groups of each row of {codes.name!r}")
        # The number of groups is exact, so their size follows: no larger block may cover the row.
        blocks = replace(blocks, size=(1, shape[-1] // blocks.grid[1]))
        for name in ("global_scale", "multiplier"):
            if name in parts and parts[name].elements not in (1, matrices):
                wrong(parts[name], f"expected one number, or one for each matrix of {codes.name!r}")
        if scale.dtype in POWERS_OF_TWO:
            scale_dtype = torch.float8_e8m0fnu
        spec = GridSpec(
            number_format("fp4-e2m1"),
            (shape[-2], shape[-1]),
            group_size=blocks.size[1],
            scale_dtype=torch.float32 if "multiplier" in parts else scale_dtype,
            global_scale="global_scale" in parts,
            matrices=matrices,
        )
        return cls(parts, spec, blocks)

    def read_rows(self, read: Read, start: int, stop: int) -> StoredGrid:
        codes = read(as_matrix(self.parts["codes"]), start, stop).view(torch.uint8)
        scales = self.blocks.rows(read, self.parts["scale"], self.spec.shape[0], start, stop)
        if self.spec.scale_dtype == torch.float8_e8m0fnu:
            scales = powers_of_two(scales)
        if "multiplier" in self.parts:
            scales = scales.float() * self._of_matrix(read, "multiplier", start, stop)[:, None]
        divisor = None
        if self.spec.global_scale:
            divisor = self._of_matrix(read, "global_scale", start, stop)
        return StoredGrid(self.spec, nibbles(codes), scales, global_scale=divisor)

    def _of_matrix(self, read: Read, part: str, start: int, stop: int) -> torch.Tensor:
        """Return the global scale or multiplier, the stored `part`, of the matrix of each row: float32 [R].

        Rows are those from `start` to `stop` of all matrices, one above the other.
        """
        found = read(flat(self.parts[part])).float()
        rows = torch.arange(start, stop) // self.spec.shape[0]
        return found[rows] if math.prod(found.shape) > 1 else found.expand(stop - start)
