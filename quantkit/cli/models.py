"""Opening models for a command: without the chatter of the libraries underneath, and without tracebacks."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
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


@contextmanager
def using_transformers(source: str) -> Iterator[None]:
    """Keep transformers' progress bars and advice off the screen while the block opens or runs `source`.

    What transformers and torch raise for files that do not fit each other, of many kinds, becomes a
    `CheckpointError`, and a lack of GPU memory an `EnvironmentProblem`.
    """
    from quantkit.memory import enough_memory
    from quantkit.model.hf_files import explained
    from quantkit.runtime.transformers.quiet import silence

    silence()
    with enough_memory(source, "Use --device cpu, or a smaller batch or window."), explained(source):
        yield
