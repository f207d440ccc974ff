"""Second moments of a linear's inputs: all that calibrated methods know of the data.

For inputs X [T, K] of a linear, H = X^T X / T. The squared error of the linear's outputs under stored weights
Q is tr((W - Q) H (W - Q)^T), so that q, k and v projections, which have one input, share one H.

Inputs come from the part of the model that is quantized already, so they differ from those of the original,
F. With the drift D = (F - X)^T X / T, the weights that bring W F closest from X are W + W D H^-1 (QEP, arXiv
2504.09629).
"""

from dataclasses import dataclass

import torch

from quantkit.errors import FormatError

#: Columns of H computed at a time: H is symmetric, and tiles below the diagonal are those above it.
TILE = 256
#: Added to the diagonal of H, in parts of its mean; a factorization that fails tries the next.
DAMPINGS = (0.01, 0.04, 0.16, 0.64)
#: How far weights move to make good for the drift. All the way fits the calibration data too closely.
CORRECTION = 0.5


@dataclass(frozen=True, eq=False)
class Moments:
    """H [K, K] and, where it was asked for, D [K, K], float32, means over `tokens`."""

    second: torch.Tensor
    tokens: int
    drift: torch.Tensor | None = None

    @property
    def importance(self) -> torch.Tensor:
        """The mean square of each input feature, float32 [K]."""
        return self.second.diagonal()

    def joined(self, other: "Moments | None", weight: float) -> "Moments":
        """These as if they were of `weight` tokens, together with those of others. Both have a drift or
        neither.
        """
        if other is None:
            return self
        share = weight / (weight + other.tokens)
        shift = None
        if self.drift is not None:
            assert other.drift is not None
            shift = torch.lerp(other.drift, self.drift, share)
        return Moments(torch.lerp(other.second, self.second, share), other.tokens, shift)

    def output_energy(self, rows: torch.Tensor) -> float:
        """The mean squared output of weights `rows` ([n, K] float32), summed over them: tr(rows H rows^T)."""
        return float(((rows @ self.second).double() * rows).sum())

    def scaled(self, factors: torch.Tensor) -> "Moments":
        """The moments of inputs divided by `factors` ([K])."""
        outer = factors[:, None] * factors[None, :]
        return Moments(self.second / outer, self.tokens, None if self.drift is None else self.drift / outer)


def gram(inputs: torch.Tensor) -> torch.Tensor:
    """X^T X of inputs [T, K], float32, exactly symmetric. Products of 16-bit inputs are exact."""
    columns = inputs.shape[1]
    wide = inputs.to(torch.float32)
    out = wide.new_empty(columns, columns)
    for start in range(0, columns, TILE):
        stop = min(start + TILE, columns)
        strip = wide[:, start:stop].T @ wide[:, start:]
        out[start:stop, start:] = strip
        out[stop:, start:stop] = strip[:, stop - start :].T
        # The product of a tile with itself need not be symmetric to the last bit.
        tile = strip[:, : stop - start]
        out[start:stop, start:stop] = torch.triu(tile) + torch.triu(tile, 1).T
    return out


def drift(exact: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """(F - X)^T X of the original's inputs F and the quantized model's X, both [T, K]: float32 [K, K]."""
    wide = inputs.to(torch.float32)
    return (exact.to(torch.float32) - wide).T @ wide


@dataclass(frozen=True, eq=False)
class Factor:
    """H, damped and factored: columns in the order they are rounded in, and how errors couple.

    order     int64 [K], by falling mean square
    coupling  float32 [K, K], strictly upper triangular, both dimensions in that order: a column's target is
              its weight plus the errors of the columns before it times its column of this
    damping   what was added to the diagonal, in parts of its mean
    """

    order: torch.Tensor
    coupling: torch.Tensor
    damping: float


def factorize(second: torch.Tensor) -> Factor | None:
    """The factor of H (float32 [K, K]) with the smallest of `DAMPINGS` that works; None if none does.

    H = L D L^T from the last column to round to the first, in float64. A feature that is always zero couples
    with none, and is rounded to nearest.
    """
    # Stable, so that equal moments keep one order everywhere.
    order = torch.argsort(second.diagonal(), descending=True, stable=True)
    backwards = order.flip(0)
    matrix = second.index_select(0, backwards).index_select(1, backwards).double()
    diagonal = matrix.diagonal().clone()
    for damping in DAMPINGS:
        matrix.diagonal().copy_(diagonal + damping * diagonal.mean())
        lower, info = torch.linalg.cholesky_ex(matrix)
        if int(info) == 0 and bool(torch.isfinite(lower).all()):
            unit = lower.div_(lower.diagonal().clone()).float()
            return Factor(order, torch.triu(unit.flip(0, 1), 1), damping)
    return None


def damped(second: torch.Tensor, damping: float) -> torch.Tensor:
    """H with `damping` times the mean of its diagonal added there."""
    result = second.clone()
    result.diagonal().add_(damping * second.diagonal().mean())
    return result


def correction(moments: Moments, damping: float, strength: float = CORRECTION) -> torch.Tensor | None:
    """P float32 [K, K] such that W + W P makes good for the drift; None without drift or if H is singular."""
    if moments.drift is None:
        return None
    matrix = damped(moments.second.double(), damping)
    lower, info = torch.linalg.cholesky_ex(matrix)
    if int(info) != 0:
        return None
    # D H^-1 is the transpose of H^-1 D^T.
    solved = torch.cholesky_solve(moments.drift.double().T, lower)
    return solved.T.mul_(strength).float().contiguous()


def check_finite(inputs: torch.Tensor, name: str) -> None:
    """`FormatError` naming the linear if an input is NaN or infinite."""
    if not bool(torch.isfinite(inputs).all()):
        nan, infinite = int(inputs.isnan().sum()), int(inputs.isinf().sum())
        raise FormatError(
            f"{name}: {nan} NaN and {infinite} infinite inputs (of {inputs.numel()}, {inputs.dtype}) during "
            "calibration. The weights before it are damaged, or activations overflow the dtype: run on the "
            "CPU, "
            "which computes in float32, check the checkpoint, or take a method without data, such as mse."
        )
