"""Embedding lookup in one launch, and its references."""

from functools import lru_cache

import torch
from torch.nn import functional as F

from quantkit.kernels.jit.launcher import Launch, launch_features, launching_on, overlap

#: Columns per program: 16 bytes per thread at 16 bits.
EMBEDDED = 1024


def embed_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of `weight` [V tokens, N] for `ids` [...] int64, by torch: [..., N]."""
    return F.embedding(ids, weight)


def padded_embed_reference(ids: torch.Tensor, weight: torch.Tensor, padding: int) -> torch.Tensor:
    """Return the rows of `weight` [V, N] for `ids` int64 [...], by torch: [..., N].

    The row of id `padding` gets no gradient.
    """
    return F.embedding(ids, weight, padding)


def embed(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the rows of `weight` [V tokens, N], of any strides, for `ids` int64 [...]: [..., N]."""
    columns = weight.shape[-1]
    y = torch.empty((*ids.shape, columns), dtype=weight.dtype, device=weight.device)
    launch = _embed_launch(ids.numel(), -(-columns // EMBEDDED), launch_features(weight.device))
    with launching_on(weight.device):
        launch(ids.contiguous(), weight, y, len(weight), columns, *weight.stride())
    return y


@lru_cache(maxsize=256)
def _embed_launch(rows: int, programs: int, features: frozenset[str]) -> Launch:
    """Build the launch of `embed` for `rows` ids, each row copied by `programs` programs.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.ops.embedding_kernel import embed

    return Launch(embed, (rows, programs), B=EMBEDDED, **overlap(features), num_warps=4)
