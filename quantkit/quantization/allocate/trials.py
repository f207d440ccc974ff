"""Measure what linears that share an input lose in each of their schemes, on a sample of their rows.

Their rows are quantized together: a call on a GPU takes the time of its launches, whatever it has of rows.

A rounding that takes columns one after the other launches thousands of kernels, too many for every scheme.
With it only one scheme is measured, the reference. All schemes are rounded to nearest, and the ratio of both
losses for the reference multiplies the others. The ratio depends on how the inputs of a linear are
correlated. It differs far more between linears than between schemes (docs/accuracy.md).
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

import torch

from quantkit.calibrate.linear_stats import LinearStats
from quantkit.calibrate.methods import Method, packed_rows, quantize_tensor
from quantkit.calibrate.parameters import fit_parameters
from quantkit.calibrate.quantize_with_hessian import quantize_calibrated_rows
from quantkit.errors import FormatError
from quantkit.packing.formats import IntFormat
from quantkit.packing.schemes import Scheme

#: Rows of a weight that are quantized to measure a scheme; fewer for methods with data, which take far
#: longer.
ROWS = 256
CALIBRATED_ROWS = 64
#: Code books are fitted to one in this many of the sampled rows.
FITTED = 8
#: Units of progress of a trial, by True if its rounding takes columns one after the other.
UNITS = {False: 1, True: 16}


class Trial(NamedTuple):
    """Scheme and method by which rows are quantized, and its units of progress per linear."""

    scheme: Scheme
    method: Method
    units: int


#: Calls a function for every trial, in any order and by any threads; yields the results in order.
Run = Callable[[Callable[[Trial], tuple[float, ...]], Iterable[Trial]], Iterable[tuple[float, ...]]]


def trials_of(schemes: Sequence[Scheme], method: Method) -> list[Trial]:
    """Return the trials that measure `schemes` of a linear: one for each and, last, that of the reference.

    There is no such last one if `method` itself rounds every scheme, as it does if that is quick or alone.
    """
    quick = replace(method, rounding=method.rounding.quick)
    exact = Trial(schemes[_reference(schemes)], method, UNITS[quick != method])
    if quick == method or len(schemes) == 1:
        return [exact._replace(scheme=scheme) for scheme in schemes]
    return [*(Trial(scheme, quick, UNITS[False]) for scheme in schemes), exact]


def _reference(schemes: Sequence[Scheme]) -> int:
    """Return the index of the scheme of middle size among those of evenly spaced values, or else among all.

    Evenly spaced values take half the launches of others.
    """

    def size(at: int) -> int:
        # A shape with whole groups of every scheme.
        parts = schemes[at].storage_shapes((256, 4096)).values()
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in parts)

    every = range(len(schemes))
    even = [at for at in every if isinstance(schemes[at].format, IntFormat)]
    ordered = sorted(even or every, key=size)
    return ordered[(len(ordered) - 1) // 2]


@dataclass(frozen=True, eq=False)
class Sample:
    """Rows of linears that share an input, and what their errors cost.

    names       the linears
    counts      how many rows each has
    rows        float32 [n, K]
    importance  float32 [n]
    hessian     float32 [K, K]
    """

    names: tuple[str, ...]
    counts: tuple[int, ...]
    rows: torch.Tensor
    importance: torch.Tensor
    hessian: torch.Tensor

    @classmethod
    def of(
        cls,
        weights: Mapping[str, torch.Tensor],
        importance: Mapping[str, torch.Tensor],
        hessian: torch.Tensor,
        most: int,
    ) -> Self:
        """Sample at most `most` rows of each of `weights`, float32 [N, K], evenly spaced.

        `importance` float32 [N] are the weights of the outputs, by name, `hessian` [K, K] is that of the
        inputs.
        """
        rows, counted = [], []
        for name, weight in weights.items():
            chosen = torch.arange(0, len(weight), -(-len(weight) // most), device=weight.device)
            # Larger or more important rows lose more: the loss of the sample is scaled up in that measure.
            energy = importance[name] * (weight.square() @ hessian.diagonal())
            share = energy[chosen].double().sum() / energy.double().sum().clamp_min(1e-300)
            rows.append(weight[chosen])
            counted.append(importance[name][chosen] / share.clamp_min(1e-30).float())
        counts = tuple(map(len, rows))
        return cls(tuple(weights), counts, torch.cat(rows), torch.cat(counted), hessian)

    def losses(
        self, schemes: Sequence[Scheme], method: Method, stats: LinearStats | None, run: Run
    ) -> dict[str, tuple[float, ...]]:
        """Return the losses of each linear, one per scheme, from trials by `method` that `run` runs.

        `stats` are those of the inputs; None if the method needs none.
        """
        found = list(run(lambda trial: self._losses(trial, stats), trials_of(schemes, method)))
        rows = zip(*found, strict=True)
        if len(found) == len(schemes):
            return dict(zip(self.names, rows, strict=True))
        at = _reference(schemes)
        return {
            name: tuple(loss * (exact / quick[at] if quick[at] else 1.0) for loss in quick)
            for name, (*quick, exact) in zip(self.names, rows, strict=True)
        }

    def _losses(self, trial: Trial, stats: LinearStats | None) -> tuple[float, ...]:
        """Return the loss of each linear: half the sum of importance_n (E H E^T)_nn over its rows."""
        try:
            errors = self.rows - self._stored(trial, stats)
        except FormatError as error:
            names = " or ".join(f"'{name}.weight'" for name in self.names)
            raise FormatError(f"{names}: {error}") from error
        found = ((errors @ self.hessian) * errors).double().sum(-1) * self.importance
        sums = torch.stack([part.sum() for part in torch.split(found, list(self.counts))])
        return tuple(sums.mul_(0.5).clamp_(min=0).tolist())

    def _stored(self, trial: Trial, stats: LinearStats | None) -> torch.Tensor:
        """Return the stored rows [n, K]. Linears do not share what a scheme has once per weight."""
        scheme = trial.scheme
        alone = scheme.column_scale or scheme.is_fitted or scheme.global_scale or scheme.per_tensor
        parts = torch.split(self.rows, list(self.counts)) if alone else [self.rows]
        return torch.cat([stored(part, scheme, trial.method, stats) for part in parts])


def stored(rows: torch.Tensor, scheme: Scheme, method: Method, stats: LinearStats | None) -> torch.Tensor:
    """Quantize rows [n, K] by the method, and return the stored weights, float32."""
    search = method.scale_search
    if scheme.is_fitted:
        # A sample of the weights shows their distribution.
        some = rows[::FITTED]
        book = fit_parameters(
            lambda: iter([some]), (len(some), rows.shape[1]), scheme, method.scale_search.fit
        )
        scheme = book.bind(scheme)
    if stats is None:
        return quantize_tensor(rows, scheme, method=method.name).dequantize(torch.float32)
    shape = (rows.shape[0], rows.shape[1])
    parameters = fit_parameters(
        lambda: iter([method.target(rows, stats)]), shape, scheme, search.fit, search.fit_tensor
    )
    quantized: Any = quantize_calibrated_rows(rows, scheme, method, parameters, stats).rows
    return packed_rows([quantized], parameters, scheme, shape).dequantize(torch.float32)
