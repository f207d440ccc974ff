"""Prefetch to L2: a kernel prefetches weights before it waits for the kernel before it (PDL)."""
# mypy: ignore-errors

import triton
import triton.language as tl

_BRING = tl.constexpr("prefetch.global.L2 [$1];\nmov.b32 $0, 0;")


@triton.jit
def cache_line_offsets(start, SIZE: tl.constexpr):
    """Return the offsets of the 128-byte cache lines of SIZE elements: int32 [lines], in elements.

    `start` is a pointer, of which only the dtype of the elements is used. SIZE is a power of two. A pointer
    plus the offsets is an argument of `prefetch_l2`.
    """
    A: tl.constexpr = 1024 // start.dtype.element_ty.primitive_bitwidth
    return tl.arange(0, SIZE // A if SIZE > A else 1) * A


@triton.jit
def prefetch_l2(at):
    """Prefetch the cache lines at pointers `at` [...] to L2.

    L2 is coherent, so data written after the prefetch is read correctly.
    """
    tl.inline_asm_elementwise(_BRING, "=r,l", [at], tl.int32, False, 1)
