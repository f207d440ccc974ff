"""What a kernel that overlaps the one before it may do before it waits: ask for what it will read."""

import triton
import triton.language as tl

_BRING = tl.constexpr("prefetch.global.L2 [$1];\nmov.b32 $0, 0;")


@triton.jit
def cache_line_offsets(start, SIZE: tl.constexpr):
    """Where the lines of 128 bytes begin in SIZE elements, a power of two, from `start` on."""
    A: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    return tl.arange(0, SIZE // A if SIZE > A else 1) * A


@triton.jit
def prefetch_l2(at):
    """Have the lines at addresses `at` brought to the L2 cache.

    Only a hint, and all memory is the same for all there: what is written later is what will be read.
    """
    tl.inline_asm_elementwise(_BRING, "=r,l", [at], tl.int32, False, 1)
