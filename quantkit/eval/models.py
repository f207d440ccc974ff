"""Query facts about models before they run: limits, dtypes, versions."""

import gc
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from quantkit import __version__
from quantkit.checkpoint.hub.repository import resolve
from quantkit.devices import pick_device
from quantkit.errors import CheckpointError, unknown_name

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


def dtype_named(name: str) -> torch.dtype:
    """Return the torch dtype called `name`; raise `UsageError` with a list of all names if unknown."""
    if name not in DTYPES:
        raise unknown_name("dtype", name, DTYPES)
    return DTYPES[name]


def dtype_for(name: str, device: str, source: Path | str) -> str:
    """Return `name`, or for "auto" float32 on a CPU and the checkpoint's dtype on a GPU.

    `source` is a directory or hub id. A GPU takes ten times as long in float32, and has no packed kernels for
    it.
    """
    if name != "auto":
        dtype_named(name)
        return name
    if pick_device(device).type == "cpu":
        return "float32"
    stored = str(_language_config(resolve(source)).dtype).removeprefix("torch.")
    return stored if stored in DTYPES else "float32"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name that `dtype_named` accepts for `dtype`."""
    return next(name for name, one in DTYPES.items() if one == dtype)


def language_limits(path: Path) -> tuple[int, int | None]:
    """Return vocabulary size and positions (or None) of the language model in config.json.

    Raises `CheckpointError` if transformers does not know the architecture.
    """
    config = _language_config(path)
    positions = getattr(config, "max_position_embeddings", None)
    return int(config.vocab_size), None if positions is None else int(positions)


def _language_config(path: Path) -> Any:
    """Return config.json as transformers reads it, with the defaults of the model's class."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True).get_text_config()
        config.vocab_size  # noqa: B018  that of a language model
    except (AttributeError, KeyError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: transformers cannot read config.json as a language model ({error}). Check model_type "
            "and the version of transformers."
        ) from error
    return config


def release(device: str) -> None:
    """Free the memory of models on `device`; call it after the last reference to them is dropped.

    Modules are reference cycles, which only a garbage collection frees. On a GPU, torch's cached memory is
    returned too.
    """
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


@dataclass(frozen=True)
class Versions:
    """Versions of packages that affect figures."""

    quantkit_version: str
    torch: str
    transformers: str


def versions() -> Versions:
    """Return the installed versions of quantkit, torch and transformers."""
    return Versions(__version__, str(torch.__version__), version("transformers"))
