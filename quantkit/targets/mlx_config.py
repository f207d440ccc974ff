"""config.json as mlx-lm reads it: with every field, and rotary embeddings under their older names.

mlx-lm has defaults of its own for fields that a file lacks, and most of its models ignore `rope_parameters`.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError
from quantkit.model.model_class import model_config
from quantkit.targets.config_fields import refuse_fields
from quantkit.targets.mlx_types import MLX_LM, MODEL_TYPES

_DENSE = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters"),
)
_WINDOW = ("sliding_window", "max_window_layers", "layer_types")
_EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
_SILU = {"hidden_act": "silu"}
_NO_WINDOW = {**_SILU, "use_sliding_window": False}
#: Kinds of rotary embeddings that mlx-lm computes as transformers does, for texts of any length.
_ROTARY = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class Tried:
    """Fields of config.json for a model type that was tried with mlx-lm.

    carried  fields that mlx-lm reads
    fixed    the value of each field that mlx-lm computes with, whatever a file says
    """

    carried: tuple[str, ...] = _DENSE
    fixed: Mapping[str, Any] = field(default_factory=lambda: _SILU)


#: Model types whose logits in mlx-lm are those of transformers.
TRIED: Mapping[str, Tried] = {
    "llama": Tried(),
    "mistral": Tried(fixed={**_SILU, "sliding_window": None}),
    "qwen2": Tried((*_DENSE, *_WINDOW), _NO_WINDOW),
    "qwen3": Tried((*_DENSE, *_WINDOW), _NO_WINDOW),
    "qwen2_moe": Tried(
        (*_DENSE, *_WINDOW, *_EXPERTS, "shared_expert_intermediate_size"),
        {**_NO_WINDOW, "norm_topk_prob": False},
    ),
    "mixtral": Tried((*_DENSE, "num_experts", "num_experts_per_tok"), {**_SILU, "sliding_window": None}),
}


def mlx_config(checkpoint: Checkpoint) -> tuple[dict[str, Any], bool]:
    """Return config.json for mlx-lm, and True if the model type was tried with it.

    Raises `CheckpointError` for a model type that mlx-lm has not, and for a field of a tried type that it
    does not compute with.
    """
    kind = checkpoint.config.get("model_type")
    if kind not in MODEL_TYPES:
        raise CheckpointError(
            f"{checkpoint.directory}: model_type is {kind!r}, and mlx-lm {MLX_LM} has no such model. Export "
            "to gptq or awq, whose readers run transformers' own model."
        )
    config = model_config(checkpoint.config, checkpoint.directory)
    if config.model_type != checkpoint.config.get("model_type"):
        # The language model is a part, and its fields are in a section.
        return dict(checkpoint.config), False
    row = TRIED.get(config.model_type)
    rope = dict(getattr(config, "rope_parameters", None) or {})
    kind = rope.get("rope_type", "default")
    if row is not None:
        refuse_fields(checkpoint.directory, config, "mlx-lm", row.carried, row.fixed)
    if row is not None and kind not in _ROTARY:
        raise CheckpointError(
            f"{checkpoint.directory}: rope_type is {kind!r}; mlx-lm computes {', '.join(_ROTARY)} as "
            "transformers does. Export to gptq or awq, whose readers run transformers' own model."
        )
    found = {**json.loads(config.to_json_string(use_diff=False)), **checkpoint.config}
    found |= {alias: found[name] for alias, name in config.attribute_map.items() if name in found}
    if "rope_theta" in rope:
        own = ("rope_theta", "partial_rotary_factor")
        found |= {key: rope[key] for key in own if key in rope}
        found["rope_scaling"] = None if kind == "default" else found["rope_parameters"]
    return found, row is not None
