"""Add a LoRA to the result of a linear, y + factor * (x A^T) B^T, in two launches, and its references.

As torch operations it is six launches and more: x to float32, both products, the factor, the sum, and back.

    shrink    u = x A^T              [M, r] float32      a program per row and rank
    expand    y + factor * u B^T     [M, N]              a program per row and block of columns
"""

from functools import lru_cache

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2

#: Largest rank, and most rows of x times the rank. A and B are read for each row and x for each rank, mostly
#: from the L2 cache: with rank 16, 32 rows and K = 16384, 32 MB of float32 A and 16 MB of x. Not measured.
MOST_RANK, MOST_NUMBERS = 256, 512
#: Most columns of x that a program reads at a time, and most elements of B: 16 per thread of 8 warps.
SHRUNK, EXPANDED = 4096, 4096


def add_lora_reference(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return y + factor * (x A^T) B^T by torch, as PEFT does: `y` [..., N], x [..., K], a [r, K], b [N, r].

    All have one dtype.
    """
    return y + F.linear(F.linear(x, a), b) * factor


def add_wide_lora_reference(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return `add_lora_reference` in y's dtype for float32 `a` [r, K] and `b` [N, r], as PEFT keeps them."""
    return (y + F.linear(F.linear(x.float(), a), b) * factor).to(y.dtype)


def add_lora(
    y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return y + factor * (x A^T) B^T, rounded once, in y's shape and dtype.

    `y` is [..., N] and x [..., K], of one dtype; `a` [r, K] and `b` [N, r] have that or float32, and column
    stride 1. The rank is at most `MOST_RANK`, and pays up to `MOST_NUMBERS` numbers of u.
    """
    rank, columns = a.shape
    flat, of = x.reshape(-1, columns).contiguous(), y.reshape(-1, y.shape[-1]).contiguous()
    (m, n), features = of.shape, launch_features(x.device)
    u = torch.empty(m, rank, dtype=torch.float32, device=x.device)
    found = torch.empty_like(y, memory_format=torch.contiguous_format)
    shrink, expand = _launches(m, n, columns, rank, factor, features)
    with launching_on(x.device):
        shrink(flat, a, u, columns, a.stride(0))
        expand(of, u, b, found, n, b.stride(0))
    return found


@lru_cache(maxsize=256)
def _launches(
    m: int, n: int, columns: int, rank: int, factor: float, features: frozenset[str]
) -> tuple[Launch, Launch]:
    """Build the launches of `add_lora` for y [`m`, `n`], x [`m`, `columns`] and a LoRA of `rank`.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.lora.add_lora_kernels import expand, shrink

    block, ranks = min(SHRUNK, next_power_of_2(columns)), next_power_of_2(rank)
    width = max(1, min(next_power_of_2(n), EXPANDED // ranks))
    return (
        Launch(
            shrink,
            (m, rank),
            R=rank,
            B=block,
            STEPS=-(-columns // block),
            **overlap(features),
            num_warps=8,
        ),
        Launch(
            expand,
            (m, -(-n // width)),
            R=rank,
            RANKS=ranks,
            FACTOR=factor,
            B=width,
            **overlap(features),
            num_warps=8,
        ),
    )
