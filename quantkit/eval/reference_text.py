"""Text of the reference's own, for all models that are compared with it."""

import torch

from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.source import Checkpoint
from quantkit.devices import pick_device
from quantkit.errors import UsageError
from quantkit.eval.eval_options import EvalOptions
from quantkit.eval.models import dtype_named, language_limits
from quantkit.eval.own_text import OwnText, beginnings
from quantkit.eval.reference import Reference
from quantkit.eval.runner import open_passes


def reference_text(options: EvalOptions, reference: Reference | None) -> OwnText:
    """Return the text that the original wrote, from `options` or `reference`, or else let it write.

    It then writes `options.own_text` texts. Raises `UsageError` without an original, or for no texts.
    """
    known = options.written or (None if reference is None else reference.settings.written)
    if known is not None:
        return known
    if options.against is None or options.own_text < 1:
        raise UsageError(
            f"{options.own_text} texts of the original's own were asked for. Give a number above 0, and the "
            "original to compare with."
        )
    checkpoint = Checkpoint.open(resolve(options.against))
    starts = beginnings(checkpoint.directory, options.own_text)
    _, limit = language_limits(checkpoint.directory)
    return _written(checkpoint, starts, limit, options.dtype, options.device)


def continuations(checkpoint: Checkpoint, text: OwnText, dtype: str, device: str) -> OwnText:
    """Let the model of `checkpoint` continue the beginnings of `text`, to the same length in tokens."""
    return _written(checkpoint, text.starts, text.windows.tokens.shape[1], dtype, device)


def _written(
    checkpoint: Checkpoint, starts: torch.Tensor, limit: int | None, dtype: str, device: str
) -> OwnText:
    passes = open_passes(checkpoint, dtype_named(dtype), str(pick_device(device)))
    try:
        return passes.writes(starts, limit)
    finally:
        passes.close()
