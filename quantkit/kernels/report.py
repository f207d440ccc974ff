"""Report the kernel selected for a problem, and why others are not: the data of `quantkit doctor`."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from quantkit.kernels.gemm.fused_kernels import grouped_kernels, why_not_groupable, why_not_shared
from quantkit.kernels.problem import Kernel, Problem, tile_text
from quantkit.kernels.registry import KERNELS, choose_unforced, explain, sums_text
from quantkit.packing.schemes import Scheme


@dataclass(frozen=True)
class Selection:
    """Kernel and tile selected for one problem, and why other kernels were not.

    kernel      name of the kernel; None if none supports the problem
    tile        the tile (launch configuration) as text; None for a kernel without tiles
    us          measured microseconds; None if no tile table has a time
    refusals    (kernel, reason) of each kernel of this device that does not run it, in the order of `KERNELS`
    ungrouped   why experts with such weights run one after the other; None if they run as a grouped GEMM
    unshared    why a grouped GEMM of few tokens has each warp load x for itself; None if warps share it, and
                without experts
    """

    problem: Problem
    kernel: str | None
    tile: str | None
    us: float | None
    refusals: tuple[tuple[str, str], ...]
    ungrouped: str | None
    unshared: str | None


def selections(
    schemes: Iterable[Scheme],
    dtypes: Iterable[torch.dtype],
    rows_of_x: Iterable[int],
    *,
    shape: tuple[int, int] = (4096, 4096),
    device: str = "cpu",
) -> tuple[Selection, ...]:
    """Return the kernel selected for each scheme, activation dtype and M, for a weight `shape` [N, K].

    `rows_of_x` are the values of M. `device` is the device's type or name. `QUANTKIT_KERNEL` is ignored.
    """
    dtypes, rows_of_x = tuple(dtypes), tuple(rows_of_x)
    return tuple(
        selection_of(Problem.on(torch.device(device), m, *shape, scheme, dtype))
        for scheme in schemes
        for dtype in dtypes
        for m in rows_of_x
    )


def selection_of(problem: Problem) -> Selection:
    """Return which kernel and tile run `problem`, and why other kernels do not."""
    here = {kernel.name for kernel in device_kernels(problem.device)}
    verdicts = [(name, reason) for name, reason in explain(problem) if name in here]
    chosen = choose_unforced(problem) if any(reason is None for _, reason in verdicts) else None
    tile = None if chosen is None else chosen.tile
    source = "" if chosen is None or not chosen.source else f" ({chosen.source})"
    return Selection(
        problem,
        None if chosen is None else chosen.kernel.name,
        None if tile is None else tile_text(tile) + sums_text(problem, tile) + source,
        None if chosen is None else chosen.us,
        tuple((name, reason) for name, reason in verdicts if reason is not None),
        why_not_groupable(problem),
        why_not_shared(problem, 2),
    )


def device_kernels(device: str) -> tuple[Kernel, ...]:
    """Return the kernels that run on a device type, "cpu" or "cuda"."""
    return tuple(kernel for kernel in KERNELS if device in kernel.devices)


def experts_text(ungrouped: str | None, unshared: str | None) -> str:
    """Return text on how experts run, from the fields `ungrouped` and `unshared` of a `Selection`."""
    if ungrouped is not None:
        return f"one after the other: {ungrouped}"
    sharing, other_kernels = (
        " or ".join(kernel.name for kernel in grouped_kernels(shares_x)) for shares_x in (True, False)
    )
    if unshared is not None:
        return f"grouped, few tokens for each in {other_kernels}, not {sharing}: {unshared}"
    return f"grouped, few tokens for each in {sharing}"
