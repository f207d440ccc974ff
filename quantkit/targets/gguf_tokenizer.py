"""Convert a tokenizer to metadata of a GGUF file.

llama.cpp implements rules of pre-tokenization, which cut text before tokens are merged, by name. `SPLITS`
maps names to these rules in the form of the library tokenizers.
"""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import CONFIG_NAME
from quantkit.errors import CheckpointError
from quantkit.model.hf_files import GENERATION_CONFIG_NAME, explained, read_generation_config
from quantkit.model.tokenizer import read_tokenizer, vocabularies
from quantkit.targets.gguf_vocabulary import (
    SPACE,
    Kind,
    byte_token,
    merge_ranks,
    missing_bytes,
    token_scores,
    token_table,
    unmade,
)

Metadata = dict[str, Any]

_PREFIX = "tokenizer.ggml"
#: Tokens named in a message.
_NAMED = 3

_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BYTES = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
_PLAIN_BYTES = {**_BYTES, "use_regex": False}


class Split(NamedTuple):
    """Rule of pre-tokenization, which cuts text before tokens are merged.

    steps           steps of tokenizer.json that affect tokens
    ignores_merges  True if words that are tokens stay whole
    """

    steps: tuple[Mapping[str, Any], ...]
    ignores_merges: bool = False


def _split(regex: str) -> tuple[Mapping[str, Any], ...]:
    step = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    return step, _PLAIN_BYTES


_OF_THREE_DIGITS = _split(_WORDS + r"\p{N}{1,3}" + _REST)
#: Rules of a byte-level tokenizer by their name in llama.cpp.
SPLITS: Mapping[str, Split] = {
    "gpt-2": Split((_BYTES,)),
    "smollm": Split(({"type": "Digits", "individual_digits": True}, _BYTES)),
    "llama-bpe": Split(_OF_THREE_DIGITS, ignores_merges=True),
    "smaug-bpe": Split(_OF_THREE_DIGITS),
    "qwen2": Split(_split(_WORDS + r"\p{N}" + _REST)),
}
_SPACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
_PREPEND = {"type": "Prepend", "prepend": SPACE}
_TRIMMED = (
    {"type": "Replace", "pattern": {"Regex": r"\A +| +\z"}, "content": ""},
    {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "},
)
#: Settings of a BPE model that llama.cpp does not have.
_UNKNOWN_SETTINGS = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
#: The EOS of a file that names none, by the kind of its tokenizer.
_EOS_BY_DEFAULT = {"gpt2": 11, "llama": 2}
#: Where llama.cpp's tokens differ, by a setting of the tokenizer or of an added token.
_COMPOSED = (
    "the tokenizer composes characters (NFC), llama.cpp does not: text that is not NFC gets other tokens"
)
_FEWER_SPACES = "the tokenizer makes one space of several, and llama.cpp keeps them: tokens differ there"
_OF_METASPACE = {
    "always": "llama.cpp puts a space before a text and after a special token; the tokenizer puts none where "
    "one is",
    "first": "llama.cpp puts a space before a text and after a special token; the tokenizer puts none after "
    "a special token, and none where one is",
}
_OF_ADDED = {
    "lstrip": "the tokenizer drops spaces in front of {}, llama.cpp keeps them",
    "rstrip": "the tokenizer drops spaces behind {}, llama.cpp keeps them",
    "single_word": "llama.cpp also finds {} inside of words, the tokenizer does not",
    "normalized": "the tokenizer looks for {} after it changed spaces, llama.cpp before: tokens differ there",
}


@dataclass(frozen=True)
class GgufTokenizer:
    """Metadata of a tokenizer, and notes on texts for which llama.cpp's tokens differ."""

    metadata: Metadata
    notes: tuple[str, ...]


def gguf_tokenizer(directory: Path, rows: int) -> GgufTokenizer | None:
    """Return the tokenizer in `directory` for an embedding of `rows`; None without one.

    Raises `CheckpointError` for a tokenizer whose tokens llama.cpp does not reproduce.
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
    for name in _UNKNOWN_SETTINGS:
        if model.get(name):
            _fail(directory, f"has {name} {model[name]!r}, which llama.cpp does not have")
    highest = max([*model["vocab"].values(), *(one["id"] for one in rules["added_tokens"])], default=-1)
    if highest >= rows:
        _fail(directory, f"has token {highest}, and the embedding {rows} rows", "the file would not load")
    tokens = token_table(rules, rows)
    of_rules = _sentencepiece if model.get("byte_fallback") else _byte_level
    found, notes = of_rules(directory, rules, *tokens)
    found |= {f"{_PREFIX}.tokens": tokens[0], f"{_PREFIX}.token_type": [int(kind) for kind in tokens[1]]}
    special, more = _special(directory, words, rows, _EOS_BY_DEFAULT[found[f"{_PREFIX}.model"]])
    found |= special | _around(directory, words) | _templates(words)
    notes += [*more, *_added_notes(rules, backend.normalizer)]
    return GgufTokenizer(found, tuple(notes))


def _byte_level(
    directory: Path, rules: Mapping[str, Any], texts: Sequence[str], kinds: Sequence[Kind]
) -> tuple[Metadata, list[str]]:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    steps = tuple(_bare(step) for step in _steps(rules["pre_tokenizer"], "pretokenizers"))
    names = [name for name, known in SPLITS.items() if steps == known.steps]
    normal = _steps(rules["normalizer"], "normalizers")
    if not names or any(step["type"] != "NFC" for step in normal):
        rules_of = _named([*normal, *steps])
        _fail(directory, f"cuts text by {rules_of}; llama.cpp has the rules of {', '.join(SPLITS)} only")
    ranks = merge_ranks(rules["model"])
    if not ranks:
        _fail(directory, "has no merges", "llama.cpp would not load the file")
    ignores = bool(rules["model"].get("ignore_merges"))
    name = next((name for name in names if SPLITS[name].ignores_merges == ignores), names[0])
    if SPLITS[name].ignores_merges != ignores:
        for token in unmade(texts, kinds, ranks):
            _fail(
                directory,
                f"has ignore_merges {ignores}, {name} of llama.cpp not, and no merges make {token!r}",
            )
    unknown = rules["model"].get("unk_token")
    lacking = missing_bytes(texts, bytes_to_unicode().__getitem__) if unknown else []
    if lacking:
        _fail(directory, f"makes {unknown!r} of bytes without a token ({_some(lacking)}), llama.cpp no token")
    merges = [" ".join(pair) for pair in ranks]
    found = {f"{_PREFIX}.model": "gpt2", f"{_PREFIX}.pre": name, f"{_PREFIX}.merges": merges}
    return found, [_COMPOSED] if normal else []


def _sentencepiece(
    directory: Path, rules: Mapping[str, Any], texts: Sequence[str], kinds: Sequence[Kind]
) -> tuple[Metadata, list[str]]:
    normal = tuple(_steps(rules["normalizer"], "normalizers"))
    before = _steps(rules["pre_tokenizer"], "pretokenizers")
    trimmed = normal[: len(_TRIMMED)] == _TRIMMED
    normal = normal[len(_TRIMMED) :] if trimmed else normal
    scheme = None
    if before and not normal:
        scheme = before[0].get("prepend_scheme")
        known = before == [
            {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
        ]
        spaced = scheme != "never"
    else:
        spaced, known = _PREPEND in normal, not before and normal in ((_PREPEND, _SPACE), (_SPACE,))
    if not known:
        rules_of = _named([*_steps(rules["normalizer"], "normalizers"), *before])
        _fail(directory, f"changes text by {rules_of}; llama.cpp's SentencePiece puts ▁ for spaces only")
    lacking = missing_bytes(texts, byte_token)
    if lacking:
        _fail(directory, f"has no token for {_some(lacking)}", "llama.cpp ends itself where a text needs one")
    ranks = merge_ranks(rules["model"])
    scores, wrong = token_scores(texts, kinds, ranks)
    if wrong is not None:
        _fail(directory, f"makes {wrong[1]} of {wrong[0]!r}, llama.cpp one token, as it knows no merges")
    if rules["model"].get("ignore_merges"):
        for token in unmade(texts, kinds, ranks):
            _fail(
                directory, f"has ignore_merges, llama.cpp's SentencePiece not, and no merges make {token!r}"
            )
    found = {
        f"{_PREFIX}.model": "llama",
        f"{_PREFIX}.pre": "default",
        f"{_PREFIX}.scores": scores,
        f"{_PREFIX}.add_space_prefix": spaced,
        f"{_PREFIX}.remove_extra_whitespaces": trimmed,
    }
    return found, [_FEWER_SPACES] * trimmed + [_OF_METASPACE[one] for one in _OF_METASPACE if one == scheme]


def _steps(rule: Mapping[str, Any] | None, several: str) -> list[Mapping[str, Any]]:
    if rule is None:
        return []
    return list(rule[several]) if rule["type"] == "Sequence" else [rule]


def _bare(step: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a step without settings that change offsets but not tokens."""
    return {key: value for key, value in step.items() if key != "trim_offsets"}


def _named(steps: Iterable[Mapping[str, Any]]) -> str:
    """Return the names of steps with their patterns as text; `nothing` without steps."""
    names = [" ".join([step["type"], *map(str, step.get("pattern", {}).values())]) for step in steps]
    return ", ".join(names) or "nothing"


def _special(directory: Path, words: Any, rows: int, eos_by_default: int) -> tuple[Metadata, list[str]]:
    """Return metadata with the numbers of special tokens, and notes on what it cannot say.

    `words` is the tokenizer, `rows` the number of rows of the embedding. The first three tokens that end a
    text are EOS, EOT and EOM. Without any, llama.cpp takes `eos_by_default`.
    """
    names = {"bos": "bos", "unk": "unknown", "pad": "padding"}
    found = {key: getattr(words, f"{name}_token_id", None) for name, key in names.items()}
    ends = [getattr(words, "eos_token_id", None), *_ends(directory)]
    ends = [number for number in dict.fromkeys(ends) if isinstance(number, int) and 0 <= number < rows]
    found |= zip(("eos", "eot", "eom"), ends, strict=False)
    notes = []
    if not ends:
        notes.append(f"the tokenizer has no EOS, and llama.cpp takes token {eos_by_default} for it")
    if ends[3:]:
        notes.append(f"generation ends at tokens {', '.join(map(str, ends))}, the file says the first 3")
    return {
        f"{_PREFIX}.{key}_token_id": number
        for key, number in found.items()
        if isinstance(number, int) and 0 <= number < rows
    }, notes


def _ends(directory: Path) -> list[Any]:
    """Return the ids of tokens that end a text, from generation_config.json, else config.json, unchecked.

    [None] if neither has one.
    """
    with explained(directory):
        settings = read_generation_config(directory / GENERATION_CONFIG_NAME)
    ends = getattr(settings, "eos_token_id", None)
    if ends is None:
        ends = read_json(directory / CONFIG_NAME).get("eos_token_id")
    return ends if isinstance(ends, list) else [ends]


def _around(directory: Path, words: Any) -> Metadata:
    """Return the metadata that tells if BOS and EOS are added to a text."""
    plain, ids = (words("a", add_special_tokens=special)["input_ids"] for special in (False, True))
    for before, after in product((False, True), repeat=2):
        if ids == [words.bos_token_id] * before + plain + [words.eos_token_id] * after:
            return {f"{_PREFIX}.add_bos_token": before, f"{_PREFIX}.add_eos_token": after}
    tokens = words.convert_ids_to_tokens(ids)
    _fail(directory, f"makes {tokens} of 'a', and llama.cpp adds BOS in front and EOS at the end only")


def _templates(words: Any) -> Metadata:
    """Return chat templates, with other special tokens than BOS and EOS, which llama.cpp passes, inserted."""
    found = words.chat_template or {}
    templates = {"default": found} if isinstance(found, str) else found
    others = {
        key: text for key, text in words.special_tokens_map.items() if key not in ("bos_token", "eos_token")
    }
    result = {}
    for name, template in templates.items():
        lines = [
            f"{{% set {key} = {json.dumps(text, ensure_ascii=False)} %}}"
            for key, text in others.items()
            if isinstance(text, str) and re.search(rf"\b{key}\b", template)
        ]
        key = "tokenizer.chat_template" + ("" if name == "default" else f".{name}")
        result[key] = "".join([*lines, template])
    return result


def _added_notes(rules: Mapping[str, Any], normalizer: Any) -> list[str]:
    """Return notes on different tokens next to added tokens, whose settings llama.cpp lacks."""
    notes = []
    for setting, note in _OF_ADDED.items():
        texts = [one["content"] for one in rules["added_tokens"] if one[setting]]
        if setting == "normalized":
            texts = [text for text in texts if normalizer and _is_changed(normalizer, text)]
        if texts:
            notes.append(note.format(_some(map(repr, texts))))
    return notes


def _is_changed(normalizer: Any, text: str) -> bool:
    return SPACE in text or normalizer.normalize_str(text) != text


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _fail(
    directory: Path, problem: str, effect: str = "llama.cpp would cut text into other tokens"
) -> NoReturn:
    files = ", ".join(path.name for path in vocabularies(directory))
    raise CheckpointError(
        f"{directory}: its tokenizer {problem}: {effect}. Move {files} elsewhere to export the weights alone."
    )
