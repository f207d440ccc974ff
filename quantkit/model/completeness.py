"""Find parameters of a model that a checkpoint has no tensor for, and explain why."""

import re
from collections.abc import Collection, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from quantkit.checkpoint.source import Checkpoint
from quantkit.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def missing_parameters(model: "nn.Module", loaded: Collection[str]) -> list[str]:
    """Return the parameters of `model` that are neither in `loaded` nor tied to a loaded parameter.

    transformers would fill missing parameters with random numbers.
    """
    optional = [
        re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
    ]
    ties = getattr(model, "all_tied_weights_keys", None) or {}
    # A file may hold either of two tied parameters.
    tied = {*ties, *(source for target, source in ties.items() if target in loaded)}
    return [
        name
        for name, _ in model.named_parameters(remove_duplicate=False)
        if name not in loaded and name not in tied and not any(p.search(name) for p in optional)
    ]


def is_only_head(model: "nn.Module", missing: Sequence[str]) -> bool:
    """Return True if all `missing` parameters are outside the base model inside `model`, as a head is."""
    base = getattr(model, "base_model", model)
    if base is model or not missing:
        return False
    inside = set(base.parameters())
    return not any(model.get_parameter(name) in inside for name in missing)


def has_base_names(model: "nn.Module", stored: Collection[str]) -> bool:
    """Return True if no name in `stored` begins with the name of the base model: it was saved on its own."""
    return not any(name.startswith(f"{model.base_model_prefix}.") for name in stored)


def lacks(model: "nn.Module", missing: Sequence[str], checkpoint: Checkpoint) -> CheckpointError:
    """Return the error for a checkpoint without tensors for the `missing` parameters of `model`.

    The text depends on the cause: no head, a tensor that transformers renames, missing tensors, or names of
    another model.
    """
    from transformers import __version__

    first, kind = missing[0], type(model).__name__
    more = f" and {len(missing) - 1} more parameters" if len(missing) > 1 else ""
    shape = list(model.get_parameter(first).shape)
    text = f"{checkpoint.directory} has no tensor for {first!r} {shape}{more} of {kind}"
    if is_only_head(model, missing):
        base = type(model.base_model).__name__
        return CheckpointError(
            f"{text}, its head, and all of {base} without. If the model has no head, name {base} in "
            "'architectures' of config.json. If it is the embedding, set \"tie_word_embeddings\": true. "
            "Otherwise download the checkpoint again: the files are not whole."
        )
    if first in checkpoint.tensors:
        return CheckpointError(
            f"{text}: transformers {__version__} gives its tensor of that name another one as it loads. The "
            "files have the names of another version of transformers. Take those of the original model."
        )
    pattern = _NUMBER.sub("*", first)
    others = [name for name in checkpoint.tensors if _NUMBER.sub("*", name) == pattern]
    parameters = sum(1 for _ in model.parameters())
    if others or 2 * len(missing) < parameters:
        instead = f"It has {others[0]!r}" if others else f"It has {parameters - len(missing)} others"
        return CheckpointError(
            f"{text}. {instead}, so the files are not whole, or config.json has other sizes than they. "
            "Download the checkpoint again, or take its own config.json."
        )
    close = get_close_matches(first, checkpoint.tensors, n=1, cutoff=0) if len(first) < 200 else []
    instead = close[0] if close else next(iter(checkpoint.tensors), "")
    return CheckpointError(
        f"{text}. Its closest name is {instead!r}: the files are of another class than {kind}, which "
        "config.json describes, or have other names than transformers gives. Name their class in "
        "'architectures' of config.json, or rename the tensors."
    )
