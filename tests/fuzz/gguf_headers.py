"""GGUF files: mutated by entry and by byte, and read as the package gguf reads them."""

import struct
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np

from quantkit.checkpoint.gguf.block_types import BLOCK_TYPES, BlockType
from quantkit.checkpoint.gguf.header import read_gguf_header
from quantkit.checkpoint.gguf.open_gguf import gguf_tensors
from quantkit.checkpoint.source import Checkpoint
from quantkit.checkpoint.stamp import FileStamp

from ..checkpoint.gguf_files import random_blocks
from .mutate import mutate_bytes

#: Numbers that counts, lengths, shapes and offsets may have.
_NUMBERS = (0, 1, 2, 3, 31, 32, 33, 255, 2**16, 2**20, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1)
#: Types of tensors in a file.
_KINDS = 4
#: Weights of a tensor that are compared.
_COMPARED = 1 << 14


@cache
def gguf_headers() -> tuple[bytes, ...]:
    """Small files with some types of tensors each, every second one with experts and another alignment.

    A case then costs a fifth of one with all types, and what is changed is as likely to be in any tensor.
    """
    kinds = tuple(BLOCK_TYPES.values())
    return tuple(
        _file(*(("llama", 32), ("qwen2moe", 64))[at % 2], kinds[first : first + _KINDS])
        for at, first in enumerate(range(0, len(kinds), _KINDS))
    )


def _file(arch: str, alignment: int, kinds: tuple[BlockType, ...]) -> bytes:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.gguf"
        writer = gguf.GGUFWriter(path, arch)
        writer.add_custom_alignment(alignment)
        for key, value in (("head_count", 2), ("head_count_kv", 1)):
            writer.add_uint32(f"{arch}.attention.{key}", value)
        writer.add_bool("a.bool", True)
        writer.add_float64("a.float", 0.5)
        writer.add_int16("a.int", -3)
        writer.add_array("tokenizer.ggml.tokens", ["a", "b\u00e9", ""])
        writer.add_array("tokenizer.ggml.scores", [0.5, 1.5])
        shapes = {"attn_q": (4, 64), "attn_k": (4, 32), "ffn_up": (2, 256), "ffn_down": (3, 512)}
        for layer, kind in enumerate(kinds):
            for stem, (rows, columns) in shapes.items():
                if columns % kind.elements or (stem == "ffn_up" and arch != "llama"):
                    continue
                number = gguf.GGMLQuantizationType(kind.number)
                if kind.dtype is None:
                    data = random_blocks(kind, rows, columns // kind.elements)
                else:
                    data = gguf.quantize(np.ones((rows, columns), np.float32), number)
                name = {"ffn_down": "attn_output"}.get(stem, stem)
                writer.add_tensor(f"blk.{layer}.{name}.weight", data, raw_dtype=number)
        if arch != "llama":
            stacked = gguf.quantize(np.ones((3, 2, 32), np.float32), gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor("blk.0.ffn_up_exps.weight", stacked, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor("blk.0.ffn_gate_inp_shexp.weight", np.ones(64, np.float32))
        writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def mutate_gguf(data: bytes, random: Random) -> bytes:
    """Numbers of the header changed where they stand, its entries moved, or any bytes."""
    kind = random.randrange(4)
    if kind == 0:
        return mutate_bytes(data, random)
    header = data.index(b"output_norm.weight") + 64
    found = bytearray(data)
    for _ in range(random.choice((1, 1, 2, 4))):
        at = random.randrange(4, header)
        if kind == 1:
            # Lengths, counts and shapes are all of 8 bytes.
            found[at : at + 8] = struct.pack("<Q", random.choice(_NUMBERS))
        elif kind == 2:
            found[at : at + 4] = struct.pack("<I", random.choice(_NUMBERS) % 2**32)
        else:
            found[at] = random.choice((0, 1, 8, 9, 12, 13, found[at] ^ 1, random.randrange(256)))
    return bytes(found)


def check_gguf(case: bytes, directory: Path) -> None:
    """Metadata, places and values are those that the package gguf reads."""
    path = directory / "a.gguf"
    path.write_bytes(case)
    header = read_gguf_header(path)
    expected = gguf.GGUFReader(path)
    keys = {key: field for key, field in expected.fields.items() if not key.startswith("GGUF.")}
    assert header.metadata.keys() == keys.keys()
    for key, value in header.metadata.items():
        # NaN is not itself, but looks like itself.
        assert repr(value) == repr(_plain(keys[key].contents())), key
    places = {one.name: one for one in expected.tensors}
    assert header.tensors.keys() == places.keys()
    for name, tensor in header.tensors.items():
        other = places[name]
        assert tensor.shape[::-1] == tuple(map(int, other.shape)), name
        assert (tensor.offset, tensor.nbytes) == (other.data_offset, other.n_bytes), name
    tensors = gguf_tensors(header)
    checkpoint = Checkpoint(directory, {}, dict(tensors), (path,), (), (), {path: FileStamp.of(path)})
    for name, rows in tensors.items():
        if rows.elements <= _COMPARED:
            found = checkpoint.read(name)
            assert tuple(found.shape) == rows.shape
            grid = rows.grid(checkpoint.read_stored, 0, rows.shape[0])
            if grid is not None:
                # Scales that are NaN for others, and code 3 of a ternary one, are numbers for llama.cpp.
                values = grid.values()
                known = ~values.isnan()
                np.testing.assert_array_equal(values[known].numpy(), found[known].numpy())
    for name in ("model.norm.weight",):
        if name in tensors:
            stored = places["output_norm.weight"]
            values = gguf.dequantize(stored.data, stored.tensor_type)
            np.testing.assert_array_equal(checkpoint.read(name).float().numpy(), np.ravel(values))


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
