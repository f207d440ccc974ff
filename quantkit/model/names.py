"""Where transformers puts each tensor of a file: its own renamings, applied to names alone."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def model_names(model: "nn.Module", stored: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """For each stored name, the model parameter it loads into, and whether it is fused with others there."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    transforms = get_model_conversion_mapping(model)
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    known = model.state_dict(keep_vars=True)
    prefix = getattr(model, "base_model_prefix", "")

    names = {}
    for name in stored:
        renamed, fused = name, False
        for renaming in renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        for converter in converters:
            renamed, matched = converter.rename_source_key(renamed)
            if matched is not None:
                fused = True
                break
        if renamed not in known and f"{prefix}.{renamed}" in known:
            # A file of the bare decoder, without the language-model head around it.
            renamed = f"{prefix}.{renamed}"
        names[name] = (renamed, fused)
    return names
