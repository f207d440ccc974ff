"""Map names of stored tensors to parameters of the model, by the renaming rules of transformers."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.source import Checkpoint

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_names(model: "nn.Module", stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Map each stored name to its model parameter, and to True if it is fused with other tensors there."""
    return {name: (renamed, fused is not None) for name, renamed, fused in _renamed(model, stored)}


def as_matrices(checkpoint: Checkpoint, stored: Iterable[str]) -> Checkpoint:
    """Return `checkpoint` with the tensors `stored` read as [N, K], which its files have as [K, N]."""
    changed = {name: checkpoint.tensors[name] for name in stored}
    turned = {name: one if one.transposed else one.transpose() for name, one in changed.items()}
    return replace(checkpoint, tensors={**checkpoint.tensors, **turned}) if turned else checkpoint


@dataclass(frozen=True)
class ExpertPart:
    """Place of a stored matrix in a fused parameter: its expert, and its index there (gate 0, up 1)."""

    parameter: str
    expert: int
    part: int

    def of(self, fused: "torch.Tensor", rows: int) -> "torch.Tensor":
        """Return the view of this part, [rows, K], in `fused` [experts, parts * rows, K]."""
        return fused[self.expert, self.part * rows : (self.part + 1) * rows]


def expert_parts(model: "nn.Module", stored: Iterable[str]) -> dict[str, ExpertPart]:
    """Map each stored name that is stacked with other experts to its place.

    Leaves out tensors that transformers changes in other ways too.
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
        # The order in which transformers stacks them.
        for expert, name in enumerate(sorted(names, key=_natural))
    }


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key that puts expert 10 after expert 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in name.split(".")]


def _renamed(model: "nn.Module", stored: Iterable[str]) -> Iterator[tuple[str, str, tuple[Any, str] | None]]:
    """Yield each stored name, its new name, and (converter, pattern) if it is fused, else None."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    parameters = model.state_dict(keep_vars=True)
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
        if renamed not in parameters and f"{prefix}.{renamed}" in parameters:
            # A file of the bare decoder, without lm_head.
            renamed = f"{prefix}.{renamed}"
        yield name, renamed, fused
