"""Which kernel runs what, and why others do not: the data behind `quantkit doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quantkit.kernels.gemm.fused_kernels import ungroupable
from quantkit.kernels.gemm.support import why_not_narrow_experts
from quantkit.kernels.problem import KernelRow, Problem, tile_text
from quantkit.kernels.registry import ROWS, choose_unforced, explain, sums_text
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class Choice:
    """What the table says of one problem; `row` is None where nothing runs it.

    `tile` is None for a row without tiles, `us` where no tile table has it for the problem.
    """

    problem: Problem
    row: str | None
    tile: str | None
    us: float | None
    #: (row, reason) of every row that does not run it, in table order; those of other devices left out.
    refusals: tuple[tuple[str, str], ...]
    #: Why experts with such weights are multiplied with one after the other; None where they are grouped.
    ungrouped: str | None
    #: Why few tokens are not multiplied with such experts, grouped, by `fused-narrow`.
    not_narrow: str | None


def choices(
    schemes: Iterable[Scheme],
    dtypes: Iterable[torch.dtype],
    rows_of_x: Iterable[int],
    *,
    shape: tuple[int, int] = (4096, 4096),
    device: str = "cpu",
) -> tuple[Choice, ...]:
    """The table's answer for each scheme x activation dtype x M, for a weight `shape` [N, K] on `device`.

    `QUANTKIT_KERNEL` is not applied: this is what runs when nothing is forced.
    """
    dtypes, rows_of_x = tuple(dtypes), tuple(rows_of_x)
    return tuple(
        choice_of(Problem.on(torch.device(device), m, *shape, scheme, dtype))
        for scheme in schemes
        for dtype in dtypes
        for m in rows_of_x
    )


def choice_of(problem: Problem) -> Choice:
    """The table's answer for one problem."""
    here = {row.name for row in device_rows(problem.device)}
    verdicts = [(name, reason) for name, reason in explain(problem) if name in here]
    chosen = choose_unforced(problem) if any(reason is None for _, reason in verdicts) else None
    tile = None if chosen is None else chosen.tile
    source = "" if chosen is None or not chosen.source else f" ({chosen.source})"
    return Choice(
        problem,
        None if chosen is None else chosen.row.name,
        None if tile is None else tile_text(tile) + sums_text(problem, tile) + source,
        None if chosen is None else chosen.us,
        tuple((name, reason) for name, reason in verdicts if reason is not None),
        ungroupable(problem),
        why_not_narrow_experts(problem, 2),
    )


def device_rows(device: str) -> tuple[KernelRow, ...]:
    """The rows there are for a device type."""
    return tuple(row for row in ROWS if device in row.devices)
