"""GGUF files of tiny models, written by the package gguf as llama.cpp's converter writes them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING

from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType

#: Options of a tiny model, by transformers' model type.
TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}
#: architecture of llama.cpp -> model type of transformers, its key in transformers' table, options.
MODELS: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "llama": ("llama", "llama", {}),
    "qwen2": ("qwen2", "qwen2", {}),
    "qwen3": ("qwen3", "qwen3", {}),
    "qwen2moe": (
        "qwen2_moe",
        "qwen2_moe",
        {
            "num_experts": 3,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        "qwen3_moe",
        {"num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "gemma2": ("gemma2", "gemma2", {}),
    "gemma3": ("gemma3_text", "gemma3", {}),
    "phi3": ("phi3", "phi3", {"pad_token_id": 0}),
    "starcoder2": ("starcoder2", "starcoder2", {}),
    "stablelm": ("stablelm", "stablelm", {}),
    "nemotron": ("nemotron", "nemotron", {}),
}
_ADDED = {"gemma2", "gemma3", "nemotron"}
_EXTRA = {
    "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "head_dim": "attention.key_length",
}
#: The GGUF type of a tensor by its name in the file and its shape.
Types = Callable[[str, tuple[int, ...]], str]


def tiny_model(arch: str, **options: Any) -> Any:
    """A random model whose numbers have few digits, so that sums and differences with 1 are exact."""
    kind, _, own = MODELS[arch]
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**TINY, **own, **options})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    for parameter in model.parameters():
        parameter.data = torch.randint(-64, 65, parameter.shape).float() / 256
    return model


def write_gguf(
    path: Path, arch: str, model: Any, types: Types = lambda name, shape: "F32", **more: Any
) -> Path:
    """`model` as the file that llama.cpp would make of it; `more` are metadata, with `__` for dots."""
    writer = gguf.GGUFWriter(path, arch)
    config = model.config.to_dict()
    names = {**_EXTRA, **{hf: key for key, hf in GGUF_CONFIG_MAPPING[MODELS[arch][1]].items() if hf}}
    config |= {"rope_theta": (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)}
    for hf, key in names.items():
        value = getattr(model.config, hf, config.get(hf))
        if isinstance(value, float):
            writer.add_float32(f"{arch}.{key}", value)
        elif isinstance(value, int) and not isinstance(value, bool):
            writer.add_uint32(f"{arch}.{key}", value)
    for key, value in more.items():
        add(writer, key.replace("__", "."), value)
    for name, weights in of_llama_cpp(arch, model):
        kind = BY_NAME[types(name, tuple(weights.shape))]
        number = gguf.GGMLQuantizationType(kind.number)
        try:
            data = gguf.quantize(weights.numpy(), number)
        except NotImplementedError:
            # The package only reads K-quants.
            data = random_blocks(kind, weights.shape[0], weights.shape[1] // kind.elements)
        writer.add_tensor(name, data, raw_dtype=number)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    """Add metadata of whatever type."""
    match value:
        case bool():
            writer.add_bool(key, value)
        case int():
            writer.add_uint32(key, value)
        case str():
            writer.add_string(key, value)
        case _:
            writer.add_array(key, value)


def of_llama_cpp(arch: str, model: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a model under llama.cpp's names, with what its converter does to them."""
    number = next(one for one, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    table = gguf.get_tensor_name_map(number, model.config.num_hidden_layers)
    found: dict[str, torch.Tensor] = {}
    tied = bool(model.config.tie_word_embeddings)
    for name, weights in model.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        if ".mlp.experts." in name:
            layer = f"blk.{name.split('.')[2]}"
            if name.endswith("gate_up_proj"):
                gate, up = weights.chunk(2, dim=1)
                found |= {f"{layer}.ffn_gate_exps.weight": gate, f"{layer}.ffn_up_exps.weight": up}
            else:
                found[f"{layer}.ffn_down_exps.weight"] = weights
            continue
        if name == "rope_freqs":
            found["rope_freqs.weight"] = weights
            continue
        stem, _, leaf = name.rpartition(".")
        stored = weights
        if arch in _ADDED and stem.endswith("norm") and leaf == "weight":
            stored = weights + 1
        if arch == "llama" and stem.endswith(("q_proj", "k_proj")):
            stored = permuted(
                weights,
                model.config.num_attention_heads
                if stem.endswith("q_proj")
                else model.config.num_key_value_heads,
            )
        if stem.endswith("shared_expert_gate"):
            stored = weights[0]
        found[f"{table.get_name(stem)}.{leaf}"] = stored
    return [(name, weights.contiguous()) for name, weights in found.items()]


def permuted(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """`LlamaModel.permute` of llama.cpp's convert_hf_to_gguf.py."""
    halves = weights.reshape(heads, 2, weights.shape[0] // heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


BY_NAME: Mapping[str, BlockType] = {one.name: one for one in BLOCK_TYPES.values()}


def random_blocks(kind: BlockType, rows: int, blocks: int) -> np.ndarray:
    """Blocks of random bytes, uint8 [rows, blocks * nbytes]: all numbers of 16 bits in them are finite."""
    data = np.random.default_rng(kind.number).integers(0, 256, (rows, blocks, kind.nbytes), dtype=np.uint8)
    # Numbers of 16 bits are at even bytes; without the highest bits of their exponents they are finite.
    for start in HALVES.get(kind.name, (0,)):
        data[:, :, start + 1] &= 0xBF
    if kind.name == "MXFP4":
        # 255 is NaN, and larger powers of two overflow.
        data[:, :, 0] %= 251
    if kind.name == "TQ2_0":
        # 3 is the code of nothing.
        data[:, :, :64] ^= data[:, :, :64] & (data[:, :, :64] >> 1) & 0x55
    return data.reshape(rows, -1)


#: Where blocks have numbers of 16 bits.
HALVES: Mapping[str, tuple[int, ...]] = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
    "IQ1_M": (),
    "MXFP4": (),
}
#: A byte-level vocabulary: all bytes, some merges, and tokens for a chat.
CHAT_TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"


def tokenizer_metadata() -> dict[str, Any]:
    """Metadata of a byte-level tokenizer of 264 tokens, with a chat template."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    tokens = ["<|end|>", "<|user|>", "<|assistant|>", *bytes_to_unicode().values()]
    merges = ["h e", "l l", "he ll", "hell o"]
    tokens += ["".join(merge.split()) for merge in merges]
    kinds = [3, 3, 3] + [1] * (len(tokens) - 3)
    return {
        "tokenizer__ggml__model": "gpt2",
        "tokenizer__ggml__pre": "gpt-2",
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__token_type": kinds,
        "tokenizer__ggml__merges": merges,
        "tokenizer__ggml__bos_token_id": 0,
        "tokenizer__ggml__eos_token_id": 0,
        "tokenizer__ggml__eot_token_id": 2,
        "tokenizer__chat_template": CHAT_TEMPLATE,
    }
