"""Tokens of a GGUF file: texts that are told apart, and scores that merge as merges do."""

import random
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from quantkit.targets.gguf_vocabulary import (
    Kind,
    byte_token,
    merge_ranks,
    merged,
    missing_bytes,
    token_scores,
    token_table,
    unmade,
)

Model = dict[str, Any]


def joined(text: str, texts: list[str], scores: list[float]) -> list[str]:
    """SentencePiece as llama.cpp has it: the first neighbours whose token has the highest score."""
    score_of = dict(zip(texts, scores, strict=True))
    pieces = list(text)
    while True:
        best = None
        for at in range(len(pieces) - 1):
            score = score_of.get(pieces[at] + pieces[at + 1])
            if score is not None and (best is None or score > best[0]):
                best = score, at
        if best is None:
            return pieces
        pieces[best[1] : best[1] + 2] = [pieces[best[1]] + pieces[best[1] + 1]]


def random_model(seed: int) -> Model:
    """Merges of random pairs in a random order, and sometimes a token that no merge makes."""
    draw = random.Random(seed)
    texts, merges = list("abc"), []
    for _ in range(draw.randint(1, 12)):
        pair = [draw.choice(texts), draw.choice(texts)]
        if pair not in merges and len("".join(pair)) <= 5:
            merges.append(pair)
            texts += [] if "".join(pair) in texts else ["".join(pair)]
    draw.shuffle(merges)
    texts += [one for one in ("ab", "bca") if draw.random() < 0.2 and one not in texts]
    return {"vocab": {text: number for number, text in enumerate(texts)}, "merges": merges}


def test_scores_make_the_tokens_of_merges_or_are_refused() -> None:
    """Against the library tokenizers, for every text of up to 6 characters that a seed draws."""
    refused = 0
    for seed in range(60):
        model = random_model(seed)
        texts = list(model["vocab"])
        scores, wrong = token_scores(texts, [Kind.NORMAL] * len(texts), merge_ranks(model))
        own = Tokenizer(models.BPE(model["vocab"], [(left, right) for left, right in model["merges"]]))
        if wrong is not None:
            refused += 1
            assert own.encode(wrong[0]).tokens == wrong[1] != joined(wrong[0], texts, scores)
            continue
        draw = random.Random(seed)
        for text in ("".join(draw.choices("abc", k=draw.randint(1, 6))) for _ in range(40)):
            assert own.encode(text).tokens == joined(text, texts, scores), (model, text)
    assert 5 < refused < 40


def test_a_score_is_of_the_merge_that_makes_the_token() -> None:
    """`abc` is first merged of `a` and `bc`, which never meet."""
    model = {"merges": ["a b", "a bc", "b c", "ab c"]}
    texts = ["a", "b", "c", "ab", "bc", "abc"]
    scores, wrong = token_scores(texts, [Kind.NORMAL] * 6, merge_ranks(model))
    assert wrong is None and scores[3:] == [0.0, -2.0, -3.0]


def test_a_token_that_is_found_before_merging_needs_no_merge() -> None:
    texts, ranks = ["a", "b", "▁", "ab", "▁a"], {("x", "y"): 0}
    assert token_scores(texts, [*[Kind.NORMAL] * 3, Kind.CONTROL, Kind.NORMAL], ranks)[1] == (
        "▁a",
        ["▁", "a"],
    )
    assert token_scores(texts, [*[Kind.NORMAL] * 3, Kind.USER, Kind.USER], ranks)[1] == ("▁a", ["▁", "a"])
    assert token_scores(texts[:4], [*[Kind.NORMAL] * 3, Kind.USER], ranks)[1] is None


def test_tokens_that_no_merge_makes() -> None:
    ranks = {("a", "b"): 0, ("ab", "ab"): 1}
    texts = ["a", "ab", "abab", "aba", "ba", "<s>"]
    assert list(unmade(texts, [*[Kind.NORMAL] * 5, Kind.CONTROL], ranks)) == ["aba", "ba"]
    assert merged("ababa", lambda *pair: ranks.get(pair)) == (["abab", "a"], 1)


@pytest.mark.parametrize(
    "left_out, missing",
    [
        ((), []),
        ((0x41,), []),
        ((0xC0, 0xC1, 0xF5, 0xFF), []),
        ((0x0A, 0x20, 0x42, 0x80, 0xF4), ["<0x0A>", "<0x42>", "<0x80>", "<0xF4>"]),
    ],
)
def test_bytes_that_text_can_need(left_out: tuple[int, ...], missing: list[str]) -> None:
    """`A` and the space are characters of the vocabulary; other bytes are none of UTF-8."""
    texts = ["A", "▁", *(byte_token(value) for value in range(256) if value not in left_out)]
    assert missing_bytes(texts, byte_token) == missing


def test_rows_without_a_token_get_a_name_that_is_free() -> None:
    rules: Model = {
        "model": {
            "vocab": {"<unk>": 0, "<0x41>": 1, "[PAD4]": 2},
            "unk_token": "<unk>",
            "byte_fallback": True,
        },
        "added_tokens": [
            {"id": 0, "content": "<unk>", "special": True},
            {"id": 3, "content": "<s>", "special": True},
            {"id": 5, "content": "<x>", "special": False},
        ],
    }
    texts, kinds = token_table(rules, 7)
    assert texts == ["<unk>", "<0x41>", "[PAD4]", "<s>", "[PAD_4]", "<x>", "[PAD_6]"]
    assert kinds == [Kind.UNKNOWN, Kind.BYTE, Kind.NORMAL, Kind.CONTROL, Kind.UNUSED, Kind.USER, Kind.UNUSED]
