"""`convert` on hostile low-bit checkpoints and GGUF files: a whole checkpoint, or nothing and words."""

import json
import tempfile
from functools import cache
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save

from quantkit.checkpoint.manifest import read_manifest
from quantkit.converting import ConvertOptions, convert
from quantkit.errors import QuantkitError
from quantkit.verification.verify import verify

from ..checkpoint.gguf_files import tiny_model, tokenizer_metadata, write_gguf
from ..checkpoint.low_bit.makers import Made, awq, gptq, pack_quantized
from .files import write_items
from .gguf_headers import mutate_gguf
from .low_bit import mutate_low_bit
from .models import dense_model
from .mutate import Item, pack_directory, unpack_directory

_GGUF, _OUT = "model.gguf", "out"
_MAKERS = (
    lambda rows, columns: pack_quantized(4, rows, columns, 16),
    lambda rows, columns: gptq(4, rows, columns, 16),
    lambda rows, columns: awq(rows, columns, 16),
)


@cache
def low_bit_models() -> tuple[bytes, ...]:
    """A llama of one block by each of three tools, and as a GGUF file."""
    seeds = []
    for make in _MAKERS:
        config, tensors = dense_model("llama")
        parts: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not name.endswith("_proj.weight"):
                parts[name] = tensor
                continue
            made: Made = make(tensor.shape[0], tensor.shape[1])
            parts |= {
                name.removesuffix("weight") + part[2:]: one.contiguous() for part, one in made.parts.items()
            }
        config["quantization_config"] = made.section
        files: dict[str, Item] = {"config.json": json.dumps(config).encode()}
        seeds.append(pack_directory({**files, "model.safetensors": save(parts, {"format": "pt"})}))
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model("llama", vocab_size=264, num_hidden_layers=1, tie_word_embeddings=True)

        def kind(name: str, shape: tuple[int, ...]) -> str:
            return "Q4_1" if len(shape) == 2 and name.startswith("blk.") else "F32"

        path = write_gguf(Path(folder, _GGUF), "llama", model, kind, **tokenizer_metadata())
        seeds.append(pack_directory({_GGUF: path.read_bytes()}))
    return tuple(seeds)


def mutate_low_bit_model(case: bytes, random: Random) -> bytes:
    items = unpack_directory(case)
    data = items.get(_GGUF)
    if isinstance(data, bytes):
        return pack_directory({_GGUF: mutate_gguf(data, random)})
    return mutate_low_bit(case, random)


def check_convert(case: bytes, directory: Path) -> None:
    """A result passes `verify`; a refusal leaves nothing that passes for a checkpoint."""
    items = unpack_directory(case)
    source, out = directory / "source", directory / _OUT
    source.mkdir()
    write_items(source, items)
    try:
        with pytest.MonkeyPatch.context() as patch:
            # A GGUF file is given the form of a checkpoint there.
            patch.setattr(tempfile, "tempdir", str(directory))
            convert(source / _GGUF if _GGUF in items else source, out, ConvertOptions(check=False))
    except QuantkitError:
        left = sorted(path.name for path in out.iterdir()) if out.is_dir() else []
        assert not {"config.json", "quantkit_manifest.json"} & {*left}, f"left behind: {left}"
        raise
    problems = [problem for check in verify(out, reload=False) for problem in check.problems]
    assert not problems, problems
    assert read_manifest(out)["files"].keys() | {"quantkit_manifest.json"} == {
        path.name for path in out.iterdir()
    }
