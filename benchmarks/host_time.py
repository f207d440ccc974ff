"""Time that the host takes to launch packed linears and dense ones, in eager mode on a GPU.

    python benchmarks/host_time.py [--formats int4,int8,nvfp4] [--rows 1,16] [--profile] [--json host.json]

Weights have the shapes of Llama-3.2 1B: hidden 2048, MLP 8192, 32 heads of 64, 8 of keys and values. A figure
is the median over `ROUNDS` of the time of `CALLS` calls that wait for nothing, divided by their number; the
GPU is waited for between rounds, outside of the clock, so that its queue never fills. Modes are those of
torch: `inference_mode`, `no_grad`, `grad` (enabled, x asks for none) and `backward` (x asks for one).

Lines are F.linear on a dense bf16 weight, the packed linear alone, and q, k and v as a model calls them; the
ratio is to dense linears in the same mode. Stages are parts of one call of o_proj: what each takes when
called by itself. `layer` is a forward of a whole decoder layer of transformers. `--profile` prints the
functions that take longest.
"""

import argparse
import cProfile
import json
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import command, machine
from torch import nn

import quantkit
from quantkit.kernels.linear import run_linear
from quantkit.kernels.problem import Outline, Problem
from quantkit.kernels.registry import choose
from quantkit.packing.schemes import scheme
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.shared_input import shared_inputs

HIDDEN, MLP, HEADS, KV_HEADS, HEAD = 2048, 8192, 32, 8, 64
#: [N, K] of linears that are called alone.
SHAPES = {"q_proj": (2048, 2048), "k_proj": (512, 2048), "gate_proj": (8192, 2048), "down_proj": (2048, 8192)}
CALLS, ROUNDS = 50, 21
DENSE = "bf16"
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "backward": torch.enable_grad,
}


@dataclass(frozen=True)
class Row:
    """Host microseconds of a call; `ratio` is to the dense linears."""

    what: str
    format: str
    rows: int
    mode: str
    us: float
    ratio: float | None = None

    def __str__(self) -> str:
        ratio = "" if self.ratio is None else f"{self.ratio:.2f}"
        return f"| {self.what} | {self.format} | {self.rows} | {self.mode} | {self.us:.1f} | {ratio} |"


class Attention(nn.Module):
    """q, k and v as models have them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for index, (part, rows) in enumerate((("q", HIDDEN), ("k", KV_HEADS * HEAD), ("v", KV_HEADS * HEAD))):
            setattr(self, f"{part}_proj", linear_of(name, (rows, HIDDEN), seed=index))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.q_proj(x), self.k_proj(x), self.v_proj(x)


def linear_of(name: str, shape: tuple[int, int], seed: int = 0) -> Any:
    """A linear of random weights."""
    torch.manual_seed(seed)
    weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
    if name == DENSE:
        dense = nn.Linear(shape[1], shape[0], bias=False, device="meta")
        dense.weight = nn.Parameter(weight, requires_grad=False)
        return dense
    return PackedLinear.from_packed(quantkit.quantize_tensor(weight.cpu(), scheme(name)).to("cuda"))


def x_of(rows: int, columns: int, mode: str) -> torch.Tensor:
    """Activations as models have them, [1, M, K]."""
    x = torch.randn(1, rows, columns, device="cuda", dtype=torch.bfloat16)
    return x.requires_grad_(mode == "backward")


def host_us(function: Callable[..., Any], *arguments: Any, **options: Any) -> float:
    """Median microseconds of a call on the host."""
    call = partial(function, *arguments, **options)
    for _ in range(10):
        call()
    found = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(CALLS):
            call()
        found.append((time.perf_counter() - started) / CALLS * 1e6)
    torch.cuda.synchronize()
    return statistics.median(found)


def linears(formats: list[str], rows: list[int]) -> Iterator[Row]:
    """Single linears by F.linear and packed, and q, k and v."""
    for what, shape in SHAPES.items():
        dense = linear_of(DENSE, shape)
        packed = {name: linear_of(name, shape) for name in formats}
        for m in rows:
            for mode, context in MODES.items():
                x = x_of(m, shape[1], mode)
                with context():
                    first = host_us(F.linear, x, dense.weight)
                    yield Row(what, DENSE, m, mode, first, 1.0)
                    for name, layer in packed.items():
                        found = host_us(layer, x)
                        yield Row(what, name, m, mode, found, found / first)
    dense = Attention(DENSE)
    every = {name: Attention(name) for name in formats}
    for model in every.values():
        for shared in shared_inputs(model):
            shared.build(torch.bfloat16)
    for m in rows:
        for mode, context in MODES.items():
            x = x_of(m, HIDDEN, mode)
            with context():
                first = host_us(dense, x)
                yield Row("q, k, v", DENSE, m, mode, first, 1.0)
                for name, model in every.items():
                    found = host_us(model, x)
                    yield Row("q, k, v", name, m, mode, found, found / first)


@torch.inference_mode()
def stages(formats: list[str], rows: list[int]) -> Iterator[Row]:
    """Parts of a call of o_proj."""
    for name in formats:
        layer = linear_of(name, (HIDDEN, HIDDEN))
        for m in rows:
            x = x_of(m, HIDDEN, "inference_mode")
            layer(x)
            layout = layer.layout(x.dtype)
            assert layout is not None
            parts, token = list(layer.matrix.stored), layer.scheme.token
            of = (x, parts, list(layout.tensors), None, token, HIDDEN, layout.name)
            flat = x.view(m, HIDDEN)
            known = (x.device, m, HIDDEN, HIDDEN, layer.scheme, x.dtype, layout.name)
            chosen = choose(Problem.on(*known))
            row = partial(chosen.launch, flat, Outline(layer.scheme, (HIDDEN, HIDDEN)), layout.tensors, None)
            calls: dict[str, Callable[[], Any]] = {
                "the module": partial(layer, x),
                "its forward": partial(layer.forward, x),
                "the operator": partial(torch.ops.quantkit.linear, *of),
                "run_linear": partial(run_linear, *of),
                "the problem": partial(Problem.on, *known),
                "the choice": partial(choose, Problem.on(*known)),
                f"the row ({chosen.kernel.name})": row,
                "torch.empty": partial(torch.empty, (m, HIDDEN), dtype=x.dtype, device=x.device),
            }
            for what, call in calls.items():
                yield Row(what, name, m, "inference_mode", host_us(call))


def layers(formats: list[str], rows: list[int]) -> Iterator[Row]:
    """The forward of a decoder layer, without a cache."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        num_hidden_layers=1,
        attn_implementation="sdpa",
    )
    first: dict[tuple[int, str], float] = {}
    rotary = LlamaRotaryEmbedding(config).to("cuda")
    for name in (DENSE, *formats):
        torch.manual_seed(0)
        layer = LlamaDecoderLayer(config, 0).to("cuda", torch.bfloat16).eval().requires_grad_(False)
        if name != DENSE:
            pack(layer, name)
        for m in rows:
            for mode in ("inference_mode", "no_grad", "grad"):
                x = x_of(m, HIDDEN, mode)
                positions = rotary(x, torch.arange(m, device="cuda")[None])
                with MODES[mode]():
                    found = host_us(layer, x, position_embeddings=positions, attention_mask=None)
                yield Row("layer", name, m, mode, found, found / first.setdefault((m, mode), found))


def pack(layer: nn.Module, name: str) -> None:
    """Pack the linears of a layer."""
    for path, module in list(layer.named_modules()):
        if isinstance(module, nn.Linear):
            packed = quantkit.quantize_tensor(module.weight.detach().cpu(), scheme(name)).to("cuda")
            layer.set_submodule(path, PackedLinear.from_packed(packed))
    for shared in shared_inputs(layer):
        shared.build(torch.bfloat16)


@torch.inference_mode()
def profiled(name: str) -> None:
    """Print the functions that a call takes longest in."""
    layer, x = linear_of(name, (HIDDEN, HIDDEN)), x_of(1, HIDDEN, "inference_mode")
    for _ in range(10):
        layer(x)
    torch.cuda.synchronize()
    with cProfile.Profile() as profile:
        for _ in range(200):
            layer(x)
    torch.cuda.synchronize()
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)


def main() -> None:
    """Parse the command line, measure, print a line for each figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default="int4,int8,nvfp4")
    parser.add_argument("--rows", default="1,16")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    formats = arguments.formats.split(",")
    rows = [int(number) for number in arguments.rows.split(",")]
    print(machine())
    print("| what | format | M | mode | host us | to dense |\n|---|---|---|---|---|---|")
    found = []
    for measure in (linears, stages, layers):
        for row in measure(formats, rows):
            found.append(row)
            print(row, flush=True)
            if arguments.json is not None:
                stored = {"machine": machine(), "command": command(), "rows": [asdict(one) for one in found]}
                arguments.json.write_text(json.dumps(stored, indent=1) + "\n")
    if arguments.profile:
        for name in formats:
            profiled(name)


if __name__ == "__main__":
    main()
