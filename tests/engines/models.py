"""Random models whose tokens are certain enough for a comparison, and directories of given ones."""

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from .environments import ROOT


def random_model(kind: str, **sizes: Any) -> Callable[[Path], None]:
    """Return what writes a random model of a class, with weights large enough for certain tokens."""

    def write(directory: Path) -> None:
        torch.manual_seed(0)
        source = ROOT / "examples" / "stories260K"
        vocabulary = json.loads((source / "config.json").read_text())["vocab_size"]
        common = {"vocab_size": vocabulary, "num_hidden_layers": 2, "max_position_embeddings": 512}
        config = getattr(transformers, f"{kind}Config")(**{**common, **sizes})
        model = getattr(transformers, f"{kind}ForCausalLM")(config)
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 1.2 * parameter.shape[-1] ** -0.5)
            elif name.endswith("bias"):
                parameter.data.normal_(0, 0.3)
        model.to(torch.bfloat16).save_pretrained(directory)
        for file in source.glob("*token*"):
            shutil.copy(file, directory)

    return write


MODELS: dict[str, Callable[[Path], None]] = {
    # Heads of 64 features: vLLM's attention on a CPU has no small ones, as the bundled model has.
    "llama": random_model(
        "Llama", hidden_size=256, intermediate_size=384, num_attention_heads=4, tie_word_embeddings=True
    ),
    "qwen2": random_model(
        # Its class of tokenizer adds a token to the 512.
        "Qwen2",
        vocab_size=544,
        hidden_size=320,
        intermediate_size=864,
        num_attention_heads=5,
        num_key_value_heads=1,
    ),
    "mixtral": random_model(
        "Mixtral",
        hidden_size=256,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=None,
    ),
    # Its class makes the embedding, which is the head, without a config.
    "gemma2": random_model(
        "Gemma2",
        hidden_size=256,
        intermediate_size=384,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        query_pre_attn_scalar=64,
    ),
}


def sources(
    work: Path,
    kinds: Iterable[str],
    given: Iterable[str] = (),
    models: Mapping[str, Callable[[Path], None]] = MODELS,
) -> dict[str, Path]:
    """Return the directories of models: of `models`, made below `work`, and `given` as NAME=DIRECTORY."""
    found = {name: Path(place) for name, _, place in (one.partition("=") for one in given)}
    for name in kinds:
        found[name] = work / name
        if not found[name].exists():
            models[name](found[name])
    return found
