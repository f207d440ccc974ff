"""Models for evaluation: one in memory at a time, and their logits."""

import gc
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.errors import CheckpointError, UsageError
from quantkit.model.load import load, tokenizer

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_named(name: str) -> torch.dtype:
    """The torch dtype called `name`; `UsageError` lists the known ones."""
    if name not in DTYPES:
        raise UsageError(f"unknown dtype {name!r}; use one of {', '.join(DTYPES)}.")
    return DTYPES[name]


def resolve_device(name: str) -> str:
    """`auto` is the GPU if there is one, else the CPU; every other name stands for itself."""
    if name != "auto":
        return name
    return "cuda" if torch.cuda.is_available() else "cpu"


def language_limits(path: Path) -> tuple[int, int | None]:
    """Vocabulary size and positions of the language model that config.json describes; positions may be None.

    transformers reads it, because what a config leaves out is a default of the model's class.
    `CheckpointError` if it does not know the architecture.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        vocabulary, positions = config.vocab_size, getattr(config, "max_position_embeddings", None)
    except (AttributeError, KeyError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: transformers cannot read config.json as a language model ({error}). Check model_type "
            "and the version of transformers."
        ) from error
    return int(vocabulary), None if positions is None else int(positions)


def open_tokenizer(path: Path) -> Any:
    """The tokenizer of a checkpoint directory."""
    return tokenizer(path)


def open_model(path: Path, dtype: torch.dtype, device: str) -> Any:
    """The model of `path` for inference. Drop it and call `release` before opening the next one."""
    model = load(path, device=device, dtype=dtype)
    model.eval()
    return model


def release(device: str) -> None:
    """Give the memory of dropped models back: modules are reference cycles, which wait for a collection."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def embedding_rows(model: Any) -> int:
    """Rows of the input embedding: one more than the largest token the model takes."""
    return int(model.get_input_embeddings().weight.shape[0])


@torch.inference_mode()
def logits_of(model: Any, tokens: torch.Tensor, scored: int, device: str, path: Path) -> torch.Tensor:
    """Logits [B, scored, V] that predict the last `scored` tokens of windows (int64 [B, W]), on `device`.

    `CheckpointError` if one is not finite: NaN would spread into every figure.
    """
    output = model(input_ids=tokens.to(device), use_cache=False)
    logits: torch.Tensor = output.logits[:, -scored - 1 : -1]
    if not bool(torch.isfinite(logits).all()):
        raise CheckpointError(
            f"{path}: the model gives logits that are not finite in {logits.dtype}. Evaluate with dtype "
            "float32; if that does not help, the weights are damaged: run `quantkit verify`."
        )
    return logits


@dataclass(frozen=True)
class Versions:
    """Versions of the packages that figures depend on."""

    quantkit_version: str
    torch: str
    transformers: str


def versions() -> Versions:
    """The versions that run."""
    return Versions(__version__, str(torch.__version__), version("transformers"))
