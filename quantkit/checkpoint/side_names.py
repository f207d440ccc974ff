"""Which files beside the weights are part of a checkpoint, in a directory and in a repository alike."""

from pathlib import Path

_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"})
_WITHOUT_SUFFIX = frozenset({"LICENSE", "NOTICE"})


def is_side_name(name: str) -> bool:
    """Return True if a file of this name is part of a checkpoint: tokenizer, license and so on, config and
    index.
    """
    wanted = Path(name).suffix in _SUFFIXES or name in _WITHOUT_SUFFIX
    return wanted and not name.startswith(".") and "/" not in name
