"""The layout builder: codes of rows into the order of fragments, every byte read and written once."""

import triton
import triton.language as tl


@triton.jit
def order_codes(
    codes, words, first, N, K, SPANS,
    TILES: tl.constexpr, PLANES: tl.constexpr, FIELDS: tl.constexpr, HALVES: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """`codes` uint8 [N, K] are the rows from 16 * `first` on, `words` int16 those of the whole weight.

    A program has 16 rows and C spans. `FIELDS` holds plane, register, position in its lane, first bit in the
    code, and mask. Sizes are no constants: one kernel serves all weights of a format.
    """
    SPAN: tl.constexpr = 16 * PLANES
    lane = tl.arange(0, 256)
    # r, t, e1, row // 8, e0, from the highest bits of a lane's number on.
    row = tl.program_id(0) * 16 + lane // 2 % 2 * 8 + lane // 32
    t = lane // 8 % 4
    of_four = lane // 4 % 2 * 2 + lane % 2
    span = tl.program_id(1) * C + tl.arange(0, C)
    inside = (row < N)[None, :]
    at = words + ((first + tl.program_id(0)).to(tl.int64) * SPANS + span[:, None]) * (TILES * 256) + lane
    for register in tl.static_range(TILES):
        word = tl.zeros((C, 256), tl.int32)
        for f in tl.static_range(len(FIELDS) // 5):
            if FIELDS[5 * f + 1] == register:
                in_run = FIELDS[5 * f] % 2 * (16 if HALVES else 4) + t * (4 if HALVES else 8) + of_four
                column = span[:, None] * SPAN + FIELDS[5 * f] // 2 * 32 + in_run
                code = tl.load(codes + row * K + column, mask=inside & (column < K), other=0).to(tl.int32)
                word |= ((code >> FIELDS[5 * f + 3]) & FIELDS[5 * f + 4]) << FIELDS[5 * f + 2]
        tl.store(at + register * 256, word.to(tl.int16), mask=(span < SPANS)[:, None])
