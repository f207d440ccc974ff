"""Load the tokenizer of a checkpoint, explain failures, and tokenize texts."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.source import examining
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError
from quantkit.model.hf_files import explained, whole_directory
from quantkit.model.transformers_version import require_transformers

#: Characters tokenized per call: tokenizers take hundreds of bytes per character.
TOKENIZED = 1 << 22

TOKENIZER_NAME = "tokenizer.json"
CHAT_TEMPLATE_NAME = "chat_template.jinja"
#: Vocabulary files, by name or suffix, and the packages besides `tokenizers` that read them.
_VOCABULARIES = {
    TOKENIZER_NAME: (),
    "vocab.json": (),
    "vocab.txt": (),
    "tekken.json": ("mistral_common",),
    ".tiktoken": ("tiktoken",),
    ".model": ("sentencepiece",),
}


def tokenizer(path: str | Path) -> Any:
    """Load the tokenizer in `path`, a directory or a hub id; code in the checkpoint is never run.

    Raises `CheckpointError` if its files are missing or unreadable, `EnvironmentProblem` if a package that
    reads them is missing.
    """
    require_transformers()
    return read_tokenizer(whole_directory(path), path)


def has_chat_template(words: Any) -> bool:
    """Return True if `words`, a tokenizer or a processor of images and text, has a chat template."""
    return bool(getattr(words, "chat_template", None))


def read_tokenizer(directory: Path, source: str | Path) -> Any:
    """Load the tokenizer in `directory`; errors name `source`.

    Raises `CheckpointError` if its files are missing or unreadable, `EnvironmentProblem` if a package that
    reads them is missing.
    """
    from transformers import AutoTokenizer

    files = vocabularies(directory)
    try:
        with explained(source):
            words = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except CheckpointError as error:
        plainer = _unusable(directory, files, error)
        if plainer is error:
            raise
        raise plainer from error
    # Without files, some classes of transformers build an empty tokenizer; others need no files.
    if not files and _tokens(words, "a") == _tokens(words, "b"):
        raise _missing(directory)
    return words


def vocabularies(directory: Path) -> list[Path]:
    """Return the vocabulary files in `directory`, sorted."""
    # Opening a FIFO would block until a writer opens it.
    with examining(directory):
        return [
            path for path in sorted(directory.iterdir()) if path.is_file() and _packages(path) is not None
        ]


def _packages(path: Path) -> tuple[str, ...] | None:
    """Return the packages besides `tokenizers` that read a vocabulary file; None for other files."""
    return _VOCABULARIES.get(path.name, _VOCABULARIES.get(path.suffix))


def _missing(directory: Path) -> CheckpointError:
    with examining(directory):
        others = [path.name for path in sorted(directory.iterdir()) if "token" in path.name]
    found = f"has {', '.join(others)}, but no file with a vocabulary" if others else "has no tokenizer files"
    return CheckpointError(
        f"{directory} {found}. Copy the original model's tokenizer into it: {TOKENIZER_NAME} and "
        "tokenizer_config.json, or what it has in their place, such as tokenizer.model."
    )


def _unusable(directory: Path, files: Sequence[Path], error: CheckpointError) -> QuantkitError:
    """Explain why a tokenizer does not load, from its vocabulary `files` and transformers' `error`."""
    from tokenizers import Tokenizer

    if not files:
        return _missing(directory)
    if (path := directory / TOKENIZER_NAME) in files:
        try:
            Tokenizer.from_file(str(path))
        except Exception as problem:  # tokenizers raises plain `Exception` only.
            return CheckpointError(
                f"{path} is not a tokenizer ({problem}). Download it again, or copy the original model's."
            )
        return error
    lacking = [name for path in files for name in _packages(path) or () if find_spec(name) is None]
    if lacking:
        package = lacking[0].replace("_", "-")
        return EnvironmentProblem(
            f"{directory} has {files[0].name} and no {TOKENIZER_NAME}: reading it takes {package}, which is "
            f"not installed. Install it with `pip install {package}`, or copy a {TOKENIZER_NAME} into the "
            "directory."
        )
    names = ", ".join(path.name for path in files)
    cause = " ".join(str(error.__cause__).split())
    return CheckpointError(
        f"{directory}: no tokenizer can be made of {names} ({cause}). Copy all tokenizer files of the "
        "original model into it."
    )


def _tokens(words: Any, text: str) -> list[int]:
    ids: list[int] = words(text, add_special_tokens=False, verbose=False)["input_ids"]
    return ids


def tokenize(tokenizer: Any, text: str) -> torch.Tensor:
    """Tokenize `text` to [n] int64, without BOS, EOS or other special tokens.

    Takes up to `TOKENIZED` characters per call, cut at line ends. Raises `CheckpointError` for a tokenizer
    with inconsistent files.
    """
    with explained(getattr(tokenizer, "name_or_path", None) or "the tokenizer"):
        # verbose=False: texts are cut into windows, so the length warning does not apply.
        parts = [
            torch.tensor(tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"])
            for part in _parts(text)
        ]
        return torch.cat(parts).to(torch.int64)


def _parts(text: str) -> Iterator[str]:
    """Yield `text` in parts of up to `TOKENIZED` characters, cut after a line end if there is one."""
    start = 0
    while start == 0 or start < len(text):
        end = start + TOKENIZED
        if end < len(text):
            end = text.rfind("\n", start, end) + 1 or end
        yield text[start:end]
        start = end
