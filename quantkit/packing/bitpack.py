"""Pack codes into int32 words, the storage layout of `docs/format.md`.

A row of K codes is cut into blocks of 32. A block of b-bit codes takes exactly b words, for b from 1 to 8.
For that, b is split into parts of 8, 4, 2 or 1 bits, each packed densely:

    bits   parts       words of one block of 32 codes
     4     4           [4444]
     6     4 + 2       [4444][22]        low 4 bits of the 32 codes, then their high 2 bits
     7     4 + 2 + 1   [4444][22][1]

Inside a part of p bits, code i of the block sits at bit `p*i % 32` of word `p*i // 32` (little-endian). No
code straddles two words, no bit is wasted, and a slice of K at a multiple of 32 is a slice of the words. The
last block of a row stores only the words it needs of each part: `ceil(r*p/32)` for r remaining codes. For 1,
2, 4 and 8 bits the bytes equal those of compressed-tensors' `pack-quantized`.
"""

import sys
from functools import lru_cache

import torch
import torch.nn.functional as F

from quantkit.errors import FormatError

BLOCK = 32

if sys.byteorder != "little":
    raise FormatError(
        f"this machine is {sys.byteorder}-endian; packed words are little-endian and quantkit "
        "reads them through memory views. Use a little-endian machine."
    )


def part_widths(bits: int) -> tuple[int, ...]:
    """Return the widths in bits of the parts of a code, lowest bits first: 6 -> (4, 2)."""
    if not 1 <= bits <= 8:
        raise FormatError(f"codes have 1 to 8 bits, got {bits}.")
    return tuple(p for p in (8, 4, 2, 1) if bits & p)


@lru_cache(maxsize=256)
def _word_columns(columns: int, bits: int) -> tuple[int, ...]:
    """Return the indices of the stored words in a row padded to whole blocks, in order."""
    full, rest = divmod(columns, BLOCK)
    kept = list(range(full * bits))
    start = full * bits
    for p in part_widths(bits):
        kept.extend(range(start, start + -(-rest * p // BLOCK)))
        start += p
    return tuple(kept)


def words_per_row(columns: int, bits: int) -> int:
    """Return the number of int32 words for a row of `columns` codes of `bits` bits."""
    full, rest = divmod(columns, BLOCK)
    return full * bits + sum(-(-rest * p // BLOCK) for p in part_widths(bits))


def codes_per_cut(bits: int) -> int:
    """Return the smallest number of columns at whose multiples a row can be cut between words.

    Codes of one part can be cut between any two words, codes of several parts only between blocks.
    """
    return BLOCK // bits if len(part_widths(bits)) == 1 else BLOCK


def check_codes(codes: torch.Tensor, limit: int, what: str) -> None:
    """Raise `FormatError` unless `codes` [...] are uint8 below `limit`: others would change neighbours."""
    if codes.dtype != torch.uint8:
        raise FormatError(f"codes are torch.uint8, got {codes.dtype}.")
    if codes.numel() and (largest := int(codes.max())) >= limit:
        raise FormatError(f"{what} is below {limit}, got {largest}.")


def check_words(words: torch.Tensor, expected: int, codes: str) -> None:
    """Raise `FormatError` unless rows of `words` [..., W] are `expected` int32, as `codes` take."""
    if words.dtype != torch.int32 or words.shape[-1] != expected:
        raise FormatError(
            f"{codes} take {expected} int32 words a row; got {words.shape[-1]} of {words.dtype}."
        )


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack codes (uint8 [..., K], each below `2**bits`) into words (int32 [..., words_per_row(K, bits)])."""
    widths = part_widths(bits)
    check_codes(codes, 2**bits, f"a code of {bits} bits")
    columns = codes.shape[-1]
    lead = codes.shape[:-1]
    blocks = -(-columns // BLOCK)
    padded = F.pad(codes, (0, -columns % BLOCK))
    packed = []
    shift = 0
    for p in widths:
        part = (padded >> shift) & ((1 << p) - 1) if p != bits else padded
        packed.append(_pack_part(_flat(part), p).view(*lead, blocks, p))
        shift += p
    words = torch.cat(packed, dim=-1) if len(packed) > 1 else packed[0]
    words = words.reshape(*lead, blocks * bits)
    if columns % BLOCK == 0:
        return words
    return words[..., list(_word_columns(columns, bits))].contiguous()


def unpack(words: torch.Tensor, bits: int, columns: int) -> torch.Tensor:
    """Unpack `words` (int32 [..., words_per_row(columns, bits)]) to codes (uint8 [..., columns]).

    The result is read-only: 8-bit codes share the memory of `words`.
    """
    expected = words_per_row(columns, bits)
    check_words(words, expected, f"{columns} codes of {bits} bits")
    lead = words.shape[:-1]
    blocks = -(-columns // BLOCK)
    if columns % BLOCK:
        padded = words.new_zeros(*lead, blocks * bits)
        padded[..., list(_word_columns(columns, bits))] = words
        words = padded
    words = words.reshape(*lead, blocks, bits)
    codes: torch.Tensor | None = None
    shift = 0
    for p in part_widths(bits):
        part = _unpack_part(_flat(words[..., shift : shift + p]), p).view(*lead, blocks * BLOCK)
        codes = part if codes is None else codes | (part << shift)
        shift += p
    assert codes is not None
    return codes[..., :columns]


def take(words: torch.Tensor, bits: int, count: int, ids: torch.Tensor) -> torch.Tensor:
    """Return codes `ids` (int64 [n]) of each column of `words`, uint8 [n, G].

    Each column of `words` (int32 [words_per_row(count), G]) holds `count` codes, packed as `pack` packs a
    row.
    """
    inside = ids % BLOCK
    at = ids // BLOCK * bits
    # The last block has fewer words of each part.
    size = (count - ids // BLOCK * BLOCK).clamp(max=BLOCK)
    codes: torch.Tensor | None = None
    shift = 0
    for p in part_widths(bits):
        word = words.index_select(0, at + p * inside // 32)
        part = (word >> (p * inside % 32)[:, None]) & ((1 << p) - 1)
        codes = part << shift if codes is None else codes | (part << shift)
        at = at + (size * p + BLOCK - 1) // BLOCK
        shift += p
    assert codes is not None
    return codes.to(torch.uint8)


# The codes of a byte are one integer of as many bytes, code i in byte i. Folds bring them together, and back
# apart:
#
#   000000dd 000000cc 000000bb 000000aa   p = 2
#   00000000 0000ddcc 00000000 0000bbaa   fold by 8 - p
#   00000000 00000000 00000000 ddccbbaa   fold by 2 * (8 - p)
_FOLDS = {1: (1, 2, 4), 2: (1, 2), 4: (1,)}
_WIDE = {1: torch.int64, 2: torch.int32, 4: torch.int16}


@lru_cache(maxsize=32)
def _mask(p: int, codes: int) -> int:
    """Return a mask of the low `codes * p` bits in every `codes` bytes of an integer of type `_WIDE[p]`."""
    return sum(((1 << codes * p) - 1) << at for at in range(0, 64 // p, 8 * codes))


def _pack_part(codes: torch.Tensor, p: int) -> torch.Tensor:
    """Pack codes, uint8 [n], of `p` bits densely to int32 [n*p/32]; n is a multiple of 32."""
    if p == 8:
        return codes.view(torch.int32)
    x = codes.view(_WIDE[p])
    for fold in _FOLDS[p]:
        x = (x >> (fold * (8 - p))).bitwise_or_(x).bitwise_and_(_mask(p, 2 * fold))
    return x.to(torch.uint8).view(torch.int32)


def _unpack_part(words: torch.Tensor, p: int) -> torch.Tensor:
    """Unpack words, int32 [n], to their codes of `p` bits, uint8 [n*32/p]."""
    if p == 8:
        return words.view(torch.uint8)
    x = words.view(torch.uint8).to(_WIDE[p])
    for fold in reversed(_FOLDS[p]):
        x = (x << (fold * (8 - p))).bitwise_or_(x).bitwise_and_(_mask(p, fold))
    return x.view(torch.uint8)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor` [...] as [n] of stride 1, so that it can be viewed with another element size.

    `flatten` alone keeps a stride of 3 on a single element and calls it contiguous.
    """
    flat = tensor.flatten()
    return flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
