"""Sums of squares of weights."""

import torch

from quantkit.errors import FormatError


def sum_of_squares(residual: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of `residual` (float32 [n, K]), float64 [n, 1]."""
    norm: torch.Tensor = torch.linalg.vector_norm(residual, dim=-1, keepdim=True).double()
    # A fast pass in float32, then a slow one for rows whose squares underflow.
    vanished = norm[:, 0] < 1e-15
    if vanished.any():
        norm[vanished] = torch.linalg.vector_norm(
            residual[vanished], dim=-1, keepdim=True, dtype=torch.float64
        )
    return norm.square()


def squared_norm(weights: torch.Tensor) -> float:
    """Return the sum of squares of `weights` (float32 [n, K]); refuse infinities and NaN."""
    # A fast pass in float32, then a slow exact one for sums that overflow.
    norm = float(sum_of_squares(weights).sum())
    if not norm < float("inf"):
        norm = float(torch.linalg.vector_norm(weights, dtype=torch.float64)) ** 2
    if not norm < float("inf"):
        nan, infinite = int(weights.isnan().sum()), int(weights.isinf().sum())
        raise FormatError(
            f"{nan} NaN and {infinite} infinite weights (as float32); a weight must be finite. "
            "Repair the checkpoint, or keep the layer dense with a rule."
        )
    return norm
