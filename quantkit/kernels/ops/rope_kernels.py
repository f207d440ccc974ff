"""Rotary position embedding, alone and with KV append, rounded where torch rounds."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.ops.norm_kernel import normed


@triton.jit
def cos_sin(
    frequencies, positions, cos, sin, T, f_n, p_b, p_t,
    SCALING: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `cos` and `sin` [B, T, 2 H] of positions times frequencies, for rotary position embedding.

    `positions` [B, T] are of B sequences of T tokens, `frequencies` [H] of a head of 2 H features. Each angle
    comes twice, once for each half of the head. Results are multiplied by SCALING. f_n is the stride of
    frequencies, p_b and p_t are those of positions. HP is H rounded up to a power of two. If PDL
    (programmatic dependent launch), start before the previous kernel ends. Grid: (B * T,).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token // T * p_b + token % T * p_t).to(tl.float32)
    n = tl.arange(0, HP)
    inside = n < H
    # Positions may exceed 100,000, for which the hardware's approximations are too coarse.
    angle = position * tl.load(frequencies + n * f_n, mask=inside, other=0.0)
    found_cos = (tl.cos(angle) * SCALING).to(cos.dtype.element_ty)
    found_sin = (tl.sin(angle) * SCALING).to(sin.dtype.element_ty)
    at = token * (2 * H) + n
    tl.store(cos + at, found_cos, mask=inside)
    tl.store(cos + at + H, found_cos, mask=inside)
    tl.store(sin + at, found_sin, mask=inside)
    tl.store(sin + at + H, found_sin, mask=inside)


@triton.jit
def rotate(
    x, cos, sin, y, T, x_b, x_h, x_t, c_b, c_t, y_b, y_h, y_t,
    HEADS: tl.constexpr, PART: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `y` [B, HEADS, T, 2 H]: `x` with rotary position embedding, x * cos + rotate_half(x) * sin.

    `x` is of B sequences, HEADS heads, T tokens and 2 H features; `cos` and `sin` are [B, T, 2 H]. For the
    two halves of a head, rotate_half((a, b)) = (-b, a).

        x_b, x_h, ..   strides, named after tensor and dimension; c_b and c_t are of both cos and sin
        PART           heads of a token per program
        HP             H rounded up to a power of two
        PDL            if True, start before the previous kernel ends (programmatic dependent launch)

    Grid: (B * T, HEADS / PART rounded up).
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    head = (tl.program_id(1) * PART + tl.arange(0, PART)).to(tl.int64)[:, None]
    # Load angles once per head, in the layout of `x`: no thread then passes angles to another one.
    d = tl.broadcast_to(tl.arange(0, HP)[None, :], (PART, HP))
    inside = (head < HEADS) & (d < H)
    base = x + b * x_b + head * x_h + t * x_t
    low = tl.load(base + d, mask=inside, other=0.0)
    high = tl.load(base + H + d, mask=inside, other=0.0)
    low, high = _rotated(low, high, cos, sin, b * c_b + t * c_t, d, d < H, H)
    out = y + b * y_b + head * y_h + t * y_t
    tl.store(out + d, low, mask=inside)
    tl.store(out + H + d, high, mask=inside)


@triton.jit
def rotate_append(
    q, k, v, cos, sin, cache_length, y, keys, values, q_weight, k_weight, T, LENGTH,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, c_b, c_t,
    keys_b, keys_h, keys_l, values_b, values_h, values_l,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `y` = q with rotary position embedding, and append k, rotated, and v to the KV cache.

        q     [B, QUERIES, T, 2 H]     cos, sin  [B, T, 2 H]
        k     [B, HEADS, T, 2 H]       keys      [B, HEADS, LENGTH, 2 H]
        v     [B, HEADS, T, V]         values    [B, HEADS, LENGTH, V]
        y     [B, QUERIES, T, 2 H]     cache_length [] int64: tokens already in the cache

    There are B sequences, QUERIES query heads, HEADS key heads and T new tokens; the cache has room for
    LENGTH tokens. A token without room is not written, and its `y` is NaN.

        q_b, q_h, ..          strides, named after tensor and dimension; c_b and c_t are of both cos and sin
        HP, VP                H and V rounded up to powers of two
        EPS                   if not None, each head x of q and k is first replaced by its RMSNorm,
                              x / sqrt(mean(x^2) + EPS) * (weight + OFFSET)
        q_weight, k_weight    [2 H], weights of these norms
        ROUND                 if True, x / sqrt(mean(x^2) + EPS) is rounded before the product with weights
        PDL                   if True, start before the previous kernel ends (programmatic dependent launch)

    Grid: (B * T, QUERIES + 2 HEADS): a program has one head of q, k or v of one token.
    """
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    d = tl.arange(0, HP)
    inside = d < H
    if EPS is not None:
        weight = k_weight
        if head < QUERIES:
            weight = q_weight
        weight_low = tl.load(weight + d, mask=inside, other=0.0)
        weight_high = tl.load(weight + H + d, mask=inside, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_wait()
        # After the wait: an attention kernel that starts earlier would slow the linear before this kernel.
        tl.extra.cuda.gdc_launch_dependents()
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    at = tl.load(cache_length).to(tl.int64) + t
    if head < QUERIES + HEADS:
        own = head - QUERIES
        base = k + b * k_b + own * k_h + t * k_t
        out = keys + b * keys_b + own * keys_h + at * keys_l
        in_cache = inside & (at < LENGTH)
        if head < QUERIES:
            in_cache = inside
            base = q + b * q_b + head * q_h + t * q_t
            out = y + ((b * QUERIES + head) * T + t) * (2 * H)
        low = tl.load(base + d, mask=inside, other=0.0)
        high = tl.load(base + H + d, mask=inside, other=0.0)
        if EPS is not None:
            dtype: tl.constexpr = low.dtype
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            rstd = tl.rsqrt(tl.sum(wide_low * wide_low + wide_high * wide_high, 0) / (2 * H) + EPS)
            low = normed(wide_low, rstd, weight_low, dtype, ROUND, OFFSET)
            high = normed(wide_high, rstd, weight_high, dtype, ROUND, OFFSET)
        low, high = _rotated(low, high, cos, sin, b * c_b + t * c_t, d, inside, H)
        tl.store(out + d, tl.where(at < LENGTH, low, float("nan")), mask=in_cache)
        tl.store(out + H + d, tl.where(at < LENGTH, high, float("nan")), mask=in_cache)
    else:
        e = tl.arange(0, VP)
        own = head - QUERIES - HEADS
        copied = tl.load(v + b * v_b + own * v_h + t * v_t + e, mask=e < V, other=0.0)
        tl.store(
            values + b * values_b + own * values_h + at * values_l + e, copied, mask=(e < V) & (at < LENGTH)
        )


@triton.jit
def _rotated(low, high, cos, sin, at, d, inside, H: tl.constexpr):
    """Rotate the halves of heads: return low * cos - high * sin and high * cos + low * sin, [..., HP] each.

    `low` and `high` [..., HP] are the first and second half of heads of 2 H features. `d` [HP] are the
    indices within a half; `inside` is True where d < H. `cos` and `sin` point to rows of 2 H values, of which
    the row that begins at element `at` is read.
    """
    dtype = low.dtype
    cos_low = tl.load(cos + at + d, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + at + H + d, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + at + d, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + at + H + d, mask=inside, other=0.0).to(tl.float32)
    first, second = low.to(tl.float32), high.to(tl.float32)
    y = (first * cos_low).to(dtype).to(tl.float32) - (second * sin_low).to(dtype).to(tl.float32)
    z = (second * cos_high).to(dtype).to(tl.float32) + (first * sin_high).to(dtype).to(tl.float32)
    return y.to(dtype), z.to(dtype)
