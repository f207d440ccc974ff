"""Apply transformers' loading operations that join or split stored tensors.

Linears stored as rows of one tensor, such as q, k and v, are read as separate matrices.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from quantkit.checkpoint.tensors import Read, StoredTensor
from quantkit.model.names import natural, renamed

#: Operations of transformers that split a tensor into rows of linears, in the order of its parameters.
SPLITS = ("Chunk", "Split")


@dataclass(frozen=True, eq=False)
class Conversion:
    """Loading operations of transformers, with the stored tensors for each of their patterns.

    `converter` is transformers' record of them, `sources` has the tensors by the number of the pattern.
    `first` is the parameter for which transformers calls the operations, which may create several.
    """

    converter: Any
    first: str
    sources: dict[int, list[str]]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the parameters that the operations create."""
        named, *others = self.converter.target_patterns
        return self.first, *(self.first.replace(named, other) for other in others)

    def run(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters by name; `read` returns a stored tensor by name."""
        converter = copy.deepcopy(self.converter)
        for part, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.first, name, converter.source_patterns[part], partial(read, name))
        found: dict[str, Any] = converter.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}


def conversions(model: nn.Module, stored: Iterable[str]) -> dict[str, Conversion]:
    """Map parameters of `model` to the conversion that creates them from the tensors `stored`.

    Parameters that are stored unchanged are left out.
    """
    found: dict[str, Conversion] = {}
    for name, place in sorted(renamed(model, stored), key=lambda one: natural(one[0])):
        if place.converter is not None:
            one = found.setdefault(place.parameter, Conversion(place.converter, place.parameter, {}))
            one.sources.setdefault(place.part, []).append(name)
    return {parameter: one for one in found.values() for parameter in one.parameters}


@dataclass(frozen=True, kw_only=True)
class RowsTensor(StoredTensor):
    """Rows of `source` from `first` on."""

    source: StoredTensor
    first: int

    @classmethod
    def from_source(cls, name: str, source: StoredTensor, first: int, rows: int) -> "RowsTensor":
        """Return `rows` rows of `source` from `first` on, called `name`."""
        offset = source.offset + first * source.stored_bytes // source.shape[0]
        shape = (rows, *source.shape[1:])
        return cls(name, source.dtype, shape, source.file, offset, source.whole, source=source, first=first)

    @property
    def stored_bytes(self) -> int:
        """Return the stored bytes: a share of the bytes of the source."""
        return self.source.stored_bytes * self.shape[0] // self.source.shape[0]

    @property
    def stored_as(self) -> str | None:
        """Return the low-bit format of the source; None for floats."""
        return self.source.stored_as

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Read rows `[start, stop)`."""
        return self.source.values(read, self.first + start, self.first + stop)


def row_cuts(
    conversions: Iterable[Conversion],
    tensors: Mapping[str, StoredTensor],
    linears: Mapping[str, tuple[int, ...]],
) -> dict[str, RowsTensor]:
    """Return each of `linears` that is a slice of rows of a stored tensor, by its name in the model.

    `linears` are the shapes [N, K] of weights by name.
    """
    cuts: dict[str, RowsTensor] = {}
    for one in dict.fromkeys(conversions):
        stored = [name for names in one.sources.values() for name in names]
        names, operations = one.parameters, one.converter.operations
        splits = len(operations) == 1 and type(operations[0]).__name__ in SPLITS and operations[0].dim == 0
        if len(stored) != 1 or len(names) < 2 or not splits or not linears.keys() >= set(names):
            continue
        source, shapes = tensors[stored[0]], [linears[name] for name in names]
        ends = list(accumulate(rows for rows, _ in shapes))
        if {(ends[-1], columns) for _, columns in shapes} != {source.shape}:
            continue
        for name, (rows, _), end in zip(names, shapes, ends, strict=True):
            cuts[name] = RowsTensor.from_source(name, source, end - rows, rows)
    return cuts
