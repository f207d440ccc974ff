"""What transformers calls the cache that models take and give: `past_key_values`, `cache` from 5.24 on."""

import dataclasses
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

#: The name before 5.24, which later ones still take, with a warning.
OLD_NAME = "past_key_values"
#: The name in the transformers that is installed.
CACHE = next(
    name
    for name in ("cache", OLD_NAME)
    if name in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
)


def renamed(inputs: dict[str, Any]) -> dict[str, Any]:
    """`inputs` of a forward with the cache by its name, whichever of both the caller has taken.

    Both at once are left to the forward, which refuses them.
    """
    if OLD_NAME in inputs and CACHE not in inputs:
        return {CACHE if name == OLD_NAME else name: value for name, value in inputs.items()}
    return inputs
