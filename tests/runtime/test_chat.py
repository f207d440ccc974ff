"""The tokens of what a user says, by the chat template of a checkpoint."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quantkit.errors import CheckpointError
from quantkit.model.tokenizer import has_chat_template
from quantkit.runtime.chat import chat_tokens

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"
TEXT = "{% for one in messages %}{{ bos_token }}<user>{{ one['content'] }}</s>{% endfor %}"
PARTS = (
    "{% for one in messages %}<user>{% for part in one['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}</s>{% endfor %}"
)
ANSWER = "{% if add_generation_prompt %}<assistant>{% endif %}"


def words(template: str | None) -> Any:
    found = AutoTokenizer.from_pretrained(STORIES)
    found.chat_template = template
    return found


@pytest.mark.parametrize(
    ("template", "content"),
    [(TEXT, "Hello\nyou"), (PARTS, [{"type": "text", "text": "Hello\nyou"}])],
    ids=["text", "parts"],
)
def test_tokens_are_those_of_transformers(template: str, content: Any) -> None:
    asked = words(template + ANSWER)
    assert has_chat_template(asked) and not has_chat_template(words(None))
    tokens = chat_tokens(asked, "Hello\nyou")
    message = {"role": "user", "content": content}
    expected = asked.apply_chat_template(
        [message], add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    assert tokens.dtype == torch.int64 and torch.equal(tokens, expected)
    # Not by the other kind of content, which this template does not show, and with one BOS at most.
    assert "Hello" in asked.decode(tokens[0]) and int((tokens == asked.bos_token_id).sum()) <= 1


def test_an_error_names_the_file_of_the_template(tmp_path: Path) -> None:
    shutil.copytree(STORIES, tmp_path / "old")
    path = tmp_path / "old" / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": "{{ missing.one }}"}))
    with pytest.raises(CheckpointError, match=r"^\S+/old/tokenizer_config\.json: the chat template fails"):
        chat_tokens(AutoTokenizer.from_pretrained(tmp_path / "old"), "Hello")
    (tmp_path / "old" / "chat_template.jinja").write_text("{% for")
    with pytest.raises(
        CheckpointError, match=r"/chat_template\.jinja: .*Copy the original model's, or leave"
    ):
        chat_tokens(AutoTokenizer.from_pretrained(tmp_path / "old"), "Hello")
