"""Attention of one new token: keys and values go from memory to registers once for all heads that share them.

A program has some of the keys of one key head, and the query heads that attend to it. What programs of one
head found is put together in the order of the keys, so that results do not change from run to run
(flash decoding, arXiv 2311.01282).
"""

import triton
import triton.language as tl

from quantkit.kernels.fused.ahead import bring, lines


@triton.jit
def attend(
    q, k, v, mask, sums, stats, LENGTH, HEADS, CHUNK,
    q_b, q_h, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_l,
    SCALE: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, MASK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`q` [B, HEADS * GROUP, D], `k` [B, HEADS, LENGTH, D], `v` [.., V] to the sums of chunks of keys.

    `sums` is float32 [B * HEADS, chunks, GROUP, V] and `stats` [B * HEADS, chunks, 2, GROUP]: the largest
    score and the sum of the weights relative to it. `mask` is [B, LENGTH]: MASK "bool" is whether a key is
    seen, "float" what is added to its score, "" for none.
    """
    head = tl.program_id(0)
    b, h = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    chunk = tl.program_id(1)
    g, d, e = tl.arange(0, G), tl.arange(0, DP), tl.arange(0, VP)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        if STAGES == 1:
            # There is no pipeline that loads the first keys ahead.
            first = tl.minimum(chunk * CHUNK + tl.arange(0, BN), LENGTH - 1).to(tl.int64)[:, None]
            bring(k + first * k_l + tl.minimum(lines(k, DP), D - 1)[None, :])
            bring(v + first * v_l + tl.minimum(lines(v, VP), V - 1)[None, :])
        tl.extra.cuda.gdc_wait()
    rows = h * GROUP + g
    inside = (g < GROUP)[:, None]
    query = tl.load(q + b * q_b + rows[:, None] * q_h + d[None, :], mask=inside & (d < D)[None, :], other=0.0)
    largest = tl.full((G,), -float("inf"), tl.float32)
    total = tl.zeros((G,), tl.float32)
    acc = tl.zeros((G, VP), tl.float32)
    last = tl.minimum(chunk * CHUNK + CHUNK, LENGTH)
    for start in tl.range(chunk * CHUNK, last, BN, num_stages=STAGES):
        at = (start + tl.arange(0, BN)).to(tl.int64)
        seen = at < LENGTH
        added = tl.zeros((BN,), tl.float32)
        if MASK == "bool":
            seen = seen & (tl.load(mask + b * m_b + at * m_l, mask=seen, other=0) != 0)
        elif MASK == "float":
            added = tl.load(mask + b * m_b + at * m_l, mask=seen, other=-float("inf")).to(tl.float32)
            seen = added > -float("inf")
        # What is not filled yet, or out of the window, is not read. Without a branch around them, loads of
        # the next keys are in flight meanwhile.
        keys = tl.load(
            k + at[:, None] * k_l + d[None, :],
            mask=seen[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        values = tl.load(
            v + at[:, None] * v_l + e[None, :],
            mask=seen[:, None] & (e < V)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * SCALE + added[None, :]
        scores = tl.where(seen[None, :], scores, -float("inf"))
        top = tl.maximum(largest, tl.max(scores, 1))
        # Where no key was seen yet, there is nothing to be relative to.
        base = tl.where(top > -float("inf"), top, 0.0)
        weights = tl.exp(scores - base[:, None])
        before = tl.exp(largest - base)
        total = total * before + tl.sum(weights, 1)
        acc = acc * before[:, None]
        acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
        largest = top
    part = (head * tl.num_programs(1) + chunk).to(tl.int64)
    tl.store(sums + (part * GROUP + g[:, None]) * V + e[None, :], acc, mask=inside & (e < V)[None, :])
    tl.store(stats + part * 2 * GROUP + g, largest, mask=g < GROUP)
    tl.store(stats + (part * 2 + 1) * GROUP + g, total, mask=g < GROUP)


@triton.jit
def gather(
    sums, stats, out, CHUNKS, GROUP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`out` [B * HEADS, GROUP, V] from what `attend` wrote; a head that sees no key has zeros."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Its programs would take room from those of `attend`.
        tl.extra.cuda.gdc_launch_dependents()
    head, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk, e = tl.arange(0, S), tl.arange(0, VP)
    part = head * CHUNKS + chunk
    largest = tl.load(stats + part * 2 * GROUP + g, mask=chunk < CHUNKS, other=-float("inf"))
    total = tl.load(stats + (part * 2 + 1) * GROUP + g, mask=chunk < CHUNKS, other=0.0)
    acc = tl.load(
        sums + (part[:, None] * GROUP + g) * V + e[None, :],
        mask=(chunk < CHUNKS)[:, None] & (e < V)[None, :], other=0.0,
    )  # fmt: skip
    top = tl.max(largest, 0)
    scale = tl.where(largest > -float("inf"), tl.exp(largest - top), 0.0)
    # A score that is no number is smaller than none, and makes the output none.
    scale = tl.where(largest == largest, scale, largest)
    y = tl.sum(acc * scale[:, None], 0) / tl.maximum(tl.sum(total * scale, 0), 1e-38)
    tl.store(out + (head * GROUP + g) * V + e, y.to(out.dtype.element_ty), mask=e < V)
