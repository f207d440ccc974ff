"""A kernel that only reads: what any kernel takes at least for so many bytes."""

import triton
import triton.language as tl


@triton.jit
def read(x, out, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sums of `STEPS` blocks of int32 per program, so that no load can be left out."""
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32)
    for i in range(STEPS):
        total += tl.load(x + (program * STEPS + i) * BLOCK + tl.arange(0, BLOCK))
    tl.store(out + program, tl.sum(total))
