"""MoE permute: sort tokens by expert, and sum the outputs of the experts of a token.

A routed token is a token paired with one of its experts. Routed token p is token p // TOP_K with expert p %
TOP_K among the token's TOP_K. An expert block is up to ROWS routed tokens of one expert, adjacent in `order`.
A program of the grouped GEMM multiplies one block, and gathers its rows of x by `order`: no kernel moves x.

    order         [P]     int32   indices of routed tokens, sorted by expert; those without an expert last
    expert_blocks [P, 3]  int32   (expert, first index in `order`, number of routed tokens)

There are always P blocks, so the host need not know how many are used. Unused blocks have 0 routed tokens.
"""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["P"])
def sort_few_tokens(
    index, order, expert_blocks, P, EXPERTS: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sort P routed tokens (token-expert pairs) by expert, by comparing each with all others.

        index         [P]             expert of each routed token, 0 to EXPERTS - 1; others are no expert
        order         [P] int32       (output) indices of routed tokens, sorted by expert; no expert last
        expert_blocks [P, 3] int32    (output) (expert, first index in `order`, count) of each block of up to
                                      ROWS of one expert; count 0 for unused blocks
        PADDED                        P rounded up to a power of two
        PDL                           True if launched with programmatic dependent launch

    Grid: (1,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    routed = tl.arange(0, PADDED)
    write_sorted(_chosen(index, routed, P, EXPERTS), routed, routed < P, order, expert_blocks, EXPERTS, ROWS)


@triton.jit
def write_sorted(expert, routed, valid, order, expert_blocks, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Sort routed tokens (token-expert pairs) by expert; write `order` and `expert_blocks`.

    routed          [P] indices of routed tokens; they ascend where valid
    expert          [P] int32, expert of each routed token; EXPERTS for none
    valid           [P] False for padding
    order           (output) [P] int32: indices of routed tokens, sorted by expert
    expert_blocks   (output) [P, 3] int32: (expert, first index in `order`, count) of blocks of up to ROWS
                    routed tokens of one expert; count 0 for unused blocks
    """
    expert = tl.where(valid, expert, EXPERTS + 1)
    # Sums over the other routed tokens go along axis 0, which lies within a thread.
    earlier = routed[:, None] < routed[None, :]
    same = expert[:, None] == expert[None, :]
    place = tl.sum(((expert[:, None] < expert[None, :]) | (same & earlier)).to(tl.int32), axis=0)
    rank = tl.sum((same & earlier).to(tl.int32), axis=0)
    its = tl.sum(same.to(tl.int32), axis=0)
    tl.store(order + place, routed, mask=valid)
    begins = (rank % ROWS == 0) & (expert < EXPERTS)
    # A routed token that begins no block gets a place after all others.
    begun = tl.where(begins, place, expert.shape[0])
    number = tl.sum((begun[:, None] < place[None, :]).to(tl.int32), axis=0)
    to = expert_blocks + number * 3
    tl.store(to, expert, mask=begins)
    tl.store(to + 1, place, mask=begins)
    tl.store(to + 2, tl.minimum(its - rank, ROWS), mask=begins)
    rest = valid & (routed >= tl.sum(begins.to(tl.int32)))
    to = expert_blocks + routed * 3
    tl.store(to, EXPERTS, mask=rest)
    tl.store(to + 1, 0, mask=rest)
    tl.store(to + 2, 0, mask=rest)


@triton.jit(do_not_specialize=["P"])
def count_tokens(
    index, counts, P, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr, PART: tl.constexpr, PDL: tl.constexpr
):
    """Count the tokens of each expert in each piece of PART routed tokens: write `counts` [pieces, BUCKETS].

        index      [P]: expert of each routed token (token-expert pair); outside 0 to EXPERTS - 1 no expert
        counts     int32 [pieces, BUCKETS] (output): column e is expert e, column EXPERTS is no expert
        BUCKETS    EXPERTS + 1 rounded up to a power of two
        PDL        True if launched with programmatic dependent launch: waits for the kernel before it

    Grid: (pieces,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    routed = tl.program_id(0) * PART + tl.arange(0, PART)
    found = tl.histogram(_chosen(index, routed, P, EXPERTS), BUCKETS, mask=routed < P)
    tl.store(counts + tl.program_id(0).to(tl.int64) * BUCKETS + tl.arange(0, BUCKETS), found)


@triton.jit(do_not_specialize=["P", "PARTS"])
def sort_tokens_by_expert(
    index, order, expert_blocks, P, counts, PARTS, EXPERTS: tl.constexpr, BUCKETS: tl.constexpr,
    PART: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Sort P routed tokens (token-expert pairs) by expert: write `order` and `expert_blocks`.

        index         [P]             expert of each routed token, 0 to EXPERTS - 1; others are no expert
        counts        [PARTS, BUCKETS] int32, routed tokens of each expert in each of PARTS pieces, from
                                      `count_tokens`. None: each program counts all P; then P <= PART.
        order         [P] int32       (output) indices of routed tokens, sorted by expert; no expert last
        expert_blocks [P, 3] int32    (output) (expert, first index in `order`, count) of each block of up to
                                      ROWS of one expert; count 0 for unused blocks
        BUCKETS                       EXPERTS + 1 rounded up to a power of two
        PART                          routed tokens that a program reads at a time
        PDL                           True if launched with programmatic dependent launch

    Program e < EXPERTS places the tokens of expert e. Program EXPERTS places the routed tokens without an
    expert and marks unused blocks. Grid: (EXPERTS + 1,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    own_expert = tl.program_id(0)
    bucket = tl.arange(0, BUCKETS)
    routed = tl.arange(0, PART)
    chosen = _chosen(index, routed, P, EXPERTS)
    if counts is None:
        total = tl.histogram(chosen, BUCKETS, mask=routed < P)
    else:
        total = tl.zeros((BUCKETS,), tl.int32)
        for first in tl.range(0, PARTS, 8):
            part = first + tl.arange(0, 8)[:, None]
            found = tl.load(counts + part * BUCKETS + bucket[None, :], mask=part < PARTS, other=0)
            total += tl.sum(found, axis=0)
    needed = tl.where(bucket < EXPERTS, (total + (ROWS - 1)) // ROWS, 0)
    start = tl.sum(tl.where(bucket < own_expert, total, 0))
    number = tl.sum(tl.where(bucket < own_expert, needed, 0))
    its = tl.sum(tl.where(bucket == own_expert, total, 0))
    place = start
    for first in tl.range(0, P, PART):
        is_its = ((chosen == own_expert) & (first + routed < P)).to(tl.int32)
        # The next load is in flight while places are counted.
        chosen = _chosen(index, first + PART + routed, P, EXPERTS)
        tl.store(order + place + tl.cumsum(is_its) - 1, first + routed, mask=is_its != 0)
        place += tl.sum(is_its)
    # The blocks of this expert; the last program has all that are left.
    is_last = own_expert == EXPERTS
    end = tl.where(is_last, P, number + (its + (ROWS - 1)) // ROWS)
    for first in tl.range(number, end, PART):
        at = first + routed
        within = (at - number) * ROWS
        to = expert_blocks + at.to(tl.int64) * 3
        tl.store(to, tl.zeros_like(at) + own_expert, mask=at < end)
        tl.store(to + 1, start + within, mask=at < end)
        tl.store(to + 2, tl.where(is_last, 0, tl.minimum(its - within, ROWS)), mask=at < end)


@triton.jit
def _chosen(index, routed, P, EXPERTS: tl.constexpr):
    """Load the experts of routed tokens `routed` [...] from `index` [P]: int32 [...]; EXPERTS for no expert.

    A routed token is a token paired with one of its experts. `routed` are their indices; those from P on are
    padding and get EXPERTS too.
    """
    expert = tl.load(index + routed, mask=routed < P, other=-1)
    return tl.where((expert < 0) | (expert >= EXPERTS), EXPERTS, expert).to(tl.int32)


@triton.jit
def combine_experts(
    y, index, weights, out, N, bias, EXPERTS: tl.constexpr, TOP_K: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Sum the outputs of each token's experts: `out` [T, N] = sum over k of weights[t, k] y[t * TOP_K + k].

        y          [T * TOP_K, N]
        index      [T, TOP_K]: expert of each row of y; outside 0 to EXPERTS - 1 the row adds nothing
        weights    [T, TOP_K]
        bias       [EXPERTS, N] or None: the row of its expert is first added to each row of y
        PDL        True if launched with programmatic dependent launch: waits for the kernel before it

    Sums are float32, in the order of top-k. A program has BLOCK columns. Grid: (T, N / BLOCK).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    first = tl.program_id(0).to(tl.int64) * TOP_K
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for slot in tl.static_range(TOP_K):
        expert = tl.load(index + first + slot)
        is_one = (expert >= 0) & (expert < EXPERTS)
        weight = tl.load(weights + first + slot, mask=is_one, other=0.0).to(tl.float32)
        value = tl.load(y + (first + slot) * N + column, mask=(column < N) & is_one, other=0.0)
        value = value.to(tl.float32)
        if bias is not None:
            of_expert = bias + expert.to(tl.int64) * N + column
            value += tl.load(of_expert, mask=(column < N) & is_one, other=0.0).to(tl.float32)
        total += weight * value
    tl.store(
        out + tl.program_id(0).to(tl.int64) * N + column, total.to(out.dtype.element_ty), mask=column < N
    )
