"""Sizes of models that people ask about, in each format: what `quantkit plan` says of their headers.

    python benchmarks/model_sizes.py --json benchmarks/results/guide/model-sizes.json

Weights are not needed. For each model a config of its shapes is written, and a safetensors file with its
header and a hole for the data. The KV cache of a token at 16 bits is 2 (keys and values) x layers x key-value
heads x head size x 2 bytes. `benchmarks/guide_pages.py` makes tables of it.
"""

import argparse
import json
import math
import struct
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from machine import command, commit

from quantkit.planning import plan_checkpoint as plan
from quantkit.quantization.gpu_memory import gpu_memory
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.quantization.stream import peak_bytes
from quantkit.recipes.recipe_options import RecipeOptions

#: Shapes of models, by their id on the hub: those of their config.json.
MODELS: dict[str, transformers.PreTrainedConfig] = {
    "meta-llama/Llama-3.2-1B-Instruct": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, tie_word_embeddings=True,
    ),
    "Qwen/Qwen3-4B": transformers.Qwen3Config(
        vocab_size=151936, hidden_size=2560, intermediate_size=9728, num_hidden_layers=36,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
    ),
    "meta-llama/Llama-3.1-8B-Instruct": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128,
    ),
    "Qwen/Qwen3-30B-A3B": transformers.Qwen3MoeConfig(
        vocab_size=151936, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=48, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=128, num_experts_per_tok=8,
    ),
    "meta-llama/Llama-3.1-70B-Instruct": transformers.LlamaConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
        num_attention_heads=64, num_key_value_heads=8, head_dim=128,
    ),
}  # fmt: skip
#: What each is planned in, as options of `quantize`. Heads and embeddings stay dense but in the last two; a
#: tied head shares the table of the embedding.
FORMATS: dict[str, dict[str, Any]] = {
    **{name: {"format": name} for name in ("int8", "fp8", "fp6", "int4", "nvfp4", "int3", "int2")},
    "int4-g32": {"format": "int4", "group_size": 32},
    "int4-head-int8": {"format": "int4", "lm_head": "int8"},
    "int4-embeddings-int8": {"format": "int4", "embeddings": "int8", "lm_head": "int8"},
}


def write_headers(config: transformers.PreTrainedConfig, directory: Path) -> None:
    """A checkpoint of a model's names and shapes in bfloat16; its data is a hole in the file."""
    cls = transformers.AutoModelForCausalLM._model_mapping[type(config)]
    config.architectures, config.dtype = [cls.__name__], torch.bfloat16
    with torch.device("meta"):
        model = cls(config).to(torch.bfloat16)
    config.save_pretrained(directory)
    header: dict[str, Any] = {}
    offset = 0
    for name, shape in stored_shapes(model).items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + offset)


def stored_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes as checkpoints have them: experts one by one, a tied head not at all."""
    found: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        shape = tuple(tensor.shape)
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        if name.endswith("experts.gate_up_proj"):
            for expert in range(shape[0]):
                for one in ("gate_proj", "up_proj"):
                    place = name.replace("gate_up_proj", f"{expert}.{one}.weight")
                    found[place] = (shape[1] // 2, shape[2])
        elif name.endswith("experts.down_proj"):
            for expert in range(shape[0]):
                found[name.replace("down_proj", f"{expert}.down_proj.weight")] = shape[1:]
        else:
            found[name] = shape
    return found


#: Methods whose memory is asked for.
METHODS = ("mse", "awq", "gptq", "best")


def memory_of(directory: Path) -> dict[str, dict[str, int]]:
    """Bytes that quantizing to int4 takes: beyond the libraries without data, and of a GPU by method."""
    found: dict[str, int] = {}
    for method in METHODS:
        asked = QuantizeOptions(recipe=RecipeOptions(format="int4", method=method), device="cuda")
        checkpoint, planned = plan(directory, asked)
        found[method] = gpu_memory(checkpoint, planned, asked.calibration).quantizing
        if method == "mse":
            host = peak_bytes(planned)
    return {"host": {"mse": host}, "gpu": found}


def measure(config: transformers.PreTrainedConfig) -> dict[str, Any]:
    """Parameters, bytes by format, and bytes of the KV cache of a token."""
    with tempfile.TemporaryDirectory() as place:
        directory = Path(place)
        write_headers(config, directory)
        dense = (directory / "model.safetensors").stat().st_size
        found: dict[str, Any] = {"bf16": dense}
        for name, options in FORMATS.items():
            tied = config.tie_word_embeddings and "embeddings" in options
            given = options | ({"lm_head": None} if tied else {})
            planned = plan(directory, QuantizeOptions(recipe=RecipeOptions(**given)))[1]
            found[name] = planned.output_bytes
        found["memory"] = memory_of(directory)
    heads = config.num_key_value_heads * config.head_dim
    found["kv_cache_per_token"] = 2 * config.num_hidden_layers * heads * 2
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    document: dict[str, Any] = {"command": command(), "about": f"headers alone, {commit()}", "models": {}}
    for name, config in MODELS.items():
        document["models"][name] = found = measure(config)
        print(name, found, flush=True)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
