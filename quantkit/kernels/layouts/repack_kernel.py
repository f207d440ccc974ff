"""Kernel that repacks stored codes to the fragment layout; every byte is written once."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def _part(
    rows, block, in_run, inside, FULL, REST,
    BITS: tl.constexpr, BEFORE: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """Load bits of codes `in_run` [256] of `block` [C, 1] from one part of the stored codes: int32 [C, 256].

    Blocks are 32 columns of the rows at `rows` [1, 256]. Codes of BITS bits are stored in parts of WIDTH bits
    each; BEFORE are the bits of a code in earlier parts. FIRST is the first bit taken, MASK keeps the wanted
    ones. Block `FULL`, the last one, has `REST` codes. `inside` [C, 256] masks the load.
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
    stored, words, reserved, found, first, N, K, STRIDE, SPANS,
    BITS: tl.constexpr, TILES: tl.constexpr, PLANES: tl.constexpr, FIELDS: tl.constexpr,
    CHECK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write `words` int16 [N / 16, SPANS, TILES, 256] from `stored` uint8 [N, STRIDE].

    Writes row tiles from `first` on. `stored` has rows of K codes of `BITS` bits. Grid: (N / 16, SPANS / C);
    a program has 16 rows and C spans.

    `FIELDS` has eight numbers per field: plane, register, position in the 16-bit lane, first bit of the code,
    mask; then, of the stored part with the field, bits before the part, its width, and first bit in it. With
    `CHECK`, `found` int32 [1] becomes 1 if `reserved` uint8 [2**bits] of a code is not 0. Sizes are no
    constexprs: one compiled kernel serves all weights of a format.
    """
    lane = tl.arange(0, 256)
    # Bits of `lane`, highest first: r (3), t (2), e1, row // 8, e0.
    row = tl.program_id(0) * 16 + lane // 2 % 2 * 8 + lane // 32
    of_product = lane // 4 % 2 * 8 + lane // 8 % 4 * 2 + lane % 2
    span = (tl.program_id(1) * C + tl.arange(0, C))[:, None]
    rows = stored + (row.to(tl.int64) * STRIDE)[None, :]
    at = words + ((first + tl.program_id(0)).to(tl.int64) * SPANS + span) * (TILES * 256) + lane[None, :]
    FIELD_COUNT: tl.constexpr = len(FIELDS) // 8
    for register in tl.static_range(TILES):
        word = tl.zeros((C, 256), tl.int32)
        for f in tl.static_range(FIELD_COUNT):
            if FIELDS[8 * f + 1] == register:
                in_run = FIELDS[8 * f] % 2 * 16 + of_product
                block = span * (PLANES // 2) + FIELDS[8 * f] // 2
                inside = (row < N)[None, :] & (block * 32 + in_run[None, :] < K)
                bits = _part(
                    rows, block, in_run, inside, K // 32, K % 32,
                    BITS, FIELDS[8 * f + 5], FIELDS[8 * f + 6], FIELDS[8 * f + 7], FIELDS[8 * f + 4],
                )  # fmt: skip
                word |= bits << FIELDS[8 * f + 2]
        tl.store(at + register * 256, word.to(tl.int16), mask=span < SPANS)
    if CHECK:
        for plane in tl.static_range(PLANES):
            in_run = plane % 2 * 16 + of_product
            block = span * (PLANES // 2) + plane // 2
            inside = (row < N)[None, :] & (block * 32 + in_run[None, :] < K)
            code = tl.zeros((C, 256), tl.int32)
            for f in tl.static_range(FIELD_COUNT):
                if FIELDS[8 * f] == plane:
                    bits = _part(
                        rows, block, in_run, inside, K // 32, K % 32,
                        BITS, FIELDS[8 * f + 5], FIELDS[8 * f + 6], FIELDS[8 * f + 7], FIELDS[8 * f + 4],
                    )  # fmt: skip
                    code |= bits << FIELDS[8 * f + 3]
            bad = inside & (tl.load(reserved + code) != 0)
            tl.store(found + tl.zeros((C, 256), tl.int32), 1, mask=bad)
