"""What a shell completes: names of values and models. Imports no torch, as a key press waits for it."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

#: Where the hub's models lie, below the cache of Hugging Face.
_PREFIX = "models--"


def names(*choices: str) -> Callable[[str], list[str]]:
    """What completes one of `choices`, ignoring case."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in choices if name.lower().startswith(incomplete.lower())]

    return complete


def lists(*choices: str) -> Callable[[str], list[str]]:
    """What completes the last of names that are separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names(*choices)(last)]

    return complete


def models(incomplete: str) -> list[str]:
    """Files and directories that begin so, and the models in the cache of the hub."""
    return [*_paths(incomplete), *(one for one in _cached() if one.lower().startswith(incomplete.lower()))]


def _paths(incomplete: str) -> Iterable[str]:
    folder, slash, start = incomplete.rpartition("/")
    try:
        found = sorted(Path(f"{folder}{slash}" or ".").expanduser().iterdir())
    except OSError:
        return []
    return [
        f"{folder}{slash}{one.name}"
        for one in found
        if one.name.startswith(start) and (one.is_dir() or one.suffix == ".gguf") and one.name[0] != "."
    ]


def _cached() -> Iterable[str]:
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    folder = Path(os.environ.get("HF_HUB_CACHE", f"{home}/hub")).expanduser()
    try:
        found = sorted(folder.glob(f"{_PREFIX}*"))
    except OSError:
        return []
    return [one.name.removeprefix(_PREFIX).replace("--", "/", 1) for one in found]
