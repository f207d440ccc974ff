"""Pairs of a token and an expert that it chose, in the order of the experts, and their outputs added up.

Pair p is slot p % SLOTS of token p // SLOTS. A segment is up to ROWS pairs of one expert that follow each
other in the order: (expert, its first pair, how many), which is what a program multiplies. Nothing here waits
for the host: there is room for as many segments as pairs, and those that there are not have no pairs.
"""

import triton
import triton.language as tl


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
    chosen = _chosen(index, pair, P, EXPERTS, BUCKETS)
    bucket = tl.arange(0, BUCKETS)
    tl.store(counts + tl.program_id(0).to(tl.int64) * BUCKETS + bucket, tl.sum(chosen, axis=0))


@triton.jit(do_not_specialize=["P"])
def order_pairs(
    index, order, segments, P, counts, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr, CHUNK: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`order` int32 [P], those without an expert last, and `segments` int32 [P, 3].

    `counts` [chunks, BUCKETS] are those of `count_pairs` added up from chunk to chunk, None for one chunk.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    bucket = tl.arange(0, BUCKETS)
    chosen = _chosen(index, at, P, EXPERTS, BUCKETS)
    here = tl.sum(chosen, axis=0)
    if counts is None:
        total = here
        before = here * 0
    else:
        total = tl.load(counts + (tl.num_programs(0) - 1).to(tl.int64) * BUCKETS + bucket)
        before = tl.load(counts + tl.program_id(0).to(tl.int64) * BUCKETS + bucket) - here
    start = tl.cumsum(total, axis=0) - total
    place = tl.cumsum(chosen, axis=0) - 1 + (start + before)[None, :]
    tl.store(order + tl.sum(chosen * place, axis=1), at, mask=at < P)
    # Segments: as many numbers as pairs.
    needed = tl.where(bucket < EXPERTS, (total + ROWS - 1) // ROWS, 0)
    last = tl.cumsum(needed, axis=0)
    expert = tl.sum((last[None, :] <= at[:, None]).to(tl.int32), axis=1)
    its = (expert[:, None] == bucket[None, :]).to(tl.int32)
    within = (at - tl.sum(its * (last - needed)[None, :], axis=1)) * ROWS
    pairs = tl.minimum(tl.sum(its * total[None, :], axis=1) - within, ROWS)
    to = segments + at.to(tl.int64) * 3
    tl.store(to, expert, mask=at < P)
    tl.store(to + 1, tl.sum(its * start[None, :], axis=1) + within, mask=at < P)
    tl.store(to + 2, tl.where(expert < EXPERTS, pairs, 0), mask=at < P)


@triton.jit
def _chosen(index, pair, P, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr):
    """1 where a pair has an expert, [pairs, BUCKETS]; any index that is none's is that of bucket EXPERTS."""
    expert = tl.load(index + pair, mask=pair < P, other=-1)
    expert = tl.where((expert < 0) | (expert >= EXPERTS), EXPERTS, expert).to(tl.int32)
    return ((expert[:, None] == tl.arange(0, BUCKETS)[None, :]) & (pair < P)[:, None]).to(tl.int32)


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
