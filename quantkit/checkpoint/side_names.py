"""Tell which files beside the weights belong to a checkpoint, in a directory or a repository."""

from pathlib import Path

_SUFFIXES = frozenset({".json", ".txt", ".model", ".jinja", ".md", ".tiktoken"})
_WITHOUT_SUFFIX = frozenset({"LICENSE", "NOTICE"})


def is_side_name(name: str) -> bool:
    """Return True for the name of a checkpoint file: tokenizer, license and others, config and index."""
    wanted = Path(name).suffix in _SUFFIXES or name in _WITHOUT_SUFFIX
    return wanted and not name.startswith(".") and "/" not in name
