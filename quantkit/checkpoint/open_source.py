"""Whatever kind of checkpoint a path is, opened: the table of kinds is the order of the questions."""

from pathlib import Path

from quantkit.checkpoint.gguf.open_gguf import gguf_file, open_gguf
from quantkit.checkpoint.source import Checkpoint


def open_source(path: Path, *, allow_auto_map: bool = False) -> Checkpoint:
    """The checkpoint in a directory, or in a GGUF file; raises as `Checkpoint.open` and `open_gguf` do."""
    file = gguf_file(path)
    if file is not None:
        return open_gguf(file)
    return Checkpoint.open(path, allow_auto_map=allow_auto_map)
