"""The kinds of steps that a method is composed of, and what each answers.

A step says what it needs of calibration data (`needs`), which schemes it cannot do (`lacks`) and what it did
not do (`note`). It does its work in one function:

    Transform     target(rows, stats)     the weights that are quantized instead
    ScaleSearch   fit(groups, scheme, importance)     scales and zero-points
    Rounding      apply(rows, stats)      codes
    Refinement    start(weight, packed)   codes that gradients of a block's outputs move

A new rounding is a subclass of `Rounding` in a module of its own, a row of `METHODS`, and its words in
`summaries.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from typing import Protocol

import torch

from quantkit.calibrate.codebook import Fit
from quantkit.calibrate.linear_stats import LinearStats, Need
from quantkit.calibrate.parameters import FitTensor
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Why a step that needs H was not done.
SINGULAR = "the Hessian of the inputs is singular, so "

#: Fits the scales [R, P] of P additive terms to groups [R, g] with the importance [R, g] of each weight.
FitPlanes = Callable[[torch.Tensor, Scheme, torch.Tensor | None], torch.Tensor]


class Step:
    """One step of a method."""

    @property
    def needs(self) -> Set[Need]:
        """Return what it needs of calibration data; nothing by default."""
        return frozenset()

    def lacks(self, scheme: Scheme) -> Iterator[str]:
        """Which properties of `scheme` it cannot choose, in words; none of most schemes.

        What needs data sees one scale per group at a time.
        """
        if self.needs:
            if scheme.planes > 1:
                yield "several planes"
            if scheme.per_tensor:
                yield "one scale per tensor"
            if scheme.group_rows > 1:
                yield "scales of blocks of rows"
            if scheme.column_scale:
                yield "column scales"

    def note(self, stats: LinearStats) -> str | None:
        """Return what it did not do with these statistics, and why; None if it did all."""
        return None


@dataclass(frozen=True, eq=False)
class Rows:
    """Weights float32 [n, K] with scales and zero-points (or None) of their groups, [n, G]."""

    weights: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme

    def wide(self, per_group: torch.Tensor) -> torch.Tensor:
        """One value per group as one per weight: [n, G] -> [n, K]."""
        columns = self.weights.shape[1]
        size = self.scheme.group_columns(columns)
        return per_group.repeat_interleave(size, dim=1)[:, :columns]


@dataclass(frozen=True, eq=False)
class Rounded:
    """Values [n, K] in units of their scale, scales [n, G], and errors W - Q [n, K], all float32."""

    values: torch.Tensor
    scale: torch.Tensor
    errors: torch.Tensor


class Transform(Step, ABC):
    """Changes the weights before scales are chosen."""

    name: str

    def changes_target(self, stats: LinearStats) -> bool:
        """Return True if `target` differs from the rows that it is given."""
        return False

    def target(self, rows: torch.Tensor, stats: LinearStats) -> torch.Tensor:
        """The weights (float32 [n, K]) that are quantized in place of `rows`."""
        return rows


@dataclass(frozen=True)
class ScaleSearch(Step):
    """Chooses scales and zero-points.

    name        what `quantkit methods` prints
    fit         groups (float32 [R, g]) -> `ScaleZero`
    fit_planes  groups and importance -> scales of additive terms; None where it has none
    fit_tensor  the values of a whole tensor -> its one scale; None where it has none
    weighted    whether errors count by the mean square of their input feature
    ints_only   whether it takes evenly spaced values only
    """

    name: str
    fit: Fit
    fit_planes: FitPlanes | None = None
    fit_tensor: FitTensor | None = None
    weighted: bool = False
    ints_only: bool = False

    @property
    def needs(self) -> Set[Need]:
        return frozenset({"hessian"}) if self.weighted else frozenset()

    def lacks(self, scheme: Scheme) -> Iterator[str]:
        if scheme.planes > 1 and self.fit_planes is None:
            yield "several planes"
        if scheme.per_tensor and self.fit_tensor is None:
            yield "one scale per tensor"
        yield from super().lacks(scheme)
        if self.ints_only and not isinstance(scheme.format, IntFormat):
            yield "values that are not evenly spaced"

    def __str__(self) -> str:
        return self.name + (", weighted" if self.weighted else "")


class Rounding(Step, ABC):
    """Chooses the codes of rows whose scales are known; `str()` is what `quantkit methods` prints."""

    @abstractmethod
    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        """The values of `rows`, each one that the scheme has; scales may move within the scale dtype."""


class Refined(Protocol):
    """A linear whose codes gradients move; `start` is as it was packed before."""

    start: PackedTensor

    def values(self) -> torch.Tensor:
        """The weights as they would be stored now, float32 [N, K]."""

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """Move by `rate` against the gradient [N, K] of the weights."""

    def packed(self) -> PackedTensor:
        """The linear as it is now."""


class Refinement(Step, ABC):
    """Goes on with the codes of all linears of a block, by gradients of the block's outputs."""

    @abstractmethod
    def start(self, weight: torch.Tensor, packed: PackedTensor) -> Refined:
        """The linear of this weight [N, K] as it is packed, ready to move."""
