"""What is between the linears of a model: rows of ids, sums and norms, gates, rotary positions, the cache.

A program has one row, or heads of one token. Numbers are rounded where torch would round them, which has a
kernel for each operation.
"""

import triton
import triton.language as tl


@triton.jit
def embed(ids, weight, y, V, N, w_v, w_n, B: tl.constexpr, PDL: tl.constexpr):
    """`y` = the rows of N numbers of `weight` [V, N] that `ids` name, no numbers where there are none."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < V)
    numbers = tl.load(weight + token * w_v + n * w_n, mask=(n < N) & known, other=float("nan"))
    tl.store(y + row * N + n, numbers, mask=n < N)


@triton.jit
def rms_norm(
    x, other, weight, total, y, x_o, x_i, o_o, o_i, w_i,
    ROWS: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, EPS: tl.constexpr, ADD: tl.constexpr,
    ROUND: tl.constexpr, OFFSET: tl.constexpr, LATE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`y` = x / sqrt(mean(x^2) + EPS) * (weight + OFFSET) of rows of N numbers; with ADD that of x + other.

    Row number r of `x` is at r // ROWS * x_o + r % ROWS * x_i. With ROUND, numbers are rounded to the dtype
    of `y` before they are multiplied by weights.
    """
    n = tl.arange(0, NP)
    inside = n < N
    # No kernel that runs beside this one writes weights.
    factor = tl.load(weight + n * w_i, mask=inside, other=0.0)
    if PDL:
        if not LATE:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if LATE:
            tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    numbers = tl.load(x + row // ROWS * x_o + row % ROWS * x_i + n, mask=inside, other=0.0)
    if ADD:
        more = tl.load(other + row // ROWS * o_o + row % ROWS * o_i + n, mask=inside, other=0.0)
        numbers = (numbers.to(tl.float32) + more.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + row * N + n, numbers, mask=inside)
    scaled = numbers.to(tl.float32)
    root = tl.rsqrt(tl.sum(scaled * scaled, 0) / N + EPS)
    tl.store(y + row * N + n, normed(scaled, root, factor, y.dtype.element_ty, ROUND, OFFSET), mask=inside)


@triton.jit
def normed(x, root, weight, dtype: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr):
    """`x` times its `root`, both float32, and `weight` + OFFSET, as numbers of `dtype`."""
    x *= root
    if ROUND:
        x = x.to(dtype).to(tl.float32)
    factor = weight.to(tl.float32)
    # Where nothing is added numbers of 16 bits are multiplied as such, two at a time.
    if OFFSET != 0.0:
        factor += OFFSET
    return (x * factor).to(dtype)


@triton.jit
def gated(x, up, KIND: tl.constexpr):
    """f(x) * up, where f is silu or gelu by tanh, rounded to their dtype where torch does."""
    numbers = x.to(tl.float32)
    if KIND == "silu":
        found = numbers / (1.0 + tl.exp(-numbers))
    else:
        # sqrt(2 / pi) * (x + 0.044715 x^3), and tanh(z) = 1 - 2 / (exp(2 z) + 1).
        z = 0.7978845608028654 * (numbers + 0.044715 * numbers * numbers * numbers)
        found = 0.5 * numbers * (2.0 - 2.0 / (tl.exp(2.0 * z) + 1.0))
    return (found.to(x.dtype).to(tl.float32) * up.to(tl.float32)).to(x.dtype)


@triton.jit
def gate(x, up, y, x_r, u_r, N, KIND: tl.constexpr, B: tl.constexpr, PDL: tl.constexpr):
    """`y` = f(x) * up, rows of N numbers, where f is silu or gelu by tanh."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    inside = n < N
    numbers = tl.load(x + row * x_r + n, mask=inside, other=0.0)
    found = gated(numbers, tl.load(up + row * u_r + n, mask=inside, other=0.0), KIND)
    tl.store(y + row * N + n, found, mask=inside)


@triton.jit
def cos_sin(
    frequencies, positions, cos, sin, T, f_n, p_b, p_t,
    SCALING: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`cos`, `sin` [B, T, 2 H] of positions times H frequencies, twice, times SCALING: a token each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + token // T * p_b + token % T * p_t).to(tl.float32)
    n = tl.arange(0, HP)
    inside = n < H
    # Positions may be in the hundred thousands: these are not the approximations of the hardware.
    angle = position * tl.load(frequencies + n * f_n, mask=inside, other=0.0)
    found_cos = (tl.cos(angle) * SCALING).to(cos.dtype.element_ty)
    found_sin = (tl.sin(angle) * SCALING).to(sin.dtype.element_ty)
    at = token * (2 * H) + n
    tl.store(cos + at, found_cos, mask=inside)
    tl.store(cos + at + H, found_cos, mask=inside)
    tl.store(sin + at, found_sin, mask=inside)
    tl.store(sin + at + H, found_sin, mask=inside)


@triton.jit
def _rotated(low, high, cos, sin, at, d, inside, H: tl.constexpr):
    """The halves of heads of a token, rotated by its angles."""
    dtype = low.dtype
    cos_low = tl.load(cos + at + d, mask=inside, other=0.0).to(tl.float32)
    cos_high = tl.load(cos + at + H + d, mask=inside, other=0.0).to(tl.float32)
    sin_low = tl.load(sin + at + d, mask=inside, other=0.0).to(tl.float32)
    sin_high = tl.load(sin + at + H + d, mask=inside, other=0.0).to(tl.float32)
    first, second = low.to(tl.float32), high.to(tl.float32)
    y = (first * cos_low).to(dtype).to(tl.float32) - (second * sin_low).to(dtype).to(tl.float32)
    z = (second * cos_high).to(dtype).to(tl.float32) + (first * sin_high).to(dtype).to(tl.float32)
    return y.to(dtype), z.to(dtype)


@triton.jit
def rotate(
    x, cos, sin, y, T, x_b, x_h, x_t, c_b, c_t, y_b, y_h, y_t,
    HEADS: tl.constexpr, PART: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`y` [B, HEADS, T, 2 H] = `x` rotated by `cos`, `sin` [B, T, 2 H]: PART heads of a token each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    head = (tl.program_id(1) * PART + tl.arange(0, PART)).to(tl.int64)[:, None]
    # Angles are loaded for each head, as numbers are: 16 bytes of a thread, which nothing moves to another.
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
    q, k, v, cos, sin, held, y, keys, values, q_weight, k_weight, T, LENGTH,
    q_b, q_h, q_t, k_b, k_h, k_t, v_b, v_h, v_t, c_b, c_t,
    keys_b, keys_h, keys_l, values_b, values_h, values_l,
    QUERIES: tl.constexpr, HEADS: tl.constexpr, H: tl.constexpr, HP: tl.constexpr, V: tl.constexpr,
    VP: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`y` = `q` rotated; `k` rotated, and `v`, into a cache that holds `held` tokens: a program for a head.

    A token for which the cache, of LENGTH tokens, has no room is not written, and its `y` is no numbers. With
    EPS, heads of `q` and `k` become their norms first, as `rms_norm` has it.
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
        # Attention that waits beside the product before this kernel would slow it down.
        tl.extra.cuda.gdc_launch_dependents()
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    at = tl.load(held).to(tl.int64) + t
    if head < QUERIES + HEADS:
        own = head - QUERIES
        base = k + b * k_b + own * k_h + t * k_t
        out = keys + b * keys_b + own * keys_h + at * keys_l
        room = inside & (at < LENGTH)
        if head < QUERIES:
            room = inside
            base = q + b * q_b + head * q_h + t * q_t
            out = y + ((b * QUERIES + head) * T + t) * (2 * H)
        low = tl.load(base + d, mask=inside, other=0.0)
        high = tl.load(base + H + d, mask=inside, other=0.0)
        if EPS is not None:
            dtype: tl.constexpr = low.dtype
            wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
            root = tl.rsqrt(tl.sum(wide_low * wide_low + wide_high * wide_high, 0) / (2 * H) + EPS)
            low = normed(wide_low, root, weight_low, dtype, ROUND, OFFSET)
            high = normed(wide_high, root, weight_high, dtype, ROUND, OFFSET)
        low, high = _rotated(low, high, cos, sin, b * c_b + t * c_t, d, inside, H)
        tl.store(out + d, tl.where(at < LENGTH, low, float("nan")), mask=room)
        tl.store(out + H + d, tl.where(at < LENGTH, high, float("nan")), mask=room)
    else:
        e = tl.arange(0, VP)
        own = head - QUERIES - HEADS
        copied = tl.load(v + b * v_b + own * v_h + t * v_t + e, mask=e < V, other=0.0)
        tl.store(
            values + b * values_b + own * values_h + at * values_l + e, copied, mask=(e < V) & (at < LENGTH)
        )


@triton.jit
def append(
    k, v, held, keys, values, T, LENGTH,
    k_b, k_h, k_t, v_b, v_h, v_t, keys_b, keys_h, keys_l, values_b, values_h, values_l,
    D: tl.constexpr, DP: tl.constexpr, V: tl.constexpr, VP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`k` and `v` into a cache that holds `held` tokens: a program for a head.

    If there is no room for all, what has none is not written, and the last key is no number: the attention
    of none of them is.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, t = (token // T).to(tl.int64), (token % T).to(tl.int64)
    first = tl.load(held).to(tl.int64)
    at = tl.minimum(first + t, LENGTH - 1)
    lost = (first + T > LENGTH) & (at == LENGTH - 1)
    d, e = tl.arange(0, DP), tl.arange(0, VP)
    key = tl.load(k + b * k_b + head * k_h + t * k_t + d, mask=d < D, other=0.0)
    value = tl.load(v + b * v_b + head * v_h + t * v_t + e, mask=e < V, other=0.0)
    key = tl.where(lost, float("nan"), key).to(key.dtype)
    tl.store(keys + b * keys_b + head * keys_h + at * keys_l + d, key, mask=d < D)
    tl.store(
        values + b * values_b + head * values_h + at * values_l + e, value, mask=(e < V) & (first + t == at)
    )
