"""Cut texts by llama.cpp and the tokenizer of a file that quantkit exports, and compare the tokens.

    python -m tests.engines.tokens
    python -m tests.engines.tokens --model books=DIRECTORY

Of the rules that llama.cpp knows by name, characters are tried between letters, digits, signs and spaces:
every byte merges with each, so a cut shows. Of SentencePiece, random merges. Where quantkit notes that tokens
differ, some must; elsewhere none may. llama-cpp-python gets a virtual environment, kept in --environments.
"""

import argparse
import json
import random
import subprocess
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import pre_tokenizers
from transformers import AutoTokenizer

from quantkit.errors import CheckpointError
from quantkit.targets.gguf import _header
from quantkit.targets.gguf_tokenizer import SPLITS, gguf_tokenizer

from ..targets.small_tokenizers import NOTED, Rules, byte_level, saved, sentencepiece
from ..targets.test_gguf_vocabulary import random_model
from .environments import about, add_places, with_packages
from .exports import LLAMA_CPP

#: Spaces, ends of lines, contractions, digits, characters that are composed or not, signs, tokens in a text.
TEXTS = (
    *(
        "",
        " ",
        "   ",
        "hello",
        " hello",
        "  hello ",
        "hello   world  x",
        "\n",
        "\n \n",
        "\t\tx",
        "\r\n\r\n c",
    ),
    *(
        "a\n\n\n  b",
        "I'm he'll 'sam IT'S '\u017f",
        "1234567890",
        " 123 45",
        "\u00bd \u00b2 \u0663\u0664 \u0967\u0968",
    ),
    *(
        "caf\u00e9",
        "cafe\u0301",
        "\u212b \u1100\u1161",
        "\u65e5\u672c\u8a9e\u3002\u4e2d",
        "\uff46\u3000\uff57",
    ),
    *(
        "\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea",
        "a\u200bb\ufeff",
        "\u0085\u2003\u2003x",
        "\ue000\U0010ffff",
    ),
    *(
        "a\x00b\x7f",
        "\u2581a\u2581\u2581b",
        "\u0120a",
        "...?!\n\n",
        "def f(x):\n    return x\n",
        "\u0645\u0631 \u0e44",
    ),
    *("<s>a", "a</s>b </s>  b", "a <|end|> b", "<unk>", "<0x41>", "<t>", "a <t>  b", "a<t>b\n<t>"),
)
#: Random merges of SentencePiece.
SEEDS = 60


@dataclass(frozen=True)
class Case:
    """A tokenizer in a directory, with texts, and if quantkit notes that tokens differ."""

    directory: Path
    texts: tuple[str, ...]
    differs: bool = False


def with_cuts(name: str) -> Rules:
    """Return a byte-level tokenizer in which each byte merges with a letter, a digit, a sign and spaces."""
    rules = byte_level(name)
    model = rules["model"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [pair for one in "a1?ĠĊ" for byte in alphabet for pair in ((byte, one), (one, byte))]
    model["merges"] = [list(pair) for pair in dict.fromkeys(pairs)]
    for pair in pairs:
        model["vocab"].setdefault("".join(pair), len(model["vocab"]))
    model["ignore_merges"] = SPLITS[name].ignores_merges
    return rules


def characters() -> Iterator[str]:
    """Yield a text for each character of Python's Unicode below U+3400, and each 16th below U+20000."""
    for number in (*range(0x3400), *range(0x3400, 0x20000, 16)):
        one = chr(number)
        if unicodedata.category(one) not in ("Cn", "Cs"):
            yield f"{one}a{one}1{one}?{one} {one}\n{one} '{one}a"


def with_merges(seed: int) -> Rules:
    """Return SentencePiece with random merges of three letters."""
    rules, drawn = sentencepiece(), random_model(seed)
    model = rules["model"]
    kept = [text for text, number in model["vocab"].items() if number < 259]
    model["vocab"] = {text: number for number, text in enumerate([*kept, "▁", *drawn["vocab"]])}
    model["merges"] = drawn["merges"]
    return rules


def cases(work: Path) -> dict[str, Case]:
    """Return all cases, with their tokenizers below `work`."""

    def place(name: str, rules: Rules, **settings: str) -> Path:
        directory = work / name.replace(" ", "-")
        directory.mkdir()
        return saved(directory, rules, **settings)

    found = {}
    for name in SPLITS:
        directory = place(name, with_cuts(name), eos_token="<|end|>")
        found[name] = Case(directory, (*TEXTS, *characters()))
    for name, (make, change, note) in NOTED.items():
        rules = make()
        change(rules)
        found[name] = Case(place(name, rules, bos_token="<s>", eos_token="</s>"), TEXTS, bool(note))
    for seed in range(SEEDS):
        draw = random.Random(seed)
        texts = tuple("".join(draw.choices("abc ", k=draw.randint(1, 12))) for _ in range(100))
        directory = place(f"merges {seed}", with_merges(seed), bos_token="<s>", eos_token="</s>")
        found[f"merges {seed}"] = Case(directory, texts)
    return found


def written(case: Case) -> tuple[Path, Any] | None:
    """Write metadata of a tokenizer alone, and return the file and the tokenizer; None if it is refused."""
    words = AutoTokenizer.from_pretrained(case.directory)
    try:
        found = gguf_tokenizer(case.directory, len(words) + 3)
    except CheckpointError as error:
        if "as it knows no merges" not in str(error):
            raise
        return None
    assert found is not None
    file = case.directory / "model.gguf"
    file.write_bytes(_header("llama", found.metadata, {}, {}).data)
    return file, words


def compare(python: Path, found: dict[str, Case]) -> dict[str, dict[str, Any]]:
    """Return for each case how many texts there are, how many differ, and the shortest of those."""
    files = {name: file for name, case in found.items() if (file := written(case)) is not None}
    with TemporaryDirectory() as folder:
        asked, answers = Path(folder, "asked.json"), Path(folder, "answers")
        texts = {str(file): found[name].texts for name, (file, _) in files.items()}
        asked.write_text(json.dumps(texts), encoding="utf-8")
        script = Path(__file__).with_name("read_tokens.py")
        command = [str(python), str(script), str(asked), str(answers)]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        answered = dict(map(json.loads, answers.read_text(encoding="utf-8").splitlines()))
    result: dict[str, dict[str, Any]] = {name: {"refused": True} for name in found.keys() - files.keys()}
    for name, (file, words) in files.items():
        if str(file) not in answered:
            result[name] = {"error": f"llama.cpp ended with {done.returncode}: {done.stderr[-200:]}"}
            continue
        own = [one.ids for one in words.backend_tokenizer.encode_batch(found[name].texts)]
        pairs = zip(found[name].texts, own, answered[str(file)], strict=True)
        wrong = [text for text, ids, other in pairs if ids != other]
        result[name] = {"texts": len(own), "differ": len(wrong), "noted": found[name].differs}
        if wrong:
            result[name]["shortest"] = min(wrong, key=len)
    return {name: result[name] for name in found}


def merges_in_one(rows: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the rows with a single one for all random merges that are right."""
    right = {name for name, row in rows.items() if name.startswith("merges") and is_right(row)}
    refused = sum("refused" in rows[name] for name in right)
    texts = sum(rows[name].get("texts", 0) for name in right)
    one = {"tokenizers": len(right), "refused": refused, "texts": texts, "differ": 0, "noted": False}
    return {**{name: row for name, row in rows.items() if name not in right}, "merges": one}


def is_right(row: dict[str, Any]) -> bool:
    """Return True if some tokens differ just where that is noted."""
    return "refused" in row or ("error" not in row and (row["differ"] > 0) == row["noted"])


def main() -> int:
    """Write tokenizers, cut texts, compare, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", action="append", default=[], metavar="NAME=DIRECTORY")
    add_places(parser)
    arguments = parser.parse_args()
    python = with_packages(arguments.environments, LLAMA_CPP[0].replace("==", "-"), *LLAMA_CPP)
    with TemporaryDirectory() as work:
        found = cases(Path(work))
        for name, _, directory in (one.partition("=") for one in arguments.model):
            copy = Path(work, name)
            copy.mkdir()
            for file in Path(directory).glob("*.json"):
                (copy / file.name).write_bytes(file.read_bytes())
            notes = getattr(gguf_tokenizer(copy, 1 << 20), "notes", ())
            found[name] = Case(copy, (*TEXTS, *characters()), bool(notes))
        rows = merges_in_one(compare(python, found))
    for name, row in rows.items():
        print(f"{name:24} {row}")
    if arguments.json is not None:
        said = about("tests.engines.tokens", python, [LLAMA_CPP[0].partition("==")[0]])
        arguments.json.write_text(json.dumps({**said, "cases": rows}, indent=1) + "\n", encoding="utf-8")
    return 0 if all(map(is_right, rows.values())) else 1


if __name__ == "__main__":
    raise SystemExit(main())
