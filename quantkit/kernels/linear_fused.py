"""Linears in traced graphs that fuse a norm of their input or output, or a gate of their output.

`weight` stands for the arguments of the operator `quantkit::linear` after x. In support checks it stands for
those without tensors: scheme, out_features, layout_name.
"""

from collections.abc import Sequence
from typing import Any

import torch

from quantkit.kernels.linear import run_linear
from quantkit.kernels.ops.quantize_x import BLOCK, CodeOrder, QuantizedX
from quantkit.kernels.problem import Normed, Problem
from quantkit.kernels.registry import Chosen, choose
from quantkit.packing.schemes import parse_token


def _runs(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, scheme: str, n: int, layout_name: str
) -> tuple[Problem, Chosen] | None:
    """Return the problem of x [rows, columns] and its kernel; None if column scales multiply x first."""
    parsed = parse_token(scheme)
    if parsed.column_scale:
        return None
    problem = Problem.on(device, rows, n, columns, parsed, dtype, layout_name)
    return problem, choose(problem)


def does_norm(
    part: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any
) -> bool:
    """Return True if the kernel for x [rows, columns] can compute `part` of an RMSNorm.

    It cannot where x is rounded after the norm. A norm that is only begun is not yet divided by its RMS, and
    may exceed float16. `problem.Normed` says what the parts "whole", "begin" and "end" are.
    """
    found = _runs(rows, columns, dtype, device, *weight)
    return (
        found is not None
        and (part == "begin" or found[0].activations is None)
        and (part == "whole" or dtype == torch.bfloat16)
        and found[1].kernel.no_norm(found[0], found[1].tile, part) is None
    )


def rounds_before(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if x [rows, columns] must be rounded before the launch of its kernel, in one of its own."""
    parsed = parse_token(weight[0])
    if parsed.activations is None:
        return False
    found = _runs(rows, columns, dtype, device, *weight)
    return found is None or not found[1].kernel.rounds_x


def rounds_within(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if the kernel rounds x [rows, columns] in its own launch, as the weight's scheme says."""
    found = _runs(rows, columns, dtype, device, *weight)
    return found is not None and found[0].activations is not None and found[1].rounds(found[0])


def code_order(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any
) -> CodeOrder | None:
    """Return the order of columns in which a kernel reads x [rows, columns] as 8-bit codes.

    None if it reads none. Rows shorter than `BLOCK` are not quantized before. There Triton 3.6 may know two
    operands of its e4m3 conversion to be equal, and on an H200 one code is then undefined.
    """
    if columns < BLOCK:
        return None
    found = _runs(rows, columns, dtype, device, *weight)
    if found is None or found[0].activations is None or found[1].kernel.code_order is None:
        return None
    order: CodeOrder = found[1].kernel.code_order(found[0])
    return order


def gates(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if the kernel for x [rows, columns] can gate its output, f(first half) * second half."""
    found = _runs(rows, columns, dtype, device, *weight)
    return found is not None and found[1].kernel.no_gate(found[0], found[1].tile) is None


def gated_linear(x: torch.Tensor, *weight: Any, gate: str) -> torch.Tensor:
    """Return f(g) * u, [..., N / 2], where g and u are the halves of the columns of x W^T and f is `gate`.

    `x` is [..., K]. `gates` must be true.
    """
    return run_linear(x, *weight, gate=gate)


def linear_then_norm(
    x: torch.Tensor, other: torch.Tensor, norm: torch.Tensor, kind: str, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return t = x W^T + other, t * norm, and sums of squares of t: an RMSNorm without its division.

    `x` is [..., K], `other` [..., N], `norm` [N] the weights, all contiguous. `kind` is one of `NORMS`: what
    is rounded, and added to weights. Results are [..., N], [..., N] and float32 [M, N / 16], over 16 columns
    each; `linear_of_begun` divides. `does_norm("begin", ...)` must be true.
    """
    columns = other.shape[-1]
    flat, total = other.view(-1, columns), torch.empty_like(other)
    squares = torch.empty((len(flat), -(-columns // 16)), dtype=torch.float32, device=x.device)
    y = run_linear(x, *weight, normed=Normed("begin", kind, 0.0, norm, flat, total, squares))
    return total, y.view(total.shape), squares


def linear_of_begun(
    x: torch.Tensor, squares: torch.Tensor, eps: float, *weight: Any, gate: str = ""
) -> torch.Tensor:
    """Return x W^T / sqrt(mean of squares + eps), [..., N]: a linear that ends a norm begun in `x`.

    `x` [..., K] and `squares` [M, K / 16] float32 are from `linear_then_norm`. With `gate`, the result is
    gated as by `gated_linear`. `does_norm("end", ...)` must be true.
    """
    return run_linear(x, *weight, normed=Normed("end", eps=eps, squares=squares), gate=gate)


def linear_of_norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    kind: str,
    *weight: Any,
    gate: str = "",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return x + other, and RMSNorm(x + other) W^T, in one launch.

    `x` and `other` are [..., K], `norm` [K] the weights, all contiguous. `kind` is one of `NORMS`: what is
    rounded, and added to weights. Results are [..., K] and [..., N]. With `gate`, an activation f, the second
    is f(first half) * second half of its columns. Without `other` the first is x. `does_norm("whole", ...)`
    must be true.
    """
    total = x if other is None else torch.empty_like(x)
    flat = None if other is None else other.view(-1, x.shape[-1])
    normed = Normed("whole", kind, eps, norm, flat, None if other is None else total)
    return total, run_linear(x, *weight, normed=normed, gate=gate)


def linear_of_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    *weight: Any,
) -> torch.Tensor:
    """Return x W^T, [..., N], for x of `shape` [..., K] and `dtype` that is given as 8-bit codes.

    `codes`, `scales` and `sums` are the fields of a `QuantizedX`, in the order that `code_order(...)`
    returns.
    """
    x = codes.new_empty((), dtype=dtype).expand(*shape)
    return run_linear(x, *weight, codes=QuantizedX(codes, scales, sums))
