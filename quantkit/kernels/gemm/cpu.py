"""CPU kernels faster than `unpack`: torch's weight-only GEMMs and an exact integer GEMM.

Limits and crossovers were measured with torch 2.13 on 2 cores of an AVX512 machine by
`benchmarks/cpu_decode.py`. All are torch operators; nothing is compiled here.
"""

from collections.abc import Sequence

import torch

from quantkit.kernels.gemm.cpu_int8 import DIGITS_ROW, DYNAMIC_ROW
from quantkit.kernels.gemm.unpack import block_rows
from quantkit.kernels.problem import Kernel, Layout, LayoutTensors, Problem, one_plane
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

_INT4_GROUPS = (32, 64, 128, 256)
#: Rows of a weight that torch's operator packs together.
_INT4_BLOCK = 64
#: Most rows of x for which torch's operators are fastest.
_INT4_ROWS, _INT8_ROWS = 32, 16


def _inexact_scales(problem: Problem) -> str | None:
    """Return why torch's operators would round the scales of a problem's weight; None if scales stay exact.

    These operators hold scales in the dtype of activations.
    """
    scale_dtype = problem.scheme.scale_dtype
    # With a global scale, a scale has more digits than its stored dtype.
    same = problem.dtype == scale_dtype and not problem.scheme.global_scale
    if same or problem.dtype == torch.float32:
        return None
    return (
        f"torch's operator holds scales in the activation dtype, and {scale_dtype} scales are "
        f"not exact in {problem.dtype}; use {scale_dtype} activations"
    )


def _is_int(scheme: Scheme, bits: int) -> bool:
    """Return True if codes of `scheme` are integers of `bits` bits."""
    return isinstance(scheme.format, IntFormat) and scheme.format.bits == bits


def _why_no_int4(problem: Problem) -> str | None:
    """Return why torch's int4 operator cannot run a problem; None if it can."""
    scheme = problem.scheme
    if not _is_int(scheme, 4):
        return f"it computes int4, the weight is {scheme.format.name}"
    if scheme.planes > 1:
        return one_plane(problem)
    if scheme.group_size not in _INT4_GROUPS:
        size = scheme.group_size or "channel"
        return (
            f"torch's operator takes groups of 32, 64, 128 or 256, this is {size}; quantize with one of them"
        )
    columns = scheme.group_columns(problem.k)
    # A group longer than a row has the columns of the row; the operator takes no other size than its own.
    if columns != scheme.group_size or problem.k % columns:
        return f"torch's operator takes whole groups, K={problem.k} is not a multiple of {scheme.group_size}"
    if problem.n % 16:
        return f"torch's operator takes N in multiples of 16, this is {problem.n}"
    return _inexact_scales(problem)


def _why_torch_op_is_slower(problem: Problem, name: str, limit: int) -> str | None:
    """Return why torch's operator `name`, "int4" or "int8", is not the fastest for a problem; None if it is.

    The operator is the fastest for up to `limit` rows of x.
    """
    if problem.dtype != torch.bfloat16:
        return f"torch's {name} operator is 4 to 15 times slower than dense at {problem.dtype}; use bfloat16"
    if "avx2" not in problem.features:
        return f"torch's {name} operator has no vector code for this CPU"
    if problem.m > limit:
        return f"torch's {name} operator is slower than other rows for M above {limit}, this is {problem.m}"
    return None


def _int4_build(weight: PackedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return `weight` [N, K] for torch's int4 operator: codes uint8 [N, K / 2], scales [K / group, N, 2].

    The last axis of scales has the scale and scale * (8 - zero-point), both in `dtype`, the dtype of
    activations.
    """
    rows, columns = weight.shape
    step = -(-block_rows(columns, weight.device) // _INT4_BLOCK) * _INT4_BLOCK
    # Blocks of rows are packed independently, so cutting between them changes nothing.
    packed = [
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(weight.codes(start, start + step).int(), 1)
        for start in range(0, rows, step)
    ]
    scale = weight.group_scale()
    zero_point = weight.zeros_in_codes()
    offset = torch.zeros_like(scale) if zero_point is None else scale * (8 - zero_point.float())
    scales = torch.stack([scale, offset], dim=-1).transpose(0, 1)
    return torch.cat(packed), scales.to(dtype).contiguous()


def _int4_join(
    layouts: Sequence[LayoutTensors], rows: Sequence[int], *_: object
) -> tuple[LayoutTensors, tuple[LayoutTensors, ...]] | None:
    """Concatenate layouts of `_int4_build` along N; return (joined layout, views of it for each weight).

    `rows` has the N of each weight; all weights have the same K. Returns None unless each N is a multiple of
    64.
    """
    if any(count % _INT4_BLOCK for count in rows):
        return None
    packed = torch.cat([one for one, _ in layouts])
    scales = torch.cat([one for _, one in layouts], dim=1)
    parts = zip(torch.split(packed, list(rows)), torch.split(scales, list(rows), dim=1), strict=True)
    return (packed, scales), tuple(parts)


def _int4_launch(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return y [M, N] = x [M, K] W^T + bias [N] by torch's int4 operator; `layout` is from `_int4_build`."""
    packed, scales = layout
    group_size = weight.scheme.group_size
    assert isinstance(group_size, int)
    # The operator reads scales as contiguous, but those of a part of joined weights are not.
    y: torch.Tensor = torch._weight_int4pack_mm_for_cpu(x, packed, group_size, scales.contiguous())
    return y if bias is None else y.add_(bias)


def _why_no_int8(problem: Problem) -> str | None:
    """Return why torch's int8 operator cannot run a problem; None if it can."""
    scheme = problem.scheme
    if not _is_int(scheme, 8):
        return f"it computes int8, the weight is {scheme.format.name}"
    if scheme.has_zero_point:
        return "torch's operator has no zero-points; quantize symmetrically"
    if isinstance(scheme.group_size, int):
        return "torch's operator has one scale per output channel; quantize with group size 'channel'"
    if problem.k % 16:
        # Measured: for other K its bfloat16 loop reads past the row, with wrong results or a crash.
        return f"torch's operator is wrong for K that is no multiple of 16, this is {problem.k}"
    return _inexact_scales(problem)


def _int8_build(weight: PackedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return `weight` [N, K] in the layout of torch's int8 operator: (values int8 [N, K], scales [N]).

    Scales have `dtype`, the dtype of activations.
    """
    number_format = weight.scheme.format
    assert isinstance(number_format, IntFormat)
    # Flip the sign bit: offset binary to two's complement.
    return (
        (weight.codes() ^ number_format.offset).view(torch.int8),
        weight.group_scale().flatten().to(dtype),
    )


def _int8_launch(
    x: torch.Tensor,
    weight: PackedTensor,
    layout: tuple[torch.Tensor, ...],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """Return y [M, N] = x [M, K] W^T + bias [N] by torch's int8 operator; `layout` is from `_int8_build`."""
    values, scale = layout
    y: torch.Tensor = torch._weight_int8pack_mm(x, values, scale)
    return y if bias is None else y.add_(bias)


CPU_KERNELS = (
    Kernel(
        name="torch-int4",
        summary="torch's weight-only int4 product, for a few bfloat16 rows; float32 sums, rounded once, "
        "and once more by a bias; scale * (8 - zero_point) is rounded too; holds the codes twice",
        devices=("cpu",),
        why_unsupported=_why_no_int4,
        why_slower=lambda problem: _why_torch_op_is_slower(problem, "int4", _INT4_ROWS),
        layout=Layout("torch-int4", _int4_build, _int4_join, most_rows=_INT4_ROWS),
        launch=_int4_launch,
    ),
    Kernel(
        name="torch-int8",
        summary="torch's weight-only int8 product, for a few bfloat16 rows; float32 sums, rounded once, "
        "and once more by a bias; holds the codes twice",
        devices=("cpu",),
        why_unsupported=_why_no_int8,
        why_slower=lambda problem: _why_torch_op_is_slower(problem, "int8", _INT8_ROWS),
        layout=Layout("torch-int8", _int8_build),
        launch=_int8_launch,
    ),
    DIGITS_ROW,
    DYNAMIC_ROW,
)
