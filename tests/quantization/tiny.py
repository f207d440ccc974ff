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


def _each(names: str, row: dict[str, Any]) -> dict[str, Any]:
    """The same row of a table for each of the names."""
    return dict.fromkeys(names.split(), row)


#: What some config classes need besides, by the name of the config class or of the model's.
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
    "ZambaConfig": {
        **{"attention_hidden_size": 128, "attention_head_dim": 32},
        **{"num_hidden_layers": 3, "layers_block_type": ["mamba", "hybrid", "hybrid"]},
    },
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
    "ReformerConfig": {"is_decoder": True, "axial_pos_embds_dim": [32, 32]},
    "ReformerForMaskedLM": {"is_decoder": False},
    "XmodConfig": {"default_language": "en_XX"},
    "RecurrentGemmaConfig": {"num_hidden_layers": 3},
    "ZayaConfig": {"num_experts_per_tok": 1},
    "MobileBertConfig": {"embedding_size": 32},
    "BltConfig": {"encoder_hash_byte_group_vocab": 64, "num_hidden_layers": 2},
    **_each(
        "BltLocalEncoderConfig BltLocalDecoderConfig",
        {"hidden_size_global": 64},
    ),
    "DbrxAttentionConfig": {"rope_theta": 10000.0, "clip_qkv": 8.0},
    "DbrxFFNConfig": {"hidden_size": 64},
    "xLSTMConfig": {"qk_dim_factor": 1.0},
    "Dots3NoteTextConfig": {
        **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 32},
        **{"swa_kv_lora_rank": 32, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16},
        **{"index_head_dim": 16, "index_n_heads": 4, "shared_experts_intermediate_size": 48},
    },
    "Dots3NoteVisionConfig": {"per_layer_config": {}, "adapter_in_dim": 64, "adapter_out_dim": 64},
    "Dots3NoteAudioConfig": {"adapter_input_size": 64, "adapter_out_dim": 64},
    "WavTokenizerEncoderConfig": {"codebook_dim": 64},
    "Qwen3OmniMoeTalkerConfig": {"spatial_merge_size": 2},
    **_each(
        "ChameleonVQVAEConfig Emu3VQVAEConfig",
        {
            **{"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 64},
            **{"codebook_size": 64, "attn_resolutions": [1], "latent_channels": 64},
        },
    ),
    "Kosmos2TextConfig": {"layers": 2},
    "Kosmos2Config": {"latent_query_num": 4},
    "MimiConfig": {"upsample_groups": 64, "num_filters": 8},
    "Qwen3OmniMoeTalkerTextConfig": {"shared_expert_intermediate_size": 96},
    "DiaDecoderConfig": {
        **{"cross_hidden_size": 64, "cross_num_attention_heads": 4, "cross_num_key_value_heads": 4},
        "cross_head_dim": 16,
    },
    "GraniteSpeech5EncoderConfig": {"num_key_value_heads": 4},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 8}},
    "Emu3Config": {"vocabulary_map": {"<image>": 8, "<|extra_200|>": 9}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"]},
    "Florence2VisionConfig": {
        **{"depths": [1, 1], "embed_dim": [32, 64], "num_heads": [2, 4], "num_groups": [2, 4]},
        **{"patch_size": [7, 3], "patch_stride": [4, 2], "patch_padding": [3, 1]},
        **{"patch_prenorm": [False, True], "window_size": 4},
    },
    "Granite4VisionConfig": {
        **{"downsample_rate": "1/2", "deepstack_layer_map": [[-1, 0]], "spatial_target_layers": [1]},
    },
    "HunYuanVLTextConfig": {"rope_parameters": _ROPE},
    "JanusVQVAEConfig": {
        **{"base_channels": 32, "channel_multiplier": [1, 1], "num_embeddings": 64, "latent_channels": 32},
    },
    **_each(
        "Blip2Config InstructBlipConfig",
        {"num_query_tokens": 2, "image_token_index": 10},
    ),
    "InstructBlipVideoConfig": {"num_query_tokens": 2, "video_token_index": 10},
    "MuseSparkAudioConfig": {"num_hidden_layers": 4, "hidden_sizes": [16, 32, 32, 64]},
    "PPFormulaNetVisionConfig": {"decoder_hidden_size": 64},
    "FunAsrNanoAdaptorConfig": {"intermediate_size": 16},
    "KyutaiSpeechToTextConfig": {
        **{"num_codebooks": 4, "codebook_vocab_size": 32},
        **{"audio_pad_token_id": 400, "audio_bos_token_id": 31},
    },
    "Nemotron3_5TranscribeWordTimestampConfig": {"blank_token_id": VOCAB - 1},
    "Qwen2_5OmniBigVGANConfig": {"upsample_initial_channel": 64},
    **_each(
        "VibeVoiceAcousticTokenizerEncoderConfig VibeVoiceAcousticTokenizerDecoderConfig",
        {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]},
    ),
    "VibeVoiceAcousticTokenizerConfig": {
        **{"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}
    },
    **_each(
        "SeamlessM4TConfig SeamlessM4Tv2Config",
        {
            **{"speech_encoder_intermediate_size": 96, "speech_encoder_layers": 2},
            **{"speech_encoder_attention_heads": 4},
        },
    ),
    "Speech2TextConfig": {"conv_channels": 64},
    "MoonshineStreamingConfig": {"num_key_value_heads": 4},
    "T5GemmaEncoderModel": {"is_encoder_decoder": False},
    "Gemma3Config": {"mm_tokens_per_image": 4},
    "ShieldGemma2Config": {"mm_tokens_per_image": 4, "yes_token_index": 5, "no_token_index": 6},
    "OmniASRAudioConfig": {"conv_dim": [64] * 7},
    "ASTConfig": {"max_length": 128},
    "BitConfig": {"hidden_sizes": [32, 64], "depths": [1, 1], "embedding_size": 32, "num_groups": 8},
    "ResNetConfig": {"hidden_sizes": [32, 64], "depths": [1, 1], "embedding_size": 32},
    **_each(
        "ConvNextConfig ConvNextV2Config",
        {"hidden_sizes": [32, 64, 64, 64], "depths": [1] * 4, "patch_size": 4},
    ),
    **_each(
        "DonutSwinConfig SwinConfig Swinv2Config",
        {
            **{"image_size": 32, "patch_size": 4, "window_size": 4, "embed_dim": 32},
            **{"depths": [1, 1], "num_heads": [2, 4]},
        },
    ),
    "EfficientNetConfig": {"width_coefficient": 0.25, "depth_coefficient": 0.25, "hidden_dim": 320},
    "HieraConfig": {
        **{"image_size": [32, 32], "masked_unit_size": [4, 4], "masked_unit_attention": [True, False]},
        **{"embed_dim": 32, "depths": [1, 1], "num_heads": [1, 2], "num_query_pool": 1},
    },
    "MobileViTV2Config": {"patch_size": 2, "n_attn_blocks": [1] * 3, "base_attn_unit_dims": [32] * 3},
    "PvtConfig": {"image_size": 32},
    "PerceiverForImageClassificationFourier": {"num_cross_attention_heads": 1},
    "PerceiverForImageClassificationConvProcessing": {"num_cross_attention_heads": 1},
}


def names() -> list[str]:
    """The classes of `MAPPINGS`, each once, without those of the encoders of timm."""
    found: dict[str, None] = {}
    for mapping in MAPPINGS:
        table = getattr(modeling_auto, f"MODEL_FOR_{mapping}_MAPPING_NAMES")
        for value in table.values():
            found.update(dict.fromkeys([value] if isinstance(value, str) else value))
    return [name for name in found if hasattr(transformers, name)]


def tiny_config(cls: Any, model: str = "") -> Any:
    """A small config of class `cls`, and of each of its parts, for the class `model`."""
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
    keywords.update(MORE.get(cls.__name__, {}) | MORE.get(model, {}))
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
    if cls.forward is torch.nn.Module.forward:
        raise ValueError("it has no forward")
    config = tiny_config(cls.config_class, name)
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


_TEXT = {"input_ids": (1, 12)}
_IMAGE = {"pixel_values": (1, 3, 32, 32)}
_PICTURE = {"pixel_values": (1, 3, 28, 28)}
_FRAMES = {"input_features": (1, 128, 16)}
#: Inputs of classes that take others than `inputs_of` makes of their main one: shapes, or values.
INPUTS: dict[str, dict[str, tuple[int, ...] | torch.Tensor]] = {
    **_each(
        "ModernVBertForMaskedLM UltraVBertForMaskedLM NeoMMEForMaskedLM",
        _TEXT,
    ),
    **_each(
        "ColModernVBertForRetrieval ColPaliForRetrieval",
        _TEXT,
    ),
    **_each(
        "ModernVBertForSequenceClassification UltraVBertForSequenceClassification",
        _TEXT,
    ),
    **_each(
        "Gemma3ForSequenceClassification ShieldGemma2ForImageClassification",
        _TEXT,
    ),
    "Kosmos2ForConditionalGeneration": {
        **{**_PICTURE, **_TEXT, "image_embeds_position_mask": torch.tensor([[0, *[1] * 4, *[0] * 7]])},
    },
    **_each(
        "MusicgenForCausalLM MusicgenMelodyForCausalLM",
        {"input_ids": (4, 12)},
    ),
    "KyutaiSpeechToTextForConditionalGeneration": {"input_ids": torch.arange(3, 63).view(1, 12, 5) % 31},
    "DiaForConditionalGeneration": {**_TEXT, "decoder_input_ids": (1, 8, 9)},
    "BlipForConditionalGeneration": {**_PICTURE, **_TEXT},
    "Blip2ForConditionalGeneration": {**_PICTURE, "input_ids": torch.tensor([[10, 10, *range(20, 30)]])},
    "InstructBlipForConditionalGeneration": {
        **{**_PICTURE, "qformer_input_ids": (1, 6)},
        "input_ids": torch.tensor([[10, 10, *range(20, 30)]]),
    },
    "InstructBlipVideoForConditionalGeneration": {
        **{"pixel_values": (1, 4, 3, 28, 28), "qformer_input_ids": (1, 6)},
        "input_ids": torch.tensor([[*[10] * 8, *range(20, 30)]]),
    },
    "IdeficsForVisionText2Text": {
        **{**_TEXT, "pixel_values": (1, 1, 3, 28, 28)},
        "image_attention_mask": torch.ones(1, 12, 1, dtype=torch.long),
    },
    "PI0ForConditionalGeneration": {
        **{**_TEXT, "state": (1, 32), "noise": (1, 50, 32), "timestep": (1,)},
        "attention_mask": torch.ones(1, 12, dtype=torch.long),
    },
    "Pix2StructForConditionalGeneration": {
        **{"flattened_patches": torch.linspace(0, 3, 8 * 770).view(1, 8, 770), "decoder_input_ids": (1, 8)},
    },
    "UdopForConditionalGeneration": {
        **{**_TEXT, "bbox": torch.linspace(0, 1, 48).view(1, 12, 4), "decoder_input_ids": (1, 8)},
    },
    "VoxtralRealtimeForConditionalGeneration": {"input_ids": (1, 4), "input_features": (1, 16, 32)},
    **_each(
        "CanaryForConditionalGeneration CohereAsrForConditionalGeneration",
        {**_FRAMES, "decoder_input_ids": (1, 8)},
    ),
    **_each(
        "ParakeetForCTC LasrForCTC",
        _FRAMES,
    ),
    "ASTForAudioClassification": {"input_values": (1, 128, 16)},
    "GraniteSpeech5ForCTC": {"input_features": (1, 64, 64)},
    "OmniASRForCTC": {"input_values": (1, 1, 4000)},
    **_each(
        "Wav2Vec2BertForCTC Wav2Vec2BertForSequenceClassification",
        {"input_features": (1, 64, 160)},
    ),
    **_each(
        "SeamlessM4TForSpeechToText SeamlessM4Tv2ForSpeechToText",
        {"input_features": (1, 64, 160), "decoder_input_ids": (1, 8)},
    ),
    "Speech2TextForConditionalGeneration": {"input_features": (1, 128, 80), "decoder_input_ids": (1, 8)},
    "SpeechEncoderDecoderModel": {"input_values": (1, 4000), "decoder_input_ids": (1, 8)},
    **_each(
        "ConvNextForImageClassification ConvNextV2ForImageClassification "
        "DonutSwinForImageClassification SwinForImageClassification "
        "Swinv2ForImageClassification HieraForImageClassification PvtForImageClassification "
        "PvtV2ForImageClassification SegformerForImageClassification",
        _IMAGE,
    ),
    **_each(
        "MobileViTV2ForImageClassification EfficientNetForImageClassification",
        {"pixel_values": (1, 3, 64, 64)},
    ),
    **_each(
        "PerceiverForImageClassificationFourier PerceiverForImageClassificationConvProcessing",
        {"pixel_values": (1, 3, 224, 224)},
    ),
    "Siglip2ForImageClassification": {
        **{"pixel_values": (1, 4, 588), "spatial_shapes": torch.tensor([[2, 2]])},
        "pixel_attention_mask": torch.ones(1, 4, dtype=torch.long),
    },
}


def _input(name: str, value: tuple[int, ...] | torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if name.endswith("_ids"):
        return torch.randint(3, 200, value, generator=generator)
    return torch.randn(value, generator=generator)


def inputs_of(model: Any) -> dict[str, torch.Tensor]:
    """Tokens, sounds or images that a model takes: its main input, and tokens for a decoder."""
    generator = torch.Generator().manual_seed(1)
    if given := INPUTS.get(type(model).__name__):
        return {name: _input(name, value, generator) for name, value in given.items()}
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
