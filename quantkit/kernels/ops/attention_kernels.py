"""Attention of one new token: keys and values go from memory to registers once for the heads of a program.

A program has some of the keys of one key head, and up to 16 of the query heads that attend to it. Each of
its W warps takes KEYS keys at a time and shares nothing with the others: what it found, a piece, is put
together with the other pieces in the end, in their order, so that results do not change from run to run
(flash decoding, arXiv 2311.01282). All keys of a head may be in one program, which then does that itself.

What a lane loads, 16 bytes at a time, are fragments of the tensor cores' operands: sums may take features,
and outputs have them, in any order. Lane 4 m + t of a warp has these of every run of 32 features of a key,
and of every 64 of a value:

    key 8 i + m, features 32 r + 8 t ..+8           value 8 i + 2 t + c, features 64 s + 8 m ..+8

and scores and sums of head m, or heads 2 t and 2 t + 1.
"""

import triton
import triton.language as tl

from quantkit.kernels.gluon.prefetch import bring, lines
from quantkit.kernels.ops.glue_kernels import normed

#: exp2 is the exponential that GPUs have.
LOG2E = tl.constexpr(1.4426950408889634)
#: The lowest float32.
LOWEST = tl.constexpr(-3.4028234663852886e38)
#: Lanes of a warp wait for each other: loads before it are not put off until after what follows.
_TOGETHER = tl.constexpr("bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;")
#: Keeps the addresses of what lanes load from being laid out otherwise.
_AS_IT_IS = tl.constexpr("mov.b32 $0, $1;")


@triton.jit
def attend(
    q, k, v, mask, sums, stats, out, new_k, new_v, cos, sin, held, q_weight, k_weight, LENGTH, HEADS,
    q_b, q_h, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_l, new_k_b, new_k_h, new_v_b, new_v_h, c_b,
    SCALE: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    MASK: tl.constexpr, ONCE: tl.constexpr, NEW: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr,
    OFFSET: tl.constexpr, SETTLED: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`q` [B, HEADS * GROUP, D], `k` [B, HEADS, LENGTH, D], `v` [.., V] to what warps found of their keys.

    `sums` is float32 [B * HEADS, pieces, GROUP, V] and `stats` [B * HEADS, pieces, 2, GROUP]: the largest
    score in powers of two and the sum of the weights relative to it. `mask` is [B, LENGTH]: MASK "bool" is
    whether a key is seen, "float" what is added to its score, "" for none. If the program is all of its head,
    WHOLE, it puts the pieces together in `out` [B, HEADS * GROUP, V].

    With NEW, queries and the key `new_k` [B, HEADS, D] are rotated by `cos`, `sin` [B or 1, D] first, and
    that key and `new_v` [B, HEADS, V] are written after the `held` ones, by the programs that attend to it.
    If there is no room for them queries become no numbers. With EPS, what is rotated are norms of heads, with
    weights [D], as `rms_norm` has them. SETTLED says that no kernel that may still run
    writes `k`, `v`, `mask` or `held`, and ONCE that each program attends to all of its keys at a time.

    Programs are key heads, by parts of their keys, by blocks of G query heads, 8 or 16.
    """
    # The tensor cores have 16.
    ROWS: tl.constexpr = 16
    STEP: tl.constexpr = W * KEYS
    head, chunk, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * m_b
    q += b * q_b + (h * GROUP + block * G) * q_h
    first, stride = chunk * STEP, tl.num_programs(1) * STEP
    if PDL and not (ONCE and SETTLED):
        ahead = tl.minimum(first + tl.arange(0, STEP), LENGTH - 1).to(tl.int64)[:, None]
        bring(k + ahead * k_l + tl.minimum(lines(k, DP), D - 1)[None, :])
        bring(v + ahead * v_l + tl.minimum(lines(v, VP), V - 1)[None, :])
    if PDL and not SETTLED:
        tl.extra.cuda.gdc_wait()
    # What is seen is known a step before, so that no load waits for it.
    seen_k = tl.full((4, 8, W, KEYS // 8, 1), False, tl.int1)
    seen_v = tl.full((4, 8, W, KEYS // 4, 1), False, tl.int1)
    added = tl.full((W, G, KEYS), 0.0, tl.float32)
    if first < LENGTH:
        # Always: what comes out of a branch does not make Triton lay operands out for masks of 8 bits.
        seen_k, seen_v, added = _seen(mask, first, LENGTH, m_l, W, KEYS, G, MASK, PTX)
    place = tl.minimum(tl.load(held), LENGTH) if NEW else LENGTH
    if ONCE:
        values = _load_columns(v, v_l, first, seen_v, W, KEYS, V, VP)
        keys = _load_rows(k, k_l, first, KEYS, seen_k, W, KEYS, D, DP)
    every = tl.full((4, 8, W, 1, 1), True, tl.int1)
    key_factors = ()
    if EPS is not None:
        # No kernel that runs beside this one writes weights.
        factor = _load_rows(q_weight, 0, 0, 0, every, W, 8, D, DP)
        other_factor = _load_rows(q_weight, 0, 0, 0, every, W, 8, D, DP, OTHER=True)
        key_factors = _load_key(k_weight, D, DP)
    if PDL and SETTLED:
        # All that is loaded from here on is of the token.
        tl.extra.cuda.gdc_wait()
    if PDL:
        # Not earlier: what starts from then on knows that all kernels before this one have ended.
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, G // 8)[:, None] * 8
    inside = tl.broadcast_to((block * G + g < GROUP)[None], (4, 8, W, G // 8, 1))
    query = _load_rows(q, q_h, 0, 0, inside, W, G, D, DP)
    if NEW:
        cos += b * c_b
        sin += b * c_b
        other = _load_rows(q, q_h, 0, 0, inside, W, G, D, DP, OTHER=True)
        by_cos = _repeated(_load_rows(cos, 0, 0, 0, every, W, 8, D, DP), G // 8)
        by_sin = _repeated(_load_rows(sin, 0, 0, 0, every, W, 8, D, DP), G // 8)
        if (place < LENGTH) & (place // STEP % tl.num_programs(1) == chunk):
            _write(
                k + place * k_l, v + place * v_l, new_k + b * new_k_b + h * new_k_h,
                new_v + b * new_v_b + h * new_v_h, cos, sin, key_factors, D, DP, V, VP, EPS, ROUND, OFFSET,
            )  # fmt: skip
            # Whoever reads them is of this program.
            tl.debug_barrier()
            if ONCE:
                row, column = _numbers(first, W, KEYS)
                values = _load_columns(v, v_l, first, seen_v & (column == place), W, KEYS, V, VP, values)
                keys = _load_rows(k, k_l, first, KEYS, seen_k & (row == place), W, KEYS, D, DP, keys)
        if EPS is not None:
            root = _roots(query, D, DP, EPS)
            query = _normed(query, root, factor, G, ROUND, OFFSET)
            other = _normed(other, root, other_factor, G, ROUND, OFFSET)
        query = _rotated(query, other, by_cos, by_sin, _features(G, DP) < D // 2)
        query = tl.where(place < LENGTH, query, float("nan"))
    # Of eight heads there are twice as many rows as are looked at.
    query = tl.permute(_as_rows(_repeated(query, ROWS // G), W, ROWS, DP), (0, 2, 1))
    largest = tl.full((W, G), -float("inf"), tl.float32)
    total = tl.zeros((W, G), tl.float32)
    acc = tl.zeros((W, VP, G), tl.float32)
    if ONCE:
        largest, total, acc = _add(
            query, keys, values, added, largest, total, acc, SCALE, W, KEYS, G, DP, VP
        )  # fmt: skip
    else:
        for start in tl.range(first, LENGTH, stride, num_stages=1):
            values = _load_columns(v, v_l, start, seen_v, W, KEYS, V, VP)
            if EARLY:
                # Else they would be asked for when scores are there.
                tl.inline_asm_elementwise(_TOGETHER, "=r,r", [start], tl.int32, False, 1)
            keys = _load_rows(k, k_l, start, KEYS, seen_k, W, KEYS, D, DP)
            seen_k, seen_v, added_next = _seen(
                mask, start + stride, LENGTH, m_l, W, KEYS, G, MASK, PTX
            )  # fmt: skip
            largest, total, acc = _add(
                query, keys, values, added, largest, total, acc, SCALE, W, KEYS, G, DP, VP
            )  # fmt: skip
            added = added_next
    piece = (head * tl.num_programs(1) + chunk).to(tl.int64) * W
    _store(sums, stats, piece, block, acc, largest, total, W, G, GROUP, V, VP)
    if WHOLE:
        tl.debug_barrier()
        _finish(sums, stats, out, head.to(tl.int64), block, W, G, GROUP, V, VP)


@triton.jit
def _add(
    query, keys, values, added, largest, total, acc, SCALE: tl.constexpr, W: tl.constexpr,
    KEYS: tl.constexpr, G: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """The largest scores, sums of weights and weighted values with KEYS more keys for each warp."""
    ROWS: tl.constexpr = query.shape[1]
    keys, values = _as_rows(keys, W, KEYS, DP), _as_columns(values, W, KEYS, VP)
    scores = tl.dot(query, keys, input_precision="ieee") * (SCALE * LOG2E)
    if G < ROWS:
        scores = tl.permute(tl.reshape(scores, (W, 2, G, KEYS)), (0, 2, 3, 1))
        scores, _ = tl.split(scores)
    scores += added
    top = tl.maximum(largest, tl.max(scores, 2))
    # Where no key was seen yet, there is nothing to be relative to.
    base = tl.where(top > -float("inf"), top, 0.0)
    weights = tl.exp2(scores - base[:, :, None])
    before = tl.exp2(largest - base)
    total = total * before + tl.sum(weights, 2)
    acc = acc * before[:, None, :]
    weights = tl.permute(weights.to(values.dtype), (0, 2, 1))
    return top, total, tl.dot(values, weights, acc, input_precision="ieee")


@triton.jit
def gather(
    sums, stats, out, PIECES, GROUP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """`out` [B * HEADS, GROUP, V] from what `attend` wrote; a head that sees no key has zeros."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        # Its programs would take room from those of `attend`.
        tl.extra.cuda.gdc_launch_dependents()
    head, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    piece, e = tl.arange(0, S), tl.arange(0, VP)
    part = head * PIECES + piece
    largest = tl.load(stats + part * 2 * GROUP + g, mask=piece < PIECES, other=-float("inf"))
    total = tl.load(stats + (part * 2 + 1) * GROUP + g, mask=piece < PIECES, other=0.0)
    acc = tl.load(
        sums + (part[:, None] * GROUP + g) * V + e[None, :],
        mask=(piece < PIECES)[:, None] & (e < V)[None, :], other=0.0,
    )  # fmt: skip
    scale = _relative(largest, tl.max(largest, 0))
    y = _divided(tl.sum(acc * scale[:, None], 0), tl.sum(total * scale, 0))
    tl.store(out + (head * GROUP + g) * V + e, y.to(out.dtype.element_ty), mask=e < V)


@triton.jit
def _finish(
    sums, stats, out, head, block, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """As `gather`, the pieces that the warps of this program wrote, one after the other for all outputs.

    Lanes that had them in a sum of their own would need several times as many instructions, which run once.
    """
    # Heads that there are, and not all that a product has.
    HEADS: tl.constexpr = G if GROUP > G else GROUP
    HP: tl.constexpr = triton.next_power_of_2(HEADS)
    o = tl.arange(0, HP * VP)
    g, e = block * G + o // VP, o % VP
    there = (o // VP < HEADS) & (g < GROUP) & (e < V)
    top = tl.full((HP * VP,), -float("inf"), tl.float32)
    total = tl.zeros((HP * VP,), tl.float32)
    acc = tl.zeros((HP * VP,), tl.float32)
    for w in tl.static_range(W):
        piece = head * W + w
        largest = tl.load(stats + piece * 2 * GROUP + g, mask=there, other=-float("inf"))
        found = tl.load(stats + (piece * 2 + 1) * GROUP + g, mask=there, other=0.0)
        value = tl.load(sums + (piece * GROUP + g) * V + e, mask=there, other=0.0)
        new = tl.maximum(top, largest)
        before, scale = _relative(top, new), _relative(largest, new)
        total = total * before + found * scale
        acc = acc * before + value * scale
        top = new
    y = _divided(acc, total)
    tl.store(out + (head * GROUP + g) * V + e, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def _relative(largest, top):
    """What sums relative to `largest` are multiplied with to be relative to `top`."""
    return tl.where(largest > -float("inf"), tl.exp2(largest - top), 0.0)


@triton.jit
def _divided(acc, total):
    """Weighted values by the sum of the weights; 0 where there are none."""
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _store(
    sums, stats, piece, block, acc, largest, total, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """`acc` [W, VP, G] and `largest` and `total` [W, G] as lanes have them."""
    S: tl.constexpr = VP // 64
    t = tl.arange(0, 4)[:, None, None, None]
    m = tl.arange(0, 8)[:, None, None]
    w = tl.arange(0, W)[:, None]
    g = block * G + tl.arange(0, G // 8) * 8 + m
    there = (t == 0) & (g < GROUP)
    at = stats + (piece + w) * (2 * GROUP) + g + t * 0
    largest = tl.permute(tl.reshape(largest, (W, G // 8, 8)), (2, 0, 1))
    total = tl.permute(tl.reshape(total, (W, G // 8, 8)), (2, 0, 1))
    tl.store(at, tl.broadcast_to(largest[None], (4, 8, W, G // 8)), mask=there)
    tl.store(at + GROUP, tl.broadcast_to(total[None], (4, 8, W, G // 8)), mask=there)
    # s, 8 features, m, 8 heads, t, c
    acc = tl.reshape(acc, (W, S, 8, 8, G // 8, 4, 2))
    acc = tl.reshape(tl.permute(acc, (5, 3, 0, 4, 6, 1, 2)), (4, 8, W, G // 4 * S, 8))
    i = tl.arange(0, G // 4 * S)[:, None]
    g = block * G + i // (2 * S) * 8 + t[:, :, :, :, None] * 2 + i // S % 2
    e = (i % S * 8 + m[:, :, :, None]) * 8 + tl.arange(0, 8)
    at = sums + ((piece + w[:, :, None]) * GROUP + g) * V + e
    tl.store(at, acc, mask=(g < GROUP) & (e < V))


@triton.jit
def _write(
    k, v, new_k, new_v, cos, sin, factors, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """A new key, rotated, and value to where the cache has them."""
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    key, other = _load_key(new_k, D, DP)
    if EPS is not None:
        wide = key.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
        key = normed(wide, root, factors[0], key.dtype, ROUND, OFFSET)
        other = normed(other.to(tl.float32), root, factors[1], key.dtype, ROUND, OFFSET)
    by_cos, by_sin = tl.load(cos + d, mask=d < D, other=0.0), tl.load(sin + d, mask=d < D, other=0.0)
    value = tl.load(new_v + e, mask=e < V, other=0.0)
    tl.store(k + d, _rotated(key, other, by_cos, by_sin, d < D // 2), mask=d < D)
    tl.store(v + e, value, mask=e < V)


@triton.jit
def _load_key(at, D: tl.constexpr, DP: tl.constexpr):
    """Features of a key, and `_other_half` of them."""
    d = tl.arange(0, DP)
    return tl.load(at + d, mask=d < D, other=0.0), _other_half(at, d, d < D, D)


@triton.jit
def _other_half(at, d, there, D: tl.constexpr):
    """What features `d` of a head that is rotated have in the other half of it."""
    return tl.load(at + tl.where(d < D // 2, d + D // 2, d - D // 2), mask=there, other=0.0)


@triton.jit
def _roots(x, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """1 / sqrt(mean(x^2) + EPS) of rows that `_load_rows` loaded: [1, 8, W, rows * runs, 1], once per run."""
    W: tl.constexpr = x.shape[2]
    RUNS: tl.constexpr = DP // 32
    ROWS: tl.constexpr = x.shape[3] // RUNS
    wide = tl.reshape(x.to(tl.float32), (4, 8, W, ROWS, RUNS, 8))
    squares = tl.sum(tl.sum(tl.sum(wide * wide, 5), 4), 0)
    root = tl.broadcast_to(tl.rsqrt(squares / D + EPS)[:, :, :, None], (8, W, ROWS, RUNS))
    return tl.reshape(root, (1, 8, W, ROWS * RUNS, 1))


@triton.jit
def _normed(x, root, weight, G: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr):
    """The norms of G rows, of their `_roots` and eight rows of weights."""
    return normed(x.to(tl.float32), root, _repeated(weight, G // 8), x.dtype, ROUND, OFFSET)


@triton.jit
def _rotated(x, other, cos, sin, is_low):
    """Features of heads and of `_other_half` by their angles, rounded where torch does; `is_low` in the first
    half, where what is of the other one is taken away.
    """
    one = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    two = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype).to(tl.float32)
    return tl.where(is_low, one - two, one + two).to(x.dtype)


@triton.jit
def _load_rows(
    at, stride, first, WARP: tl.constexpr, there, W: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, others=0.0, OTHER: tl.constexpr = False,
):  # fmt: skip
    """Rows of D features from `at` on, R for each warp, WARP further on: [4, 8, W, rows * runs, 8].

    That is t, m, warp, each eighth row by runs of 32 features, and 8 of these. Rows that are not `there`,
    [4, 8, W, rows, 1], are `others`. With OTHER it is `_other_half` of them.
    """
    RUNS: tl.constexpr = DP // 32
    m = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, R // 8 * RUNS)[:, None]
    row = first + w * WARP + i // RUNS * 8 + m
    d = _features(R, DP)
    there = tl.reshape(tl.broadcast_to(there, (4, 8, W, R // 8, RUNS)), (4, 8, W, R // 8 * RUNS, 1))
    at += row.to(tl.int64) * stride
    if OTHER:
        return _other_half(at, d, there & (d < D), D)
    return tl.load(at + d, mask=there & (d < D), other=others)


@triton.jit
def _features(R: tl.constexpr, DP: tl.constexpr):
    """Which features of R rows lanes have: [4, 1, 1, rows * runs, 8] of `_load_rows`."""
    run = tl.arange(0, R // 8 * (DP // 32))[:, None] % (DP // 32)
    return run * 32 + tl.arange(0, 4)[:, None, None, None, None] * 8 + tl.arange(0, 8)


@triton.jit
def _repeated(x, TIMES: tl.constexpr):
    """Rows that `_load_rows` loaded so many times, one after the other."""
    W: tl.constexpr = x.shape[2]
    RUNS: tl.constexpr = x.shape[3]
    x = tl.broadcast_to(tl.reshape(x, (4, 8, W, 1, RUNS, 8)), (4, 8, W, TIMES, RUNS, 8))
    return tl.reshape(x, (4, 8, W, TIMES * RUNS, 8))


@triton.jit
def _as_rows(x, W: tl.constexpr, R: tl.constexpr, DP: tl.constexpr):
    """What `_load_rows` loaded as [W, DP, R]."""
    # t, m, warp, 8 rows, 32 features, and 8 that two products have two and two of.
    x = tl.reshape(x, (4, 8, W, R // 8, DP // 32, 2, 2, 2))
    return tl.reshape(tl.permute(x, (2, 4, 5, 6, 0, 7, 3, 1)), (W, DP, R))


@triton.jit
def _load_columns(
    at, stride, first, there, W: tl.constexpr, R: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, others=0.0
):
    """As `_load_rows`, for sums over rows: a lane has R // 4 of them, and runs of 64 features."""
    S: tl.constexpr = VP // 64
    t = tl.arange(0, 4)[:, None, None, None, None]
    m = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, R // 4 * S)[:, None]
    row = first + w * R + i // (2 * S) * 8 + t * 2 + i // S % 2
    e = (i % S * 8 + m) * 8 + tl.arange(0, 8)
    there = tl.reshape(tl.broadcast_to(there, (4, 8, W, R // 4, S)), (4, 8, W, R // 4 * S, 1))
    return tl.load(at + row.to(tl.int64) * stride + e, mask=there & (e < V), other=others)


@triton.jit
def _as_columns(x, W: tl.constexpr, R: tl.constexpr, VP: tl.constexpr):
    """What `_load_columns` loaded as [W, VP, R]: feature 64 s + 8 m + j is 64 s + 8 j + m."""
    x = tl.reshape(x, (4, 8, W, R // 8, 2, VP // 64, 8))
    return tl.reshape(tl.permute(x, (2, 5, 6, 1, 3, 0, 4)), (W, VP, R))


@triton.jit
def _numbers(first, W: tl.constexpr, KEYS: tl.constexpr):
    """Which keys lanes have from `first` on: [4, 8, W, rows, 1] of `_load_rows`, and of `_load_columns`."""
    t = tl.arange(0, 4)[:, None, None, None, None]
    m = tl.arange(0, 8)[:, None, None, None]
    w = tl.arange(0, W)[:, None, None]
    i = tl.arange(0, KEYS // 8)[:, None]
    j = tl.arange(0, KEYS // 4)[:, None]
    return first + w * KEYS + i * 8 + m + t * 0, first + w * KEYS + j // 2 * 8 + t * 2 + j % 2 + m * 0


@triton.jit
def _seen(
    mask, first, LENGTH, m_l, W: tl.constexpr, KEYS: tl.constexpr, G: tl.constexpr, MASK: tl.constexpr,
    PTX: tl.constexpr,
):  # fmt: skip
    """Which keys are seen, as `_numbers` has them, and what is added to scores [W, G, KEYS]."""
    row, column = _numbers(first, W, KEYS)
    row, column = _added(mask, row, LENGTH, m_l, MASK, PTX), _added(mask, column, LENGTH, m_l, MASK, PTX)
    # t, m, warp, 8 keys, c
    added = tl.permute(tl.reshape(column, (4, 8, W, KEYS // 8, 2)), (2, 1, 3, 0, 4))
    added = tl.broadcast_to(tl.reshape(added, (W, 1, 8, KEYS)), (W, G // 8, 8, KEYS))
    return row > -float("inf"), column > -float("inf"), tl.reshape(added, (W, G, KEYS))


@triton.jit
def _added(mask, at, LENGTH, m_l, MASK: tl.constexpr, PTX: tl.constexpr):
    """What is added to scores of the keys `at`: -inf for those that are not seen."""
    if PTX:
        at = tl.inline_asm_elementwise(_AS_IT_IS, "=r,r", [at], tl.int32, True, 1)
    there = at < LENGTH
    if MASK == "":
        return tl.where(there, 0.0, -float("inf"))
    at = mask + at.to(tl.int64) * m_l
    if MASK == "bool":
        return tl.where(tl.load(at, mask=there, other=0) != 0, 0.0, -float("inf"))
    added = tl.load(at, mask=there, other=-float("inf")).to(tl.float32)
    # Masks have the lowest number for keys that are not to be seen, if there are others.
    return tl.where(added > -float("inf"), tl.maximum(added * LOG2E, LOWEST), added)
