"""Find the tokens of a chat template around what a user says, and those with which questions begin."""

import itertools
from collections import defaultdict
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
#: First words of questions and requests, from which a chat model goes on to the end of a question, and
#: answers. Of 64 texts that SmolLM2-135M-Instruct wrote as a user without them, none began with Who, Where,
#: When, Why, Which or How.
OPENINGS = (
    "What", "What is", "What is the", "What is a", "What are", "What are the", "What was the", "What does",
    "Who", "Who is", "Who is the", "Who was", "Who was the", "Who are",
    "Where", "Where is", "Where is the", "Where are", "Where do", "Where does", "Where was",
    "When", "When is", "When was", "When was the", "When did", "When do",
    "Why", "Why is", "Why is the", "Why are", "Why do", "Why does", "Why did",
    "How", "How do", "How does", "How is", "How many", "How much", "How long", "How often", "How far",
    "Which", "Which is", "Which is the", "Which of", "Which of the", "In which",
    "Is", "Is the", "Are", "Do", "Does", "Can", "Name", "Name the", "List", "Explain", "Define", "Describe",
    "Tell me", "Tell me about", "Give", "Write", "Translate",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class ChatTurn:
    """Tokens around a user's words.

    before    before them, int64 [b]
    after     from there to the start of the answer, int64 [a]
    openings  `before` with each of `OPENINGS`: a tensor int64 [n, T] for each length T in tokens, with most
              openings first
    """

    before: torch.Tensor
    after: torch.Tensor
    openings: tuple[torch.Tensor, ...] = ()

    @property
    def length(self) -> int:
        """Return the number of tokens of `before` and `after`."""
        return len(self.before) + len(self.after)

    def count(self, samples: torch.Tensor) -> int:
        """Return how many of `samples`, int64 [n, T], begin as chats do."""
        # The first token of an opening may include a space at the end of `before`.
        found = torch.zeros(len(samples), dtype=torch.bool)
        for beginning in (self.before, *itertools.chain.from_iterable(self.openings)):
            if samples.shape[1] >= len(beginning):
                found |= (samples[:, : len(beginning)] == beginning).all(1)
        return int(found.sum())


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
    turn = ChatTurn(tokenize(words, before), tokenize(words, after[0]), _openings(words, before, vocabulary))
    largest = int(torch.cat([turn.before, turn.after]).max())
    if largest >= vocabulary:
        raise CheckpointError(
            f"{words.name_or_path}: the chat template has token {largest}, but the embedding has "
            f"{vocabulary} rows. The template or the tokenizer belongs to another model; restore the files "
            "of one revision."
        )
    return turn


def _openings(words: Any, before: str, vocabulary: int) -> tuple[torch.Tensor, ...]:
    """Return the tokens of the text `before` with each of `OPENINGS`, as `ChatTurn.openings`.

    Openings with tokens beyond an embedding with `vocabulary` rows are left out.
    """
    by_length = defaultdict[int, list[torch.Tensor]](list)
    for opening in OPENINGS:
        tokens = tokenize(words, before + opening)
        if int(tokens.max()) < vocabulary:
            by_length[len(tokens)].append(tokens)
    return tuple(torch.stack(some) for some in sorted(by_length.values(), key=len, reverse=True))
