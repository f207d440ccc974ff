"""Read texts to score on: strictly, tokenized as one stream, cut into windows.

The protocol is GPTQ's (arXiv 2210.17323): the whole text is one stream of tokens, without BOS or other added
tokens, even if the tokenizer adds them by default. Windows of 2048 tokens do not overlap; tokens after the
last whole window are not used. Position 0 of a window has no context and is not scored, so a window of W
tokens scores W - 1.

With a stride below the window, windows overlap. Only the last `stride` tokens of each window are then scored,
and each has at least window - stride tokens of context.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from quantkit.calibrate.data.samples import token_digest
from quantkit.errors import CheckpointError, UsageError


@dataclass(frozen=True, eq=False)
class TextWindows:
    """Text as windows of tokens: int64 [windows, window], and notes for the user.

    The last `scored` tokens of each window are scored.
    """

    name: str
    tokens: torch.Tensor
    scored: int
    notes: tuple[str, ...] = ()

    @property
    def digest(self) -> str:
        """Return the hex SHA-256 of the windows' shape and tokens."""
        return token_digest(self.tokens)


def text_names(paths: Sequence[Path]) -> tuple[str, ...]:
    """Return a distinct name per text: the file name, or the whole path if that is ambiguous.

    Raises `UsageError` if a text is given twice.
    """
    for path, count in Counter(paths).items():
        if count > 1:
            raise UsageError(f"text {path} is given {count} times. Give each text once.")
    names = Counter(path.name for path in paths)
    return tuple(path.name if names[path.name] == 1 else str(path) for path in paths)


def usable_window(window: int, limit: int | None) -> tuple[int, str | None]:
    """Limit `window` to the positions of a model; return it with a note if it was shortened."""
    if window < 2:
        raise UsageError(f"window is {window}; a window has at least 2 tokens, one to predict from.")
    if limit is None or window <= limit:
        return window, None
    return limit, f"window {window} was cut to {limit}, the positions that the model has"


def cut(
    name: str, tokens: torch.Tensor, window: int, max_windows: int | None = None, stride: int | None = None
) -> TextWindows:
    """Cut the first `max_windows` (default all) windows of `window` tokens from a stream (int64 [n]).

    Windows start `stride` tokens (default `window`) apart. A stream shorter than one window becomes one short
    window. Raises `UsageError` below two tokens.
    """
    stride = window if stride is None else stride
    if max_windows is not None and max_windows < 1:
        raise UsageError(f"max_windows is {max_windows}; use at least 1, or none for the whole text.")
    if not 1 <= stride <= window:
        raise UsageError(f"stride is {stride}; use 1 to {window}, the tokens of a window.")
    length = len(tokens)
    if length < 2:
        raise UsageError(f"{name}: the text has {length} tokens; scoring takes at least 2. Give more text.")
    if length < window:
        note = f"{name}: {length} tokens are less than one window of {window}; scored as one short window"
        return TextWindows(name, tokens[None], min(stride, length - 1), (note,))
    windows = tokens.unfold(0, window, stride)[:max_windows].contiguous()
    return TextWindows(name, windows, min(stride, window - 1))


def check_tokens(text: TextWindows, rows: int, model: Path) -> None:
    """Raise `CheckpointError` if a token of `text` has no row in the embedding of `model`."""
    largest = int(text.tokens.max())
    if largest >= rows:
        raise CheckpointError(
            f"{model}: the tokenizer gives token {largest} for {text.name}, but the embedding has {rows} "
            "rows. The tokenizer belongs to another model; restore the files of one revision."
        )
