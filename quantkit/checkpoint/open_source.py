"""Open any kind of checkpoint: plain, low-bit, or a GGUF file."""

from dataclasses import replace
from pathlib import Path

from quantkit.checkpoint.gguf.open_gguf import gguf_file, open_gguf
from quantkit.checkpoint.low_bit.dequantized import dequantized
from quantkit.checkpoint.source import Checkpoint


def open_source(path: Path, *, allow_auto_map: bool = False) -> Checkpoint:
    """Open the checkpoint in a directory or a GGUF file, with low-bit weights dequantized when read.

    With `allow_auto_map`, a config that asks for remote code is no error; the code never runs. Raises
    `CheckpointError` for damaged files, and for formats and architectures that no reader supports. Raises
    `EnvironmentProblem` on a big-endian host, and without the package gguf.
    """
    file = gguf_file(path)
    if file is not None:
        return open_gguf(file)
    return dequantized(Checkpoint.open(path, allow_auto_map=allow_auto_map))


def exactly(checkpoint: Checkpoint) -> Checkpoint:
    """Return `checkpoint` with low-bit weights in float32, unrounded, and without notes on rounding."""
    tensors = {
        name: tensor if tensor.stored_as is None else replace(tensor, dtype="F32")
        for name, tensor in checkpoint.tensors.items()
    }
    return replace(checkpoint, tensors=tensors, notes=())
