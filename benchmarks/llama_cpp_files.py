"""GGUF files that llama.cpp itself quantizes, and their weights as a dense model that `quantkit eval` reads.

The embedding and the head keep the dtype of the model, as in rows of quantkit: only linears have errors. Rows
of no multiple of 256 get another block type from llama.cpp, so bits are counted in the file.
"""

import ctypes
import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file

from quantkit.checkpoint.gguf.gguf_names import exported_as, place
from quantkit.checkpoint.gguf.open_gguf import open_gguf
from quantkit.checkpoint.open_source import open_source
from quantkit.checkpoint.source import CONFIG_NAME
from quantkit.model.prefixes import read_names
from quantkit.quantization.quantize_options import QuantizeOptions
from quantkit.targets.gguf import GGUF

#: Part of the names of matrices in blocks: the linears.
BLOCK = "model.layers."


def write_dense(model: Path, out: Path) -> None:
    """Write a dense model as the GGUF file `out`, in its own dtype."""
    checkpoint, structure = read_names(open_source(model))
    (file,) = GGUF.plan(checkpoint, structure, QuantizeOptions.max_shard_bytes).files
    assert file.header is not None
    with out.open("wb") as written:
        written.write(file.header.data)
        for job in file.jobs:
            # One tensor a job; its chunks come in order.
            for _, tensor, _ in job.chunks(checkpoint):
                written.write(tensor.contiguous().view(torch.uint8).numpy().tobytes())
            written.write(bytes(-written.tell() % file.header.alignment))


def importance(model: Path, sequences: Sequence[Sequence[int]]) -> dict[str, torch.Tensor]:
    """Return llama.cpp's importance matrix of a model: the mean square of each input of a linear, [K].

    Names are those of a GGUF file.
    """
    from transformers import AutoModelForCausalLM

    dense = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    found = exported_as(dense.config.model_type)
    assert found is not None
    sums: dict[str, torch.Tensor] = {}

    def watch(name: str, inputs: tuple[torch.Tensor, ...]) -> None:
        sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().sum(dim=0)

    for module, linear in dense.named_modules():
        if isinstance(linear, torch.nn.Linear) and (at := place(found[1], f"{module}.weight")) is not None:
            linear.register_forward_pre_hook(partial(lambda name, _, inputs: watch(name, inputs), at.name))
    with torch.inference_mode():
        for ids in sequences:
            dense(torch.tensor([ids]))
    tokens = sum(map(len, sequences))
    return {name: (total / tokens).contiguous() for name, total in sums.items()}


def quantize_file(
    source: Path, out: Path, kind: str, weights: Mapping[str, torch.Tensor] = MappingProxyType({})
) -> None:
    """Quantize a dense GGUF file by llama.cpp to one of its types of files, such as `Q4_K_M`.

    `weights` is the importance matrix, float32 [K] by name.
    """
    import llama_cpp

    embedding: Any = open_gguf(source).tensors["model.embed_tokens.weight"]
    options: Any = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    options.token_embedding_type = options.output_tensor_type = embedding.block_type.number
    if weights:
        record, floats = llama_cpp.llama_model_imatrix_data, ctypes.POINTER(ctypes.c_float)
        rows = [
            record(name.encode(), ctypes.cast(one.data_ptr(), floats), one.numel())
            for name, one in weights.items()
        ]
        # An entry without a name ends the list.
        options.imatrix = (record * (len(rows) + 1))(*rows, record(None, None, 0))
    failed = llama_cpp.llama_model_quantize(bytes(source), bytes(out), ctypes.byref(options))
    if failed:
        raise RuntimeError(f"llama.cpp made no {kind} of {source.name}: code {failed}")


def dequantize(file: Path, model: Path, out: Path) -> tuple[float, str]:
    """Write the weights of a GGUF file as a dense model in float32, with the config and tokenizer of `model`.

    Returns the bits per weight of its linears, and how many are of which block type.
    """
    checkpoint = open_gguf(file)
    linears = [
        one for name, one in checkpoint.tensors.items() if name.startswith(BLOCK) and len(one.shape) == 2
    ]
    kinds = Counter(one.stored_as or one.dtype for one in linears)
    tensors = {name: checkpoint.read(name).float() for name in checkpoint.tensors}
    out.mkdir()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    for path in open_source(model).side_files:
        shutil.copy(path, out)
    config = {**json.loads((model / CONFIG_NAME).read_text()), "dtype": "float32"}
    config.pop("torch_dtype", None)
    (out / CONFIG_NAME).write_text(json.dumps(config))
    bits = 8 * sum(one.stored_bytes for one in linears) / sum(one.elements for one in linears)
    return bits, " and ".join(f"{count} {kind}" for kind, count in kinds.most_common())
