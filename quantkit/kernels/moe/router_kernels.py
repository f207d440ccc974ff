"""What sends tokens to experts: products with few rows of dense weights, and the choice of the largest."""

import triton
import triton.language as tl

from quantkit.kernels.moe.permute_kernels import write_order
from quantkit.kernels.ops.argmax_kernels import LEAST_ORDER, number_of, order_of
from quantkit.kernels.ops.glue_kernels import normed


@triton.jit(do_not_specialize=["M"])
def small_linear(
    x, other, norm, weight, total, made, y, M, N, x_r, w_r, K: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`y` [M, N] = x [M, K] W^T: a program for each row of `weight` [N, K] and ROWS rows of x.

    With EPS it is `made` times W^T, the norm of `total` = x + other, rows of K numbers all: both are written,
    by the programs of the first row of `weight`. It has weights `norm`, and is that of `rms_norm`.
    """
    n = tl.program_id(0)
    k = tl.arange(0, PADDED)
    # No kernel that runs beside this one writes weights.
    weights = tl.load(weight + n.to(tl.int64) * w_r + k, mask=k < K, other=0.0).to(tl.float32)
    if EPS is not None:
        factor = tl.load(norm + k, mask=k < K, other=0.0)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = (m < M)[:, None] & (k < K)[None, :]
    at = m.to(tl.int64)[:, None] * x_r + k[None, :]
    numbers = tl.load(x + at, mask=inside, other=0.0)
    if EPS is not None:
        dtype: tl.constexpr = numbers.dtype
        numbers = (numbers.to(tl.float32) + tl.load(other + at, mask=inside, other=0.0).to(tl.float32)).to(
            dtype
        )
        tl.store(total + at, numbers, mask=inside & (n == 0))
        wide = numbers.to(tl.float32)
        root = tl.rsqrt(tl.sum(wide * wide, axis=1) / K + EPS)
        numbers = normed(wide, root[:, None], factor[None, :], dtype, ROUND, OFFSET)
        tl.store(made + at, numbers, mask=inside & (n == 0))
    sums = tl.sum(numbers.to(tl.float32) * weights[None, :], axis=1)
    tl.store(y + m.to(tl.int64) * N + n, sums.to(y.dtype.element_ty), mask=m < M)


@triton.jit(do_not_specialize=["T"])
def route(
    logits, bias, weights, index, T, l_t, order, segments,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr,
    TOKENS: tl.constexpr, OF_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`weights` and `index` [T, SLOTS] of the experts of each token, of EXPERTS logits: TOKENS in a program.

    Those with the largest logits, and as weights exp(logit) over the sum of all, or, if OF_CHOSEN, of those
    that were chosen. With SIGMOID, those with the largest sigmoid(logit) + bias [EXPERTS], of KEPT of GROUPS
    only, and as weights FACTOR sigmoid(logit) over the sum of those that were chosen. One program for all
    tokens writes `order` and `segments` of their pairs as well, unless these are None.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.broadcast_to(tl.arange(0, PADDED)[None, :], (TOKENS, PADDED))
    is_token = (token < T)[:, None]
    of_token = logits + token.to(tl.int64)[:, None] * l_t
    numbers = tl.load(of_token + column, mask=is_token & (column < EXPERTS), other=0.0).to(tl.float32)
    scores = numbers
    if SIGMOID:
        scores = _sigmoid(numbers)
        scores += tl.load(bias + column, mask=column < EXPERTS, other=0.0).to(tl.float32)
    left = tl.where(column < EXPERTS, order_of(scores), LEAST_ORDER)
    if GROUPS > 1:
        left = _of_groups(left, GROUPS, KEPT)
    # Column s of what was found is slot s.
    experts = tl.zeros((TOKENS, PADDED), tl.int32)
    found = tl.zeros((TOKENS, PADDED), tl.int32)
    largest = number_of(tl.max(left, axis=1))[:, None]
    for slot in range(SLOTS):
        best, expert = _largest(left, column, 1)
        experts = tl.where(column == slot, expert, experts)
        found = tl.where(column == slot, best, found)
        left = tl.where(column == expert, LEAST_ORDER, left)
    is_slot = column < SLOTS
    if SIGMOID:
        # What was found has a bias.
        chosen = tl.load(of_token + experts, mask=is_token & is_slot, other=0.0).to(tl.float32)
        shares = tl.where(is_slot, _sigmoid(chosen), 0.0)
        shares = shares / (tl.sum(shares, axis=1) + 1e-20)[:, None] * FACTOR
    else:
        shares = tl.where(is_slot, tl.exp(number_of(found) - largest), 0.0)
        if OF_CHOSEN:
            whole = tl.sum(shares, axis=1)
        else:
            whole = tl.sum(tl.where(column < EXPERTS, tl.exp(numbers - largest), 0.0), axis=1)
        shares = shares / whole[:, None]
    to = token.to(tl.int64)[:, None] * SLOTS + column
    tl.store(weights + to, shares.to(weights.dtype.element_ty), mask=is_token & is_slot)
    tl.store(index + to, experts, mask=is_token & is_slot)
    if order is not None:
        slots = tl.where(is_slot, experts, 0)
        slots = tl.sum(tl.reshape(slots, (TOKENS, PADDED // PADDED_SLOTS, PADDED_SLOTS)), axis=1)
        slot = tl.arange(0, PADDED_SLOTS)
        pair = token[:, None] * SLOTS + slot[None, :]
        there = is_token & (slot < SLOTS)[None, :]
        flat: tl.constexpr = TOKENS * PADDED_SLOTS
        write_order(
            tl.reshape(slots, (flat,)), tl.reshape(pair, (flat,)), tl.reshape(there, (flat,)),
            order, segments, EXPERTS, ROWS,
        )  # fmt: skip


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _largest(orders, place, AXIS: tl.constexpr):
    """The largest of `orders` along AXIS, the last, and its `place`, the first of several."""
    best = tl.max(orders, axis=AXIS, keep_dims=True)
    return best, tl.min(tl.where(orders == best, place, orders.shape[AXIS]), axis=AXIS, keep_dims=True)


@triton.jit
def _of_groups(left, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """`left` [tokens, experts], orders of scores, of those KEPT of GROUPS whose two largest scores add up to
    the most; LEAST_ORDER for others.
    """
    TOKENS: tl.constexpr = left.shape[0]
    EACH: tl.constexpr = left.shape[1] // GROUPS
    grouped = tl.reshape(left, (TOKENS, GROUPS, EACH))
    place = tl.broadcast_to(tl.arange(0, EACH)[None, None, :], (TOKENS, GROUPS, EACH))
    first, its = _largest(grouped, place, 2)
    second = tl.max(tl.where(place == its, LEAST_ORDER, grouped), axis=2, keep_dims=True)
    sums = order_of(tl.reshape(number_of(first) + number_of(second), (TOKENS, GROUPS)))
    group = tl.broadcast_to(tl.arange(0, GROUPS)[None, :], (TOKENS, GROUPS))
    is_kept = tl.zeros((TOKENS, GROUPS), tl.int1)
    for _ in range(KEPT):
        _, which = _largest(sums, group, 1)
        is_kept = is_kept | (group == which)
        sums = tl.where(group == which, LEAST_ORDER, sums)
    return tl.reshape(tl.where(is_kept[:, :, None], grouped, LEAST_ORDER), left.shape)
