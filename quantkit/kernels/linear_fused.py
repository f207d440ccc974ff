"""The operator `quantkit::linear` in traced graphs, whose kernels can take norms, and gate what they compute.

`weight` is what the operator takes after x, or of it what is no tensor: scheme, out_features, layout_name.
"""

from typing import Any

import torch

from quantkit.kernels.linear import run_linear
from quantkit.kernels.problem import Normed, Problem
from quantkit.kernels.registry import Chosen, choose
from quantkit.packing.schemes import parse_token


def _runs(
    rows: int, columns: int, dtype: torch.dtype, device: torch.device, scheme: str, n: int, layout_name: str
) -> tuple[Problem, Chosen] | None:
    """The problem of x [rows, columns], and what runs it; None where x is scaled first."""
    parsed = parse_token(scheme)
    if parsed.column_scale:
        return None
    problem = Problem.on(device, rows, n, columns, parsed, dtype, layout_name)
    return problem, choose(problem)


def does_norm(
    part: str, rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any
) -> bool:
    """Whether the kernel that the operator would run for x [rows, columns] does a part of a norm (`Normed`).

    What is begun has no root yet, and may be too large for a float16.
    """
    found = _runs(rows, columns, dtype, device, *weight)
    return (
        found is not None
        and (part == "whole" or dtype == torch.bfloat16)
        and found[1].row.no_norm(found[0], found[1].tile, part) is None
    )


def gates(rows: int, columns: int, dtype: torch.dtype, device: torch.device, *weight: Any) -> bool:
    """Whether the kernel that the operator would run for x [rows, columns] can gate what it computes."""
    found = _runs(rows, columns, dtype, device, *weight)
    return found is not None and found[1].row.no_gate(found[0], found[1].tile) is None


def gated_linear(x: torch.Tensor, *weight: Any, gate: str) -> torch.Tensor:
    """The second half of the columns that the operator computes, gated by the first (`glue.gate`).

    For what `gates` says.
    """
    return run_linear(x, *weight, gate=gate)


def linear_then_norm(
    x: torch.Tensor, other: torch.Tensor, norm: torch.Tensor, kind: str, *weight: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the operator computes plus `other`; the norm of that by `norm`, begun; and the squares that
    `linear_of_begun` ends it with.

    For "begin" of `does_norm`; all are contiguous.
    """
    columns = other.shape[-1]
    flat, total = other.view(-1, columns), torch.empty_like(other)
    squares = torch.empty((len(flat), -(-columns // 16)), dtype=torch.float32, device=x.device)
    y = run_linear(x, *weight, normed=Normed("begin", kind, 0.0, norm, flat, total, squares))
    return total, y.view(total.shape), squares


def linear_of_begun(
    x: torch.Tensor, squares: torch.Tensor, eps: float, *weight: Any, gate: str = ""
) -> torch.Tensor:
    """What the operator computes of the norm that x was begun to become; gated as by `gated_linear`.

    For "end" of `does_norm`.
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
    """x + `other`, and what the operator computes of the norm of that by `norm` (`glue.add_norm`) at once.

    For "whole" of `does_norm`; all are contiguous. Without `other` the first result is x. With the kind of a
    `gate`, what is computed is that of `gated_linear`.
    """
    total = x if other is None else torch.empty_like(x)
    flat = None if other is None else other.view(-1, x.shape[-1])
    normed = Normed("whole", kind, eps, norm, flat, None if other is None else total)
    return total, run_linear(x, *weight, normed=normed, gate=gate)
