"""Select the parts of a model to pack by default: those that process text, or else all blocks.

In a model that generates text, the decoder is packed, and the encoder if it reads text too or has the same
config. Parts before them, such as vision towers and projectors, stay dense. In a model without a text
decoder, such as an encoder, the linears of its blocks are packed.
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
    """Prefixes `within` which linears are packed, and prefixes `without`, which are excluded.

    `outside` is the reason for other linears to stay dense.
    """

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
    if isinstance(decoder, nn.Linear):  # The decoder of ModernBERT is the linear that makes the logits.
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
    """Return True if transformers has a generative class for this config that is not an encoder."""
    if not any(of_mapping(mapping, config) for mapping in GENERATIVE):
        return False
    # BERT and others have an option to decode.
    decodes = getattr(config, "is_decoder", False) or getattr(config, "is_encoder_decoder", False)
    return decodes or of_mapping("MODEL_FOR_MASKED_LM_MAPPING", config) is None


def _embeds_tokens(encoder: Any) -> bool:
    from torch import nn

    return isinstance(embeddings(encoder, "input"), nn.Embedding)


def embeddings(model: Any, side: str) -> "nn.Module | None":
    """Return the module that embeds tokens (`side` "input") or computes logits ("output"), or None."""
    try:
        found = getattr(model, f"get_{side}_embeddings")()
    # Models of images or sounds have none, and signal it in different ways.
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
    """Return the prefixes of submodels inside `chosen` whose config has another type, such as vision towers.

    `modules` are all modules of the model by name. A prefix ends in a dot.
    """
    from transformers import PreTrainedModel

    kinds = {type(part.config) for part in chosen if hasattr(part, "config")}
    inside = {module for part in chosen for module in part.modules()}
    return [
        f"{name}."
        for name, module in modules.items()
        if isinstance(module, PreTrainedModel) and type(module.config) not in kinds and module in inside
    ]


def _block_lists(model: Any, names: dict["nn.Module", str]) -> tuple[str, ...]:
    """Return the prefixes of the outermost lists of blocks below the head; "" for the model without any."""
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
