"""Parameters that transformers makes of several stored tensors, or of a part of one, as it loads.

Linears that are rows of one tensor, such as of q, k and v, are read as matrices of their own.
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

#: Operations of transformers that give each linear rows of its own, in the order of its parameters.
SPLITS = ("Chunk", "Split")


@dataclass(frozen=True, eq=False)
class Conversion:
    """Operations of transformers on stored tensors, by the number of the pattern that each matches.

    `first` is the parameter after which transformers calls them; they may make more.
    """

    converter: Any
    first: str
    sources: dict[int, list[str]]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameters that they make."""
        named, *others = self.converter.target_patterns
        return self.first, *(self.first.replace(named, other) for other in others)

    def run(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the parameters by name; `read` gives a stored tensor."""
        converter = copy.deepcopy(self.converter)
        for part, names in self.sources.items():
            for name in names:
                converter.add_tensor(self.first, name, converter.source_patterns[part], partial(read, name))
        found: dict[str, Any] = converter.convert(self.first, model=model, config=model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in found.items()}


def conversions(model: nn.Module, stored: Iterable[str]) -> dict[str, Conversion]:
    """Map parameters of `model` to what makes them of the tensors `stored`; others are left out."""
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
        """Its part of the bytes of the source."""
        return self.source.stored_bytes * self.shape[0] // self.source.shape[0]

    @property
    def stored_as(self) -> str | None:
        """The low-bit format of the source."""
        return self.source.stored_as

    def values(self, read: Read, start: int, stop: int) -> torch.Tensor:
        """Rows `[start, stop)`."""
        return self.source.values(read, self.first + start, self.first + stop)


def row_cuts(
    conversions: Iterable[Conversion],
    tensors: Mapping[str, StoredTensor],
    linears: Mapping[str, tuple[int, ...]],
) -> dict[str, RowsTensor]:
    """Return the parts of stored tensors that become one of `linears` each, by the names that the model has.

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
