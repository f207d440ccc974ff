"""MoE router: GEMM of few rows with dense weights, softmax or sigmoid, and top-k."""
# mypy: ignore-errors

import triton
import triton.language as tl

from quantkit.kernels.moe.permute_kernels import write_sorted
from quantkit.kernels.ops.argmax_kernels import LOWEST_ORDERED, float_to_ordered, ordered_to_float
from quantkit.kernels.ops.norm_kernel import normed


@triton.jit(do_not_specialize=["M"])
def small_linear(
    x, other, norm, weight, total, made, y, M, N, x_r, w_r, K: tl.constexpr, PADDED: tl.constexpr,
    ROWS: tl.constexpr, EPS: tl.constexpr, ROUND: tl.constexpr, OFFSET: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write `y` [M, N] = x W^T for few rows x [M, K] and a dense `weight` W [N, K]. Grid: (N, M / ROWS).

    A program has one row of `weight` and ROWS rows of `x`; sums are float32. PADDED is K rounded up to a
    power of two; x_r and w_r are strides of rows. If PDL (programmatic dependent launch), the kernel starts
    while the one before it ends.

    If EPS is not None, x is first replaced by t = x + `other`, and t by its RMSNorm:

        total     [M, K]: output for t, written by the programs of row 0 of `weight`, as is `made`
        made      [M, K]: output for the RMSNorm of t, t / sqrt(mean(t^2) + EPS) * (norm + OFFSET)
        norm      [K]: weights of the norm
        ROUND     True if t / sqrt(...) is rounded to the dtype of x before the product with weights
    """
    n = tl.program_id(0)
    k = tl.arange(0, PADDED)
    # Before PDL's wait: no kernel that may still run writes weights.
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
        rstd = tl.rsqrt(tl.sum(wide * wide, axis=1) / K + EPS)
        numbers = normed(wide, rstd[:, None], factor[None, :], dtype, ROUND, OFFSET)
        tl.store(made + at, numbers, mask=inside & (n == 0))
    sums = tl.sum(numbers.to(tl.float32) * weights[None, :], axis=1)
    tl.store(y + m.to(tl.int64) * N + n, sums.to(y.dtype.element_ty), mask=m < M)


@triton.jit(do_not_specialize=["T"])
def route(
    logits, bias, weights, index, T, l_t, order, expert_blocks,
    EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, PADDED_TOP_K: tl.constexpr,
    TOKENS: tl.constexpr, OF_CHOSEN: tl.constexpr, SIGMOID: tl.constexpr, FACTOR: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Choose the experts of T tokens, top-k of `logits` [T, EXPERTS]: `index` int64, `weights` [T, TOP_K].

    Weights are the softmax over all logits, or over the chosen ones if OF_CHOSEN. If SIGMOID, experts are
    chosen by their score, sigmoid(logit) + `bias` [EXPERTS], within the best KEPT of GROUPS groups of
    experts. Weights are then FACTOR * sigmoid(logit) over the sum of the chosen sigmoids.

    If `order` is not None, one program has all tokens and sorts them by expert, in blocks of up to ROWS. It
    writes `order` [T * TOP_K] int32 and `expert_blocks` [T * TOP_K, 3] int32 (see `permute_kernels`).

        l_t             stride of rows of `logits`
        PADDED          EXPERTS rounded up to a power of two
        PADDED_TOP_K    TOP_K rounded up to a power of two
        TOKENS          tokens of a program
        PDL             True if launched with programmatic dependent launch: waits for the kernel before it

    Grid: (T / TOKENS,).
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
    candidates = tl.where(column < EXPERTS, float_to_ordered(scores), LOWEST_ORDERED)
    if GROUPS > 1:
        candidates = _of_groups(candidates, GROUPS, KEPT)
    # Column s holds the s-th of the top-k.
    experts = tl.zeros((TOKENS, PADDED), tl.int32)
    found = tl.zeros((TOKENS, PADDED), tl.int32)
    largest = ordered_to_float(tl.max(candidates, axis=1))[:, None]
    for slot in range(TOP_K):
        best, expert = _largest(candidates, column, 1)
        experts = tl.where(column == slot, expert, experts)
        found = tl.where(column == slot, best, found)
        candidates = tl.where(column == expert, LOWEST_ORDERED, candidates)
    is_slot = column < TOP_K
    if SIGMOID:
        # `found` includes the bias.
        chosen = tl.load(of_token + experts, mask=is_token & is_slot, other=0.0).to(tl.float32)
        probs = tl.where(is_slot, _sigmoid(chosen), 0.0)
        probs = probs / (tl.sum(probs, axis=1) + 1e-20)[:, None] * FACTOR
    else:
        probs = tl.where(is_slot, tl.exp(ordered_to_float(found) - largest), 0.0)
        if OF_CHOSEN:
            whole = tl.sum(probs, axis=1)
        else:
            whole = tl.sum(tl.where(column < EXPERTS, tl.exp(numbers - largest), 0.0), axis=1)
        probs = probs / whole[:, None]
    to = token.to(tl.int64)[:, None] * TOP_K + column
    tl.store(weights + to, probs.to(weights.dtype.element_ty), mask=is_token & is_slot)
    tl.store(index + to, experts, mask=is_token & is_slot)
    if order is not None:
        chosen_experts = tl.where(is_slot, experts, 0)
        chosen_experts = tl.sum(
            tl.reshape(chosen_experts, (TOKENS, PADDED // PADDED_TOP_K, PADDED_TOP_K)), axis=1
        )
        slot = tl.arange(0, PADDED_TOP_K)
        routed = token[:, None] * TOP_K + slot[None, :]
        valid = is_token & (slot < TOP_K)[None, :]
        flat: tl.constexpr = TOKENS * PADDED_TOP_K
        write_sorted(
            tl.reshape(chosen_experts, (flat,)), tl.reshape(routed, (flat,)), tl.reshape(valid, (flat,)),
            order, expert_blocks, EXPERTS, ROWS,
        )  # fmt: skip


@triton.jit
def _sigmoid(x):
    """Return sigmoid(x), float32 [...]."""
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _largest(orders, place, AXIS: tl.constexpr):
    """Return the largest int32 of `orders` [..., N] along its last axis, and its index: [..., 1] each.

    `place` [..., N] has the index of each value. AXIS is the number of the last axis. Of equal values, the
    first wins.
    """
    best = tl.max(orders, axis=AXIS, keep_dims=True)
    return best, tl.min(tl.where(orders == best, place, orders.shape[AXIS]), axis=AXIS, keep_dims=True)


@triton.jit
def _of_groups(candidates, GROUPS: tl.constexpr, KEPT: tl.constexpr):
    """Return `candidates` with the scores outside the best KEPT of GROUPS groups replaced by LOWEST_ORDERED.

    `candidates` int32 [tokens, experts] are the scores of experts, as `float_to_ordered` maps floats. The
    best groups are those with the largest sums of their two best scores.
    """
    TOKENS: tl.constexpr = candidates.shape[0]
    GROUP_SIZE: tl.constexpr = candidates.shape[1] // GROUPS
    grouped = tl.reshape(candidates, (TOKENS, GROUPS, GROUP_SIZE))
    place = tl.broadcast_to(tl.arange(0, GROUP_SIZE)[None, None, :], (TOKENS, GROUPS, GROUP_SIZE))
    first, its = _largest(grouped, place, 2)
    second = tl.max(tl.where(place == its, LOWEST_ORDERED, grouped), axis=2, keep_dims=True)
    sums = float_to_ordered(tl.reshape(ordered_to_float(first) + ordered_to_float(second), (TOKENS, GROUPS)))
    group = tl.broadcast_to(tl.arange(0, GROUPS)[None, :], (TOKENS, GROUPS))
    is_kept = tl.zeros((TOKENS, GROUPS), tl.int1)
    for _ in range(KEPT):
        _, which = _largest(sums, group, 1)
        is_kept = is_kept | (group == which)
        sums = tl.where(group == which, LOWEST_ORDERED, sums)
    return tl.reshape(tl.where(is_kept[:, :, None], grouped, LOWEST_ORDERED), candidates.shape)
