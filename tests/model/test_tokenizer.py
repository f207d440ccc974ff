"""Tokenizers of checkpoints: read as transformers reads them, and errors that say which file is missing."""

import json
import os
from pathlib import Path

import pytest
import torch

from quantkit.errors import CheckpointError, EnvironmentProblem
from quantkit.model import tokenizer as tokenizer_module
from quantkit.model.tokenizer import tokenize, tokenizer

from ..support.compare import assert_equal


def test_the_tokenizer_of_a_checkpoint_is_read(tiny, words):
    checkpoint = tiny()
    words.save_pretrained(checkpoint.packed)
    assert tokenizer(checkpoint.packed)("w5 w6").input_ids == [5, 6]


def test_long_texts_are_tokenized_in_parts(tiny, words, monkeypatch):
    checkpoint = tiny()
    words.save_pretrained(checkpoint.packed)
    words = tokenizer(checkpoint.packed)
    text = "w1 w2\nw3 w4 w5\nw6\nw7 w8 w9 w1 w2\n"
    whole = tokenize(words, text)
    monkeypatch.setattr(tokenizer_module, "TOKENIZED", 9)
    assert list(tokenizer_module._parts(text)) == ["w1 w2\n", "w3 w4 w5\n", "w6\n", "w7 w8 w9 ", "w1 w2\n"]
    found = tokenize(words, text)
    assert_equal(found, whole)
    assert found.dtype == torch.int64
    assert tokenize(words, "").tolist() == []


def test_a_tokenizer_with_code_is_refused(tiny, words):
    checkpoint = tiny()
    words.save_pretrained(checkpoint.packed)
    path = checkpoint.packed / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {
        "tokenizer_class": "Mine",
        "auto_map": {"AutoTokenizer": ["mine.Mine", None]},
    }
    path.write_text(json.dumps(config))
    (checkpoint.packed / "mine.py").write_text("raise SystemExit('code of the checkpoint ran')")
    with pytest.raises(CheckpointError, match="asks for code that comes with it, and quantkit runs none"):
        tokenizer(checkpoint.packed)


def config_of(directory: Path, model_type: str, **tokenizer_config: str) -> Path:
    """A directory with a config.json, and a tokenizer_config.json if it says anything."""
    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    if tokenizer_config:
        (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return directory


# transformers itself makes an empty tokenizer of gpt2, qwen2 and gemma2, whose tokens are none.
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2", "gemma2"])
def test_a_directory_without_tokenizer_files(tmp_path, model_type):
    with pytest.raises(CheckpointError) as caught:
        tokenizer(config_of(tmp_path, model_type))
    assert str(caught.value) == (
        f"{tmp_path} has no tokenizer files. Copy the original model's tokenizer into it: tokenizer.json and "
        "tokenizer_config.json, or what it has in their place, such as tokenizer.model."
    )


@pytest.mark.parametrize(
    "kind", ["PreTrainedTokenizerFast", "LlamaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"]
)
def test_a_tokenizer_config_alone(tmp_path, kind):
    config_of(tmp_path, "llama", tokenizer_class=kind, eos_token="</s>")
    with pytest.raises(
        CheckpointError, match=r"has tokenizer_config\.json, but no file with a vocabulary\. Copy"
    ):
        tokenizer(tmp_path)


def test_a_tokenizer_that_needs_no_vocabulary(tmp_path):
    config_of(tmp_path, "t5", tokenizer_class="ByT5Tokenizer")
    assert tokenizer(tmp_path)("ab", add_special_tokens=False).input_ids == [100, 101]


@pytest.mark.parametrize(
    "content", ["", "{}", '{"version": "1.0", "model": ', "version https://git-lfs.github.com/spec/v1\n"]
)
def test_a_tokenizer_json_that_is_none(tmp_path, content):
    config_of(tmp_path, "llama")
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is not a tokenizer \(.+\)\. Download it"):
        tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("name", "package"),
    [("tokenizer.model", "sentencepiece"), ("qwen.tiktoken", "tiktoken"), ("tekken.json", "mistral-common")],
)
def test_a_vocabulary_whose_package_is_missing(tmp_path, monkeypatch, name, package):
    config_of(tmp_path, "llama", tokenizer_class="PreTrainedTokenizerFast")
    (tmp_path / name).write_bytes(b"\x0a\x0b some vocabulary")
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda _: None)
    with pytest.raises(EnvironmentProblem) as caught:
        tokenizer(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} has {name} and no tokenizer.json: reading it takes {package}, which is not installed. "
        f"Install it with `pip install {package}`, or copy a tokenizer.json into the directory."
    )


def test_half_of_a_vocabulary(tmp_path):
    config_of(tmp_path, "gpt2")
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1}')
    with pytest.raises(CheckpointError, match=r"can be made of vocab\.json \(.*merges.*\)\. Copy all"):
        tokenizer(tmp_path)


def test_a_fifo_is_no_tokenizer_and_nobody_waits_for_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(CheckpointError, match="no file with a vocabulary"):
        tokenizer(tmp_path)
