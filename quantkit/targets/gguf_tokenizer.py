"""A tokenizer as metadata of a GGUF file.

llama.cpp has code of its own for the rules by which text is cut before tokens are merged, and knows them by
name. `SPLITS` has the rules, as the library tokenizers writes them, for each name.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from quantkit.errors import CheckpointError
from quantkit.model.tokenizer import read_tokenizer, vocabularies

Metadata = dict[str, Any]

_PREFIX = "tokenizer.ggml"
#: Kinds of tokens.
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = range(1, 7)

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PLAIN_BYTES = {**_BYTES, "use_regex": False}


def _split(regex: str) -> Mapping[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


#: Name in llama.cpp -> the steps before merging, without what does not change tokens.
SPLITS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "gpt-2": (_BYTES,),
    "smollm": ({"type": "Digits", "individual_digits": True}, _BYTES),
    "llama-bpe": (_split(_WORDS + r"\p{N}{1,3}" + _REST), _PLAIN_BYTES),
    "qwen2": (_split(_WORDS + r"\p{N}" + _REST), _PLAIN_BYTES),
}
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
_TRIMMED = (
    {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
)


def tokenizer_metadata(directory: Path, vocabulary: int) -> Metadata | None:
    """Return metadata of the tokenizer in `directory`, for `vocabulary` rows of the embedding.

    None where the directory has none. `CheckpointError` for one that llama.cpp has no name for.
    """
    if not vocabularies(directory):
        return None
    words: Any = read_tokenizer(directory, directory)
    backend = getattr(words, "backend_tokenizer", None)
    if backend is None:
        _fail(directory, "is of a class that the library tokenizers does not have")
    rules = json.loads(backend.to_str())
    model = rules["model"]
    if model.get("type") != "BPE":
        _fail(directory, f"is of the type {model.get('type')}, and not BPE")
    found = _sentencepiece(directory, rules) if model.get("byte_fallback") else _byte_level(directory, rules)
    tokens, kinds = _tokens(directory, rules, vocabulary)
    found |= {f"{_PREFIX}.tokens": tokens, f"{_PREFIX}.token_type": kinds}
    if f"{_PREFIX}.merges" not in found:
        found[f"{_PREFIX}.scores"] = _scores(model["merges"], tokens)
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        number = getattr(words, f"{name}_token_id", None)
        if isinstance(number, int) and number < vocabulary:
            found[f"{_PREFIX}.{key}_token_id"] = number
    ids, plain = (words("a", add_special_tokens=special)["input_ids"] for special in (True, False))
    start = len(ids) - len(plain) - (ids[len(ids) - 1 :] == [words.eos_token_id] and ids != plain)
    found[f"{_PREFIX}.add_bos_token"] = bool(start and ids[:1] == [words.bos_token_id])
    found[f"{_PREFIX}.add_eos_token"] = bool(ids != plain and ids[-1] == words.eos_token_id)
    if isinstance(words.chat_template, str):
        found["tokenizer.chat_template"] = words.chat_template
    return found


def _byte_level(directory: Path, rules: Mapping[str, Any]) -> Metadata:
    steps = tuple(_bare(step) for step in _steps(rules["pre_tokenizer"], "pretokenizers"))
    name = next((name for name, known in SPLITS.items() if steps == known), None)
    normal = _steps(rules["normalizer"], "normalizers")
    if name is None or any(step["type"] != "NFC" for step in normal):
        _fail(directory, f"cuts text by rules that are none of {', '.join(SPLITS)} of llama.cpp")
    merges = [one if isinstance(one, str) else " ".join(one) for one in rules["model"]["merges"]]
    return {f"{_PREFIX}.model": "gpt2", f"{_PREFIX}.pre": name, f"{_PREFIX}.merges": merges}


def _sentencepiece(directory: Path, rules: Mapping[str, Any]) -> Metadata:
    normal = tuple(_steps(rules["normalizer"], "normalizers"))
    before = _steps(rules["pre_tokenizer"], "pretokenizers")
    trimmed = normal[: len(_TRIMMED)] == _TRIMMED
    normal = normal[len(_TRIMMED) :] if trimmed else normal
    prefix = {"type": "Prepend", "prepend": "▁"}
    if before and not normal and before[0]["type"] == "Metaspace" and not before[0].get("split", True):
        spaced, known = before[0].get("prepend_scheme") != "never", len(before) == 1
    else:
        spaced, known = prefix in normal, not before and normal in ((prefix, _SPACE), (_SPACE,))
    if not known:
        _fail(directory, "changes text by rules that llama.cpp's SentencePiece does not have")
    return {
        f"{_PREFIX}.model": "llama",
        f"{_PREFIX}.pre": "default",
        f"{_PREFIX}.add_space_prefix": spaced,
        f"{_PREFIX}.remove_extra_whitespaces": trimmed,
    }


def _steps(rule: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    if rule is None:
        return []
    return list(rule[several]) if rule["type"] == "Sequence" else [rule]


def _bare(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """A step without what changes offsets and not tokens."""
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _tokens(directory: Path, rules: Mapping[str, Any], vocabulary: int) -> tuple[list[str], list[int]]:
    """All tokens by number, and their kinds; rows of the embedding without a token get one."""
    tokens = {number: text for text, number in rules["model"]["vocab"].items()}
    kinds = dict.fromkeys(tokens, _NORMAL)
    if rules["model"].get("byte_fallback"):
        for number, text in tokens.items():
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                kinds[number] = _BYTE
    for one in rules["added_tokens"]:
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = _CONTROL if one["special"] else _USER
    unknown = rules["model"].get("unk_token")
    kinds |= {number: _UNKNOWN for number, text in tokens.items() if text == unknown}
    if max(tokens) >= vocabulary:
        _fail(directory, f"has token {max(tokens)}, and the embedding {vocabulary} rows")
    texts = [tokens.get(number, f"[PAD{number}]") for number in range(vocabulary)]
    return texts, [kinds.get(number, _UNUSED) for number in range(vocabulary)]


def _scores(merges: list[Any], tokens: list[str]) -> list[float]:
    """Return the scores that SentencePiece merges by, the highest first; 0 for what no merge makes."""
    ranks: dict[str, int] = {}
    for rank, one in enumerate(merges):
        ranks.setdefault(one.replace(" ", "") if isinstance(one, str) else "".join(one), rank)
    return [-float(ranks.get(text, 0)) for text in tokens]


def _fail(directory: Path, problem: str) -> NoReturn:
    raise CheckpointError(
        f"{directory}: its tokenizer {problem}, so llama.cpp would cut text into other tokens. Move the "
        "tokenizer's files elsewhere to export the weights alone."
    )
