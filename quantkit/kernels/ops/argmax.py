"""The likeliest token of each row of logits: the place of its largest number, in two launches.

torch has one program for a row, and a decoding step has few rows, which are long.
"""

from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, launch_features, launching_on, overlap
from quantkit.kernels.layouts.shared_memory import power_of_two
from quantkit.kernels.problem import ACTIVATION_DTYPES, device_features

#: Numbers of a row that a program reads: of 128256 there are 63 parts.
PART = 2048
#: The most numbers of a row, of whose parts one program has the largest.
MOST_COLUMNS = 1024 * PART


def slow_largest(x: torch.Tensor) -> torch.Tensor:
    """The twin of `largest`."""
    return x.argmax(-1)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Where the largest number of each row of `x` [B, N] is: int64 [B], the first of several that are equal.

    What is no number is larger than all that are, and -0 is 0. N is from 1 to `MOST_COLUMNS`, and numbers are
    float32, bfloat16 or float16.
    """
    rows, columns = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    parts = -(-columns // PART)
    found = torch.empty((rows, parts), dtype=torch.int64, device=x.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=x.device)
    of_parts, of_rows = _launches(rows, parts, launch_features(x.device))
    with launching_on(x.device):
        of_parts(x, found, x.stride(0), columns)
        of_rows(found, tokens)
    return tokens


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """The tokens int64 [B] with the largest of `logits` [B, V]: by `largest` on a GPU that has Triton."""
    fits = logits.dtype in ACTIVATION_DTYPES and 0 < logits.shape[-1] <= MOST_COLUMNS
    if fits and logits.is_cuda and "triton" in device_features(logits.device):
        return largest(logits)
    return slow_largest(logits)


@lru_cache(maxsize=256)
def _launches(rows: int, parts: int, features: frozenset[str]) -> tuple[Launch, Launch]:
    """What has the largest of each part, and what has that of each row."""
    from quantkit.kernels.ops.argmax_kernels import largest_of_parts, largest_of_rows

    padded = power_of_two(parts)
    # Sixteen numbers of a thread, and up to four parts.
    return (
        IndexLaunch(largest_of_parts, (rows, parts), B=PART, **overlap(features), num_warps=PART // 512),
        IndexLaunch(
            largest_of_rows,
            (rows,),
            PARTS=parts,
            PADDED=padded,
            **overlap(features),
            num_warps=max(1, padded // 128),
        ),
    )
