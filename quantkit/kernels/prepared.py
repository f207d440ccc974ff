"""The operator `quantkit::linear` in traced graphs, where what comes before prepares x for the kernel.

Norms and gates can write the columns of x in the order that a kernel wants, and kernels can take norms.
"""

import torch

from quantkit.kernels.linear import run_linear
from quantkit.kernels.problem import Normed, Problem
from quantkit.kernels.table import choose
from quantkit.packing.schemes import parse_token


def order_of(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    scheme: str,
    out_features: int,
    layout_name: str,
) -> str:
    """The order that the operator would put columns of x [rows, columns] in first, `KernelRow.order`."""
    parsed = parse_token(scheme)
    if parsed.column_scale:
        return ""
    problem = Problem.on(device, rows, out_features, columns, parsed, dtype, layout_name)
    return choose(problem).row.order(problem)


def linear_in_order(
    x: torch.Tensor,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    out_features: int,
    layout_name: str,
) -> torch.Tensor:
    """What the operator computes, of x whose columns are in the order that `order_of` names."""
    return run_linear(x, parts, layout, bias, scheme, out_features, layout_name, ordered=True)


def takes_norm(
    rows: int,
    columns: int,
    dtype: torch.dtype,
    device: torch.device,
    scheme: str,
    out_features: int,
    layout_name: str,
) -> bool:
    """Whether the kernel that the operator would run for x [rows, columns] takes the norm of x itself."""
    parsed = parse_token(scheme)
    if parsed.column_scale:
        return False
    problem = Problem.on(device, rows, out_features, columns, parsed, dtype, layout_name)
    chosen = choose(problem)
    return chosen.row.no_norm(problem, chosen.tile) is None


def linear_of_norm(
    x: torch.Tensor,
    other: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    kind: str,
    parts: list[torch.Tensor],
    layout: list[torch.Tensor],
    bias: torch.Tensor | None,
    scheme: str,
    out_features: int,
    layout_name: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x + `other`, and what the operator computes of the norm of that (`glue.add_norm`), in one launch.

    For what `takes_norm` says; all are contiguous. Without `other` the first result is x.
    """
    total = x if other is None else torch.empty_like(x)
    flat = None if other is None else other.view(-1, x.shape[-1])
    normed = Normed(weight, eps, kind, flat, None if other is None else total)
    return total, run_linear(x, parts, layout, bias, scheme, out_features, layout_name, normed=normed)
