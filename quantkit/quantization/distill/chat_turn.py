"""Find the tokens of a chat template around what a user says."""

from dataclasses import dataclass
from typing import Any

import torch

from quantkit.errors import CheckpointError
from quantkit.model.tokenizer import has_chat_template, tokenize

#: Day of templates that write one, so that what is trained does not depend on today.
_DAY = "01 Jan 2026"
_FIXED = f"{{% macro strftime_now(format) %}}{_DAY}{{% endmacro %}}"
#: Stands for the user's words: letters that no template changes.
_WORDS = "quantkitusersays"


@dataclass(frozen=True, eq=False)
class ChatTurn:
    """Tokens before a user's words, int64 [b], and from there to the start of the answer, int64 [a]."""

    before: torch.Tensor
    after: torch.Tensor

    @property
    def length(self) -> int:
        """Return the number of tokens of both."""
        return len(self.before) + len(self.after)

    def count(self, samples: torch.Tensor) -> int:
        """Return how many of `samples`, int64 [n, T], begin with the tokens before a user's words."""
        size = len(self.before)
        return int((samples[:, :size] == self.before).all(1).sum()) if samples.shape[1] >= size else 0


def chat_turn(words: Any, vocabulary: int) -> ChatTurn | None:
    """Return the first turn of the chat template of a tokenizer.

    None without a template, and for one that refuses a lone message of a user or does not show it once.
    Raises `CheckpointError` for tokens beyond an embedding with `vocabulary` rows.
    """
    if not has_chat_template(words):
        return None
    message = {"role": "user", "content": _WORDS}
    try:
        text = words.apply_chat_template(
            [message],
            tokenize=False,
            add_generation_prompt=True,
            chat_template=_FIXED + words.get_chat_template(),
            date_string=_DAY,
        )
    except Exception:  # Templates may raise anything.
        return None
    before, *after = text.split(_WORDS)
    if len(after) != 1 or not before or not after[0]:
        return None
    turn = ChatTurn(tokenize(words, before), tokenize(words, after[0]))
    largest = int(torch.cat([turn.before, turn.after]).max())
    if largest >= vocabulary:
        raise CheckpointError(
            f"{words.name_or_path}: the chat template has token {largest}, but the embedding has "
            f"{vocabulary} rows. The template or the tokenizer belongs to another model; restore the files "
            "of one revision."
        )
    return turn
