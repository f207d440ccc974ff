"""Cells: where the code of a value in a code book is looked up, which is faster than a search."""

import math
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

#: A book whose edges lie closer than this many cells can tell apart is searched instead.
MAX_CELLS = 1 << 12


def codes_between(x: torch.Tensor, edges: tuple[float, ...]) -> torch.Tensor:
    """The codes (uint8) of values (float32) in a book, given its edges.

    These ascend, and are of each code but the first the smallest value that has it.
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
    """Cells of equal width, a power of two, with at most one edge in each: where a value's code is looked up.

    Cell i is [first + i, first + i + 1) / per_unit. `code` (uint8) is the code of what is in it below
    `edge` (float32), and one less than the code of what is not. The outermost cells reach to infinity.
    """

    per_unit: float
    first: int
    code: torch.Tensor
    edge: torch.Tensor

    def codes(self, x: torch.Tensor) -> torch.Tensor:
        """The codes (uint8) of values (float32), both of any shape."""
        cell = (x * self.per_unit).floor_().clamp_(self.first, self.first + len(self.edge) - 1)
        # NaN has no cell; which code it gets does not matter, but it must not be an address.
        index = cell.sub_(self.first).nan_to_num_(0.0).to(torch.int32).flatten()
        above = x.flatten() >= self.edge.index_select(0, index)
        return self.code.index_select(0, index).add_(above.view(torch.uint8)).view(x.shape)


@lru_cache(maxsize=64)
def _cells(edges: tuple[float, ...], device: torch.device) -> _Cells | None:
    """The cells of two edges or more; None where they were too many. About four times as fast as a search."""
    gap = min(b - a for a, b in pairwise(edges))
    # Multiplying by a power of two is exact, so that no value ends up in its neighbour's cell.
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
