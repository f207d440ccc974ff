"""Decide which parts of a model are packed by default: those that compute text, or else all of its blocks.

A model that generates text has its decoder packed, and its encoder if that reads text too or is of the same
config. What feeds them, such as vision towers and projectors, stays dense. A model without a text decoder, an
encoder or several, has the linears of its blocks packed.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quantkit.model.model_class import GENERATIVE, of_mapping

if TYPE_CHECKING:
    from torch import nn

OUTSIDE_DECODER = "a linear outside the decoder"
OUTSIDE_BLOCKS = "a linear outside the blocks of the model"


@dataclass(frozen=True)
class Parts:
    """Prefixes of modules whose linears are packed, less those `without`; `outside` is why others are not."""

    within: tuple[str, ...]
    without: tuple[str, ...]
    outside: str

    def __contains__(self, name: str) -> bool:
        return name.startswith(self.within) and not name.startswith(self.without or "\0")


def packed_parts(model: Any) -> Parts:
    """Return the parts of a transformers model that are packed by default."""
    from torch import nn

    modules = dict(model.named_modules())
    names = {module: name for name, module in modules.items()}
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else model
    if isinstance(decoder, nn.Linear):  # that of ModernBERT makes the logits
        decoder = model.base_model
    if decoder is model or decoder not in names or not _generates(model.config):
        return Parts(_block_lists(model, names), (), OUTSIDE_BLOCKS)
    chosen = [decoder]
    if getattr(model.config, "is_encoder_decoder", False):
        encoder = model.get_encoder()
        flat = getattr(encoder, "config", None) is model.config
        if encoder is not model and encoder in names and (flat or _embeds_tokens(encoder)):
            chosen.append(encoder)
    within = tuple(f"{names[part]}." for part in chosen)
    parts = Parts(within, tuple(_towers(modules, chosen)), OUTSIDE_DECODER)
    lists = _block_lists(model, names)
    # A decoder may be made of models alone, each with a config of its own, as that of BLT.
    if parts.without and not any(one in parts for one in lists):
        return Parts(lists, (), OUTSIDE_BLOCKS)
    return parts


def _generates(config: Any) -> bool:
    """Return True if transformers has a class for this config that generates text, and it is no encoder's."""
    if not any(of_mapping(mapping, config) for mapping in GENERATIVE):
        return False
    # BERT and others can be told to decode.
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return decodes or of_mapping("MODEL_FOR_MASKED_LM_MAPPING", config) is None


def _embeds_tokens(encoder: Any) -> bool:
    from torch import nn

    return isinstance(embeddings(encoder, "input"), nn.Embedding)


def embeddings(model: Any, side: str) -> "nn.Module | None":
    """Return the module that embeds tokens (`side` "input") or makes logits ("output"), or None."""
    try:
        found = getattr(model, f"get_{side}_embeddings")()
    # A model of images or sounds has none, and not all of them say so in one way.
    except (AttributeError, NotImplementedError):
        return None
    return found  # type: ignore[no-any-return]


def why_no_tokens(model: Any) -> str:
    """Return why a model does not look tokens up in one Embedding."""
    main = getattr(model, "main_input_name", "input_ids")
    if main != "input_ids":
        return f"it runs on {main}, not on tokens"
    found = embeddings(model, "input")
    return f"it embeds tokens by a {type(found).__name__}" if found else "it does not embed tokens"


def _towers(modules: dict[str, "nn.Module"], chosen: list[Any]) -> list[str]:
    """Return the prefixes of models inside the chosen ones that have a config of another kind."""
    from transformers import PreTrainedModel

    kinds = {type(part.config) for part in chosen if hasattr(part, "config")}
    inside = {module for part in chosen for module in part.modules()}
    return [
        f"{name}."
        for name, module in modules.items()
        if isinstance(module, PreTrainedModel) and type(module.config) not in kinds and module in inside
    ]


def _block_lists(model: Any, names: dict["nn.Module", str]) -> tuple[str, ...]:
    """Return the prefixes of the outermost lists of blocks below the head; all of the model without any."""
    from torch import nn

    base = getattr(model, "base_model", model)
    prefix = f"{names[base]}." if names.get(base) else ""
    lists: list[str] = []
    for module, name in names.items():
        if not isinstance(module, nn.ModuleList) or not f"{name}.".startswith(prefix):
            continue
        if not name.startswith(tuple(lists) or "\0"):
            lists.append(f"{name}.")
    return tuple(lists) or (prefix,)
