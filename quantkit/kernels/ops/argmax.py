"""Argmax of each row of logits in two launches, for greedy sampling.

Many programs share a row: a decode step has few rows, and they are long. torch runs one program per row.
"""

from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2
from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features

#: Columns per program of the first launch, so that a vocabulary of 128,256 has 63 parts.
PART = 2048
#: Largest N: one program of the second launch takes at most 1024 parts of a row.
MOST_COLUMNS = 1024 * PART


def argmax_reference(x: torch.Tensor) -> torch.Tensor:
    """Return the column of the largest number of each row by torch: `x` [B, N] -> int64 [B]."""
    return x.argmax(-1)


def argmax_two_stage(x: torch.Tensor) -> torch.Tensor:
    """Return the argmax of each row of `x` [B, N] (float32, bfloat16 or float16): int64 [B].

    Of equal values, the first wins. NaN is larger than every number, and -0 equals 0. N is 1 to
    `MOST_COLUMNS`.
    """
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = -(-columns // PART)
    partial = torch.empty((rows, parts), dtype=torch.int64, device=x.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=x.device)
    of_parts, of_rows = _launches(rows, parts, launch_features(x.device))
    with launching_on(x.device):
        of_parts(x, partial, x.stride(0), columns)
        of_rows(partial, tokens)
    return tokens


def argmax_tokens(logits: torch.Tensor) -> torch.Tensor:
    """Return the greedy tokens of `logits` [B sequences, V tokens]: int64 [B].

    Runs `argmax_two_stage` on a GPU that has Triton, and torch's argmax elsewhere.
    """
    fits = logits.dtype in ACTIVATION_DTYPES and 0 < logits.shape[-1] <= MOST_COLUMNS
    if fits and logits.is_cuda and "triton" in device_features(logits.device):
        return argmax_two_stage(logits)
    return argmax_reference(logits)


@lru_cache(maxsize=256)
def _launches(rows: int, parts: int, features: frozenset[str]) -> tuple[Launch, Launch]:
    """Build the launches of `argmax_partial`, `parts` programs per row, and then of `argmax_combine`.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.ops.argmax_kernels import argmax_combine, argmax_partial

    padded = next_power_of_2(parts)
    # 16 columns per thread in the first launch, 4 parts per thread in the second.
    return (
        IndexLaunch(argmax_partial, (rows, parts), B=PART, **overlap(features), num_warps=PART // 512),
        IndexLaunch(
            argmax_combine,
            (rows,),
            PARTS=parts,
            PADDED=padded,
            **overlap(features),
            num_warps=max(1, padded // 128),
        ),
    )
