"""Unpack codes from words that hold a whole number of codes each."""

import torch


def unpack_fields(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack words (int32) that hold `32 // bits` codes each to codes (uint8 [R, columns])."""
    shifts = torch.arange(32 // bits) * bits
    found = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return found.flatten(1)[:, :columns].to(torch.uint8)


def nibbles(data: torch.Tensor) -> torch.Tensor:
    """Split bytes (uint8 [R, B]) into codes (uint8 [R, 2 B]), the low half of each first."""
    return torch.stack((data & 15, data >> 4), -1).flatten(1)
