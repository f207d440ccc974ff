"""CPU kernels `int8-dynamic` and `int-digits`: integer weights times activations, as exact int8 products.

The values of most low-bit formats are small integers times one power of two: int4 is -8..7, fp6-e2m3 is
(-60..60)/8, binary is -1 and 1. `int8-dynamic` multiplies them with inputs that a scheme rounds to int8, with
one scale per token or tensor. For other inputs, `int-digits` writes an activation in fixed point as three
int8 digits,

    x = unit * (65536*d2 + 256*d1 + d0)        unit a power of two, |x| <= unit * 2**22

so the sum of a group is three int8 dot products. CPUs with VNNI compute them exactly, four products per lane
and cycle, from one byte per weight. x is rounded to 2**-23 of the largest activation of its group, and groups
are added in float32. That is closer to the true sum than a float32 product of dequantized weights. It is also
faster, because it reads a quarter of the bytes.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from quantkit.kernels.problem import Kernel, Layout, Problem, one_plane
from quantkit.packing.activations import ActivationScheme
from quantkit.packing.formats import IntFormat, NumberFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

DIGITS = 3
_FRACTION_BITS = 22
_DIGIT_WEIGHTS = (65536.0, 256.0, 1.0)
#: Least exponent of the unit, as of normal float32: smaller activations round to multiples of 2**-126.
_MIN_EXPONENT = -126

#: Columns of one product in longer groups. 128 to 512 take the same time; 2048 take twice as long.
_SEGMENT = 256
#: Rows of x that `int8-dynamic` multiplies at a time. With 512, sums leave the cache, for 1.5 times the time
#: (K and N of 2048, a core with AVX512).
_ROWS = 128
#: Fewest columns of a segment: `torch._int_mm` of one column reads memory that nobody wrote (torch 2.13).
_LEAST_SEGMENT = 2
#: Most columns of a segment: sums of products of int8 stay below 2**31.
_MAX_SEGMENT = 1 << 16


@lru_cache(maxsize=64)
def integer_values(number_format: NumberFormat) -> tuple[tuple[int, ...], int] | None:
    """Return (values, shift) such that code i of the format has the value `values[i]` * 2**-`shift`.

    All `values` are in -128..127; a code whose value is NaN gets 0. Returns None if there are no such
    integers.
    """
    numbers = number_format.numbers
    if not numbers:
        return None  # The values of a `FittedFormat` differ by tensor.
    shift = 0
    while any(not (value * 2.0**shift).is_integer() for value in numbers):
        shift += 1
        if max(abs(value) for value in numbers) * 2.0**shift > 128:
            return None
    # An invalid code gets 0; `_build` makes its scale NaN.
    values = tuple(0 if math.isnan(value) else int(value * 2**shift) for value in number_format.values)
    return (values, shift) if min(values) >= -128 and max(values) <= 127 else None


def segmentation(scheme: Scheme, columns: int) -> tuple[int, int]:
    """Return how a row of a weight is divided into segments: (columns of a segment, segments of the row).

    A segment is the columns of one integer product: a group, or one of several equal pieces of a longer
    group. `columns` is the length K of the row.
    """
    size = scheme.group_size
    if not isinstance(size, int):
        parts = -(-columns // _SEGMENT)
        return -(-columns // parts), parts
    whole = size
    while size > 2 * _SEGMENT and size % 2 == 0:
        size //= 2
    return size, scheme.groups(columns) * (whole // size)


def _why_unsupported(problem: Problem) -> str | None:
    """Return why `int-digits`, which splits x into int8 digits, cannot compute a problem; None if it can."""
    scheme = problem.scheme
    if integer_values(scheme.format) is None:
        return f"the values of {scheme.format.name} are not int8 integers times a power of two"
    if scheme.planes > 1:
        return one_plane(problem)
    if (reason := scheme.zero_point_type.why_not_int8) is not None:
        return reason
    if scheme.has_zero_point and scheme.format.bits == 8:
        return "8-bit codes less a zero-point need 9 bits; quantize symmetrically"
    segment = segmentation(scheme, problem.k)[0]
    if not _LEAST_SEGMENT <= segment <= _MAX_SEGMENT:
        return (
            "torch's int8 product is wrong for one column"
            if segment < _LEAST_SEGMENT
            else f"an int32 overflows in groups of {scheme.group_size}"
        ) + f"; use a group size of {_LEAST_SEGMENT} to {_MAX_SEGMENT}"
    return None


def _why_slower(problem: Problem) -> str | None:
    """Return why another kernel is faster than `int-digits` for a problem; None if none is."""
    if "vnni" not in problem.features:
        return "this CPU has no VNNI instructions, without which int8 products are slow"
    segment, _ = segmentation(problem.scheme, problem.k)
    if problem.n * segment < 1 << 15:
        return f"its products of {problem.n} x {segment} weights are too small to be worth starting"
    limit = 32 if problem.dtype == torch.bfloat16 else 64
    if problem.m > limit:
        return f"it is slower than unpacking for M above {limit} at {problem.dtype}, this is {problem.m}"
    return None


def _whole_groups(scheme: Scheme, columns: int) -> tuple[int, int]:
    """Return (columns of a group, groups of a row) for K = `columns`: the argument `divide` of `_build`."""
    return scheme.group_columns(columns), scheme.groups(columns)


def _build(
    weight: PackedTensor,
    dtype: torch.dtype,
    divide: Callable[[Scheme, int], tuple[int, int]] = segmentation,
) -> tuple[torch.Tensor, ...]:
    """Return `weight` [N, K] as (codes int8 [segments, N, segment], scales float32 [segments, N]).

    A segment is the columns of one integer product. If one of its codes is NaN, its scale is NaN.

    dtype    dtype of activations, on which the result does not depend
    divide   function of (scheme, K) that returns (columns of a segment, segments of a row)
    """
    scheme = weight.scheme
    rows, columns = weight.shape
    found = integer_values(scheme.format)
    assert found is not None
    values, shift = found
    segment, segments = divide(scheme, columns)
    device = weight.device
    table = torch.tensor(values, dtype=torch.int8, device=device)
    reserved = torch.tensor([math.isnan(value) for value in scheme.format.values], device=device)
    is_partial = any(math.isnan(value) for value in scheme.format.values)
    zero_point = weight.zeros_in_codes()
    # Groups, or parts of them, with the scale of each.
    scale = (weight.group_scale() * 2.0**-shift).T
    scale = scale.repeat_interleave(segments // scale.shape[0], dim=0).contiguous()
    out = torch.empty(segments, rows, segment, dtype=torch.int8, device=device)
    step = max(1, (1 << 20) // columns)
    for start in range(0, rows, step):
        # Padding of a row may have any value, because the launch pads activations with zeros.
        codes = F.pad(weight.codes(start, start + step), (0, segments * segment - columns))
        if zero_point is None:
            block = table.index_select(0, codes.view(-1).int())
            if is_partial:
                damaged = reserved.index_select(0, codes.view(-1).int()).view(-1, segments, segment).any(2)
                scale[:, start : start + step].masked_fill_(damaged.T, torch.nan)
        else:
            zero = zero_point[start : start + step].repeat_interleave(
                codes.shape[1] // zero_point.shape[1], dim=1
            )
            # uint8 wraps around, so its bits are those of the signed difference.
            block = (codes - zero).view(torch.int8)
        out[:, start : start + step] = block.view(-1, segments, segment).transpose(0, 1)
    return out, scale


def _split(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return activations `groups` float32 [S, M, g] as three int8 digits each, and the digits' place values.

    digits         int8 [S, M * 3, g]: the three digits d2, d1 and d0 of a row of x follow each other
    place values   float32 [S, M, 3]: 65536, 256 and 1 times the unit of the row and segment

    An activation is rounded to unit * (65536 d2 + 256 d1 + d0). There are S segments of g columns, the
    columns of one integer product. The place values are NaN for a segment of a row with NaN or infinity.
    """
    largest = groups.abs().amax(dim=2, keepdim=True)
    exponent = torch.frexp(largest).exponent.sub_(_FRACTION_BITS).clamp_(min=_MIN_EXPONENT)
    # Build the power of two from its bits: exact, which exp2 may not be.
    unit = ((exponent + 127) << 23).view(torch.float32)
    fixed = torch.round(groups / unit).to(torch.int32).add_(0x808080)
    digits = torch.stack([(fixed >> shift).to(torch.uint8) ^ 0x80 for shift in (16, 8, 0)], dim=2)
    counts = torch.where(largest.isfinite(), unit, torch.nan) * unit.new_tensor(_DIGIT_WEIGHTS)
    return digits.view(torch.int8).flatten(1, 2), counts


def _launch(
    x: torch.Tensor, weight: PackedTensor, layout: tuple[torch.Tensor, ...], bias: torch.Tensor | None
) -> torch.Tensor:
    """Return y [M, N] = x [M, K] W^T + bias [N], by splitting each value of x into three int8 digits.

    `layout` is W from `_build`: codes int8 [segments, N, segment] and scales float32 [segments, N]. A segment
    is the columns of one integer product. `weight` is not read.
    """
    values, scale = layout
    segments, rows, segment = values.shape
    count = x.shape[0]
    padded = F.pad(x.float(), (0, segments * segment - x.shape[1]))
    digits, counts = _split(padded.view(count, segments, segment).transpose(0, 1))
    y = torch.zeros(count, rows, dtype=torch.float32, device=x.device)
    for index in range(segments):
        # Each digit's sum is below 2**31; float32 rounds it with a relative error of 2**-24.
        sums = torch._int_mm(digits[index], values[index].T).float().view(count, DIGITS, rows)
        y.addcmul_(torch.bmm(counts[index].unsqueeze(1), sums).squeeze(1), scale[index])
    if bias is not None:
        y.add_(bias)
    return y.to(x.dtype)


def is_int8_product(scheme: Scheme) -> bool:
    """Return True if `int8-dynamic` can multiply weights of `scheme`, with x rounded to int8 by the scheme.

    The values of weights must be small integers times a power of two. x must have one scale per token or
    tensor.
    """
    inputs = scheme.activations
    return (
        inputs is not None
        and isinstance(inputs.number_format, IntFormat)
        and (inputs.number_format.bits, inputs.group_size, inputs.scale) == (8, None, "float32")
        and integer_values(scheme.format) is not None
        and scheme.planes == 1
        and not scheme.column_scale
    )


def _why_not_dynamic(problem: Problem) -> str | None:
    """Return why `int8-dynamic` cannot compute a problem; None if it can.

    This kernel multiplies int8 weights with x rounded to int8.
    """
    if not is_int8_product(replace(problem.scheme, activations=problem.activations)):
        return (
            "it multiplies single integers, not columns' scales, with inputs in int8, one scale per token or "
            "tensor"
        )
    if _whole_groups(problem.scheme, problem.k)[0] > _MAX_SEGMENT:
        return f"an int32 overflows in rows of {problem.k}; use a group size up to {_MAX_SEGMENT}"
    return _why_unsupported(problem)


def _why_dynamic_is_slower(problem: Problem) -> str | None:
    """Return why another kernel is faster than `int8-dynamic`; None if none is."""
    if "vnni" not in problem.features:
        return "this CPU has no VNNI instructions, without which int8 products are slow"
    if problem.dtype != torch.float32 and problem.scheme.groups(problem.k) > 1:
        return f"decoding in groups is faster with torch's weight-only product at {problem.dtype}"
    return None


def _quantized(x: torch.Tensor, inputs: ActivationScheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x` [M, K] quantized by `inputs`: round(x / scale) as int8 [M, K], and scales float32 [M, 1].

    The scale is NaN for a row with NaN or infinity.
    """
    rows = x.float()
    scale = inputs.scales(rows)
    return inputs.number_format.round(rows.div(scale)).to(torch.int8), scale


def _launch_dynamic(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
    activations: ActivationScheme,
) -> torch.Tensor:
    """Return y [M, N] = x [M, K] W^T + bias [N], by int8 products; x is rounded to int8 by `activations`.

    `layout` is W from `_build`: codes int8 [segments, N, segment] and scales float32 [segments, N]. A segment
    is the columns of one integer product. `weight` is not read.
    """
    values, scale = layout
    segments, _, segment = values.shape
    some = []
    for rows in torch.split(x, _ROWS):
        codes, x_scale = _quantized(rows, activations)
        if segments * segment > codes.shape[1]:
            codes = F.pad(codes, (0, segments * segment - codes.shape[1]))
        y = torch._int_mm(codes[:, :segment], values[0].T).float().mul_(scale[0])
        for index in range(1, segments):
            part = codes[:, index * segment : (index + 1) * segment]
            y.addcmul_(torch._int_mm(part, values[index].T).float(), scale[index])
        y.mul_(x_scale)
        some.append((y if bias is None else y.add_(bias)).to(x.dtype))
    return some[0] if len(some) == 1 else torch.cat(some)


DYNAMIC_ROW = Kernel(
    name="int8-dynamic",
    summary="exact int8 products with inputs that a scheme rounds to int8, which it quantizes first; float32 "
    "sums; holds one more byte per weight",
    devices=("cpu",),
    why_unsupported=_why_not_dynamic,
    why_slower=_why_dynamic_is_slower,
    layout=Layout("int8-dynamic", partial(_build, divide=_whole_groups)),
    launch=_launch_dynamic,
    rounds_x=True,
)
DIGITS_ROW = Kernel(
    name="int-digits",
    summary="exact int8 products of the weights and three digits of the activations; float32 sums; holds "
    "one more byte per weight",
    devices=("cpu",),
    why_unsupported=_why_unsupported,
    why_slower=_why_slower,
    layout=Layout("int-digits", _build),
    launch=_launch,
)
