"""Hadamard rotations: x -> x Q spreads features with large values over all features.

Q = D H / sqrt(n), with D a diagonal of random signs and H a Hadamard matrix: entries +-1, H H^T = n (QuaRot,
arXiv 2404.00456). Rotated weights are close to Gaussian, without outliers that stretch the scale.
`quantization/rotated_checkpoint.py` says where Q is applied in a model.
"""

import math
from dataclasses import dataclass
from functools import reduce

import torch

#: Largest factor of H, a Kronecker product: n features then cost about 2 x 64 multiplications each, not n.
FACTOR = 64
#: Seed of the random signs. No format depends on it: the model computes the same for any signs.
SEED = 0

_PAIR = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
_CORNER = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)


@dataclass(frozen=True, eq=False)
class Rotation:
    """Orthogonal Q = diag(signs) (F_1 x F_2 x ...) / sqrt(size), with Kronecker products of the factors.

    signs    float64 [size], each 1 or -1
    factors  Hadamard matrices F, float64 [n, n] of 1 and -1, whose sizes n multiply to `size`
    """

    signs: torch.Tensor
    factors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, size: int) -> "Rotation | None":
        """Return the rotation of `size` features, always the same; None without a known Hadamard matrix."""
        factors = _factors(size)
        if factors is None:
            return None
        bits = torch.randint(2, (size,), generator=torch.Generator().manual_seed(SEED))
        return cls(1.0 - 2.0 * bits.double(), factors)

    @property
    def size(self) -> int:
        return len(self.signs)

    def apply(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return vectors (float64 [..., n * size]) with each slice x of `size` features replaced by x Q."""
        runs = vectors.reshape(-1, self.size) * (self.signs / math.sqrt(self.size))
        turned = runs.view(-1, *map(len, self.factors))
        for axis, factor in enumerate(self.factors, 1):
            turned = (turned.movedim(axis, -1) @ factor).movedim(-1, axis)
        return turned.reshape(vectors.shape)


def _factors(size: int) -> tuple[torch.Tensor, ...] | None:
    """Return Hadamard matrices, float64 [n, n] each, whose sizes n multiply to `size`.

    Paley's comes first, then Sylvester's. None if none are known.
    """
    power = size & -size
    if size == power:
        return _sylvester(power)
    for part in (4, 8, 16, 32, 64):
        core = _paley(size // power * part) if power % part == 0 else None
        if core is not None:
            return (core, *_sylvester(power // part))
    return None


def _sylvester(power: int) -> tuple[torch.Tensor, ...]:
    """Return Sylvester's matrices, float64 [n, n], n <= `FACTOR`, whose sizes multiply to a power of two."""
    whole, left = divmod(power.bit_length() - 1, FACTOR.bit_length() - 1)
    counts = [FACTOR.bit_length() - 1] * whole + [left] * (left > 0)
    return tuple(reduce(torch.kron, [_PAIR] * count) for count in counts)


def _paley(size: int) -> torch.Tensor | None:
    """Return Paley's Hadamard matrix, float64 [size, size]; None if there is none of that size.

    It is built from squares modulo a prime q. Its size is q + 1 or 2 (q + 1), a multiple of 4.
    """
    if size % 4:
        return None
    if _is_prime(size - 1):
        return torch.eye(size, dtype=torch.float64) + _conference(size - 1, -1.0)
    half = size // 2
    if half % 4 == 2 and _is_prime(half - 1):
        outer = torch.kron(_conference(half - 1, 1.0), _PAIR)
        return outer + torch.kron(torch.eye(half, dtype=torch.float64), _CORNER)
    return None


def _conference(prime: int, sign: float) -> torch.Tensor:
    """Return a conference matrix C [q + 1, q + 1] for a `prime` q: diagonal 0, +-1 elsewhere, C C^T = q I.

    Its first column is `sign`.
    """
    squares = torch.zeros(prime, dtype=torch.bool)
    squares[torch.arange(1, prime) ** 2 % prime] = True
    residues = torch.where(squares, 1.0, -1.0).double()
    residues[0] = 0
    steps = torch.arange(prime)
    found = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    found[0, 1:], found[1:, 0] = 1, sign
    found[1:, 1:] = residues[(steps[:, None] - steps[None, :]) % prime]
    return found


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % divisor for divisor in range(2, math.isqrt(number) + 1))
