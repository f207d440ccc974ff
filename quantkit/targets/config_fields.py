"""Refuse a model whose config.json has a field that the reader of an export does not compute with."""

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from quantkit.errors import CheckpointError

#: Fields that change no logits, or only those of training.
_NEUTRAL = frozenset(
    {
        *("_name_or_path", "architectures", "dtype", "id2label", "label2id", "model_type", "problem_type"),
        *("return_dict", "transformers_version", "output_attentions", "output_hidden_states", "use_cache"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "chunk_size_feed_forward"),
        *("attention_dropout", "attn_dropout", "embd_pdrop", "hidden_dropout", "resid_pdrop"),
        *("embedding_dropout", "residual_dropout", "router_jitter_noise", "is_encoder_decoder"),
        *("output_router_logits", "pretraining_tp", "router_aux_loss_coef", "_attn_implementation"),
    }
)
#: Fields that decide which tensors there are, or their shapes.
BY_TENSORS = frozenset(
    {
        "attention_bias",
        "mlp_bias",
        "qkv_bias",
        "tie_word_embeddings",
        "decoder_sparse_step",
        "mlp_only_layers",
    }
)


def refuse_fields(
    directory: Path, config: Any, reader: str, carried: Collection[str], fixed: Mapping[str, Any]
) -> None:
    """Raise `CheckpointError` for a field of `config` that `reader` would ignore.

    `carried` fields may have any value, and `fixed` fields the value in `fixed`. All others must have the
    default of the model's class, so that unknown fields are refused.
    """
    names = {config.attribute_map.get(name, name) for name in (*carried, *BY_TENSORS)} | _NEUTRAL
    default = type(config)().to_dict()
    for name, usual in default.items():
        value, expected = getattr(config, name, None), fixed.get(name, usual)
        if name not in names and value != expected:
            raise CheckpointError(
                f"{directory}: {name} is {value!r}; {reader} computes {config.model_type} with {expected!r}, "
                "whatever a file says. Export to gptq or awq, whose readers run transformers' own model."
            )
