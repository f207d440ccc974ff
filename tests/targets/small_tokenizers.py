"""Small tokenizers for exports to GGUF, what is changed in them, and where llama.cpp then differs."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from quantkit.targets.gguf_tokenizer import SPLITS

STORIES = Path(__file__).parents[2] / "examples" / "stories260K"
Rules = dict[str, Any]
Change = Callable[[Rules], object]
METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": False}


def byte_level(name: str = "gpt-2") -> Rules:
    """Return a tokenizer of bytes with four merges, by the rules of a name of llama.cpp."""
    words = ["<|end|>", "<|user|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell", "hello"]
    return {
        "version": "1.0",
        "added_tokens": [token(number, words[number], special=True) for number in (0, 1)],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {**step, **({"trim_offsets": True} if step["type"] == "ByteLevel" else {})}
                for step in SPLITS[name].steps
            ],
        },
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "BPE",
            "vocab": {word: number for number, word in enumerate(words)},
            "merges": [["h", "e"], ["l", "l"], ["he", "ll"], ["hell", "o"]],
        },
    }


def sentencepiece() -> Rules:
    """Return the bundled model's tokenizer, without the rules that drop spaces."""
    rules: Rules = json.loads((STORIES / "tokenizer.json").read_text(encoding="utf-8"))
    del rules["normalizer"]["normalizers"][:2]
    return rules


def token(number: int, content: str, **settings: bool) -> Rules:
    usual = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    return {"id": number, "content": content, **usual, **settings}


def saved(directory: Path, rules: Rules, **settings: Any) -> Path:
    (directory / "tokenizer.json").write_text(json.dumps(rules), encoding="utf-8")
    usual = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (directory / "tokenizer_config.json").write_text(json.dumps({**usual, **settings}), encoding="utf-8")
    (directory / "config.json").write_text("{}")
    return directory


def model(**settings: Any) -> Change:
    return lambda rules: rules["model"].update(settings)


def added(content: str, **settings: bool) -> Change:
    def change(rules: Rules) -> None:
        rules["added_tokens"].append(token(len(rules["model"]["vocab"]), content, **settings))

    return change


def around(*before: str) -> Change:
    """Return what puts tokens of a name before a text."""

    def change(rules: Rules) -> None:
        template: list[Rules] = [{"SpecialToken": {"id": one, "type_id": 0}} for one in before]
        template.append({"Sequence": {"id": "A", "type_id": 0}})
        known = {one: {"id": one, "ids": [rules["model"]["vocab"][one]], "tokens": [one]} for one in before}
        rules["post_processor"] = {
            "type": "TemplateProcessing",
            "single": template,
            "pair": [*template, {"Sequence": {"id": "B", "type_id": 0}}],
            "special_tokens": known,
        }

    return change


def renamed(text: str) -> Change:
    def change(rules: Rules) -> None:
        vocabulary = rules["model"]["vocab"]
        vocabulary["renamed"] = vocabulary.pop(text)

    return change


def metaspace(**settings: Any) -> Change:
    return lambda rules: rules.update(normalizer=None, pre_tokenizer={**METASPACE, **settings})


def unmerged(word: str) -> Change:
    return lambda rules: rules["model"]["vocab"].update({word: len(rules["model"]["vocab"])})


def both(*changes: Change) -> Change:
    return lambda rules: [change(rules) for change in changes]


SPACED = "llama.cpp puts a space before a text and after a special token; the tokenizer puts none "
#: A tokenizer, what is changed in it, and the note.
NOTED: dict[str, tuple[Callable[..., Rules], Change, str]] = {
    "composed": (
        byte_level,
        lambda rules: rules.update(normalizer={"type": "NFC"}),
        "the tokenizer composes characters (NFC), llama.cpp does not: text that is not NFC gets other tokens",
    ),
    "lstrip": (
        byte_level,
        added("<t>", lstrip=True),
        "the tokenizer drops spaces in front of '<t>', llama.cpp keeps them",
    ),
    "rstrip": (
        byte_level,
        added("<t>", rstrip=True),
        "the tokenizer drops spaces behind '<t>', llama.cpp keeps them",
    ),
    "single word": (
        byte_level,
        added("<t>", single_word=True),
        "llama.cpp also finds '<t>' inside of words, the tokenizer does not",
    ),
    "normalized bytes": (byte_level, added("<t>", normalized=True), ""),
    "normalized": (
        sentencepiece,
        added("<t>", normalized=True),
        "the tokenizer looks for '<t>' after it changed spaces, llama.cpp before: tokens differ there",
    ),
    "always": (sentencepiece, metaspace(), f"{SPACED}where one is"),
    "first": (
        sentencepiece,
        metaspace(prepend_scheme="first"),
        f"{SPACED}after a special token, and none where one is",
    ),
    "never": (sentencepiece, metaspace(prepend_scheme="never"), ""),
}
