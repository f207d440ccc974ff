"""Types of GGUF tensors: the block layout of each, as rows of a table.

A block has some weights and their scales. If all its weights are `scale * value(code)`, or `scale * code +
minimum`, the row has a `BlockGrid`. It splits a block into codes, scales and minimums, and joins them.
The package gguf dequantizes other blocks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from quantkit.packing.formats import FORMATS, CodebookFormat, NumberFormat

#: Codes (uint8 [B, elements]), scales ([B]) and minimums ([B], or None) of B blocks (uint8 [B, nbytes]).
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class BlockGrid:
    """Grid of a block: the format of its codes, and the functions that split a block and join it.

    Scales are `scale_dtype`. With `affine` "biases" a block has a minimum, too, which is added.
    """

    format: NumberFormat
    scale_dtype: torch.dtype
    split: Callable[[torch.Tensor], Parts]
    join: Callable[[Parts], torch.Tensor]
    affine: Literal["none", "biases"] = "none"


@dataclass(frozen=True)
class BlockType:
    """Tensor type: `elements` weights take `nbytes` bytes.

    `dtype` is set if a block is a single number. `grid` is None then, and for blocks with scales of scales.
    """

    number: int
    name: str
    elements: int
    nbytes: int
    dtype: torch.dtype | None = None
    grid: BlockGrid | None = None


def _half(blocks: torch.Tensor, start: int) -> torch.Tensor:
    """Return the float16 at byte `start` of each block, [B]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)[:, 0]


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Return the low halves of all bytes, then the high halves: uint8 [B, 2 n] from [B, n]."""
    return torch.cat([data & 15, data >> 4], dim=1)


def _bits(data: torch.Tensor) -> torch.Tensor:
    """Return all bits of each byte, lowest first: uint8 [B, 8 n] from [B, n]."""
    return ((data.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8)) & 1).flatten(1)


def _joined(parts: Parts, *rest: torch.Tensor) -> torch.Tensor:
    """Join blocks (uint8 [B, nbytes]): scales, minimums if there are any, then bytes [B, n]."""
    numbers = [one.unsqueeze(1).view(torch.uint8) for one in parts[1:] if one is not None]
    return torch.cat([*numbers, *rest], dim=1)


def _as_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes, uint8 [B, 2 n], to bytes [B, n]: the first n are the low halves, the rest the high ones.

    Ignores all but the lowest four bits of a code.
    """
    low, high = (codes & 15).chunk(2, dim=1)
    return low | high << 4


def _as_bits(codes: torch.Tensor) -> torch.Tensor:
    """Invert `_bits`, for codes 0 and 1."""
    shifted = codes.view(len(codes), -1, 8) << torch.arange(8, dtype=torch.uint8)
    return shifted.sum(dim=2, dtype=torch.uint8)


def _join_4(parts: Parts) -> torch.Tensor:
    return _joined(parts, _as_nibbles(parts[0]))


def _join_5(parts: Parts) -> torch.Tensor:
    return _joined(parts, _as_bits(parts[0] >> 4), _as_nibbles(parts[0]))


def _join_8(parts: Parts) -> torch.Tensor:
    return _joined(parts, parts[0] ^ 128)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 2:]), _half(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 4:]), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4, _half(blocks, 0), None


def _q5_1(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4, _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    # Two's complement to offset binary.
    return blocks[:, 2:] ^ 128, _half(blocks, 0), None


def _mxfp4(blocks: torch.Tensor) -> Parts:
    return _nibbles(blocks[:, 1:]), blocks[:, 0].contiguous().view(torch.float8_e8m0fnu), None


def _tq2_0(blocks: torch.Tensor) -> Parts:
    # 2 x 32 bytes; the 4 codes of a byte are 32 weights apart.
    codes = blocks[:, :64].reshape(-1, 2, 1, 32) >> torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    return (codes & 3).flatten(1), _half(blocks, 64), None


def _join_tq2_0(parts: Parts) -> torch.Tensor:
    codes = parts[0].view(-1, 2, 4, 32) << torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    # Scales come last.
    return torch.cat([codes.sum(dim=2, dtype=torch.uint8).flatten(1), _joined((parts[0], parts[1], None))], 1)


#: ggml's `kvalues_iq4nl`.
_IQ4_NL = CodebookFormat(
    "iq4-nl", 4, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)


def _halves(
    name: str,
    split: Callable[[torch.Tensor], Parts],
    join: Callable[[Parts], torch.Tensor],
    *,
    minimum: bool = False,
) -> BlockGrid:
    return BlockGrid(FORMATS[name], torch.float16, split, join, "biases" if minimum else "none")


#: Types by their number in files. To add one, add a row.
BLOCK_TYPES: Mapping[int, BlockType] = {
    row.number: row
    for row in (
        BlockType(0, "F32", 1, 4, torch.float32),
        BlockType(1, "F16", 1, 2, torch.float16),
        BlockType(30, "BF16", 1, 2, torch.bfloat16),
        BlockType(2, "Q4_0", 32, 18, grid=_halves("int4", _q4_0, _join_4)),
        BlockType(3, "Q4_1", 32, 20, grid=_halves("int4", _q4_1, _join_4, minimum=True)),
        BlockType(6, "Q5_0", 32, 22, grid=_halves("int5", _q5_0, _join_5)),
        BlockType(7, "Q5_1", 32, 24, grid=_halves("int5", _q5_1, _join_5, minimum=True)),
        BlockType(8, "Q8_0", 32, 34, grid=_halves("int8", _q8_0, _join_8)),
        BlockType(20, "IQ4_NL", 32, 18, grid=BlockGrid(_IQ4_NL, torch.float16, _q4_0, _join_4)),
        BlockType(
            39, "MXFP4", 32, 17, grid=BlockGrid(FORMATS["fp4-e2m1"], torch.float8_e8m0fnu, _mxfp4, _join_4)
        ),
        BlockType(35, "TQ2_0", 256, 66, grid=_halves("ternary", _tq2_0, _join_tq2_0)),
        BlockType(34, "TQ1_0", 256, 54),
        BlockType(10, "Q2_K", 256, 84),
        BlockType(11, "Q3_K", 256, 110),
        BlockType(12, "Q4_K", 256, 144),
        BlockType(13, "Q5_K", 256, 176),
        BlockType(14, "Q6_K", 256, 210),
        BlockType(16, "IQ2_XXS", 256, 66),
        BlockType(17, "IQ2_XS", 256, 74),
        BlockType(22, "IQ2_S", 256, 82),
        BlockType(18, "IQ3_XXS", 256, 98),
        BlockType(21, "IQ3_S", 256, 110),
        BlockType(19, "IQ1_S", 256, 50),
        BlockType(29, "IQ1_M", 256, 56),
        BlockType(23, "IQ4_XS", 256, 136),
    )
}
