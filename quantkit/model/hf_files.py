"""Guard files that transformers reads: explain its errors, and refuse links out of the directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from traceback import walk_tb
from typing import Any

import quantkit
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.output.atomic_write import is_inside
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.checkpoint.source import examining
from quantkit.errors import CheckpointError, QuantkitError, causes
from quantkit.files import disk_error
from quantkit.memory import is_lack_of_memory

#: Files of a processor, which also prepares images or sounds.
PROCESSOR_NAMES = ("processor_config.json", "preprocessor_config.json")
GENERATION_CONFIG_NAME = "generation_config.json"
#: Directory of quantkit's own code.
PACKAGE = Path(quantkit.__file__).parent
#: Errors that bad files can cause in quantkit's own code: values out of range, such as probabilities below 0,
#: missing keys, and disk errors.
_OF_FILES = (OSError, ValueError, KeyError, RuntimeError)


def has_processor(directory: Path) -> bool:
    """Return True if the directory of a model has processor files."""
    with examining(directory):
        return any((directory / name).is_file() for name in PROCESSOR_NAMES)


def whole_directory(source: str | Path) -> Path:
    """Return the directory of `source`, a path or hub id, after a check that no file links out of it.

    transformers would follow such a link. Raises `CheckpointError` that names it.
    """
    directory = resolve(source)
    with explained(source):
        files = sorted(directory.iterdir())
    for file in files:
        if not is_inside(file):
            raise CheckpointError(
                f"{file}: links to {os.path.realpath(file)}; expected a file inside the directory. Replace "
                "the link by the file."
            )
    return directory


@contextmanager
def explained(source: str | Path) -> Iterator[None]:
    """Context manager: turn errors of transformers about bad files into `CheckpointError`.

    Errors of quantkit's own code pass, except those that bad files can cause.
    """
    try:
        yield
    except BaseException as error:
        # tokenizers raises plain `Exception`; panics of its Rust code have a class that cannot be imported.
        files = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not files or isinstance(error, QuantkitError) or is_lack_of_memory(error) or _is_bug(error):
            raise
        text = " ".join(str(error).split())
        if "trust_remote_code=True" in text:
            raise CheckpointError(
                f"{source} asks for code that comes with it, and quantkit runs none. Use a checkpoint of a "
                "kind that transformers itself knows."
            ) from error
        raise CheckpointError(
            f"{source} cannot be opened or run: {type(error).__name__}: {text}{_of_the_disk(error)} Check "
            "its files, a packed checkpoint's with `quantkit verify`."
        ) from error


def _is_bug(error: BaseException) -> bool:
    """Return True if quantkit's code raised an error that no file can cause. Only Python code has frames."""
    if isinstance(error, _OF_FILES):
        return False
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return Path(frames[-1]).is_relative_to(PACKAGE)


def _of_the_disk(error: BaseException) -> str:
    """Return the disk error behind `error`, in brackets, if transformers hid one; else ""."""
    cause = disk_error(islice(causes(error), 1, None))
    return "" if cause is None else f" ({cause})"


def read_generation_config(path: Path, cls: Any = None) -> Any:
    """Read generation_config.json; None without one. transformers would ignore an unreadable file.

    A model class `cls` may define its own config class.
    """
    from transformers import GenerationConfig

    kind = getattr(cls, "generation_config_class", GenerationConfig)
    return kind.from_dict(read_json(path)) if path.is_file() else None
