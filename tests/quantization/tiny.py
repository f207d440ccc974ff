"""Tiny random models of transformers' classes, by the names of `names()`, and inputs for them."""

import copy
import inspect
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers.models.auto import modeling_auto

#: Mappings whose classes are tried, and of how many inputs the tasks are.
MAPPINGS = (
    *(
        "CAUSAL_LM",
        "IMAGE_TEXT_TO_TEXT",
        "MULTIMODAL_LM",
        "SEQ_TO_SEQ_CAUSAL_LM",
        "SPEECH_SEQ_2_SEQ",
        "MASKED_LM",
    ),
    *(
        "SEQUENCE_CLASSIFICATION",
        "TEXT_ENCODING",
        "RETRIEVAL",
        "CTC",
        "AUDIO_CLASSIFICATION",
        "IMAGE_CLASSIFICATION",
    ),
)

VOCAB = 272
#: Sizes of every config that has a field of the name. Heads are 4 of 16.
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), VOCAB),
    "unpadded_vocab_size": VOCAB,
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "emb_dim"), 64
    ),
    **dict.fromkeys(
        ("word_embed_proj_dim", "attention_hidden_size", "out_hidden_size", "projection_dim"), 64
    ),
    **dict.fromkeys(("projector_hidden_size", "output_dim", "vision_output_dim", "d_embed", "out_dim"), 64),
    **dict.fromkeys(("n_layer", "num_hidden_layers", "n_layers", "num_layers", "depth", "encoder_layers"), 2),
    **dict.fromkeys(("decoder_layers", "num_decoder_layers", "num_encoder_layers", "vision_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_global_key_value_heads"), 2),
    **dict.fromkeys(
        ("head_dim", "d_kv", "global_head_dim", "v_head_dim", "qk_nope_head_dim", "kv_channels"), 16
    ),
    **dict.fromkeys(
        ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "encoder_ffn_dim", "decoder_ffn_dim"), 96
    ),
    **dict.fromkeys(("ffn_hidden_size", "hidden_dim", "d_inner", "shared_expert_intermediate_size"), 96),
    **dict.fromkeys(("intermediate_size_mlp", "shared_intermediate_size", "dim_ff", "mlp_hidden_size"), 96),
    **dict.fromkeys(
        ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48
    ),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(
        ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token"), 2
    ),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "first_k_dense_replace", "n_groups"), 1),
    **dict.fromkeys(
        ("max_position_embeddings", "n_positions", "n_ctx", "context_length", "max_seq_len"), 128
    ),
    **dict.fromkeys(("max_source_positions", "max_target_positions", "max_sequence_length"), 64),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 32),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("image_size",), 28),
    **dict.fromkeys(("text_hidden_size", "audio_hidden_size"), 64),
    **dict.fromkeys(("temporal_patch_size", "video_temporal_patch_size"), 2),
    **dict.fromkeys(("patch_size", "spatial_patch_size"), 14),
    **dict.fromkeys(("state_size", "mamba_d_state", "ssm_state_size"), 16),
    **dict.fromkeys(("sliding_window", "attention_window_size"), 16),
    "num_mel_bins": 16,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}
LARGEST = 20_000_000
#: What some config classes need besides, by the name of the config class.
_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_TEXTS = (
    *(
        "Qwen2VLTextConfig",
        "Qwen2_5_VLTextConfig",
        "Glm4vTextConfig",
        "Glm4vMoeTextConfig",
        "Glm46VTextConfig",
    ),
    *("GlmOcrTextConfig", "PaddleOCRTextConfig", "Qwen2_5OmniTextConfig"),
)
MORE: dict[str, dict[str, Any]] = {
    **{name: {"rope_parameters": _ROPE, "num_key_value_heads": 4} for name in _TEXTS},
    "BambaConfig": {"attn_layer_indices": [1]},
    "JambaConfig": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "GraniteMoeHybridConfig": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeConfig": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "Mamba2Config": {"num_heads": 8},
    "GPTNeoConfig": {"attention_types": [[["global", "local"], 1]], "max_position_embeddings": 128},
    "Gemma3nTextConfig": {
        **{"num_hidden_layers": 4, "num_kv_shared_layers": 2, "intermediate_size": [96] * 4},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"activation_sparsity_pattern": [0.0] * 4, "hidden_size_per_layer_input": 16, "laurel_rank": 8},
    },
    "LongcatFlashConfig": {"head_dim": 8},
    "Qwen4ExpTextConfig": {
        **{"indexer_budget": 8, "indexer_compress_ratio": 2},
        **{"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16},
    },
    "CohereCompassTextConfig": {
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)
    },
    "ZambaConfig": {"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    "Zamba2Config": {"num_hidden_layers": 2, "layers_block_type": ["mamba", "hybrid"], "num_mem_blocks": 1},
    "Ernie4_5_VLMoeTextConfig": {
        **{"rope_parameters": _ROPE, "num_key_value_heads": 4, "moe_intermediate_size": [48, 48]},
    },
    "Glm5NextTextConfig": {"qk_rope_head_dim": 0},
    "Molmo2AdapterConfig": {"vision_feature_layer": [1, 0]},
    "MuseSparkVisionConfig": {"num_hidden_layers": 4},
    "EsmcConfig": {"num_key_value_heads": 4},
    "LukeConfig": {"entity_vocab_size": 16, "entity_emb_size": 16},
    "PerceiverConfig": {"d_latents": 64, "num_latents": 8, "num_blocks": 1},
    "ReformerConfig": {"is_decoder": True},
    "XmodConfig": {"default_language": "en_XX"},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "MobileBertConfig": {"embedding_size": 32},
}


def names() -> list[str]:
    """The classes of `MAPPINGS`, each once, without those of the encoders of timm."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        table = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for value in table.values():
            found.update(dict.fromkeys([value] if isinstance(value, str) else value))
    return [name for name in found if hasattr(transformers, name)]


def tiny_config(cls: Any) -> Any:
    """A small config of class `cls`, and of each of its parts."""
    fields = inspect.signature(cls.__init__).parameters
    default = cls()
    fixed = default.to_dict()
    # Some have a list of sizes, one per stage, where others have one.
    keywords = {
        name: value
        for name, value in SIZES.items()
        if name in fields and not isinstance(fixed.get(name), list | tuple)
    }
    for name in getattr(cls, "sub_configs", {}):
        part = getattr(default, name, None)
        if isinstance(part, transformers.PreTrainedConfig):
            keywords[name] = tiny_config(type(part)).to_dict()
    keywords.update(MORE.get(cls.__name__, {}))
    if "kv_lora_rank" in fields:
        keywords["num_key_value_heads"] = keywords["num_attention_heads"]
    rope = {**(fixed.get("rope_parameters") or {}), **keywords.get("rope_parameters", {})}
    if "mrope_section" in rope and "rope_parameters" in fields:
        part = rope.get("partial_rotary_factor") or fixed.get("partial_rotary_factor") or 1
        half = SIZES["qk_rope_head_dim"] if "qk_rope_head_dim" in fields else int(part * SIZES["head_dim"])
        third = 3 * half // 16
        keywords["rope_parameters"] = {**rope, "mrope_section": [third, third, half // 2 - 2 * third]}
    kinds = {} if "num_hidden_layers" in MORE.get(cls.__name__, {}) else _kinds_of_layers(default, fields)
    return cls(**{**keywords, **kinds})


def _kinds_of_layers(default: Any, fields: Any) -> dict[str, Any]:
    """A layer of each kind that the default config has."""
    kinds = list(dict.fromkeys(getattr(default, "layer_types", None) or ()))
    if "layer_types" not in fields or len(kinds) < 2:
        return {}
    return {"layer_types": kinds, "num_hidden_layers": len(kinds)}


def tiny_model(name: str) -> Any:
    """A random model of class `name` whose outputs differ from token to token."""
    cls = getattr(transformers, name)
    config = tiny_config(cls.config_class)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in cls(copy.deepcopy(config)).parameters())
    if size > LARGEST:
        raise ValueError(f"{size} weights; SIZES does not know what makes it large")
    torch.manual_seed(0)
    model = cls(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2 and parameter.std() < 0.1:
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) / parameter.shape[-1] ** 0.5
                )
    return model


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Tokens, sounds or images that a model takes: its main input, and tokens for a decoder."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 200, (1, 12), generator=generator)
    takes, config = inspect.signature(model.forward).parameters, model.config
    main = model.main_input_name
    inputs = {}
    if main == "pixel_values":
        inputs[main] = torch.randn(1, getattr(config, "num_channels", 3), 28, 28, generator=generator)
    elif main == "input_features":
        inputs[main] = torch.randn(1, getattr(config, "num_mel_bins", 16), 128, generator=generator)
    elif main == "input_values":
        inputs[main] = torch.randn(1, 4000, generator=generator)
    else:
        inputs["input_ids"] = ids
        if "pixel_values" in takes and not model.can_generate():
            inputs["pixel_values"] = torch.randn(1, 3, 28, 28, generator=generator)
    # Classifiers shift the tokens of the encoder.
    classifies = type(model).__name__.endswith("SequenceClassification")
    if classifies:
        ids[:, -1] = SIZES["eos_token_id"]
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes and not classifies:
        inputs["decoder_input_ids"] = ids[:, :8]
    return inputs


def save_source(model: Any, directory: Path) -> None:
    """Write a model, and a tokenizer that gives a token per byte."""
    model.save_pretrained(directory)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
