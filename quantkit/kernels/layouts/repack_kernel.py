"""Kernel that repacks stored codes to the fragment layout; every byte is written once."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _part(
    rows, block, in_run, inside, FULL, REST,
    BITS: tl.constexpr, BEFORE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Load bits of stored codes from one of the parts in which a code is stored: int32 [C, 256].

    Codes of BITS bits are stored in blocks of 32 columns, each code in parts of 8, 4, 2 and 1 bits. A code of
    6 bits is stored as its lowest 4 bits, and its other 2 after the lowest bits of the whole block.

        rows [1, 256]     pointers to rows of stored bytes
        block [C, 1]      indices of blocks; block FULL, the last one of a row, has only REST codes
        in_run [256]      which of the 32 codes of a block
        inside [C, 256]   where to load; elsewhere 0
        BEFORE, WIDTH     bits of a code in earlier parts, and in this part
        FIRST, MASK       first bit taken of this part, and a mask of the bits taken
    """
    in_last = 0
    for other in tl.static_range(3):
        # Words of each part of 8, 4 and 2 bits in the last block.
        if BEFORE & (8 >> other):
            in_last += (REST * (8 >> other) + 31) // 32
    words = block * BITS + tl.where(block == FULL, in_last, BEFORE)
    byte = tl.load(rows + 4 * words + (in_run * WIDTH // 8)[None, :], mask=inside, other=0).to(tl.int32)
    return (byte >> (in_run * WIDTH % 8 + FIRST)[None, :]) & MASK


@triton.jit(do_not_specialize=["first", "N", "K", "STRIDE", "SPANS"])
def repack_codes(
    stored, repacked, reserved, found, first, N, K, STRIDE, SPANS,
    BITS: tl.constexpr, REGISTERS: tl.constexpr, FRAGMENTS: tl.constexpr, FIELDS: tl.constexpr,
    CHECK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Repack stored codes into fragment order: `stored` uint8 [N, STRIDE] to `repacked` int16.

        repacked   [row tiles, SPANS, REGISTERS, 256]   a row tile: 16 rows; written from row tile `first` on
        stored     rows of K codes of BITS bits, STRIDE bytes each
        reserved   uint8 [2**bits], not 0 for codes that stand for no number; read with CHECK
        found      int32 [1], becomes 1 if a reserved code occurs; written with CHECK

    A span is 16 * FRAGMENTS columns, whose codes are stored in the same REGISTERS registers. A program has 16
    rows and C spans. Grid: (N / 16, SPANS / C).

    FIELDS has eight numbers for each bit field of a code, which say where it goes and where it is stored:

        fragment, register, position in the halfword, first bit of the code, mask;
        of the stored part: bits of a code in earlier parts, width, first bit taken

    Sizes are no constexprs: one compiled kernel serves all weights of a format.
    """
    place = tl.arange(0, 256)
    # Bits of `place`, highest first: r (3), t (2), e1, row // 8, e0.
    row = tl.program_id(0) * 16 + place // 2 % 2 * 8 + place // 32
    of_product = place // 4 % 2 * 8 + place // 8 % 4 * 2 + place % 2
    span = (tl.program_id(1) * C + tl.arange(0, C))[:, None]
    rows = stored + (row.to(tl.int64) * STRIDE)[None, :]
    at = (
        repacked
        + ((first + tl.program_id(0)).to(tl.int64) * SPANS + span) * (REGISTERS * 256)
        + place[None, :]
    )
    FIELD_COUNT: tl.constexpr = len(FIELDS) // 8
    for register in tl.static_range(REGISTERS):
        word = tl.zeros((C, 256), tl.int32)
        for f in tl.static_range(FIELD_COUNT):
            if FIELDS[8 * f + 1] == register:
                in_run = FIELDS[8 * f] % 2 * 16 + of_product
                block = span * (FRAGMENTS // 2) + FIELDS[8 * f] // 2
                inside = (row < N)[None, :] & (block * 32 + in_run[None, :] < K)
                bits = _part(
                    rows, block, in_run, inside, K // 32, K % 32,
                    BITS, FIELDS[8 * f + 5], FIELDS[8 * f + 6], FIELDS[8 * f + 7], FIELDS[8 * f + 4],
                )  # fmt: skip
                word |= bits << FIELDS[8 * f + 2]
        tl.store(at + register * 256, word.to(tl.int16), mask=span < SPANS)
    if CHECK:
        for fragment in tl.static_range(FRAGMENTS):
            in_run = fragment % 2 * 16 + of_product
            block = span * (FRAGMENTS // 2) + fragment // 2
            inside = (row < N)[None, :] & (block * 32 + in_run[None, :] < K)
            code = tl.zeros((C, 256), tl.int32)
            for f in tl.static_range(FIELD_COUNT):
                if FIELDS[8 * f] == fragment:
                    bits = _part(
                        rows, block, in_run, inside, K // 32, K % 32,
                        BITS, FIELDS[8 * f + 5], FIELDS[8 * f + 6], FIELDS[8 * f + 7], FIELDS[8 * f + 4],
                    )  # fmt: skip
                    code |= bits << FIELDS[8 * f + 3]
            bad = inside & (tl.load(reserved + code) != 0)
            tl.store(found + tl.zeros((C, 256), tl.int32), 1, mask=bad)
