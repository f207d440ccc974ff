"""Keep what other libraries print out of a command's output: their progress bars, warnings and advice."""

from functools import cache
from importlib import import_module
from typing import Any


def silence() -> None:
    """Keep progress bars and advice of the libraries underneath off the screen, and out of pipes."""
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    _silence_tqdm()


@cache
def _silence_tqdm() -> None:
    """Draw no bars of tqdm: compressed-tensors, datasets and lm-eval do so whatever transformers is told."""
    # It has no types.
    tqdm: Any = import_module("tqdm").tqdm
    begin = tqdm.__init__

    def begin_silent(bar: Any, *arguments: Any, **options: Any) -> None:
        begin(bar, *arguments, **{**options, "disable": True})

    tqdm.__init__ = begin_silent
