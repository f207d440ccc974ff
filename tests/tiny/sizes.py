"""What tests make tiny models of: the sizes, odd ones, so that nothing fits by luck, and their files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
}

_MADE: dict[str, tuple[dict[Path, bytes], torch.Tensor]] = {}


def made_once(directory: Path, key: object, make: Callable[[], None]) -> None:
    """Have `make` fill a directory, or fill it with what that wrote for the same `key` before.

    Random numbers go on as after it in both cases, and what tests change is theirs: they have copies.
    """
    known = repr(key)
    assert not any(directory.rglob("*")), "it has files that are others'"
    if known not in _MADE:
        make()
        files = [path for path in directory.rglob("*") if path.is_file()]
        contents = {path.relative_to(directory): path.read_bytes() for path in files}
        _MADE[known] = contents, torch.get_rng_state()
        return
    contents, state = _MADE[known]
    for name, data in contents.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    # A GPU's random numbers, of which `make` takes none.
    torch.manual_seed(0)
    torch.set_rng_state(state)
