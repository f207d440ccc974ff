"""Unpack codes from bit streams, the layout of formats whose codes may straddle words."""

import torch
import torch.nn.functional as F

from quantkit.packing import bitpack

#: Widths whose codes straddle no words: a stream of them is a part of `bitpack`.
_WHOLE = (1, 2, 4, 8)


def words_of(codes: int, bits: int) -> int:
    """Return the number of int32 words of a stream of `codes` codes."""
    return -(-codes * bits // 32)


def unpack_stream(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack rows of words (int32 [R, words_of(columns, bits)]) to codes (uint8 [R, columns]).

    Bits are counted from the lowest of each word: code i of a row is bits `bits * i` to `bits * (i + 1) - 1`.
    """
    if bits in _WHOLE:
        return bitpack.unpack(words, bits, columns)
    # 32 codes take as many words as a code has bits.
    blocks = -(-columns // 32)
    padded = F.pad(words, (0, blocks * bits - words.shape[1])).view(len(words), blocks, bits)
    codes = torch.empty(len(words), blocks, 32, dtype=torch.uint8)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        low = padded[:, :, word] >> shift
        if (inside := 32 - shift) < bits:
            # Shifting an int32 right copies its sign into the high bits.
            low = (low & ((1 << inside) - 1)) | (padded[:, :, word + 1] << inside)
        codes[:, :, i] = low & ((1 << bits) - 1)
    return codes.flatten(1)[:, :columns]


def pack_stream(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """The inverse of `unpack_stream`: int32 [R, words_of(columns, bits)] of codes, uint8 [R, columns]."""
    columns = codes.shape[1]
    if bits in _WHOLE:
        return bitpack.pack(codes, bits)
    padded = F.pad(codes, (0, -columns % 32)).view(len(codes), -1, 32).to(torch.int64)
    words = torch.zeros(*padded.shape[:2], bits + 1, dtype=torch.int64)
    for i in range(32):
        word, shift = divmod(i * bits, 32)
        words[:, :, word] |= padded[:, :, i] << shift
        words[:, :, word + 1] |= padded[:, :, i] >> (32 - shift)
    # The conversion keeps the low 32 bits. Nothing is left for the last word.
    return words[:, :, :bits].to(torch.int32).flatten(1)[:, : words_of(columns, bits)].contiguous()


def unpack_fields(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack words (int32) that hold `32 // bits` codes each to codes (uint8 [R, columns])."""
    shifts = torch.arange(32 // bits) * bits
    found = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return found.flatten(1)[:, :columns].to(torch.uint8)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Split bytes (uint8 [R, B]) into codes (uint8 [R, 2 B]), the low half of each first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)
