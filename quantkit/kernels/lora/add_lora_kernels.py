"""The two products of a LoRA beside a linear, for few rows: no tensor cores, as the weights are read once."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def shrink(
    x, a, u, K, a_r, R: tl.constexpr, B: tl.constexpr, STEPS: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Write `u` [M, R] = x A^T in float32, for contiguous `x` [M, K] and `a` [R, K] with row stride `a_r`.

    A program adds up a number of u, B columns at each of STEPS steps. Grid: (M, R). If PDL (programmatic
    dependent launch), the kernel starts while the one before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, rank = tl.program_id(0).to(tl.int64), tl.program_id(1)
    total = tl.zeros([B], dtype=tl.float32)
    for step in range(STEPS):
        k = step * B + tl.arange(0, B)
        of_x = tl.load(x + row * K + k, mask=k < K, other=0.0).to(tl.float32)
        total += of_x * tl.load(a + rank * a_r + k, mask=k < K, other=0.0).to(tl.float32)
    tl.store(u + row * R + rank, tl.sum(total, 0))


@triton.jit
def expand(
    y, u, b, found, N, b_n, R: tl.constexpr, RANKS: tl.constexpr, FACTOR: tl.constexpr, B: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Write `found` [M, N] = y + FACTOR * u B^T in y's dtype: `y` [M, N], `u` float32 [M, R], `b` [N, R].

    `y` is contiguous, `b` has row stride `b_n`. A program has B columns of a row; RANKS is R or the next
    power of two. Grid: (M, N / B). If PDL (programmatic dependent launch), the kernel starts while the one
    before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, n, r = tl.program_id(0).to(tl.int64), tl.program_id(1) * B + tl.arange(0, B), tl.arange(0, RANKS)
    inside = (n < N)[:, None] & (r < R)[None, :]
    of_b = tl.load(b + n.to(tl.int64)[:, None] * b_n + r[None, :], mask=inside, other=0.0).to(tl.float32)
    low = tl.load(u + row * R + r, mask=r < R, other=0.0)
    added = FACTOR * tl.sum(of_b * low[None, :], 1)
    of_y = tl.load(y + row * N + n, mask=n < N, other=0.0)
    tl.store(found + row * N + n, (of_y.to(tl.float32) + added).to(of_y.dtype), mask=n < N)
