"""Time and memory of making a loaded model ready: what the quantizer does once the weights are on the GPU.

    python benchmarks/layout_build.py --formats int4,int8,fp8,ternary,mxfp4,nvfp4 --layers 32
    python benchmarks/layout_build.py --formats int4 --layers 1 --repeats 1 --device cpu

The model has the linears of Llama 3 8B, quantized from Gaussian weights. The first time in a process includes
what Triton compiles or finds compiled, and what the allocator asks of the driver; the other is the median of
repeats. The bytes are those that torch has allocated afterwards, against those of the parameters.
"""

import argparse
import statistics
import time
from typing import Any

import torch
from torch import nn

import quantkit
from quantkit.kernels.tuning.shapes import shapes_named
from quantkit.packing.schemes import scheme
from quantkit.packing.tensor import PackedTensor
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.transformers.quantizer import QuantkitConfig, QuantkitQuantizer

FORMATS = "int8,int4,int3,ternary,fp8,mxfp4,nvfp4"
GROUPS = {"self_attn": ("q", "kv", "kv", "o"), "mlp": ("up", "up", "down")}
NAMES = {"self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"), "mlp": ("gate_proj", "up_proj", "down_proj")}


class Model(nn.Module):
    """The linears of so many layers; `weights` are one of each shape, of which every layer has a copy."""

    def __init__(self, weights: dict[str, PackedTensor], layers: int) -> None:
        super().__init__()
        self.dtype = torch.bfloat16
        for layer in range(layers):
            block = nn.Module()
            for group, shapes in GROUPS.items():
                part = nn.Module()
                for name, shape in zip(NAMES[group], shapes, strict=True):
                    one = weights[shape]
                    tensors = tuple(tensor.clone() for tensor in one.tensors)
                    packed = PackedTensor(tensors, one.scheme, one.shape)
                    part.add_module(name, PackedLinear.from_packed(packed))
                block.add_module(group, part)
            self.add_module(f"layer{layer}", block)


def weights_of(name: str, device: str) -> dict[str, PackedTensor]:
    found = {}
    for shape in ("q", "kv", "o", "up", "down"):
        ((_, (n, k)),) = shapes_named([f"llama3-8b.{shape}"]).items()
        found[shape] = quantkit.quantize_tensor(torch.randn(n, k, device=device), scheme(name), method="rtn")
    return found


def quantizer(name: str) -> QuantkitQuantizer:
    section = {"version": 1, "schemes": [scheme(name).to_dict()], "default": 0, "modules": {}}
    return QuantkitQuantizer(QuantkitConfig(quant_method="quantkit", quantkit=section))


def build(made: QuantkitQuantizer, model: Any, device: str) -> float:
    """Seconds until the model is ready, on the device too."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    wait()
    start = time.perf_counter()
    made._process_model_after_weight_loading(model)
    wait()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    asked = parser.parse_args()
    print(f"{'format':10} {'first ms':>9} {'ms':>8} {'us a weight':>12} {'stored MB':>10} {'allocated':>10}")
    for name in asked.formats.split(","):
        weights, seconds, allocated = weights_of(name, asked.device), [], 0
        for _ in range(asked.repeats + 1):
            before = torch.cuda.memory_allocated() if asked.device == "cuda" else 0
            model = Model(weights, asked.layers)
            stored = sum(parameter.nbytes for parameter in model.parameters())
            seconds.append(build(quantizer(name), model, asked.device))
            allocated = torch.cuda.memory_allocated() - before if asked.device == "cuda" else 0
            del model
        median = statistics.median(seconds[1:] or seconds)
        ratio = f"{allocated / stored:.3f}" if allocated else "-"
        per_weight = median / (7 * asked.layers) * 1e6
        print(
            f"{name:10} {seconds[0] * 1e3:9.1f} {median * 1e3:8.1f} {per_weight:12.0f} "
            f"{stored / 1e6:10.0f} {ratio:>10}",
            flush=True,
        )


if __name__ == "__main__":
    main()
