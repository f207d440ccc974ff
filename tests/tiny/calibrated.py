"""Tiny random models to calibrate, with tokenizers of one token per character."""

import itertools
import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from quantkit.calibrate.data.calibration_options import CalibrationOptions
from quantkit.checkpoint.source import Checkpoint
from quantkit.quantization.blockwise.calibration_data import read_samples

from .sizes import SIZES, made_once

MODEL_SIZES = {**SIZES, "intermediate_size": 84, "num_hidden_layers": 3}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "tied": ("LlamaConfig", {"tie_word_embeddings": True, "attention_bias": True}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "mistral": ("MistralConfig", {"sliding_window": 8}),
    "gemma2": ("Gemma2Config", {"query_pre_attn_scalar": 16, "sliding_window": 8}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 36},
    ),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 36,
            "shared_expert_intermediate_size": 48,
        },
    ),
    "gpt_oss": ("GptOssConfig", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 33},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8, "num_key_value_heads": 4},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
        },
    ),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "qwen2-window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    ),
    "granite": ("GraniteConfig", {"residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "smollm3": ("SmolLM3Config", {"no_rope_layers": [1, 0, 1]}),
    "phi3": ("Phi3Config", {"partial_rotary_factor": 0.5}),
    "glm": ("GlmConfig", {"partial_rotary_factor": 0.5, "attention_bias": True}),
    "opt": ("OPTConfig", {"ffn_dim": 84, "word_embed_proj_dim": 32, "do_layer_norm_before": True}),
    "gpt2": ("GPT2Config", {"n_layer": 2, "n_head": 4, "n_embd": 64}),
    "bloom": ("BloomConfig", {"n_layer": 2, "n_head": 4}),
    "mpt": ("MptConfig", {"d_model": 64, "n_layers": 2, "n_heads": 4, "max_seq_len": 64}),
    "gptj": ("GPTJConfig", {"n_layer": 2, "n_head": 4, "n_embd": 64, "rotary_dim": 8}),
    # None leaves a size out: this config computes that one.
    "falcon": ("FalconConfig", {"head_dim": None}),
    "rwkv": (
        "RwkvConfig",
        {"attention_hidden_size": 64, "context_length": 64, "num_hidden_layers": 2, "rescale_every": 1},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        {
            **{"global_head_dim": 16, "num_global_key_value_heads": 2, "sliding_window": 8},
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
            **{"num_hidden_layers": 4, "num_kv_shared_layers": 2},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        {
            **{"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96, "laurel_rank": 8},
            **{"altup_num_inputs": 4, "num_hidden_layers": 4, "num_kv_shared_layers": 2},
            **{"activation_sparsity_pattern": [0.0] * 4, "intermediate_size": [84] * 4, "sliding_window": 8},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {
            **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 33},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "n_shared_experts": 1},
            **{"q_lora_rank": 16, "kv_lora_rank": 16, "head_dim": 8, "num_key_value_heads": 4},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
            **{"index_n_heads": 2, "index_head_dim": 16, "index_topk": 8},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 1, "interleave_moe_layer_step": 2},
            **{"num_hidden_layers": 2, "intermediate_size_mlp": 84, "attention_chunk_size": 64},
        },
    ),
    "t5": ("T5Config", {"num_layers": 2, "d_ff": 84, "head_dim": None, "d_kv": 16}),
    "bart": (
        "BartConfig",
        {
            **{"encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 84, "decoder_ffn_dim": 84},
            **{"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
            "num_hidden_layers": None,
        },
    ),
    "bert": ("BertConfig", {}),
    "embedding": ("Qwen3Config", {}),
    "vision": (
        "Qwen2VLConfig",
        {
            "text_config": {
                **MODEL_SIZES,
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
                },
            },
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2},
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        {
            **{"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1},
            **{"mamba_d_state": 16, "mamba_chunk_size": 8, "num_hidden_layers": 2},
        },
    ),
}
#: Classes of models that do not predict the next token.
CLASSES = {
    "t5": "T5ForConditionalGeneration",
    "bart": "BartForConditionalGeneration",
    "bert": "BertForMaskedLM",
    "embedding": "Qwen3Model",
    "vision": "Qwen2VLForConditionalGeneration",
}
LINEARS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
)


def write(
    directory: Path, family: str = "llama", dtype: torch.dtype = torch.bfloat16, **changes: Any
) -> Path:
    """A tiny random model with a tokenizer of one token per character."""
    source = directory / f"{family}-source"
    key = "calibrated", family, dtype, sorted(changes.items())
    made_once(source, key, lambda: _write(source, family, dtype, changes))
    return source


def _write(source: Path, family: str, dtype: torch.dtype, changes: dict[str, Any]) -> None:
    name, fields = FAMILIES[family]
    torch.manual_seed(0)
    sizes = {**MODEL_SIZES, **fields, **changes}
    config = getattr(transformers, name)(**{key: one for key, one in sizes.items() if one is not None})
    cls = getattr(transformers, CLASSES[family]) if family in CLASSES else transformers.AutoModelForCausalLM
    model = (cls(config) if family in CLASSES else cls.from_config(config)).to(dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    model.save_pretrained(source)
    tokens = {character: i for i, character in enumerate(string.printable[:94])}
    document = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Split", "pattern": {"Regex": ""}, "behavior": "Isolated", "invert": False},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": tokens, "unk_token": "0"},
    }
    (source / "tokenizer.json").write_text(json.dumps(document))
    (source / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')


def data(text: Path | None, **options: Any) -> CalibrationOptions:
    return CalibrationOptions(None if text is None else str(text), **{"samples": 12, "length": 24, **options})


def files_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def tokens_of(source: Path, text: Path, **options: Any) -> torch.Tensor:
    """The tokens that `data` has for a model."""
    return read_samples(Checkpoint.open(source), data(text, **options), 96).tokens


def interrupted_at(stop: int) -> Callable[[int, int, str], None]:
    """A `progress` that interrupts the run at its call number `stop`."""
    calls = itertools.count(1)

    def progress(done: int, total: int, name: str) -> None:
        if next(calls) == stop:
            raise KeyboardInterrupt

    return progress
