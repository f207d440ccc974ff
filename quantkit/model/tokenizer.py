"""The tokenizer of a checkpoint, what is wrong where it has none, and texts as its tokens."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError
from quantkit.model.hf_files import explained, whole_directory
from quantkit.model.transformers_version import require_transformers

#: Characters that are tokenized at a time: tokenizers take hundreds of bytes for each.
TOKENIZED = 1 << 22

TOKENIZER_NAME = "tokenizer.json"
#: Files that have a vocabulary, by name or ending, and the packages that read them if `tokenizers` alone does
#: not.
_VOCABULARIES = {
    TOKENIZER_NAME: (),
    "vocab.json": (),
    "vocab.txt": (),
    "tekken.json": ("mistral_common",),
    ".tiktoken": ("tiktoken",),
    ".model": ("sentencepiece",),
}


def tokenizer(path: str | Path) -> Any:
    """The tokenizer in `path`, a directory or a hub id; code in the checkpoint is never run.

    `CheckpointError` where its files are missing or cannot be read, `EnvironmentProblem` where a package that
    reads them is missing.
    """
    require_transformers()
    return read_tokenizer(whole_directory(path), path)


def read_tokenizer(directory: Path, source: str | Path) -> Any:
    """The tokenizer in `directory`, which errors of transformers call `source`; errors as of `tokenizer`."""
    from transformers import AutoTokenizer

    found = vocabularies(directory)
    try:
        with explained(source):
            words = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except CheckpointError as error:
        plainer = _unusable(directory, found, error)
        if plainer is error:
            raise
        raise plainer from error
    # Some classes of transformers build an empty one where there is no file, others need none.
    if not found and _tokens(words, "a") == _tokens(words, "b"):
        raise _missing(directory)
    return words


def vocabularies(directory: Path) -> list[Path]:
    """The files in `directory` that have a vocabulary, sorted."""
    # Opening a FIFO would wait for who writes to it.
    return [path for path in sorted(directory.iterdir()) if path.is_file() and _packages(path) is not None]


def _packages(path: Path) -> tuple[str, ...] | None:
    """What reads a file with a vocabulary beside `tokenizers`; None for any other file."""
    return _VOCABULARIES.get(path.name, _VOCABULARIES.get(path.suffix))


def _missing(directory: Path) -> CheckpointError:
    others = [path.name for path in sorted(directory.iterdir()) if "token" in path.name]
    found = f"has {', '.join(others)}, but no file with a vocabulary" if others else "has no tokenizer files"
    return CheckpointError(
        f"{directory} {found}. Copy the original model's tokenizer into it: {TOKENIZER_NAME} and "
        "tokenizer_config.json, or what it has in their place, such as tokenizer.model."
    )


def _unusable(directory: Path, found: Sequence[Path], error: CheckpointError) -> QuantkitError:
    """Why no tokenizer loads, given the files with a vocabulary and what transformers raised."""
    from tokenizers import Tokenizer

    if not found:
        return _missing(directory)
    if (path := directory / TOKENIZER_NAME) in found:
        try:
            Tokenizer.from_file(str(path))
        except Exception as problem:  # The only class that tokenizers raises.
            return CheckpointError(
                f"{path} is not a tokenizer ({problem}). Download it again, or copy the original model's."
            )
        return error
    lacking = [name for path in found for name in _packages(path) or () if find_spec(name) is None]
    if lacking:
        package = lacking[0].replace("_", "-")
        return EnvironmentProblem(
            f"{directory} has {found[0].name} and no {TOKENIZER_NAME}: reading it takes {package}, which is "
            f"not installed. Install it with `pip install {package}`, or copy a {TOKENIZER_NAME} into the "
            "directory."
        )
    names = ", ".join(path.name for path in found)
    cause = " ".join(str(error.__cause__).split())
    return CheckpointError(
        f"{directory}: no tokenizer can be made of {names} ({cause}). Copy all tokenizer files of the "
        "original model into it."
    )


def _tokens(words: Any, text: str) -> list[int]:
    found: list[int] = words(text, add_special_tokens=False, verbose=False)["input_ids"]
    return found


def tokenize(tokenizer: Any, text: str) -> torch.Tensor:
    """The tokens of `text` alone, int64 [n]: no BOS, no EOS, no other special token is added.

    Lines of up to `TOKENIZED` characters go together. `CheckpointError` for a tokenizer whose files do not
    fit each other.
    """
    with explained(getattr(tokenizer, "name_or_path", None) or "the tokenizer"):
        # verbose=False: windows make the length warning of the tokenizer pointless.
        found = [
            torch.tensor(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            for part in _parts(text)
        ]
        return torch.cat(found).to(torch.int64)


def _parts(text: str) -> Iterator[str]:
    """`text` in parts of up to `TOKENIZED` characters, which end with a line where there is one."""
    start = 0
    while start == 0 or start < len(text):
        end = start + TOKENIZED
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
