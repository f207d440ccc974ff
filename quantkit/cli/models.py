"""Opening models for a command: without the chatter of the libraries underneath, and without tracebacks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any


def open_model(source: str, device: str, dtype: str) -> tuple[Any, Any]:
    """The model and tokenizer of `source`; arguments as for `load`."""
    from quantkit.eval.models import dtype_named
    from quantkit.model.tokenizer import tokenizer
    from quantkit.runtime.load import load_language_model

    named = None if dtype == "auto" else dtype_named(dtype)
    with using_transformers(source):
        return load_language_model(source, device=device, dtype=named), tokenizer(source)


def log_kernels() -> None:
    """Have every choice of a kernel logged, with why no other was chosen."""
    os.environ["QUANTKIT_VERBOSE"] = "1"


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


@contextmanager
def using_transformers(source: str) -> Iterator[None]:
    """Keep transformers' progress bars and advice off the screen while the block opens or runs `source`.

    What transformers and torch raise for files that do not fit each other, of many kinds, becomes a
    `CheckpointError`, and a lack of GPU memory an `EnvironmentProblem`.
    """
    from quantkit.memory import enough_memory
    from quantkit.model.hf_files import explained

    silence()
    with enough_memory(source, "Use --device cpu, or a smaller batch or window."), explained(source):
        yield
