"""Build the vocabulary of a GGUF file: text, kind and score of each token.

llama.cpp's SentencePiece knows no merges. It joins any two neighbours whose text is a token, of the highest
score first. Scores are ranks of merges here. Texts then get the same tokens if the text of every token does:
the first pair that only one of both joins is a token.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from itertools import pairwise
from typing import Any

SPACE = "▁"
#: Bytes from 128 on that UTF-8 has.
_HIGH_BYTES = (*range(0x80, 0xC0), *range(0xC2, 0xF5))


class Kind(IntEnum):
    """Kind of a token, by its number in GGUF."""

    NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)


#: Kinds that llama.cpp looks for in a text before it merges.
_FOUND_FIRST = (Kind.UNKNOWN, Kind.CONTROL, Kind.USER)
Ranks = Mapping[tuple[str, str], int]


def token_table(rules: Mapping[str, Any], rows: int) -> tuple[list[str], list[Kind]]:
    """Return texts and kinds of `rows` tokens by id; an embedding row without a token gets a placeholder.

    `rules` are those of tokenizer.json, whose tokens are all below `rows`.
    """
    model = rules["model"]
    tokens = {number: text for text, number in model["vocab"].items()}
    kinds = dict.fromkeys(tokens, Kind.NORMAL)
    if model.get("byte_fallback"):
        names = {byte_token(value) for value in range(256)}
        kinds |= {number: Kind.BYTE for number, text in tokens.items() if text in names}
    for one in rules["added_tokens"]:
        tokens[one["id"]] = one["content"]
        kinds[one["id"]] = Kind.CONTROL if one["special"] else Kind.USER
    unknown = model.get("unk_token")
    kinds |= {number: Kind.UNKNOWN for number, text in tokens.items() if text == unknown}
    # llama.cpp ends itself where two tokens have the same text.
    used, name = set(tokens.values()), "[PAD"
    while any(f"{name}{number}]" in used for number in range(rows)):
        name += "_"
    texts = [tokens.get(number, f"{name}{number}]") for number in range(rows)]
    return texts, [kinds.get(number, Kind.UNUSED) for number in range(rows)]


def missing_bytes(texts: Iterable[str], name_of: Callable[[int], str]) -> list[str]:
    """Return the names of byte tokens that the vocabulary lacks and a text can need."""
    known = set(texts)
    low = [value for value in range(0x80) if chr(value).replace(" ", SPACE) not in known]
    return [name for value in (*low, *_HIGH_BYTES) if (name := name_of(value)) not in known]


def merge_ranks(model: Mapping[str, Any]) -> dict[tuple[str, str], int]:
    """Return the ranks of the merges of a model of tokenizer.json, by pair of tokens."""
    pairs = (one.split(" ") if isinstance(one, str) else one for one in model["merges"])
    return {(left, right): rank for rank, (left, right) in enumerate(pairs)}


def unmade(texts: Sequence[str], kinds: Sequence[Kind], ranks: Ranks) -> Iterator[str]:
    """Yield the normal tokens that merges of their characters do not produce."""
    for text, kind in zip(texts, kinds, strict=True):
        if kind == Kind.NORMAL and merged(text, lambda *pair: ranks.get(pair))[0] != [text]:
            yield text


def token_scores(
    texts: Sequence[str], kinds: Sequence[Kind], ranks: Ranks
) -> tuple[list[float], tuple[str, list[str]] | None]:
    """Return scores by which llama.cpp merges as `ranks` do, and the first token where it does not.

    That token comes with the tokens that merges make of its text.
    """
    made: dict[str, int] = {}
    others: dict[str, list[str]] = {}
    for text, kind in zip(texts, kinds, strict=True):
        pieces, rank = merged(text, lambda *pair: ranks.get(pair))
        if pieces == [text]:
            made[text] = len(ranks) if rank is None else rank
        elif kind not in _FOUND_FIRST or SPACE in text:
            others[text] = pieces
    known = set(texts)

    def joined(left: str, right: str) -> int | None:
        text = left + right
        return made.get(text, len(ranks)) if text in known else None

    wrong = next(((text, own) for text, own in others.items() if merged(text, joined)[0] != own), None)
    return [-float(made.get(text, len(ranks))) for text in texts], wrong


def merged(text: str, rank_of: Callable[[str, str], int | None]) -> tuple[list[str], int | None]:
    """Return the tokens of `text` after all merges, the lowest rank first, and the last one's rank."""
    pieces, last = list(text), None
    while True:
        ranked = [(rank_of(*pair), at) for at, pair in enumerate(pairwise(pieces))]
        known = [(rank, at) for rank, at in ranked if rank is not None]
        if not known:
            return pieces, last
        last, at = min(known)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def byte_token(value: int) -> str:
    """Return the token of a byte in SentencePiece."""
    return f"<0x{value:02X}>"
