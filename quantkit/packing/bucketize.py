"""Bucketize: find the code of a value by a table of equal intervals, which is faster than a binary search."""

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
    """Lookup table of codes by value: it cuts the number line into cells of equal width, a power of two.

    per_unit  cells in an interval of length 1
    first     number of the first cell: cell i is [first + i, first + i + 1) / per_unit
    code      uint8 [cells], the code of values in the cell that are below its edge
    edge      float32 [cells], the smallest value of the next code; infinite without an edge in the cell

    A cell has at most one edge. The outermost cells extend to infinity.
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
    """Build the lookup table of two or more ascending `edges` on `device`; None for more than `MAX_CELLS`.

    Cells are as wide as the largest power of two within the smallest gap. A lookup takes about a quarter of
    the time of a binary search.
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
