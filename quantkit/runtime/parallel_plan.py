"""Tensor-parallel plan of a model: how ranks divide its matrices, and which numbers of ranks fit."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from quantkit.errors import UsageError

Axis = Literal["rows", "columns"]
#: Largest number of ranks that is checked.
MOST_RANKS = 64


@dataclass(frozen=True)
class Cut:
    """Division of one matrix among tensor-parallel ranks: equal shards of its `length` rows or columns.

    The size of a shard must be a multiple of each number in `units`, which has names such as "groups of 128".
    `refusal` is the reason if ranks cannot divide the matrix at all.
    """

    name: str
    axis: Axis
    length: int
    units: Mapping[str, int]
    refusal: str | None = None

    def why_not(self, ranks: int) -> str | None:
        """Return why the matrix cannot be divided among `ranks` ranks; None if it can."""
        share, rest = divmod(self.length, ranks)
        if ranks == 1 or self.refusal is not None:
            return None if ranks == 1 else self.refusal
        if rest:
            return f"the {self.length} {self.axis} of {self.name!r} have no equal shares for {ranks} ranks"
        for what, size in self.units.items():
            if share % size:
                return (
                    f"with {ranks} ranks each has {share} of the {self.length} {self.axis} of {self.name!r}, "
                    f"which are no whole {what}"
                )
        return None


@dataclass(frozen=True)
class TensorParallelPlan:
    """Division of a model among ranks: a `Cut` for each divided matrix; `model` is the name of its class."""

    model: str
    cuts: tuple[Cut, ...]

    def why_not(self, ranks: int) -> str | None:
        """Return why `ranks` ranks cannot run the model; None if they can.

        The reason is for the first matrix that they cannot divide.
        """
        if ranks > 1 and not self.cuts:
            return f"transformers has no tensor-parallel plan for {self.model}"
        return next((reason for cut in self.cuts if (reason := cut.why_not(ranks)) is not None), None)

    @property
    def first_refused(self) -> int:
        """Return the smallest number of ranks among 2, 4, 8, ... that cannot run the model."""
        ranks = 2
        while self.why_not(ranks) is None:
            ranks *= 2
        return ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Return all numbers of ranks that can run the model, up to `MOST_RANKS`."""
        return tuple(ranks for ranks in range(1, MOST_RANKS + 1) if self.why_not(ranks) is None)

    def check(self, ranks: int) -> None:
        """Raise `UsageError` if `ranks` ranks cannot run the model."""
        reason = self.why_not(ranks)
        if reason is not None:
            raise UsageError(
                f"{reason}. The tensor parallel sizes of this checkpoint are "
                f"{', '.join(map(str, self.sizes))}. Use one of them, or quantize the model with another "
                "format or group size."
            )


def local(tensor: Any) -> Any:
    """Return the shard of this rank if `tensor` is a DTensor, else `tensor`."""
    return getattr(tensor, "_local_tensor", tensor)
