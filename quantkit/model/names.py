"""Where transformers puts each tensor of a file: its own renamings, applied to names alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_names(model: "nn.Module", stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """For each stored name, the model parameter it loads into, and whether it is fused with others there."""
    return {name: (renamed, fused is not None) for name, renamed, fused in _renamed(model, stored)}


@dataclass(frozen=True)
class ExpertPart:
    """The place of a stored matrix in a fused parameter: its expert, and how many matrices of that are above
    it (the up projection is below the gate).
    """

    parameter: str
    expert: int
    part: int

    def of(self, fused: "torch.Tensor", rows: int) -> "torch.Tensor":
        """The part's view in `fused` [experts, parts x rows, K]."""
        return fused[self.expert, self.part * rows : (self.part + 1) * rows]


def expert_parts(model: "nn.Module", stored: Iterable[str]) -> dict[str, ExpertPart]:
    """For each stored name that is joined with those of other experts, where it goes.

    Without those that transformers changes in another way when it joins them.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist

    experts: dict[tuple[str, int], list[str]] = {}
    for name, parameter, fused in _renamed(model, stored):
        if fused is None:
            continue
        converter, pattern = fused
        kinds = [type(operation) for operation in converter.operations]
        if kinds in ([MergeModulelist], [MergeModulelist, Concatenate]):
            experts.setdefault((parameter, converter.source_patterns.index(pattern)), []).append(name)
    return {
        name: ExpertPart(parameter, expert, part)
        for (parameter, part), names in experts.items()
        # In the order that transformers merges them in.
        for expert, name in enumerate(sorted(names, key=_natural))
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Sorts expert 10 after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _renamed(model: "nn.Module", stored: Iterable[str]) -> Iterator[tuple[str, str, tuple[Any, str] | None]]:
    """Each stored name, its new name, and the converter that joins it with others and the pattern."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")

    for name in stored:
        renamed, fused = name, None
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        for converter in converters:
            renamed, matched = converter.rename_source_key(renamed)
            if matched is not None:
                fused = (converter, matched)
                break
        if renamed not in known and f"{prefix}.{renamed}" in known:
            # A file of the bare decoder, without the language-model head around it.
            renamed = f"{prefix}.{renamed}"
        yield name, renamed, fused
