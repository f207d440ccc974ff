"""Result of an allocation: the scheme of every group of linears, and its cost."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quantkit.quantization.allocate.budget import Limit


@dataclass(frozen=True)
class Share:
    """Scheme of one group of linears, with bytes, cost and expected divergence of the group.

    The cost is in the unit of the limit.
    """

    linears: tuple[str, ...]
    scheme: str
    nbytes: int
    cost: int
    divergence: float


@dataclass(frozen=True)
class Allocation:
    """Result of an allocation: the budget, and the scheme and cost of each group of linears.

    weights      number of weights of all groups
    allowed      largest allowed cost, in the unit of the limit
    cost         cost of all groups, in the same unit
    divergence   expected KL divergence of all groups together, nats per token
    """

    limit: Limit
    weights: int
    allowed: int
    shares: tuple[Share, ...]

    @property
    def nbytes(self) -> int:
        return sum(share.nbytes for share in self.shares)

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.nbytes / self.weights

    @property
    def cost(self) -> int:
        return sum(share.cost for share in self.shares)

    @property
    def divergence(self) -> float:
        return sum(share.divergence for share in self.shares)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values; `from_dict` is the inverse."""
        return {
            "asked": self.limit.to_dict(),
            "counts": self.limit.counts,
            "budget": self.allowed,
            "cost": self.cost,
            "weights": self.weights,
            "bytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
            "expected_kl": self.divergence,
            "groups": [
                {
                    "linears": list(share.linears),
                    "scheme": share.scheme,
                    "bytes": share.nbytes,
                    "cost": share.cost,
                    "expected_kl": share.divergence,
                }
                for share in self.shares
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Allocation":
        """Parse the output of `to_dict`; raise `KeyError` or `TypeError` for anything else."""
        shares = tuple(
            Share(tuple(one["linears"]), one["scheme"], one["bytes"], one["cost"], one["expected_kl"])
            for one in data["groups"]
        )
        return cls(Limit.from_dict(data["asked"]), data["weights"], data["budget"], shares)
