"""Embedding lookup: copy rows of a table of weights."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def embed(ids, weight, y, V, N, w_v, w_n, B: tl.constexpr, PDL: tl.constexpr):
    """Write `y` [ids, N], the rows of `weight` [V, N] for `ids` int64; NaN for an id outside 0 to V - 1.

    `w_v` and `w_n` are strides of `weight`. A program copies B columns. Grid: (ids, N / B). If PDL
    (programmatic dependent launch), the kernel starts while the one before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * B + tl.arange(0, B)
    token = tl.load(ids + row).to(tl.int64)
    known = (token >= 0) & (token < V)
    numbers = tl.load(weight + token * w_v + n * w_n, mask=(n < N) & known, other=float("nan"))
    tl.store(y + row * N + n, numbers, mask=n < N)
