"""Linears in traced graphs that also compute an RMSNorm of input or output, or a gate of the output.

`*weight` stands for the arguments of the operator `quantkit::linear` after x: parts, layout, bias, scheme
token, out_features, layout_name. In the checks, which take sizes instead of tensors, it stands for (scheme
token, out_features, layout_name).
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
    """Return the `Problem` of x [rows, columns] W^T and its kernel; None if the weight has column scales.

    `scheme` is a `Scheme.token`, `n` the number of outputs of W, `layout_name` its layout. Column scales
    multiply x before the kernel runs.
    """
    parsed = parse_token(scheme)
    if parsed.column_scale:
        return None
    problem = Problem.on(device, rows, n, columns, parsed, dtype, layout_name)
    return problem, choose(problem)


def does_norm(
    part: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any
) -> bool:
    """Return True if the kernel for x [rows, columns] can compute `part` of an RMSNorm.

    `part` is "whole", "begin" or "end" (`problem.Normed`); `weight` is (`Scheme.token`, out_features,
    layout_name). False if x is rounded to 8 bits after the norm. "begin" and "end" need bfloat16: before its
    division by the RMS, a norm may exceed float16.
    """
    found = _runs(rows, columns, dtype, device, *weight)
    return (
        found is not None
        and (part == "begin" or found[0].activations is None)
        and (part == "whole" or dtype == torch.bfloat16)
        and found[1].kernel.why_no_norm(found[0], found[1].tile, part) is None
    )


def rounds_before(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if x [rows, columns] is rounded to 8 bits by a launch of its own, before the product.

    `weight` is (`Scheme.token`, out_features, layout_name).
    """
    parsed = parse_token(weight[0])
    if parsed.activations is None:
        return False
    found = _runs(rows, columns, dtype, device, *weight)
    return found is None or not found[1].kernel.rounds_x


def rounds_within(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if the kernel for x [rows, columns] itself rounds x to 8 bits, as the scheme says.

    `weight` is (`Scheme.token`, out_features, layout_name).
    """
    found = _runs(rows, columns, dtype, device, *weight)
    return found is not None and found[0].activations is not None and found[1].rounds(found[0])


def code_order(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any
) -> CodeOrder | None:
    """Return the order of columns in which the kernel reads x [rows, columns] as 8-bit codes.

    `weight` is (`Scheme.token`, out_features, layout_name). An earlier kernel may then write x as such codes.
    None if the kernel reads no codes, and for rows shorter than `BLOCK`. For these, Triton 3.6 may take two
    operands of the conversion to e4m3 for one, and on an H200 a code is then undefined.
    """
    if columns < BLOCK:
        return None
    found = _runs(rows, columns, dtype, device, *weight)
    if found is None or found[0].activations is None or found[1].kernel.code_order is None:
        return None
    order: CodeOrder = found[1].kernel.code_order(found[0])
    return order


def gates(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Return True if the kernel for x [rows, columns] can gate its output: f(first half) * second half.

    `weight` is (`Scheme.token`, out_features, layout_name).
    """
    found = _runs(rows, columns, dtype, device, *weight)
    return found is not None and found[1].kernel.why_no_gate(found[0], found[1].tile) is None


def gated_linear(x: torch.Tensor, *weight: Any, gate: str) -> torch.Tensor:
    """Return f(g) * u, [..., N / 2], where g and u are the halves of the columns of x W^T [..., N].

    `x` is [..., K], f is the activation `gate`, and `weight` are the arguments of `quantkit::linear` after x.
    `gates(...)` must be true.
    """
    return run_linear(x, *weight, gate=gate)


def linear_then_norm(
    x: torch.Tensor, other: torch.Tensor, norm: torch.Tensor, kind: str, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return t = x W^T + other, t * norm, and sums of squares of t: an RMSNorm without its division.

        x, other    [..., K] and [..., N], contiguous
        norm        [N], contiguous weights; `kind` is one of `NORMS`, which says what is added to them
        weight      arguments of `quantkit::linear` after x
        results     [..., N], [..., N], and float32 [M, N / 16], each the sum over 16 columns

    The next linear, `linear_of_begun`, divides. `does_norm("begin", ...)` must be true.
    """
    columns = other.shape[-1]
    flat, total = other.view(-1, columns), torch.empty_like(other)
    squares = torch.empty((len(flat), -(-columns // 16)), dtype=torch.float32, device=x.device)
    y = run_linear(x, *weight, normed=Normed("begin", kind, 0.0, norm, flat, total, squares))
    return total, y.view(total.shape), squares


def linear_of_begun(
    x: torch.Tensor, squares: torch.Tensor, eps: float, *weight: Any, gate: str = ""
) -> torch.Tensor:
    """Return x W^T / sqrt(mean of squares + eps), [..., N]: a linear that ends an RMSNorm begun before.

        x          [..., K]: the second result of `linear_then_norm`
        squares    float32 [M, K / 16]: its third result
        weight     arguments of `quantkit::linear` after x
        gate       activation f: the result is [..., N / 2] = f(first half) * second half; "" for no gate

    `does_norm("end", ...)` must be true.
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
    """Return t = x + other and RMSNorm(t) W^T, in one launch: [..., K] and [..., N].

        x           [..., K], contiguous
        other       as x; if None, t is x
        norm        [K], contiguous weights of the norm
        kind        one of `NORMS`: where the norm rounds, and what it adds to its weights
        weight      arguments of `quantkit::linear` after x
        gate        activation f: the second result is f(first half) * second half of its columns; "" for none

    `does_norm("whole", ...)` must be true.
    """
    total = x if other is None else torch.empty_like(x)
    flat = None if other is None else other.view(-1, x.shape[-1])
    normed = Normed("whole", kind, eps, norm, flat, None if other is None else total)
    return total, run_linear(x, *weight, normed=normed, gate=gate)


def linear_of_codes(
    codes: torch.Tensor,
    scales: torch.Tensor,
    sums: torch.Tensor,
    order: Sequence[Any],
    shape: Sequence[int],
    dtype: torch.dtype,
    *weight: Any,
) -> torch.Tensor:
    """Return x W^T, [..., N], for x of `shape` [..., K] and `dtype` that was quantized to 8 bits before.

    `codes`, `scales` and `sums` are those of a `QuantizedX`, `order` the fields of its `CodeOrder`. `weight`
    are the arguments of `quantkit::linear` after x.
    """
    x = codes.new_empty((), dtype=dtype).expand(*shape)
    return run_linear(x, *weight, codes=QuantizedX(codes, scales, sums, CodeOrder(*order)))
