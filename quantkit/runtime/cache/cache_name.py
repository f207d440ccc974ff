"""Name of the KV cache argument and output in transformers: `past_key_values`, or `cache` from 5.24 on."""

import dataclasses
from typing import Any

from transformers.modeling_outputs import CausalLMOutputWithPast

#: Name before 5.24; later versions accept it with a warning.
OLD_NAME = "past_key_values"
#: Name in the installed transformers.
CACHE = next(
    name
    for name in ("cache", OLD_NAME)
    if name in {field.name for field in dataclasses.fields(CausalLMOutputWithPast)}
)


def renamed(inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments `inputs` of a model's forward with the KV cache under the name `CACHE`.

    Inputs with both names are returned unchanged; the forward refuses them.
    """
    if OLD_NAME in inputs and CACHE not in inputs:
        return {CACHE if name == OLD_NAME else name: value for name, value in inputs.items()}
    return inputs
