"""Sizes of a checkpoint's blocks from its headers alone."""

import re

from quantkit.checkpoint.source import Checkpoint
from quantkit.model.architectures import text_config


def block_of(name: str) -> str:
    """Return the block of a tensor: its name up to the first number; "" outside of blocks."""
    found = re.match(r".*?\.\d+(?=\.)", name)
    return "" if found is None else found[0]


def stored_bytes(checkpoint: Checkpoint, itemsize: int) -> dict[str, int]:
    """Return the bytes of each block's weights in the compute dtype, plus the stored ones if that differs."""
    found: dict[str, int] = {}
    for name, tensor in checkpoint.tensors.items():
        kept = tensor.torch_dtype.itemsize
        block = block_of(name)
        found[block] = found.get(block, 0) + tensor.elements * (itemsize + (kept != itemsize) * kept)
    return found


def hidden_size(checkpoint: Checkpoint, widest: int) -> int:
    """Return the hidden size in config.json, or `widest`, an upper bound, if it states none."""
    config = text_config(checkpoint.config)
    return next((config[name] for name in ("hidden_size", "n_embd", "d_model") if name in config), widest)
