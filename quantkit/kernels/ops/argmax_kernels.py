"""Where the largest number of each row is: of parts of rows first, then of rows.

A number and its place are one integer of 64 bits, so that the largest integer has both:

    bit   63 ............ 32 | 31 | 30 ............ 0
          order of the float | 0  | inverted place

The float32 as an integer is in its order once the lower 31 bits of what is negative are inverted. Places are
inverted so that the first of equal numbers is the largest.
"""

import triton
import triton.language as tl

#: The lower 31 bits: also the order of what is no number, above that of infinity.
_LOW = tl.constexpr(0x7FFFFFFF)
#: What is below every number with its place.
_LEAST = tl.constexpr(-(1 << 63))
#: What is below the order of every number.
LEAST_ORDER = tl.constexpr(-(1 << 31))


@triton.jit
def order_of(numbers):
    """Float32 `numbers` as int32 in their order: -0 as 0, and what is no number after all that are."""
    order = numbers.to(tl.int32, bitcast=True)
    order ^= (order >> 31) & _LOW
    order = tl.where(order == -1, 0, order)
    return tl.where(numbers != numbers, _LOW, order)


@triton.jit
def number_of(order):
    """The float32 numbers that have such an order."""
    return (order ^ ((order >> 31) & _LOW)).to(tl.float32, bitcast=True)


@triton.jit
def largest_of_parts(x, found, x_r, N, B: tl.constexpr, PDL: tl.constexpr):
    """`found` [rows, parts] = the largest number, with its place, of each B of rows of N numbers in `x`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = part * B + tl.arange(0, B)
    # Equal to -inf, what is outside is after all that is inside.
    numbers = tl.load(x + row * x_r + n, mask=n < N, other=float("-inf")).to(tl.float32)
    pairs = (order_of(numbers).to(tl.int64) << 32) | (n ^ _LOW).to(tl.int64)
    tl.store(found + row * tl.num_programs(1) + part, tl.max(pairs, 0))


@triton.jit
def largest_of_rows(found, tokens, PARTS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr):
    """`tokens` [rows] = the places of the largest of PARTS numbers with places in rows of `found`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PADDED)
    pairs = tl.load(found + row * PARTS + part, mask=part < PARTS, other=_LEAST)
    tl.store(tokens + row, (tl.max(pairs, 0) & _LOW) ^ _LOW)
