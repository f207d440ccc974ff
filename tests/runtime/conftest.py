"""Tiny checkpoints to run."""

from ..tiny.fixtures import prompt, small_rows, text, tiny, transformers_warnings, words

__all__ = ["prompt", "small_rows", "text", "tiny", "transformers_warnings", "words"]
