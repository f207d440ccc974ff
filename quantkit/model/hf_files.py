"""Files that transformers reads: its errors as `CheckpointError`, and no links out of their directory."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import quantkit
from quantkit.checkpoint.hub.repository import resolve
from quantkit.checkpoint.output.atomic_write import is_inside
from quantkit.checkpoint.safetensors_header import read_json
from quantkit.errors import CheckpointError, QuantkitError
from quantkit.memory import is_lack_of_memory

GENERATION_CONFIG_NAME = "generation_config.json"
_PACKAGE = Path(quantkit.__file__).parent
#: What quantkit's own calls of Python and torch raise for what files say: numbers that do not fit, such as
#: probabilities that are none, keys that are not there, and what the disk says.
_OF_FILES = (OSError, ValueError, KeyError, RuntimeError)


def whole_directory(source: str | Path) -> Path:
    """The directory of `source`; `CheckpointError` for a link out of it, which transformers would follow."""
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
    """What transformers raises, of many kinds, for files that do not fit each other, as `CheckpointError`.

    Errors of quantkit's own code are let through, but those that files can lead to.
    """
    try:
        yield
    except BaseException as error:
        # tokenizers raises plain `Exception`s; panics of its Rust code have a class that none can import.
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
    """Whether quantkit's code raised what no file leads to; what is not Python has no frame of its own."""
    if isinstance(error, _OF_FILES):
        return False
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return Path(frames[-1]).is_relative_to(_PACKAGE)


def _of_the_disk(error: BaseException) -> str:
    """What the disk said of which file, where transformers raised `error` because of that but kept it."""
    cause, seen = error.__cause__ or error.__context__, {error}
    while cause is not None and not (isinstance(cause, OSError) and cause.errno is not None):
        # Whoever raises an old exception again can make a circle of them.
        seen.add(cause)
        cause = cause.__cause__ or cause.__context__
        cause = None if cause in seen else cause
    return "" if cause is None else f" ({cause})"


def read_generation_config(path: Path) -> Any:
    """What generation_config.json says, None without one; transformers takes one it cannot read for none."""
    from transformers import GenerationConfig

    return GenerationConfig.from_dict(read_json(path)) if path.is_file() else None
