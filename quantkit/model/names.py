"""Map names of stored tensors to parameters of the model, by the renaming rules of transformers."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.model_class import build, model_class, model_config, of_mapping
from quantkit.model.parts import embeddings

#: End of the name of a part of a packed matrix.
PART = re.compile(r"\.weight_\w+$")

if TYPE_CHECKING:
    import torch
    from torch import nn


def model_names(model: "nn.Module", stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """Map each stored name to its model parameter, and to True if it is fused with other tensors there."""
    return {name: (renamed, fused is not None) for name, renamed, fused in _renamed(model, stored)}


def other_names(
    model: "nn.Module", names: Mapping[str, tuple[str, bool]], checkpoint: Checkpoint
) -> dict[str, tuple[str, ...]]:
    """Map modules of `model` to their names in what AutoModelForCausalLM makes of the checkpoint.

    `names` is `model_names` of `model`. Empty where that is the same class, or there is none.
    """
    config, directory = checkpoint.config, checkpoint.directory
    found = of_mapping("MODEL_FOR_CAUSAL_LM_MAPPING", model_config(config, directory))
    if found is None or found[0] is type(model):
        return {}
    try:
        text: Any = build(*found, directory)
    except CheckpointError:
        return {}
    entries = text.state_dict(keep_vars=True)
    aliases: dict[str, dict[str, None]] = {}
    for stored, (parameter, fused) in model_names(text, checkpoint.tensors).items():
        own, _ = names[stored]
        if (fused or parameter in entries) and parameter != own:
            aliases.setdefault(own.removesuffix(".weight"), {})[parameter.removesuffix(".weight")] = None
    for side in ("input", "output"):
        # A tied head has no tensor.
        pair = [_name_of(one, embeddings(one, side)) for one in (model, text)]
        if None not in pair and pair[0] != pair[1]:
            aliases.setdefault(str(pair[0]), {})[str(pair[1])] = None
    return {name: tuple(of) for name, of in aliases.items()}


def names_in_own_class(
    model: "nn.Module", config: Mapping[str, Any], directory: Path, stored: Iterable[str]
) -> dict[str, str] | None:
    """Map modules of `model` to their names in the class that a checkpoint is of; None if that is its class.

    `stored` are the tensors of the checkpoint, packed or not. Modules without a tensor, such as a new head,
    are left out.
    """
    cls, parsed = model_class(config, directory)
    if cls is type(model) or cls.__name__ == type(model).__name__:
        return None
    weights = list(dict.fromkeys(PART.sub(".weight", name) for name in stored))
    own = model_names(build(cls, parsed, directory), weights)
    here = model_names(model, weights)
    return {
        here[name][0].removesuffix(".weight"): parameter.removesuffix(".weight")
        for name, (parameter, _) in own.items()
    }


def _name_of(model: "nn.Module", module: "nn.Module | None") -> str | None:
    return next((name for name, one in model.named_modules() if one is module), None)


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
        inside = renamed.removeprefix(f"{prefix}.")
        if renamed not in parameters and f"{prefix}.{renamed}" in parameters:
            # A file of the bare decoder, without lm_head.
            renamed = f"{prefix}.{renamed}"
        elif renamed not in parameters and inside in parameters and not hasattr(model, prefix):
            # The bare decoder of a file with lm_head.
            renamed = inside
        yield name, renamed, fused
