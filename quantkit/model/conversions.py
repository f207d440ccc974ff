"""Parameters that transformers makes of several stored tensors, or of a part of one, as it loads."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from quantkit.model.names import natural, renamed


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
