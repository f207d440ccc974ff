"""Check the files that are copied unchanged, before work starts, with the libraries that read them.

A run copies them last. Otherwise an unreadable file would be found only after everything else is written, or
when the result is loaded. `READERS` is the table of file names and readers.
"""

import json
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from quantkit.checkpoint.manifest import MANIFEST_NAME, is_export
from quantkit.checkpoint.output.atomic_write import is_inside, is_plain_name
from quantkit.checkpoint.safetensors_header import MAX_JSON_BYTES
from quantkit.checkpoint.side_names import is_side_name
from quantkit.checkpoint.source import CONFIG_NAME, HEADERS_ONLY_NAME, INDEX_NAME, Checkpoint, examining
from quantkit.errors import CheckpointError, EnvironmentProblem, QuantkitError, first_of
from quantkit.files import open_regular, os_error_text, parse_json, replace_file, shown
from quantkit.model.hf_files import GENERATION_CONFIG_NAME, explained, read_generation_config
from quantkit.model.model_class import is_known_type
from quantkit.model.tokenizer import CHAT_TEMPLATE_NAME, TOKENIZER_NAME, read_tokenizer, vocabularies

_TOKENIZER_CONFIG = "tokenizer_config.json"
#: Folder of further templates, one file each.
_TEMPLATES = "additional_chat_templates"
#: Most names of skipped files in a message.
_NAMED = 10
#: Files of git and of the hub client, in every download.
_OF_TOOLS = frozenset({".git", ".gitattributes", ".gitignore", ".cache", HEADERS_ONLY_NAME})
#: Names of quantkit's own files in lower case: no copy may have one, whatever its case.
_TAKEN = frozenset(name.lower() for name in (MANIFEST_NAME, CONFIG_NAME, INDEX_NAME))
#: First bytes of files that are not the file itself: their kind, and the remedy.
_IMPOSTORS = (
    (b"version https://git-lfs", "a git LFS pointer", "Run `git lfs pull` in the directory"),
    (b"<!doctype html", "an HTML page", "Download it again: that was the answer of a login page or a proxy"),
    (b"<html", "an HTML page", "Download it again: that was the answer of a login page or a proxy"),
)
_OF_PEOPLE = (".md", "")
_COPY_AGAIN = "Download it again, or copy the original model's"
_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class _Reader:
    """Reader of files of certain names: `check` raises for an unreadable one; `remedy` for the user."""

    names: tuple[str, ...]
    check: Callable[[Path], object]
    remedy: str


def check_side_files(checkpoint: Checkpoint) -> Checkpoint:
    """Check all files to copy; return `checkpoint`, with a warning about files that cannot be checked here.

    Raises `CheckpointError` for an unreadable file, and for a name that is no regular file, such as a broken
    link.
    """
    # The manifest of an export is about the files of the source alone.
    kept = tuple(
        path for path in checkpoint.side_files if path.name != MANIFEST_NAME or not is_export(path.parent)
    )
    checkpoint = (
        replace(checkpoint, side_files=kept) if len(kept) < len(checkpoint.side_files) else checkpoint
    )
    with examining(checkpoint.directory):
        _check_left_out(checkpoint.directory)
        for path in checkpoint.side_files:
            _check_name(path)
            _check_start(path)
            for reader in READERS:
                if path.name in reader.names or path.suffix in reader.names:
                    _check_with(reader, path)
        found = (_tokenizer_warning(checkpoint), _not_copied(checkpoint))
    warnings = [warning for warning in found if warning is not None]
    return replace(checkpoint, warnings=(*checkpoint.warnings, *warnings)) if warnings else checkpoint


def _not_copied(checkpoint: Checkpoint) -> str | None:
    """Return one line on source files that are not copied; None if all are."""
    directory = checkpoint.directory
    # Unused weights, and links out of the directory, have their own warnings.
    left = [
        path
        for path in sorted(directory.iterdir())
        if path not in checkpoint.stamps
        and path.name not in _OF_TOOLS
        and not (path.suffix == ".safetensors" or (is_side_name(path.name) and not is_inside(path)))
    ]
    if not left:
        return None
    templates = ""
    if any(path.name == _TEMPLATES and path.is_dir() for path in left):
        templates = f" {_TEMPLATES}/ has chat templates that transformers reads: copy it into the output."
    names = [f"{path.name}/" if path.is_dir() else path.name for path in left]
    return f"{directory}: not copied: {first_of(names, _NAMED)}.{templates}"


def _check_left_out(directory: Path) -> None:
    """Raise `CheckpointError` for something that has the name of a file to copy but is no file."""
    read = {CHAT_TEMPLATE_NAME, *(name for reader in READERS for name in reader.names)}
    for path in sorted(directory.iterdir()):
        if not is_side_name(path.name) or path.name.endswith(".index.json") or path.is_file():
            continue
        # Folders and pipes may have any name that no reader asks for.
        if path.is_symlink() or path.name in read:
            found = "a link that leads to no file" if path.is_symlink() else "no regular file"
            raise CheckpointError(
                f"{path}: is {found}; expected a file to copy. Download it again, or remove it."
            )


def _check_name(path: Path) -> None:
    if not is_plain_name(path.name) or path.name.lower() in _TAKEN:
        raise CheckpointError(
            f"{path}: a copy cannot have the name {shown(path.name)}; expected one without control "
            "characters that is none of quantkit's own files. Rename or remove it."
        )


def _check_start(path: Path) -> None:
    try:
        with open_regular(path) as file:
            start = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read: {os_error_text(error)}; expected a file to copy. Make it readable, or "
            "remove it."
        ) from error
    for prefix, kind, remedy in _IMPOSTORS if path.suffix not in _OF_PEOPLE else _IMPOSTORS[:1]:
        if start.startswith(prefix):
            raise CheckpointError(f"{path}: is {kind}; expected the file itself. {remedy}.")


def _check_with(reader: _Reader, path: Path) -> None:
    try:
        reader.check(path)
    except CheckpointError as error:
        raise CheckpointError(f"{error}. {reader.remedy}.") from error
    except MemoryError:
        raise
    # transformers may raise anything for the content of a file.
    except Exception as error:
        text = " ".join(str(error).split())
        raise CheckpointError(
            f"{path}: cannot be read: {type(error).__name__}: {text}. {reader.remedy}."
        ) from error


def _json(path: Path) -> dict[str, Any]:
    """Parse a JSON object as transformers does: duplicate keys are allowed."""
    found = json.loads(_bytes(path).decode("utf-8"))
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: is {shown(found)}; expected a JSON object")
    return found


def _check_not_empty(path: Path) -> None:
    if not path.stat().st_size:
        raise CheckpointError(f"{path}: is empty; expected a vocabulary")


def _bytes(path: Path) -> bytes:
    with open_regular(path) as file:
        file_bytes = os.fstat(file.fileno()).st_size
        if file_bytes > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: has {file_bytes} bytes; allowed are {MAX_JSON_BYTES}")
        return file.read(file_bytes)


def _check_generation_config(path: Path) -> None:
    try:
        parse_json(_bytes(path), "the file")
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    read = read_generation_config(path)
    for key in _IDS:
        value = getattr(read, key, None)
        ids = value if isinstance(value, list) else [value]
        if not all(one is None or type(one) is int for one in ids):
            raise CheckpointError(f"{path}: {key} is {shown(value)}; expected a token id or a list of them")


def _check_text(path: Path) -> str:
    return _bytes(path).decode("utf-8")


def _check_template(path: Path) -> None:
    _compile(_check_text(path))


def _check_template_config(path: Path) -> None:
    found = _json(path).get("chat_template")
    if not isinstance(found, str):
        raise CheckpointError(f"{path}: chat_template is {shown(found)}; expected a template")
    _compile(found)


def _check_tokenizer_config(path: Path) -> None:
    found = _json(path).get("chat_template")
    templates = found if isinstance(found, list) else [] if found is None else [{"template": found}]
    for one in templates:
        if not isinstance(one, dict) or not isinstance(one.get("template"), str):
            raise CheckpointError(f"{path}: chat_template has {shown(one)}; expected a template")
        _compile(one["template"])


def _compile(template: str) -> None:
    """Raise what transformers raises for a chat template that cannot be parsed; does not run it."""
    from transformers.utils import chat_template_utils, is_jinja_available

    if is_jinja_available():
        chat_template_utils._compile_jinja_template(template)


def _check_tokenizer_json(path: Path) -> None:
    from tokenizers import Tokenizer

    try:
        Tokenizer.from_file(str(path))
    except BaseException as error:
        # Panics of its Rust code have a class that cannot be imported.
        if isinstance(error, MemoryError):
            raise
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise CheckpointError(
                f"{path}: is not a tokenizer ({' '.join(str(error).split())}); expected one of the library "
                "tokenizers"
            ) from error
        raise


READERS = (
    _Reader(
        (GENERATION_CONFIG_NAME,),
        _check_generation_config,
        "Mend it, or remove it: the model then generates with the defaults of transformers",
    ),
    _Reader((TOKENIZER_NAME,), _check_tokenizer_json, f"{_COPY_AGAIN} {TOKENIZER_NAME}"),
    _Reader((_TOKENIZER_CONFIG,), _check_tokenizer_config, f"Mend it. {_COPY_AGAIN} {_TOKENIZER_CONFIG}"),
    _Reader(
        ("special_tokens_map.json", "added_tokens.json", "vocab.json"),
        _json,
        f"{_COPY_AGAIN} tokenizer files",
    ),
    _Reader(("vocab.txt", "merges.txt"), _check_text, f"{_COPY_AGAIN} tokenizer files"),
    # Their readers are packages that may not be installed.
    _Reader((".model", ".tiktoken"), _check_not_empty, f"{_COPY_AGAIN} tokenizer files"),
    _Reader((".jinja",), _check_template, "Mend the template, or remove the file"),
    _Reader(("chat_template.json",), _check_template_config, "Mend the template, or remove the file"),
    _Reader(
        (
            *("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json"),
            "image_processor_config.json",
        ),
        _json,
        f"{_COPY_AGAIN}, or remove it: text needs none",
    ),
)


def _tokenizer_warning(checkpoint: Checkpoint) -> str | None:
    """Return a warning if a part of the tokenizer needs code or a package that is missing; else None.

    Raises `CheckpointError` for tokenizer files that are invalid on every machine.
    """
    directory = checkpoint.directory
    if not any(path in checkpoint.side_files for path in vocabularies(directory)):
        return None
    try:
        _read_tokenizer(checkpoint, checkpoint.side_files)
    except OSError as error:
        return f"the tokenizer is copied, and was not read: no temporary directory: {os_error_text(error)}."
    except EnvironmentProblem as error:
        return f"the tokenizer is copied, and was not read: {error}"
    except CheckpointError as error:
        config = directory / _TOKENIZER_CONFIG
        if config in checkpoint.side_files and _json(config).get("auto_map"):
            return (
                f"{config}: the tokenizer is copied, and was not read: auto_map names code of its "
                "repository, which quantkit never runs."
            )
        _fail_for(checkpoint, error)
    return None


def _read_tokenizer(checkpoint: Checkpoint, files: Sequence[Path]) -> None:
    """Build a tokenizer from copies of `files`, as the output will have them, and use it."""
    with tempfile.TemporaryDirectory(prefix="quantkit-tokenizer-", ignore_cleanup_errors=True) as folder:
        view = Path(folder)
        # For an unknown model_type transformers ignores the config.
        config = checkpoint.config if is_known_type(checkpoint.config.get("model_type")) else {}
        replace_file(view / CONFIG_NAME, json.dumps(config).encode(), durable=False)
        for path in files:
            (view / path.name).symlink_to(path)
        try:
            words: Any = read_tokenizer(view, checkpoint.directory)
            with explained(checkpoint.directory):
                words("a", add_special_tokens=False, verbose=False)
        except QuantkitError as error:
            # The temporary path would not help the user.
            text = str(error).replace(folder, str(checkpoint.directory))
            raise type(error)(text) from _first_cause(error)


def _first_cause(error: BaseException) -> BaseException:
    """Return the exception that made quantkit raise `error`, or `error` itself."""
    while isinstance(error, QuantkitError) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _fail_for(checkpoint: Checkpoint, error: CheckpointError) -> NoReturn:
    """Raise `error` with the file that breaks the tokenizer, or else the files that hold a vocabulary."""
    cause = _first_cause(error)
    why = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    found = [path for path in vocabularies(checkpoint.directory) if path in checkpoint.side_files]
    # Try files first that a tokenizer can do without.
    for path in sorted(checkpoint.side_files, key=lambda path: (path in found, path.name)):
        rest = [other for other in checkpoint.side_files if other != path]
        if path.suffix in _OF_PEOPLE or not any(other in found for other in rest):
            continue
        try:
            _read_tokenizer(checkpoint, rest)
        except QuantkitError:
            continue
        raise CheckpointError(
            f"{path}: no tokenizer can be made with this file, and without it one can ({why}). "
            f"{_COPY_AGAIN} {path.name}."
        ) from cause
    first, *others = found
    beside = f" and {', '.join(path.name for path in others)}" if others else ""
    raise CheckpointError(
        f"{first}: no tokenizer can be made of it{beside} ({why}). {_COPY_AGAIN} tokenizer files, all of one "
        "model."
    ) from cause
