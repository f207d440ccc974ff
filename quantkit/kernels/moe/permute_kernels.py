"""Pairs of a token and an expert that it chose, in the order of the experts, and their outputs added up.

Pair p is slot p % SLOTS of token p // SLOTS. A segment is up to ROWS pairs of one expert that follow each
other in the order: (expert, its first pair, how many), which is what a program multiplies. Nothing here waits
for the host: there is room for as many segments as pairs, and those that there are not have no pairs.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def order_few_pairs(
    index, order, segments, P, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """What `order_pairs` writes, by one program that compares each of up to PADDED pairs with all others."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.arange(0, PADDED)
    write_order(_chosen(index, pair, P, EXPERTS), pair, pair < P, order, segments, EXPERTS, ROWS)


@triton.jit
def write_order(expert, pair, there, order, segments, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Write the order and the segments of pairs with these numbers, which rise where they are `there`.

    `expert` is EXPERTS for pairs that have none.
    """
    expert = tl.where(there, expert, EXPERTS + 1)
    # Sums over others, down the columns, are those of a lane: a lane has few pairs of its own.
    earlier = pair[:, None] < pair[None, :]
    same = expert[:, None] == expert[None, :]
    place = tl.sum(((expert[:, None] < expert[None, :]) | (same & earlier)).to(tl.int32), axis=0)
    rank = tl.sum((same & earlier).to(tl.int32), axis=0)
    its = tl.sum(same.to(tl.int32), axis=0)
    tl.store(order + place, pair, mask=there)
    begins = (rank % ROWS == 0) & (expert < EXPERTS)
    # Of a pair that begins no segment, a place that is after all others.
    begun = tl.where(begins, place, expert.shape[0])
    number = tl.sum((begun[:, None] < place[None, :]).to(tl.int32), axis=0)
    to = segments + number * 3
    tl.store(to, expert, mask=begins)
    tl.store(to + 1, place, mask=begins)
    tl.store(to + 2, tl.minimum(its - rank, ROWS), mask=begins)
    rest = there & (pair >= tl.sum(begins.to(tl.int32)))
    to = segments + pair * 3
    tl.store(to, EXPERTS, mask=rest)
    tl.store(to + 1, 0, mask=rest)
    tl.store(to + 2, 0, mask=rest)


@triton.jit(do_not_specialize=["P"])
def count_pairs(
    index, counts, P, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr
):
    """`counts` int32 [chunks, BUCKETS]: pairs of each expert in each CHUNK of `index` [P]; the next are those
    of no expert.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    found = tl.histogram(_chosen(index, pair, P, EXPERTS), BUCKETS, mask=pair < P)
    tl.store(counts + tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS), found)


@triton.jit(do_not_specialize=["P", "CHUNKS"])
def order_pairs(
    index, order, segments, P, counts, CHUNKS, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr,
    CHUNK: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`order` int32 [P], those without an expert last, and `segments` int32 [P, 3]: a program per expert.

    `counts` [CHUNKS, BUCKETS] are those of `count_pairs`, or None where all pairs are one CHUNK. The program
    after the experts' has the pairs without an expert, and the segments that there are not.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mine = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    pair = tl.arange(0, CHUNK)
    chosen = _chosen(index, pair, P, EXPERTS)
    if counts is None:
        total = tl.histogram(chosen, BUCKETS, mask=pair < P)
    else:
        total = tl.zeros((BUCKETS,), tl.int32)
        for first in tl.range(0, CHUNKS, 8):
            chunk = first + tl.arange(0, 8)[:, None]
            found = tl.load(counts + chunk * BUCKETS + bucket[None, :], mask=chunk < CHUNKS, other=0)
            total += tl.sum(found, axis=0)
    needed = tl.where(bucket < EXPERTS, (total + (ROWS - 1)) // ROWS, 0)
    start = tl.sum(tl.where(bucket < mine, total, 0))
    number = tl.sum(tl.where(bucket < mine, needed, 0))
    its = tl.sum(tl.where(bucket == mine, total, 0))
    place = start
    for first in tl.range(0, P, CHUNK):
        is_its = ((chosen == mine) & (first + pair < P)).to(tl.int32)
        # What comes next is on its way while places are counted.
        chosen = _chosen(index, first + CHUNK + pair, P, EXPERTS)
        tl.store(order + place + tl.cumsum(is_its) - 1, first + pair, mask=is_its != 0)
        place += tl.sum(is_its)
    # Its segments; of the last program all that are left.
    is_last = mine == EXPERTS
    end = tl.where(is_last, P, number + (its + (ROWS - 1)) // ROWS)
    for first in tl.range(number, end, CHUNK):
        at = first + pair
        within = (at - number) * ROWS
        to = segments + at.to(tl.int64) * 3
        tl.store(to, tl.zeros_like(at) + mine, mask=at < end)
        tl.store(to + 1, start + within, mask=at < end)
        tl.store(to + 2, tl.where(is_last, 0, tl.minimum(its - within, ROWS)), mask=at < end)


@triton.jit
def _chosen(index, pair, P, EXPERTS: tl.constexpr):
    """The experts of pairs; EXPERTS for any index that is none's."""
    expert = tl.load(index + pair, mask=pair < P, other=-1)
    return tl.where((expert < 0) | (expert >= EXPERTS), EXPERTS, expert).to(tl.int32)


@triton.jit
def weigh_pairs(
    y, index, weights, out, N, EXPERTS: tl.constexpr, SLOTS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N]: the rows of y [T * SLOTS, N] times their weights, added up in the order of the slots."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * SLOTS
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(SLOTS):
        expert = tl.load(index + first + slot)
        is_one = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights + first + slot, mask=is_one, other=0.0).to(tl.float32)
        value = tl.load(y + (first + slot) * N + column, mask=(column < N) & is_one, other=0.0)
        total += weight * value.to(tl.float32)
    tl.store(
        out + tl.program_id(0).to(tl.int64) * N + column, total.to(out.dtype.element_ty), mask=column < N
    )
