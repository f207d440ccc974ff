"""Tiny checkpoints and tokenizers."""

from ..tiny.fixtures import tiny, words

__all__ = ["tiny", "words"]
