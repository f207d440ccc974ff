"""Loading a model for a command, without the chatter of the libraries underneath."""

import os
from typing import Any


def open_model(source: str, device: str, dtype: str, *, verbose: bool) -> tuple[Any, Any]:
    """The model and tokenizer of `source`; with `verbose`, which kernel runs is logged as it is chosen."""
    if verbose:
        os.environ["QUANTKIT_VERBOSE"] = "1"
    quiet_transformers()
    from quantkit.eval.models import dtype_named
    from quantkit.model.load import load, tokenizer

    loaded = load(source, device=device, dtype=None if dtype == "auto" else dtype_named(dtype))
    return loaded, tokenizer(source)


def quiet_transformers() -> None:
    """Keep transformers' own progress bars and advice off the screen; errors still show."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
