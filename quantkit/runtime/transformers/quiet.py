"""Silence progress bars, warnings and advice of other libraries in the output of commands."""

from functools import cache
from importlib import import_module
from typing import Any


def silence() -> None:
    """Turn off progress bars and advice of transformers, huggingface_hub and tqdm in the whole process.

    Messages of transformers below errors are hidden too. Nothing is turned on again.
    """
    from huggingface_hub.utils.tqdm import disable_progress_bars
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disable_progress_bars()
    _silence_tqdm()


@cache
def _silence_tqdm() -> None:
    """Turn off all bars of tqdm in this process, by replacing `tqdm.__init__`.

    compressed-tensors, datasets and lm-eval ignore the setting of transformers.
    """
    # It has no types.
    tqdm: Any = import_module("tqdm").tqdm
    begin = tqdm.__init__

    def begin_silent(bar: Any, *arguments: Any, **options: Any) -> None:
        begin(bar, *arguments, **{**options, "disable": True})

    tqdm.__init__ = begin_silent
