"""Bucketize: look up the code of a value in a table of cells, which is faster than a binary search."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

#: Most cells of a table. A code book whose edges need finer cells is searched instead.
MAX_CELLS = 1 << 12


def codes_between(x: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    """Return the codes (uint8 [...]) of values `x` (float32 [...]) in a code book with these `edges`.

    `edges` ascend; edge i is the smallest value whose code is i + 1.
    """
    if len(edges) == 1:
        return (x >= edges[0]).view(torch.uint8)
    cells = _cells(edges, x.device)
    if cells is None:
        bounds = torch.tensor(edges, dtype=torch.float32, device=x.device)
        return torch.bucketize(x.contiguous(), bounds, out_int32=True, right=True).to(torch.uint8)
    return cells.codes(x)


@dataclass(frozen=True, eq=False)
class _Cells:
    """Lookup table of cells of equal width, a power of two, with at most one edge in each.

    Cell i is [first + i, first + i + 1) / per_unit. `code` (uint8) is one less than the code of values from
    `edge` (float32) on. Without an edge in the cell, `edge` lies below or above all of it. The outermost
    cells extend to infinity.
    """

    per_unit: float
    first: int
    code: torch.Tensor
    edge: torch.Tensor

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        """Return the codes (uint8 [...]) of values `x` (float32 [...])."""
        cell = (x * self.per_unit).floor_().clamp_(self.first, self.first + len(self.edge) - 1)
        # NaN may get any code, but its index must stay inside the table.
        index = cell.sub_(self.first).nan_to_num_(0.0).to(torch.int32).flatten()
        above = x.flatten() >= self.edge.index_select(0, index)
        return self.code.index_select(0, index).add_(above.view(torch.uint8)).view(x.shape)


@lru_cache(maxsize=64)
def _cells(edges: tuple[float, ...], device: torch.device) -> _Cells | None:
    """Return the lookup table for two or more ascending `edges`, on `device`; None if it is too large.

    Cells are as wide as the largest power of two within the smallest gap. More than `MAX_CELLS` are too many.
    A lookup takes about a quarter of the time of a binary search.
    """
    gap = min(b - a for a, b in pairwise(edges))
    # Multiplying by a power of two is exact, so no value moves to a neighbouring cell.
    per_unit = 2.0 ** -math.floor(math.log2(gap))
    first, last = math.floor(edges[0] * per_unit), math.floor(edges[-1] * per_unit)
    if last - first >= MAX_CELLS:
        return None
    at = {math.floor(edge * per_unit): edge for edge in edges}
    code, codes, limits = 0, [], []
    for cell in range(first, last + 1):
        codes.append(code)
        limits.append(at.get(cell, math.inf))
        code += cell in at
    return _Cells(
        per_unit,
        first,
        torch.tensor(codes, dtype=torch.uint8, device=device),
        torch.tensor(limits, dtype=torch.float32, device=device),
    )
