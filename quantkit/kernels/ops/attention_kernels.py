"""Decode attention (flash decoding, arXiv 2311.01282): softmax(q k^T * scaling + mask) v of one new token.

Each key and value is loaded once for up to 16 query heads that share it. The keys of a head are divided among
programs. Each of the W warps of a program takes KEYS keys per step, independently of the other warps. The
partial sums of one warp are a split. Splits are added in a fixed order at the end, so that results are
reproducible.

The order of features in a sum is free, so warp lanes load 16 bytes at a time straight into fragments of
`mma`. A run is 32 features of keys, or 64 features of values. Warp lane 4 r + t loads of run i:

    key 8 j + r, features 32 i + 8 t ..+8           value 8 j + 2 t + c, features 64 i + 8 r ..+8

The lane has the scores and sums of head r, or of heads 2 t and 2 t + 1.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.gluon.prefetch import cache_line_offsets, prefetch_l2
from quantkit.kernels.ops.attention_fragments import (
    LOG2E,
    as_columns,
    as_rows,
    features_of_lanes,
    key_numbers,
    load_columns,
    load_rows,
    other_half,
    repeated,
    visible_keys,
)
from quantkit.kernels.ops.norm_kernel import normed

#: Barrier of the lanes of a warp; the compiler moves no load past it.
_TOGETHER = tl.constexpr("bar.warp.sync 0xffffffff;\nmov.b32 $0, $1;")


@triton.jit
def attend(
    q, k, v, mask, sums, stats, out, new_k, new_v, cos, sin, cache_length, q_weight, k_weight, LENGTH, HEADS,
    q_b, q_h, k_b, k_h, k_l, v_b, v_h, v_l, m_b, m_l, new_k_b, new_k_h, new_v_b, new_v_h, c_b,
    SCALE: tl.constexpr, GROUP: tl.constexpr, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr, W: tl.constexpr, KEYS: tl.constexpr, WHOLE: tl.constexpr,
    MASK: tl.constexpr, SINGLE_STEP: tl.constexpr, NEW: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr,
    OFFSET: tl.constexpr, CACHE_READY: tl.constexpr, PTX: tl.constexpr, EARLY: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute softmax(q k^T * SCALE + mask) v of one token: write partial sums of each warp over its keys.

    Grid: (B * HEADS, programs per head, GROUP / G) for B sequences, HEADS key heads and LENGTH keys.

        q     [B, HEADS * GROUP, D]         sums   [B * HEADS, splits, GROUP, V] float32
        k     [B, HEADS, LENGTH, D]         stats  [B * HEADS, splits, 2, GROUP] float32
        v     [B, HEADS, LENGTH, V]         out    [B, HEADS * GROUP, V]
        mask  [B, LENGTH]

    A split is the keys of one warp. `sums` has the sums of weight * value, where weight = exp2(score -
    largest score). `stats` has the largest score, times log2(e), and the sum of the weights. `q_b` to `c_b`
    are strides of tensors: of sequences (b), heads (h) and tokens (l).

        GROUP          query heads that share a key head
        G              query heads of a program, padded: 8 or 16
        D, DP          features of a key, and D padded to runs of 32
        V, VP          features of a value, and V padded to runs of 64
        W              warps of a program
        KEYS           keys that a warp takes per step
        WHOLE          True if a program has all keys of its head; it then also writes `out`
        SINGLE_STEP    True if each program attends to all its keys in one step
        MASK           "bool" (True: key is visible), "float" (added to scores) or "" for no mask
        CACHE_READY    True if no kernel that may still run writes `k`, `v`, `mask` or `cache_length`
        PTX            True if inline PTX may be used
        EARLY          True if values are loaded before scores are computed, not after
        PDL            True if launched with programmatic dependent launch: waits for the kernel before it

    If NEW, queries and the key `new_k` [B, HEADS, D] are first rotated by `cos` and `sin` [B or 1, D]. That
    key and `new_v` [B, HEADS, V] are written after `cache_length` tokens, by the programs that attend to
    them. If the cache has no room, queries become NaN. If EPS is not None, heads get an RMSNorm before
    rotation, with weights `q_weight` and `k_weight` [D] plus OFFSET. If ROUND, the norm is rounded before it
    is multiplied by the weights.
    """
    # Rows of an `mma`.
    ROWS: tl.constexpr = 16
    STEP: tl.constexpr = W * KEYS
    head, share, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    b, h = (head // HEADS).to(tl.int64), (head % HEADS).to(tl.int64)
    k += b * k_b + h * k_h
    v += b * v_b + h * v_h
    mask += b * m_b
    q += b * q_b + (h * GROUP + block * G) * q_h
    first, stride = share * STEP, tl.num_programs(1) * STEP
    if PDL and not (SINGLE_STEP and CACHE_READY):
        ahead = tl.minimum(first + tl.arange(0, STEP), LENGTH - 1).to(tl.int64)[:, None]
        prefetch_l2(k + ahead * k_l + tl.minimum(cache_line_offsets(k, DP), D - 1)[None, :])
        prefetch_l2(v + ahead * v_l + tl.minimum(cache_line_offsets(v, VP), V - 1)[None, :])
    if PDL and not CACHE_READY:
        tl.extra.cuda.gdc_wait()
    # Load masks one step ahead, so that no load of keys waits for them.
    seen_k = tl.full((4, 8, W, KEYS // 8, 1), False, tl.int1)
    seen_v = tl.full((4, 8, W, KEYS // 4, 1), False, tl.int1)
    added = tl.full((W, G, KEYS), 0.0, tl.float32)
    if first < LENGTH:
        # In a branch, always taken: Triton then does not lay operands out for 8-bit masks.
        seen_k, seen_v, added = visible_keys(mask, first, LENGTH, m_l, W, KEYS, G, MASK, PTX)
    place = tl.minimum(tl.load(cache_length), LENGTH) if NEW else LENGTH
    if SINGLE_STEP:
        values = load_columns(v, v_l, first, seen_v, W, KEYS, V, VP)
        keys = load_rows(k, k_l, first, KEYS, seen_k, W, KEYS, D, DP)
    every = tl.full((4, 8, W, 1, 1), True, tl.int1)
    key_factors = ()
    if EPS is not None:
        # Before PDL's wait: no kernel that may still run writes weights.
        factor = load_rows(q_weight, 0, 0, 0, every, W, 8, D, DP)
        other_factor = load_rows(q_weight, 0, 0, 0, every, W, 8, D, DP, OTHER=True)
        key_factors = _load_key(k_weight, D, DP)
    if PDL and CACHE_READY:
        # From here on only tensors of the new token are loaded.
        tl.extra.cuda.gdc_wait()
    if PDL:
        # Not earlier: kernels that start from then on rely on all kernels before this one having ended.
        tl.extra.cuda.gdc_launch_dependents()
    g = tl.arange(0, 8)[:, None, None, None] + tl.arange(0, G // 8)[:, None] * 8
    inside = tl.broadcast_to((block * G + g < GROUP)[None], (4, 8, W, G // 8, 1))
    query = load_rows(q, q_h, 0, 0, inside, W, G, D, DP)
    if NEW:
        cos += b * c_b
        sin += b * c_b
        other = load_rows(q, q_h, 0, 0, inside, W, G, D, DP, OTHER=True)
        by_cos = repeated(load_rows(cos, 0, 0, 0, every, W, 8, D, DP), G // 8)
        by_sin = repeated(load_rows(sin, 0, 0, 0, every, W, 8, D, DP), G // 8)
        if (place < LENGTH) & (place // STEP % tl.num_programs(1) == share):
            _write(
                k + place * k_l, v + place * v_l, new_k + b * new_k_b + h * new_k_h,
                new_v + b * new_v_b + h * new_v_h, cos, sin, key_factors, D, DP, V, VP, EPS, ROUND, OFFSET,
            )  # fmt: skip
            # Only this program reads them.
            tl.debug_barrier()
            if SINGLE_STEP:
                row, column = key_numbers(first, W, KEYS)
                values = load_columns(v, v_l, first, seen_v & (column == place), W, KEYS, V, VP, values)
                keys = load_rows(k, k_l, first, KEYS, seen_k & (row == place), W, KEYS, D, DP, keys)
        if EPS is not None:
            rstd = _rstd(query, D, DP, EPS)
            query = _normed(query, rstd, factor, G, ROUND, OFFSET)
            other = _normed(other, rstd, other_factor, G, ROUND, OFFSET)
        query = _rotated(query, other, by_cos, by_sin, features_of_lanes(G, DP) < D // 2)
        query = tl.where(place < LENGTH, query, float("nan"))
    # With 8 heads, half of the 16 rows are unused.
    query = tl.permute(as_rows(repeated(query, ROWS // G), W, ROWS, DP), (0, 2, 1))
    largest = tl.full((W, G), -float("inf"), tl.float32)
    total = tl.zeros((W, G), tl.float32)
    acc = tl.zeros((W, VP, G), tl.float32)
    if SINGLE_STEP:
        largest, total, acc = _online_softmax_step(
            query, keys, values, added, largest, total, acc, SCALE, W, KEYS, G, DP, VP
        )  # fmt: skip
    else:
        for start in tl.range(first, LENGTH, stride, num_stages=1):
            values = load_columns(v, v_l, start, seen_v, W, KEYS, V, VP)
            if EARLY:
                # Else these loads would be issued only after the scores.
                tl.inline_asm_elementwise(_TOGETHER, "=r,r", [start], tl.int32, False, 1)
            keys = load_rows(k, k_l, start, KEYS, seen_k, W, KEYS, D, DP)
            seen_k, seen_v, added_next = visible_keys(
                mask, start + stride, LENGTH, m_l, W, KEYS, G, MASK, PTX
            )  # fmt: skip
            largest, total, acc = _online_softmax_step(
                query, keys, values, added, largest, total, acc, SCALE, W, KEYS, G, DP, VP
            )  # fmt: skip
            added = added_next
    split = (head * tl.num_programs(1) + share).to(tl.int64) * W
    _store(sums, stats, split, block, acc, largest, total, W, G, GROUP, V, VP)
    if WHOLE:
        tl.debug_barrier()
        _combine_warps(sums, stats, out, head.to(tl.int64), block, W, G, GROUP, V, VP)


@triton.jit
def _online_softmax_step(
    query, keys, values, added, largest, total, acc, SCALE: tl.constexpr, W: tl.constexpr,
    KEYS: tl.constexpr, G: tl.constexpr, DP: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Add KEYS more keys per warp to a softmax-weighted sum of values; return (largest, total, acc).

    These three are the state of G query heads for each of W warps (online softmax). They are arguments, and
    are returned rescaled to the new largest score:

        largest [W, G]      largest score so far, times log2(e)
        total   [W, G]      sum of the weights exp2(score - largest)
        acc     [W, VP, G]  sum of weight * value

    The other arguments are:

        query          [W, 16, DP]: rows of an `mma`; only the first G of 16 count
        keys           result of `load_rows`
        values         result of `load_columns`
        added          [W, G, KEYS]: addends of scores; -inf hides a key
        SCALE          scores are query key^T * SCALE + added
        DP, VP         padded features of a key, and of a value
    """
    ROWS: tl.constexpr = query.shape[1]
    keys, values = as_rows(keys, W, KEYS, DP), as_columns(values, W, KEYS, VP)
    scores = tl.dot(query, keys, input_precision="ieee") * (SCALE * LOG2E)
    if G < ROWS:
        scores = tl.permute(tl.reshape(scores, (W, 2, G, KEYS)), (0, 2, 3, 1))
        scores, _ = tl.split(scores)
    scores += added
    top = tl.maximum(largest, tl.max(scores, 2))
    # Without a key so far, scores are relative to 0.
    base = tl.where(top > -float("inf"), top, 0.0)
    weights = tl.exp2(scores - base[:, :, None])
    before = tl.exp2(largest - base)
    total = total * before + tl.sum(weights, 2)
    acc = acc * before[:, None, :]
    weights = tl.permute(weights.to(values.dtype), (0, 2, 1))
    return top, total, tl.dot(values, weights, acc, input_precision="ieee")


@triton.jit
def combine_splits(
    sums, stats, out, SPLITS, GROUP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, S: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of all splits of the keys: write `out` [B * HEADS, GROUP, V]; 0 without keys.

    A split is the keys of one warp of `attend`. GROUP query heads share each of the B * HEADS key heads of
    all sequences. A weight is exp2(score - largest score of the split).

        sums    float32 [B * HEADS, SPLITS, GROUP, V]       sums of weight * value
        stats   float32 [B * HEADS, SPLITS, 2, GROUP]       largest score * log2(e); sum of the weights

    VP and S are V (features of a value) and SPLITS, rounded up to powers of two. Grid: (B * HEADS, GROUP). If
    PDL (programmatic dependent launch), the kernel starts while the one before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        # After the wait: programs of the next kernel would take room from `attend`.
        tl.extra.cuda.gdc_launch_dependents()
    head, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    split, e = tl.arange(0, S), tl.arange(0, VP)
    part = head * SPLITS + split
    largest = tl.load(stats + part * 2 * GROUP + g, mask=split < SPLITS, other=-float("inf"))
    total = tl.load(stats + (part * 2 + 1) * GROUP + g, mask=split < SPLITS, other=0.0)
    acc = tl.load(
        sums + (part[:, None] * GROUP + g) * V + e[None, :],
        mask=(split < SPLITS)[:, None] & (e < V)[None, :], other=0.0,
    )  # fmt: skip
    scale = _relative(largest, tl.max(largest, 0))
    y = _divided(tl.sum(acc * scale[:, None], 0), tl.sum(total * scale, 0))
    tl.store(out + (head * GROUP + g) * V + e, y.to(out.dtype.element_ty), mask=e < V)


@triton.jit
def _combine_warps(
    sums, stats, out, head, block, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of W warps: write `out` [B * HEADS, GROUP, V] for one key head.

    GROUP query heads share the key head with index `head`. This program computes G of these, from `block` * G
    on.

        sums    float32 [splits, GROUP, V]       sums of weight * value; V features, VP is V padded
        stats   float32 [splits, 2, GROUP]       largest score; sum of weights exp2(score - largest)
    """

    # Only existing heads, not all rows of an `mma`.
    HEADS: tl.constexpr = G if GROUP > G else GROUP
    HP: tl.constexpr = triton.next_power_of_2(HEADS)
    o = tl.arange(0, HP * VP)
    g, e = block * G + o // VP, o % VP
    valid = (o // VP < HEADS) & (g < GROUP) & (e < V)
    top = tl.full((HP * VP,), -float("inf"), tl.float32)
    total = tl.zeros((HP * VP,), tl.float32)
    acc = tl.zeros((HP * VP,), tl.float32)
    for w in tl.static_range(W):
        split = head * W + w
        largest = tl.load(stats + split * 2 * GROUP + g, mask=valid, other=-float("inf"))
        found = tl.load(stats + (split * 2 + 1) * GROUP + g, mask=valid, other=0.0)
        value = tl.load(sums + (split * GROUP + g) * V + e, mask=valid, other=0.0)
        new = tl.maximum(top, largest)
        before, scale = _relative(top, new), _relative(largest, new)
        total = total * before + found * scale
        acc = acc * before + value * scale
        top = new
    y = _divided(acc, total)
    tl.store(out + (head * GROUP + g) * V + e, y.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _relative(largest, top):
    """Return exp2(largest - top) [...], or 0 for -inf: the factor that rescales sums to the score `top`.

    Sums of exp2(score - largest) become sums of exp2(score - top).
    """
    return tl.where(largest > -float("inf"), tl.exp2(largest - top), 0.0)


@triton.jit
def _divided(acc, total):
    """Return `acc` / `total` [...], a weighted mean; 0 where the sum of the weights, `total`, is 0."""
    return acc / tl.where(total == 0.0, 1.0, total)


@triton.jit
def _store(
    sums, stats, split, block, acc, largest, total, W: tl.constexpr, G: tl.constexpr, GROUP: tl.constexpr,
    V: tl.constexpr, VP: tl.constexpr,
):  # fmt: skip
    """Write the partial sums of W warps, as W splits of the keys from split `split` on.

    acc              [W, VP, G]   sum of weight * value, of G query heads from `block` * G on
    largest          [W, G]       largest score
    total            [W, G]       sum of weights exp2(score - largest)
    sums             float32 [splits, GROUP, V]       output for `acc`
    stats            float32 [splits, 2, GROUP]       output for `largest` and `total`
    GROUP            query heads that share a key head
    V                features of a value
    VP               V padded to whole runs of 64
    """
    S: tl.constexpr = VP // 64
    t = tl.arange(0, 4)[:, None, None, None]
    r = tl.arange(0, 8)[:, None, None]
    w = tl.arange(0, W)[:, None]
    g = block * G + tl.arange(0, G // 8) * 8 + r
    valid = (t == 0) & (g < GROUP)
    at = stats + (split + w) * (2 * GROUP) + g + t * 0
    largest = tl.permute(tl.reshape(largest, (W, G // 8, 8)), (2, 0, 1))
    total = tl.permute(tl.reshape(total, (W, G // 8, 8)), (2, 0, 1))
    tl.store(at, tl.broadcast_to(largest[None], (4, 8, W, G // 8)), mask=valid)
    tl.store(at + GROUP, tl.broadcast_to(total[None], (4, 8, W, G // 8)), mask=valid)
    # s, 8 features, r, 8 heads, t, c
    acc = tl.reshape(acc, (W, S, 8, 8, G // 8, 4, 2))
    acc = tl.reshape(tl.permute(acc, (5, 3, 0, 4, 6, 1, 2)), (4, 8, W, G // 4 * S, 8))
    i = tl.arange(0, G // 4 * S)[:, None]
    g = block * G + i // (2 * S) * 8 + t[:, :, :, :, None] * 2 + i // S % 2
    e = (i % S * 8 + r[:, :, :, None]) * 8 + tl.arange(0, 8)
    at = sums + ((split + w[:, :, None]) * GROUP + g) * V + e
    tl.store(at, acc, mask=(g < GROUP) & (e < V))


@triton.jit
def _write(
    k, v, new_k, new_v, cos, sin, factors, D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    """Append a new token to the KV cache: its key, rotated, to `k` [D], and its value to `v` [V].

    new_k, new_v   [D] and [V], of one head
    cos, sin       [D], of the token's position
    EPS            if not None, the key gets an RMSNorm before rotation
    factors        weights of the norm, from `_load_key`; () if EPS is None
    ROUND          True if the norm is rounded before the product with its weights
    OFFSET         number added to these weights
    DP, VP         D and V padded to powers of two
    """
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    key, other = _load_key(new_k, D, DP)
    if EPS is not None:
        wide = key.to(tl.float32)
        rstd = tl.rsqrt(tl.sum(wide * wide, 0) / D + EPS)
        key = normed(wide, rstd, factors[0], key.dtype, ROUND, OFFSET)
        other = normed(other.to(tl.float32), rstd, factors[1], key.dtype, ROUND, OFFSET)
    by_cos, by_sin = tl.load(cos + d, mask=d < D, other=0.0), tl.load(sin + d, mask=d < D, other=0.0)
    value = tl.load(new_v + e, mask=e < V, other=0.0)
    tl.store(k + d, _rotated(key, other, by_cos, by_sin, d < D // 2), mask=d < D)
    tl.store(v + e, value, mask=e < V)


@triton.jit
def _load_key(at, D: tl.constexpr, DP: tl.constexpr):
    """Load the D features of a key from `at`, and the features that rotate with them: two tensors [DP].

    Feature d rotates with the one D / 2 away. DP is D padded to a power of two.
    """
    d = tl.arange(0, DP)
    return tl.load(at + d, mask=d < D, other=0.0), other_half(at, d, d < D, D)


@triton.jit
def _rstd(x, D: tl.constexpr, DP: tl.constexpr, EPS: tl.constexpr):
    """Return 1 / sqrt(mean(x^2) + EPS) of each row of x: [1, 8, W, rows * runs, 1], repeated for each run.

    `x` [4, 8, W, rows * runs, 8] is the result of `load_rows`: D features, padded to DP, in runs of 32.
    """
    W: tl.constexpr = x.shape[2]
    RUNS: tl.constexpr = DP // 32
    ROWS: tl.constexpr = x.shape[3] // RUNS
    wide = tl.reshape(x.to(tl.float32), (4, 8, W, ROWS, RUNS, 8))
    squares = tl.sum(tl.sum(tl.sum(wide * wide, 5), 4), 0)
    rstd = tl.broadcast_to(tl.rsqrt(squares / D + EPS)[:, :, :, None], (8, W, ROWS, RUNS))
    return tl.reshape(rstd, (1, 8, W, ROWS * RUNS, 1))


@triton.jit
def _normed(x, rstd, weight, G: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr):
    """Return the RMSNorm of G rows: `x` * `rstd` * (`weight` + OFFSET), [4, 8, W, G / 8 * runs, 8].

    `x` is the result of `load_rows`, `rstd` that of `_rstd`. `weight` [4, 8, W, runs, 8] has the norm's
    weights for eight rows. If ROUND, `x` * `rstd` is rounded to the dtype of `x` before it is multiplied by
    weights.
    """
    return normed(x.to(tl.float32), rstd, repeated(weight, G // 8), x.dtype, ROUND, OFFSET)


@triton.jit
def _rotated(x, other, cos, sin, is_low):
    """Return rotary position embedding, `x` * `cos` -+ `other` * `sin` [...], rounded as torch does.

    `other` is the feature that rotates with each feature of `x`. The sign is - where `is_low`: for features
    in the first half of a head.
    """
    one = (x.to(tl.float32) * cos.to(tl.float32)).to(x.dtype).to(tl.float32)
    two = (other.to(tl.float32) * sin.to(tl.float32)).to(x.dtype).to(tl.float32)
    return tl.where(is_low, one - two, one + two).to(x.dtype)
