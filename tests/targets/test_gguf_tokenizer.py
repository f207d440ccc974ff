"""Tokenizers as metadata of GGUF: the names of rules, and scores that merge as merges do."""

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

from quantkit.errors import CheckpointError
from quantkit.targets.gguf_tokenizer import SPLITS, tokenizer_metadata

from ..checkpoint.gguf_files import tokenizer_metadata as byte_level

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"


def merged(text: str, found: dict[str, Any]) -> list[int]:
    """SentencePiece as llama.cpp has it: neighbours whose token has the highest score are merged first."""
    numbers = {token: number for number, token in enumerate(found["tokenizer.ggml.tokens"])}
    scores = found["tokenizer.ggml.scores"]
    pieces = list("▁" + text.replace(" ", "▁"))
    while True:
        pairs = [
            (scores[numbers[one + other]], -at)
            for at, (one, other) in enumerate(pairwise(pieces))
            if one + other in numbers
        ]
        if not pairs:
            return [numbers[piece] for piece in pieces]
        at = -max(pairs)[1]
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def test_scores_merge_as_the_tokenizer_does(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(STORIES, tmp_path / "stories"))
    found = tokenizer_metadata(directory, 512)
    assert found is not None
    kinds = found["tokenizer.ggml.token_type"]
    assert kinds[:4] == [2, 3, 3, 6] and set(kinds[259:]) == {1}
    assert found["tokenizer.ggml.add_bos_token"] and not found["tokenizer.ggml.add_eos_token"]
    assert found["tokenizer.ggml.add_space_prefix"]
    text = "Once upon a time there was a little girl, who said hello to her mom."
    expected = AutoTokenizer.from_pretrained(directory)(text, add_special_tokens=False)["input_ids"]
    assert merged(text, found) == expected
    with pytest.raises(CheckpointError, match="its tokenizer has token 511, and the embedding 500 rows"):
        tokenizer_metadata(directory, 500)


def saved(directory: Path, pre_tokenizer: Any) -> Path:
    words = next(value for key, value in byte_level().items() if key.endswith("tokens"))
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizer
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>").save_pretrained(directory)
    (directory / "config.json").write_text("{}")
    return directory


PLAIN = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False)
STEPS = {
    "gpt-2": WORDS,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]),
    **{
        name: pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(SPLITS[name][0]["pattern"]["Regex"]), "isolated"), PLAIN]
        )
        for name in ("llama-bpe", "qwen2")
    },
}


@pytest.mark.parametrize("name", SPLITS)
def test_rules_have_llama_cpps_names(name: str, tmp_path: Path) -> None:
    found = tokenizer_metadata(saved(tmp_path, STEPS[name]), 270)
    assert found is not None
    assert (found["tokenizer.ggml.model"], found["tokenizer.ggml.pre"]) == ("gpt2", name)
    assert found["tokenizer.ggml.tokens"][-1] == "[PAD269]" and found["tokenizer.ggml.token_type"][-1] == 5
    assert found["tokenizer.ggml.merges"] == ["h e", "l l", "he ll", "hell o"]


def test_rules_of_qwen_are_those_of_transformers(tmp_path: Path) -> None:
    words = Qwen2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
    rules = json.loads(words.backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"]
    assert rules[0] == SPLITS["qwen2"][0]


def test_rules_without_a_name_are_refused(tmp_path: Path) -> None:
    directory = saved(tmp_path, pre_tokenizers.Sequence([pre_tokenizers.Punctuation(), PLAIN]))
    with pytest.raises(CheckpointError, match="cuts text by rules that are none of gpt-2, smollm, llama-bpe"):
        tokenizer_metadata(directory, 270)
    (directory / "tokenizer.json").unlink()
    assert tokenizer_metadata(directory, 270) is None
