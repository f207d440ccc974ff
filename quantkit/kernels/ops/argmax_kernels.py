"""Two-stage argmax: the largest of each part of a row, then the largest of each row.

A number and its column are one int64 key, so that the largest key holds both:

    bits  63 ............ 32 | 31 | 30 ............ 0
          number as int32    | 0  | inverted column

The bits of a float32, read as int32, sort like the float once the lower 31 bits of negative numbers are
inverted. Columns are inverted so that the first of equal values has the largest key.
"""
# mypy: ignore-errors

import triton
import triton.language as tl

#: The lower 31 bits. As an ordered int32 it is NaN, above infinity.
_LOW = tl.constexpr(0x7FFFFFFF)
#: Smaller than every key.
_LEAST = tl.constexpr(-(1 << 63))
#: Smaller than the ordered int32 of every number.
LOWEST_ORDERED = tl.constexpr(-(1 << 31))


@triton.jit
def float_to_ordered(numbers):
    """Map float32 `numbers` [...] to int32 of the same order: -0 counts as 0, NaN as above infinity."""
    order = numbers.to(tl.int32, bitcast=True)
    order ^= (order >> 31) & _LOW
    order = tl.where(order == -1, 0, order)
    return tl.where(numbers != numbers, _LOW, order)


@triton.jit
def ordered_to_float(order):
    """Map int32 `order` [...] back to float32: the inverse of `float_to_ordered`."""
    return (order ^ ((order >> 31) & _LOW)).to(tl.float32, bitcast=True)


@triton.jit
def argmax_partial(x, partial, x_r, N, B: tl.constexpr, PDL: tl.constexpr):
    """Write the largest of each B columns of `x` [rows, N], with its column: `partial` int64 [rows, parts].

    Bits 63..32 of a result are the value, ordered as int32; bits 30..0 are the inverted column. So int64
    results sort as their values do. `x` is float32, bfloat16 or float16, with row stride `x_r`. Grid: (rows,
    parts). If PDL (programmatic dependent launch), the kernel starts while the one before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = part * B + tl.arange(0, B)
    # Columns past N are -inf, and lose to an equal -inf inside: their column is larger.
    numbers = tl.load(x + row * x_r + n, mask=n < N, other=float("-inf")).to(tl.float32)
    keys = (float_to_ordered(numbers).to(tl.int64) << 32) | (n ^ _LOW).to(tl.int64)
    tl.store(partial + row * tl.num_programs(1) + part, tl.max(keys, 0))


@triton.jit
def argmax_combine(partial, tokens, PARTS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """Write the column of each row's largest number: `tokens` int64 [rows], from `argmax_partial`.

    `partial` int64 [rows, PARTS] has the largest key of each part of a row. PADDED is PARTS rounded up to a
    power of two. Grid: (rows,). If PDL (programmatic dependent launch), the kernel starts while the one
    before it ends.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    keys = tl.load(partial + row * PARTS + part, mask=part < PARTS, other=_LEAST)
    tl.store(tokens + row, (tl.max(keys, 0) & _LOW) ^ _LOW)
