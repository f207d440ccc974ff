"""Fit parameters to a whole tensor before its rows are quantized.

The tensor is read in chunks of rows, in order, so results depend only on the weights and their shape.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain

import torch

from quantkit.calibrate.codebook import Fit, bind, fit_codebook
from quantkit.calibrate.rank_one import Chunks, fit_column_scale
from quantkit.calibrate.scale_search import ScaleZero, global_scale
from quantkit.calibrate.tensor_scale import ValueCounts, count_values
from quantkit.packing.schemes import Scheme

#: Weights sampled to fit a code book: whole rows, evenly spaced.
SAMPLE_WEIGHTS = 1 << 20

FitTensor = Callable[[ValueCounts, Scheme], float]


@dataclass(frozen=True)
class TensorParameters:
    """Parameters that all rows of a tensor share; None if the scheme has none.

    global_scale  divides all scales
    column_scale  float [K] in its stored dtype, multiplies the weights of an input feature
    codebook      the values of the codes
    scale         the single scale of a tensor, exact in its stored dtype
    """

    global_scale: float = 1.0
    column_scale: torch.Tensor | None = None
    codebook: tuple[float, ...] | None = None
    scale: float | None = None

    def scale_zero(self, groups: int, device: torch.device) -> ScaleZero | None:
        """Return the single scale as a `ScaleZero` of `groups` groups; None if each group has its own."""
        return None if self.scale is None else ScaleZero(torch.full((groups, 1), self.scale, device=device))

    def bind(self, scheme: Scheme) -> Scheme:
        """Return `scheme` with the fitted values of its codes."""
        return scheme if self.codebook is None else bind(scheme, self.codebook)

    def normalised(self, rows: torch.Tensor) -> torch.Tensor:
        """Return rows ([n, K], any float dtype) in float32, over the column scale and times the global scale.

        Scales are searched for these: the stored scales are divided by the global scale.
        """
        # Other strides would sum in another order.
        weights = rows.to(torch.float32).contiguous()
        if self.column_scale is not None:
            weights = weights / self.column_scale.to(torch.float32)
        return weights if self.global_scale == 1.0 else weights * self.global_scale

    def parts(self, scheme: Scheme) -> dict[str, torch.Tensor]:
        """Return the stored parts that exist once for the whole tensor, by part name, on the CPU."""
        parts = {
            "global_scale": torch.tensor([self.global_scale]),
            "column_scale": self.column_scale,
            "codebook": None if self.codebook is None else torch.tensor(self.codebook),
            "scale": None if self.scale is None else torch.tensor([self.scale], dtype=scheme.scale_dtype),
        }
        return {
            part: tensor.cpu()
            for part, tensor in parts.items()
            if tensor is not None and part in scheme.part_names
        }


def fit_parameters(
    chunks: Chunks,
    shape: tuple[int, int],
    scheme: Scheme,
    fit: Fit,
    fit_tensor: FitTensor | None = None,
    beside: Chunks = lambda: iter(()),
) -> TensorParameters:
    """Fit the parameters of a tensor of `shape` that `chunks` reads; `fit` searches scales of groups.

    `fit_tensor` searches a single scale. `beside` reads other tensors that share the global or single scale.
    The tensor is read once for a global or single scale, and several times for a column scale.
    """
    if scheme.per_tensor:
        assert fit_tensor is not None
        counted = count_values(chain(chunks(), beside()))
        # Not finite: quantizing the rows will raise an error that names the weight.
        return TensorParameters(scale=1.0 if counted is None else fit_tensor(counted, scheme))
    columns = fit_column_scale(chunks, scheme) if scheme.column_scale else None
    if not scheme.global_scale and not scheme.is_fitted:
        return TensorParameters(column_scale=columns)
    flat = TensorParameters(column_scale=columns)
    step = -(-shape[0] * shape[1] // SAMPLE_WEIGHTS) if scheme.is_fitted else shape[0]
    absmax, sample = _survey((flat.normalised(chunk) for chunk in chunks()), step)
    book = None
    if scheme.is_fitted and math.isfinite(absmax):
        book = fit_codebook(sample, scheme, absmax, fit)
    elif scheme.is_fitted:
        # Not finite: quantizing the rows will raise an error that names the weight.
        book = fit_codebook(torch.zeros_like(sample), scheme, 1.0, fit)
    for chunk in beside():
        absmax = max(absmax, float(chunk.abs().max()))
    found = TensorParameters(column_scale=columns, codebook=book)
    factor = global_scale(absmax, found.bind(scheme)) if scheme.global_scale else 1.0
    return TensorParameters(factor, columns, book)


def _survey(chunks: Iterable[torch.Tensor], step: int) -> tuple[float, torch.Tensor]:
    """Return the largest magnitude (NaN if any value is NaN), and every `step`-th row, float32 [n, K]."""
    largest, sample = [], list[torch.Tensor]()
    for chunk, start in _numbered(chunks):
        largest.append(float(chunk.abs().max()))
        sample.append(chunk[-start % step :: step].clone())
    absmax = math.nan if any(map(math.isnan, largest)) else max(largest)
    return absmax, torch.cat(sample)


def _numbered(chunks: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, int]]:
    start = 0
    for chunk in chunks:
        yield chunk, start
        start += len(chunk)
