"""Find the tokens of a chat template around what a user says."""

from dataclasses import dataclass
from typing import Any

import torch

from quantkit.model.tokenizer import tokenize

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
        return int((samples[:, : len(self.before)] == self.before).all(1).sum())


def chat_turn(words: Any) -> ChatTurn | None:
    """Return the first turn of the chat template of a tokenizer.

    None without a template, and for one that refuses a lone message of a user or does not show it once.
    """
    if not getattr(words, "chat_template", None):
        return None
    message = {"role": "user", "content": _WORDS}
    try:
        text = words.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception:  # Templates may raise anything.
        return None
    before, *after = text.split(_WORDS)
    if len(after) != 1 or not before or not after[0]:
        return None
    return ChatTurn(tokenize(words, before), tokenize(words, after[0]))
