"""Bandwidth kernel: reads memory and does nothing else, so its time is a floor for any kernel."""
# mypy: ignore-errors

import triton
import triton.language as tl


@triton.jit
def read(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sum STEPS blocks of BLOCK int32 of `x` per program, and write the sum to `out` [programs] int32.

    `x` is [programs * STEPS * BLOCK]. Only reading takes time; the sum keeps the compiler from removing the
    loads. Grid: (programs,).
    """
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(STEPS):
        total += tl.load(x + (program * STEPS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))
