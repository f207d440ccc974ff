"""Logits of exported models by another tool: `python read_logits.py ANSWERS IDS DIRECTORY...`.

IDS is a JSON list of token ids. Writes a file to the folder ANSWERS for each directory, with float32 arrays
[T, V]: `dequantized`, by weights that the tool dequantized, and `own`, as the tool computes. `exports.py`
calls it in an environment with the tool.
"""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

Arrays = Mapping[str, Any]


def llama_cpp(directory: Path, ids: list[int]) -> Arrays:
    """Compute by llama.cpp: the file, and a copy of it with float32 weights of the package gguf."""
    import gguf
    from llama_cpp import Llama

    file = directory / "model.gguf"
    copy = directory / "float32.gguf"
    reader = gguf.GGUFReader(file)
    writer = gguf.GGUFWriter(copy, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = field.contents()
        if key.startswith("GGUF.") or key == "general.architecture":
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            writer.add_key_value(key, value, field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = {}
    # Keys and values in float32: the default is float16.
    options = {"n_ctx": 128, "n_threads": 1, "verbose": False, "logits_all": True, "type_k": 0, "type_v": 0}
    for name, path in ("own", file), ("dequantized", copy):
        model = Llama(str(path), n_threads_batch=1, **options)
        model.eval(ids)
        found[name] = np.array(model._scores)[: len(ids)]
    copy.unlink()
    return found


def mlx(directory: Path, ids: list[int]) -> Arrays:
    """Compute by mlx-lm: as it loads the model, and with all that is float, scales too, in float32."""
    import mlx.core as mx
    from mlx_lm import load

    model, _ = load(str(directory))
    own = np.array(model(mx.array([ids])).astype(mx.float32))[0]
    halves = (mx.float16, mx.bfloat16)
    model.apply(lambda one: one.astype(mx.float32) if one.dtype in halves else one)
    return {"own": own, "dequantized": np.array(model(mx.array([ids])))[0]}


def gptqmodel(directory: Path, ids: list[int]) -> Arrays:
    """Compute by transformers with gptqmodel: in float16, and dense in float32 of the weights that it has."""
    import torch
    from gptqmodel.nn_modules.qlinear import BaseQuantLinear
    from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
    from transformers import AutoModelForCausalLM, AwqConfig, GPTQConfig

    def dequantized(module: Any) -> Any:
        module.scales = module.scales.float()
        if hasattr(module, "dequantize_weight"):
            return module.dequantize_weight()
        return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)

    section = json.loads((directory / "config.json").read_text())["quantization_config"]
    kind, backend = (GPTQConfig, "torch") if section["quant_method"] == "gptq" else (AwqConfig, "torch_awq")
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float16,
        device_map="cpu",
        quantization_config=kind(bits=section["bits"], backend=backend),
    ).eval()
    tokens = torch.tensor([ids])
    found = {}
    with torch.inference_mode():
        found["own"] = model(tokens).logits[0].float().numpy()
        for name, module in list(model.named_modules()):
            if isinstance(module, BaseQuantLinear):
                weight = dequantized(module).T
                dense = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=module.bias is not None)
                dense.weight.copy_(weight)
                if module.bias is not None:
                    dense.bias.copy_(module.bias)
                model.set_submodule(name, dense)
        found["dequantized"] = torch.nn.Module.float(model)(tokens).logits[0].numpy()
    return found


def reader_of(directory: Path) -> Callable[[Path, list[int]], Arrays]:
    """Return the function of the tool for an export."""
    if (directory / "model.gguf").exists():
        return llama_cpp
    return mlx if "quantization" in json.loads((directory / "config.json").read_text()) else gptqmodel


def main() -> None:
    """Read each export; say why one fails, and go on."""
    answers, ids = Path(sys.argv[1]), json.loads(sys.argv[2])
    for directory in map(Path, sys.argv[3:]):
        try:
            np.savez(answers / f"{directory.name}.npz", **reader_of(directory)(directory, ids))
        except Exception as error:
            (answers / f"{directory.name}.txt").write_text(f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
