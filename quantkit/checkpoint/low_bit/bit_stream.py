"""Codes as a stream of bits: the layout that formats share whose codes straddle words."""

import torch

from quantkit.packing import bitpack

#: Widths whose codes straddle no words, so that a stream of them is a plane of `bitpack`.
_WHOLE = (1, 2, 4, 8)


def words_of(codes: int, bits: int) -> int:
    """int32 words that a stream of so many codes takes."""
    return -(-codes * bits // 32)


def unpack_stream(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Codes (uint8 [R, columns]) of rows of words (int32 [R, words_of(columns, bits)]).

    Code i of a row has the bits `bits * i` to `bits * (i + 1) - 1`, the lowest of a word first.
    """
    if bits in _WHOLE:
        return bitpack.unpack(words, bits, columns)
    # A code lies in its word and the next: as 64 bits, shifted down.
    padded = torch.nn.functional.pad(words.to(torch.int64) & 0xFFFFFFFF, (0, 1))
    first = torch.arange(columns) * bits
    pairs = padded | torch.nn.functional.pad(padded[:, 1:] << 32, (0, 1))
    found = (pairs[:, first // 32] >> (first % 32)) & ((1 << bits) - 1)
    return found.to(torch.uint8)


def unpack_fields(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Codes (uint8 [R, columns]) of words (int32) that hold `32 // bits` codes each, none in two."""
    shifts = torch.arange(32 // bits) * bits
    found = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return found.flatten(1)[:, :columns].to(torch.uint8)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Codes (uint8 [R, 2 B]) of bytes (uint8 [R, B]), the low half of each first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)
