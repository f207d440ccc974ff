"""Find the names by which other classes know the modules of a checkpoint."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.model_class import build, model_class, model_config, of_mapping
from quantkit.model.names import model_names
from quantkit.model.parts import embeddings

if TYPE_CHECKING:
    from torch import nn

#: End of the name of a part of a packed matrix.
PART = re.compile(r"\.weight_\w+$")


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
