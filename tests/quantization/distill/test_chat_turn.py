"""The tokens of a chat template around what a user says."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from quantkit.errors import CheckpointError
from quantkit.model.tokenizer import tokenize
from quantkit.quantization.distill.chat_turn import OPENINGS, chat_turn

STORIES = Path(__file__).parents[3] / "examples" / "stories260K"
TEMPLATE = (
    "{% for one in messages %}<{{ one['role'] }}>{{ one['content'] | trim }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def words(template: str | None) -> Any:
    found = AutoTokenizer.from_pretrained(STORIES)
    found.chat_template = template
    return found


def test_a_turn_is_what_the_template_writes_around_the_words() -> None:
    of_model = words(TEMPLATE)
    turn = chat_turn(of_model, 512)
    assert turn is not None
    assert torch.equal(turn.before, tokenize(of_model, "<user>"))
    assert torch.equal(turn.after, tokenize(of_model, "</s><assistant>"))
    assert turn.length == len(turn.before) + len(turn.after)


def test_openings_are_what_a_user_would_have_begun_with() -> None:
    of_model = words(TEMPLATE)
    turn = chat_turn(of_model, 512)
    assert turn is not None
    lengths, counts = zip(*[(rows.shape[1], len(rows)) for rows in turn.openings], strict=True)
    assert len(set(lengths)) == len(lengths) and list(counts) == sorted(counts, reverse=True)
    found = [tuple(row.tolist()) for rows in turn.openings for row in rows]
    assert sorted(found) == sorted(tuple(tokenize(of_model, f"<user>{one}").tolist()) for one in OPENINGS)
    assert len(set(OPENINGS)) == len(OPENINGS)


@pytest.mark.parametrize(
    "template",
    [
        None,
        "{{ raise_exception('a system message is needed') }}",
        "{% for one in messages %}<user>{{ one['content'] | upper }}<assistant>{% endfor %}",
        "{% for one in messages %}<user>{{ one['content'] }}{{ one['content'] }}<assistant>{% endfor %}",
        "{% for one in messages %}{{ one['content'] }}<assistant>{% endfor %}",
        "{% for one in messages %}<user>{{ one['content'][0]['text'] }}<assistant>{% endfor %}",
    ],
    ids=["none", "refuses", "changes", "twice", "nothing before", "parts"],
)
def test_templates_without_a_turn(template: str | None) -> None:
    assert chat_turn(words(template), 512) is None


def test_chats_are_counted_by_their_beginning() -> None:
    turn = chat_turn(words(TEMPLATE), 512)
    assert turn is not None
    size = len(turn.before)
    samples = torch.zeros(3, size + 4, dtype=torch.int64)
    samples[1, :size] = samples[2, :size] = turn.before
    samples[2, 0] += 1
    assert turn.count(samples) == 1 and turn.count(samples[:0]) == 0
    # Samples may be shorter than what comes before the words, and there may be none.
    assert turn.count(samples[:, : size - 1]) == turn.count(samples[:0, : size - 1]) == 0


@pytest.mark.parametrize(
    "template", [TEMPLATE, "{{ messages[0]['content'] }}".join(["user: ", " assistant:"])]
)
def test_chats_that_begin_with_an_opening_are_counted(template: str) -> None:
    turn = chat_turn(words(template), 512)
    assert turn is not None
    rows = torch.nn.utils.rnn.pad_sequence([row for some in turn.openings for row in some], True)
    assert turn.count(rows) == len(rows) == len(OPENINGS)
    assert turn.count(rows + 1) == 0


def test_openings_beyond_the_embedding_are_left_out() -> None:
    of_model = words("e{{ messages[0]['content'] }}e")
    whole = chat_turn(of_model, 512)
    assert whole is not None
    largest = max(int(rows.max()) for rows in whole.openings)
    turn = chat_turn(of_model, largest)
    assert turn is not None
    found = [row for rows in turn.openings for row in rows]
    assert 0 < len(found) < len(OPENINGS) and all(int(row.max()) < largest for row in found)


def test_a_template_with_a_date_writes_the_same_on_every_day() -> None:
    of_model = words("{{ strftime_now('%d %b %Y') }} {{ date_string }}" + TEMPLATE)
    turn = chat_turn(of_model, 512)
    assert turn is not None
    assert torch.equal(turn.before, tokenize(of_model, "01 Jan 2026 01 Jan 2026<user>"))


def test_tokens_beyond_the_embedding_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"token \d+, but the embedding has 100 rows\. The"):
        chat_turn(words(TEMPLATE), 100)
