"""Tokenizers as metadata of GGUF: the names of rules, what is refused, and what llama.cpp does otherwise."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jinja2
import pytest
from transformers import AutoTokenizer, Qwen2Tokenizer

from quantkit.errors import CheckpointError
from quantkit.targets.gguf_tokenizer import SPLITS, gguf_tokenizer

from .small_tokenizers import (
    NOTED,
    STORIES,
    Change,
    Rules,
    around,
    both,
    byte_level,
    metaspace,
    model,
    renamed,
    saved,
    sentencepiece,
    unmerged,
)
from .test_gguf_vocabulary import joined


def written(directory: Path, rules: Rules, rows: int = 600, **settings: Any) -> tuple[Rules, str]:
    found = gguf_tokenizer(saved(directory, rules, **settings), rows)
    assert found is not None
    return {key.removeprefix("tokenizer.ggml."): value for key, value in found.metadata.items()}, "\n".join(
        found.notes
    )


def test_scores_merge_as_the_tokenizer_does(tmp_path: Path) -> None:
    directory = Path(shutil.copytree(STORIES, tmp_path / "stories"))
    found = gguf_tokenizer(directory, 512)
    assert found is not None and found.notes == (
        "the tokenizer makes one space of several, and llama.cpp keeps them: tokens differ there",
    )
    values = {key.removeprefix("tokenizer.ggml."): value for key, value in found.metadata.items()}
    kinds, texts = values["token_type"], values["tokens"]
    assert kinds[:4] == [2, 3, 3, 6] and set(kinds[259:]) == {1}
    assert values["add_bos_token"] and not values["add_eos_token"] and values["add_space_prefix"]
    text = "Once upon a time there was a little girl, who said hello to her mom."
    expected = AutoTokenizer.from_pretrained(directory).tokenize(text)
    assert joined("▁" + text.replace(" ", "▁"), texts, values["scores"]) == expected
    with pytest.raises(
        CheckpointError, match="has token 511, and the embedding 500 rows: the file would not"
    ):
        gguf_tokenizer(directory, 500)


@pytest.mark.parametrize("name", SPLITS)
def test_rules_have_llama_cpps_names(name: str, tmp_path: Path) -> None:
    rules = byte_level(name)
    rules["model"]["ignore_merges"] = SPLITS[name].ignores_merges
    found, notes = written(tmp_path, rules, 270, eos_token="<|end|>")
    assert (found["model"], found["pre"], notes) == ("gpt2", name, "")
    assert found["tokens"][-1] == "[PAD269]" and found["token_type"][-1] == 5
    assert found["merges"] == ["h e", "l l", "he ll", "hell o"]


def test_rules_of_qwen_are_those_of_transformers() -> None:
    words = Qwen2Tokenizer(vocab={"<|endoftext|>": 0, "a": 1}, merges=[])
    rules = json.loads(words.backend_tokenizer.to_str())["pre_tokenizer"]["pretokenizers"]
    assert rules[0] == SPLITS["qwen2"].steps[0]


CUT = "llama.cpp would cut text into other tokens"
#: A tokenizer, what is changed in it, and what the refusal says.
REFUSED: dict[str, tuple[Callable[..., Rules], Change, str]] = {
    "rules without a name": (
        byte_level,
        lambda rules: rules["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Punctuation", "behavior": "Isolated"}
        ),
        "cuts text by Punctuation, ByteLevel; llama.cpp has the rules of gpt-2, smollm, llama-bpe, "
        f"smaug-bpe, qwen2 only: {CUT}",
    ),
    "an unknown expression": (
        byte_level,
        lambda rules: rules["pre_tokenizer"]["pretokenizers"].insert(
            0, {"type": "Split", "pattern": {"Regex": r"\d+"}, "behavior": "Isolated", "invert": False}
        ),
        r"cuts text by Split \d+, ByteLevel; llama.cpp has the rules of gpt-2, smollm,",
    ),
    "another change of text": (
        sentencepiece,
        lambda rules: rules["normalizer"]["normalizers"].insert(0, {"type": "Lowercase"}),
        "changes text by Lowercase, Prepend, Replace  ; llama.cpp's SentencePiece puts",
    ),
    "dropout": (byte_level, model(dropout=0.5), f"has dropout 0.5, which llama.cpp does not have: {CUT}"),
    "a suffix": (byte_level, model(end_of_word_suffix="@", merges=[]), "has end_of_word_suffix '@', which"),
    "no merges": (byte_level, model(merges=[]), "has no merges: llama.cpp would not load the file"),
    "words that stay whole": (
        byte_level,
        both(model(ignore_merges=True), unmerged("hel")),
        f"has ignore_merges True, gpt-2 of llama.cpp not, and no merges make 'hel': {CUT}",
    ),
    "bytes without a token": (
        byte_level,
        both(renamed("Ã"), model(unk_token="<|user|>")),
        "makes '<|user|>' of bytes without a token (Ã), llama.cpp no token",
    ),
    "a token before BOS": (
        byte_level,
        around("<|user|>"),
        "makes ['<|user|>', 'a'] of 'a', and llama.cpp adds BOS in front and EOS at the end only",
    ),
    "no byte": (
        sentencepiece,
        renamed("<0xF0>"),
        "has no token for <0xF0>: llama.cpp ends itself where a text needs one",
    ),
    "no merge": (
        sentencepiece,
        unmerged("zq"),
        f"makes ['z', 'q'] of 'zq', llama.cpp one token, as it knows no merges: {CUT}",
    ),
    "another sign for a space": (
        sentencepiece,
        metaspace(replacement="_"),
        f"changes text by Metaspace; llama.cpp's SentencePiece puts ▁ for spaces only: {CUT}",
    ),
    "ignored merges": (
        sentencepiece,
        both(model(ignore_merges=True), unmerged("zqj")),
        "has ignore_merges, llama.cpp's SentencePiece not, and no merges make 'zqj'",
    ),
}


@pytest.mark.fault(72)
@pytest.mark.parametrize("case", REFUSED)
def test_what_llama_cpp_would_cut_otherwise_is_refused(case: str, tmp_path: Path) -> None:
    """The files that the refusal names are all that keeps the weights from being exported."""
    make, change, text = REFUSED[case]
    rules = make()
    change(rules)
    with pytest.raises(CheckpointError) as error:
        written(tmp_path, rules, eos_token="<|end|>", bos_token="<|end|>")
    remedy = "Move tokenizer.json elsewhere to export the weights alone."
    assert str(error.value).startswith(f"{tmp_path}: its tokenizer {text}")
    assert str(error.value).endswith(remedy)
    (tmp_path / "tokenizer.json").unlink()
    assert gguf_tokenizer(tmp_path, 600) is None


@pytest.mark.parametrize("case", NOTED)
def test_what_llama_cpp_does_otherwise_is_noted(case: str, tmp_path: Path) -> None:
    make, change, text = NOTED[case]
    rules = make()
    change(rules)
    found, notes = written(
        tmp_path, rules, eos_token="<|end|>" if make is byte_level else "</s>", bos_token="<s>"
    )
    assert notes == text
    assert found.get("add_space_prefix") is (None if make is byte_level else case != "never")


def test_words_that_stay_whole_without_a_merge_have_a_name(tmp_path: Path) -> None:
    """With and without, by two names for the same rules; one for the other where every word is merged."""
    rules = byte_level("llama-bpe")
    rules["model"]["vocab"]["hel"] = len(rules["model"]["vocab"])
    assert written(tmp_path, rules)[0]["pre"] == "smaug-bpe"
    rules["model"]["ignore_merges"] = True
    assert written(tmp_path, rules)[0]["pre"] == "llama-bpe"
    rules = byte_level("qwen2")
    rules["model"]["ignore_merges"] = True
    assert written(tmp_path, rules)[0]["pre"] == "qwen2"


def test_tokens_that_end_a_text(tmp_path: Path) -> None:
    """The EOS, and two more; llama.cpp would take one of its own if there is none."""
    found, notes = written(tmp_path, byte_level())
    assert "eos_token_id" not in found
    assert notes == "the tokenizer has no EOS, and llama.cpp takes token 11 for it"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [-1, 1, 0, 900]}')
    found, notes = written(tmp_path, byte_level())
    assert (found["eos_token_id"], found["eot_token_id"], notes) == (1, 0, "")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [0, 1, 2, 3]}')
    _, notes = written(tmp_path, byte_level())
    assert notes == "generation ends at tokens 0, 1, 2, 3, the file says the first 3"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1}')
    found, _ = written(tmp_path, byte_level(), eos_token="<|end|>")
    assert (found["eos_token_id"], found["eot_token_id"]) == (0, 1) and "eom_token_id" not in found


def test_templates_get_the_tokens_that_llama_cpp_does_not_give(tmp_path: Path) -> None:
    template = "{{ bos_token }}{{ messages[0].content }}{{ unk_token }}"
    (tmp_path / "chat_template.jinja").write_text(template)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    found, _ = written(tmp_path, byte_level(), bos_token="<|user|>", unk_token='<|"|>', eos_token="<|end|>")
    assert found["tokenizer.chat_template.tool_use"] == "tools"
    rendered = jinja2.Template(found["tokenizer.chat_template"]).render(
        bos_token="<|user|>", messages=[{"content": "hello"}]
    )
    assert rendered == '<|user|>hello<|"|>'
