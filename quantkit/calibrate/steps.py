"""Steps of which methods are composed.

A step declares the statistics that it needs (`needs`), the schemes that it does not support (`lacks`) and
skipped work (`note`). Its work is one function:

    Transform     target(rows, stats)     changes the weights to quantize
    ScaleSearch   fit(groups, scheme, importance)     chooses scales and zero-points
    Rounding      apply(rows, stats)      chooses codes
    Refinement    start(weight, packed)   changes codes by gradients of a block's outputs

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

#: Reason why a step that needs H was skipped.
SINGULAR = "the Hessian of the inputs is singular, so "

#: Fits the scales [R, P] of P additive terms to groups [R, g] with the importance [R, g] of each weight.
FitPlanes = Callable[[torch.Tensor, Scheme, torch.Tensor | None], torch.Tensor]


class Step:
    """Base class of the steps of a method."""

    @property
    def needs(self) -> Set[Need]:
        """Return the statistics of calibration data that the step needs; none by default."""
        return frozenset()

    def lacks(self, scheme: Scheme) -> Iterator[str]:
        """Yield the properties of `scheme` that the step does not support, as text; none for most schemes.

        Steps with data support only one scale per group.
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
        """Return a note on work that the step skipped with these statistics, and why; None without."""
        return None


@dataclass(frozen=True, eq=False)
class Rows:
    """Weights float32 [n, K] with scales and zero-points (or None) of their groups, float32 [n, G]."""

    weights: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    scheme: Scheme

    def wide(self, per_group: torch.Tensor) -> torch.Tensor:
        """Repeat one value per group to one per weight: [n, G] -> [n, K]."""
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
    """Changes the weights before scales are chosen; the changed weights are called the target."""

    name: str

    def changes_target(self, stats: LinearStats) -> bool:
        """Return True if `target` returns other weights than its `rows`, given these statistics."""
        return False

    def target(self, rows: torch.Tensor, stats: LinearStats) -> torch.Tensor:
        """Return the weights (float32 [n, K]) to quantize in place of `rows`."""
        return rows


@dataclass(frozen=True)
class ScaleSearch(Step):
    """Chooses scales and zero-points.

    name        name in `quantkit methods`
    fit         groups (float32 [R, g]), scheme, importance ([R, g] or None) -> `ScaleZero`
    fit_planes  the same arguments -> scales [R, planes] of the terms of a weight; None if unsupported
    fit_tensor  the values of a whole tensor -> its single scale; None if unsupported
    weighted    True if errors are weighted by the mean square of their input feature
    ints_only   True if it is of integer formats alone, which are evenly spaced
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
    """Chooses the codes of rows whose scales are known; `quantkit methods` prints its `str()`."""

    @property
    def quick(self) -> "Rounding":
        """Return a rounding of few launches, whose output errors are nearly in proportion; or itself."""
        return self

    @abstractmethod
    def apply(self, rows: Rows, stats: LinearStats) -> Rounded:
        """Return `rows` rounded to values of the scheme; scales may change within the scale dtype."""


class Refined(Protocol):
    """Linear whose codes change by gradients; `start` is its initial packed form."""

    start: PackedTensor

    def values(self) -> torch.Tensor:
        """Return the stored weights for the current codes, float32 [N, K]."""

    def descend(self, gradient: torch.Tensor, rate: float) -> None:
        """Change the codes by a step of size `rate` against the `gradient` of the weights, float32 [N, K]."""

    def packed(self) -> PackedTensor:
        """Return the packed linear for the current codes."""


class Refinement(Step, ABC):
    """Improves the codes of all linears of a block by gradients of the block's outputs."""

    @abstractmethod
    def start(self, weight: torch.Tensor, packed: PackedTensor) -> Refined:
        """Return the `Refined` linear that starts at the weight [N, K] and its packed form."""
