"""KL divergence of two rows of logits, with its gradient, in one launch.

torch takes some 15 passes over logits in float32. A program has one row and reads it three times, twice from
the L2 cache: largest, sums, gradient.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

#: Logit past the last column: finite, so that differences of two are 0.
_NOTHING = tl.constexpr(-3.0e38)


@triton.jit
def _load(x, row, n, N: tl.constexpr):
    """Load columns `n` [B] of row `row` of `x` [rows, N]: float32 [B], with the finite -3e38 past N."""
    numbers = tl.load(x + row * N + n, mask=n < N, other=0.0).to(tl.float32)
    return tl.where(n < N, numbers, _NOTHING)


@triton.jit
def kl_divergence_rows(logits, target, divergence, difference, N: tl.constexpr, B: tl.constexpr):
    """Write per row `divergence` = KL(softmax(target) || softmax(logits)), and its gradient for `logits`.

    The gradient goes to `difference`: softmax(logits) - softmax(target). `logits`, `target` and `difference`
    [rows, N] are float32, bfloat16 or float16; `divergence` [rows] is float32, in nats. B columns are loaded
    at a time. Grid: (rows,).
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, B)
    most, most_target = tl.full([B], _NOTHING, tl.float32), tl.full([B], _NOTHING, tl.float32)
    for start in range(0, N, B):
        most = tl.maximum(most, _load(logits, row, start + columns, N))
        most_target = tl.maximum(most_target, _load(target, row, start + columns, N))
    largest, largest_target = tl.max(most, 0), tl.max(most_target, 0)
    total, total_target = tl.zeros([B], tl.float32), tl.zeros([B], tl.float32)
    # Of the differences of logits, weighted by the target's exponentials.
    weighted = tl.zeros([B], tl.float32)
    for start in range(0, N, B):
        x, t = _load(logits, row, start + columns, N), _load(target, row, start + columns, N)
        weight = tl.exp(t - largest_target)
        total += tl.exp(x - largest)
        total_target += weight
        # Where the target is sure that a token does not follow, both logits may be infinite.
        weighted += tl.where(weight == 0, 0.0, weight * (t - x))
    whole, whole_target = tl.sum(total, 0), tl.sum(total_target, 0)
    mean = tl.sum(weighted, 0) / whole_target
    found = mean + (largest - largest_target) + (tl.log(whole) - tl.log(whole_target))
    tl.store(divergence + row, found)
    for start in range(0, N, B):
        n = start + columns
        x, t = _load(logits, row, n, N), _load(target, row, n, N)
        value = tl.exp(x - largest) / whole - tl.exp(t - largest_target) / whole_target
        tl.store(difference + row * N + n, value.to(difference.dtype.element_ty), mask=n < N)
