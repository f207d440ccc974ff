"""Kernel that repacks stored codes to the fragment layout; every byte is written once."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _part(
    rows, block, in_run, inside, FULL, REST,
    BITS: tl.constexpr, BEFORE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Load bits of stored codes from one of the parts in which a code is stored: int32 [C, 256], at bit 0.

    Codes of BITS bits are stored in blocks of 32 columns, each code in parts of 8, 4, 2 and 1 bits. For 6
    bits, a block has the lowest 4 bits of its 32 codes, and then the other 2 bits of its 32 codes.

        rows             [1, 256]: pointers to the first byte of stored rows
        block            [C, 1]: indices of blocks in a row
        in_run           [256]: index 0 to 31 of a code in its block
        inside           [C, 256]: False where nothing is loaded and the result is 0
        FULL, REST       number of blocks with 32 codes in a row, and number of codes in the block after them
        BEFORE, WIDTH    number of bits of a code in earlier parts, and in this part
        FIRST, MASK      lowest bit that is taken of this part, and a mask of the bits taken, at bit 0
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

        stored     N rows of K codes of BITS bits, STRIDE bytes each
        repacked   int16 [row tiles of 16 rows, SPANS, REGISTERS, 256]
        first      row tile of `repacked` that is the first one written
        reserved   uint8 [2**bits], not 0 for codes that are NaN; read only if CHECK
        found      int32 [1]: if CHECK, it becomes 1 if a code is NaN
        C          spans per program

    A span is 16 * FRAGMENTS columns, whose codes are stored in the same REGISTERS registers. A program has 16
    rows. Grid: (N / 16, SPANS / C).

    FIELDS has eight numbers for each bit field of a code, which say where it goes and where it is stored:

        fragment, register, lowest bit in the halfword, lowest bit in the code, mask at bit 0;
        of the stored part: bits of a code in earlier parts, bits of a code in it, lowest bit taken

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
