"""Pack codes into a dense stream of bits, the layout of compressed-tensors from 0.18 on and of vLLM.

Code i of a row is bits `b*i` to `b*i + b - 1`, counted from the lowest bit of the first int32 word. So codes
of 3, 5, 6 and 7 bits may straddle two words:

    b = 3    word 0   bits 0..2 code 0, 3..5 code 1, ..., 30..31 the low two bits of code 10
             word 1   bit  0    the high bit of code 10, 1..3 code 11, ...

32 codes take b words, as in `bitpack`. A GPU repacks words of `bitpack` directly, and words of a stream
through codes of a byte.
"""

import math
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.packing import bitpack


def straddles(bits: int) -> bool:
    """Return True if some codes straddle two words; otherwise the words equal those of `bitpack`."""
    return 32 % bits != 0


def words_per_row(columns: int, bits: int) -> int:
    """Return the number of int32 words for a row of `columns` codes of `bits` bits."""
    return -(-columns * bits // 32)


def codes_per_cut(bits: int) -> int:
    """Return the smallest number of columns at whose multiples a row can be cut between words."""
    return 32 // math.gcd(32, bits)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (uint8 [..., K], each below `2**bits`) into words (int32 [..., words_per_row(K, bits)])."""
    if not straddles(bits):
        return bitpack.pack(codes, bits)
    bitpack.check_codes(codes, 2**bits, f"a code of {bits} bits")
    columns = codes.shape[-1]
    x = F.pad(codes, (0, -columns % 32)).contiguous().view(torch.int64)
    for fold in _FOLDS:
        low = _mask(bits, fold)
        x = (x & (low << 8 * fold)).bitwise_right_shift_(fold * (8 - bits)).bitwise_or_(x & low)
    stored = x[..., None].view(torch.uint8)[..., :bits].flatten(-2).view(torch.int32)
    return stored[..., : words_per_row(columns, bits)].contiguous()


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack `words` (int32 [..., words_per_row(columns, bits)]) to codes (uint8 [..., columns])."""
    if not straddles(bits):
        return bitpack.unpack(words, bits, columns)
    expected = words_per_row(columns, bits)
    bitpack.check_words(words, expected, f"{columns} codes of {bits} bits")
    padded = F.pad(words, (0, -expected % bits)).contiguous().view(torch.uint8)
    eights = padded.view(*words.shape[:-1], padded.shape[-1] // bits, bits)
    x = F.pad(eights, (0, 8 - bits)).view(torch.int64).squeeze(-1)
    for fold in reversed(_FOLDS):
        low = _mask(bits, fold)
        x = (x & (low << bits * fold)).bitwise_left_shift_(fold * (8 - bits)).bitwise_or_(x & low)
    return x.view(torch.uint8)[..., :columns]


# Eight codes are an int64, code i in byte i. Folds bring them together, to as many bytes as a code has bits,
# and back apart. The lowest four of a width of 3:
#
#   00000ddd 00000ccc 00000bbb 00000aaa
#   00000000 00dddccc 00000000 00bbbaaa   fold by 8 - 3
#   00000000 00000000 0000dddc ccbbbaaa   fold by 2 * (8 - 3)
_FOLDS = (1, 2, 4)


@lru_cache(maxsize=32)
def _mask(bits: int, codes: int) -> int:
    """Return a mask of the low `codes * bits` bits of every second run of `codes` bytes."""
    return sum(((1 << codes * bits) - 1) << at for at in range(0, 64, 16 * codes))
