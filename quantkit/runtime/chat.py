"""Tokenize what a user says by the chat template of a checkpoint."""

from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError, UsageError
from quantkit.model.tokenizer import CHAT_TEMPLATE_NAME, has_chat_template

#: Files that may have the chat template. Older checkpoints have it in the second.
_TEMPLATE_FILES = (CHAT_TEMPLATE_NAME, "tokenizer_config.json")


def chat_tokens(words: Any, said: str) -> torch.Tensor:
    """Tokenize a chat of one message: a user says `said`, and the model's answer starts.

    Returns P tokens, int64 [1, P], by the chat template of the tokenizer `words`, which runs in a sandbox.
    Raises `UsageError` without a template or for a blank `said`. Raises `CheckpointError`, which names the
    file, if the template fails or its text lacks `said`.
    """
    if not has_chat_template(words):
        raise UsageError(
            f"{words.name_or_path} has no chat template ({' or '.join(_TEMPLATE_FILES)}), so it continues "
            "texts. Leave out --chat."
        )
    if not said.strip():
        raise UsageError("the prompt is blank; write what the user says.")
    # Some templates, often those of models of images, read a list of parts and skip plain text.
    for content in (said, [{"type": "text", "text": said}]):
        text = _rendered(words, content)
        if said.strip() in text:
            # The template writes special tokens itself.
            ids: torch.Tensor = words(text, add_special_tokens=False, return_tensors="pt").input_ids
            return ids
    raise CheckpointError(
        f"{_template_file(words)}: the chat template does not write what a user says; expected the prompt in "
        "its text. Copy the original model's template, or leave out --chat."
    )


def _rendered(words: Any, content: Any) -> str:
    """Return a chat as text: one user message `content`, then the start of the answer.

    The text follows the chat template of the tokenizer `words`. `content` is a string, or a list of parts as
    in templates for images. Raises `CheckpointError` if the template fails.
    """
    message = {"role": "user", "content": content}
    try:
        text: str = words.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
    except Exception as error:  # Templates may raise anything.
        cause = " ".join(str(error).split())
        raise CheckpointError(
            f"{_template_file(words)}: the chat template fails ({type(error).__name__}: {cause}); expected "
            "one that takes a message of a user alone. Copy the original model's, or leave out --chat."
        ) from error
    return text


def _template_file(words: Any) -> Path:
    """Return the file with the chat template of the tokenizer `words`; its directory if there is none."""
    directory = Path(words.name_or_path)
    return next((path for name in _TEMPLATE_FILES if (path := directory / name).is_file()), directory)
