"""Pack codes as digits of a byte, for formats whose number of values is no power of two.

2-bit codes waste a quarter of their range on three values. As digits to base 3, five codes fit a byte,
because 3**5 = 243:

    byte = c0 + 3*c1 + 9*c2 + 27*c3 + 81*c4            c0 the code of the lowest column

Bytes are in the order of columns, four to a little-endian int32 word. So a row of K ternary codes takes
`ceil(K/20)` words: 1.6 bits a code. Digits beyond the last column are zero. Bytes that are no sum of digits,
here 243 to 255, are invalid: each of their digits reads as the base, a code without a value.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.errors import FormatError
from quantkit.packing.bitpack import check_codes, check_words

WORD_BYTES = 4


@lru_cache(maxsize=256)
def digits_per_byte(base: int) -> int:
    """Return the number of codes below `base` that a byte holds: 5 for 3, 3 for 5 and 6, 2 for 7 to 16."""
    if not 2 <= base <= 256:
        raise FormatError(f"the digits of a byte are to base 2 to 256, got {base}.")
    digits = 1
    while base ** (digits + 1) <= 256:
        digits += 1
    return digits


def words_per_row(columns: int, base: int) -> int:
    """Return the number of int32 words for a row of `columns` codes below `base`."""
    return -(-columns // (WORD_BYTES * digits_per_byte(base)))


def pack(codes: torch.Tensor, base: int) -> torch.Tensor:
    """Pack codes (uint8 [..., K], each below `base`) into words (int32 [..., words_per_row(K, base)])."""
    check_codes(codes, base, f"a digit to base {base}")
    digits, words = digits_per_byte(base), words_per_row(codes.shape[-1], base)
    padded = F.pad(codes, (0, words * WORD_BYTES * digits - codes.shape[-1]))
    places = padded.view(*codes.shape[:-1], words * WORD_BYTES, digits)
    packed = places[..., digits - 1].clone(memory_format=torch.contiguous_format)
    for digit in range(digits - 2, -1, -1):
        packed.mul_(base).add_(places[..., digit])
    return packed.view(torch.int32)


def unpack(words: torch.Tensor, base: int, columns: int) -> torch.Tensor:
    """Unpack `words` (int32 [..., words_per_row(columns, base)]) to codes (uint8 [..., columns])."""
    expected = words_per_row(columns, base)
    check_words(words, expected, f"{columns} codes to base {base}")
    packed = words.contiguous().view(torch.uint8)
    digits = digits_per_byte(base)
    # One gather looks up all codes of a byte; dividing would take one pass per code.
    codes = _digits(base, words.device).index_select(0, packed.flatten().int())
    return codes.view(*packed.shape[:-1], packed.shape[-1] * digits)[..., :columns]


@lru_cache(maxsize=64)
def _digits(base: int, device: torch.device) -> torch.Tensor:
    """Return the codes in each byte, uint8 [256, digits]."""
    return torch.tensor([_digits_of(byte, base) for byte in range(256)], dtype=torch.uint8, device=device)


def _digits_of(byte: int, base: int) -> list[int]:
    digits = digits_per_byte(base)
    if byte >= base**digits:
        return [base] * digits
    return [byte // base**place % base for place in range(digits)]
