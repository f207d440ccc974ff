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
    config = getattr(transformers, name)(**{**MODEL_SIZES, **fields, **changes})
    model = transformers.AutoModelForCausalLM.from_config(config).to(dtype)
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
