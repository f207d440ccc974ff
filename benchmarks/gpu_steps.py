"""Time decoding steps on a GPU, recorded as `generate` records them, of a model of random weights.

    python benchmarks/gpu_steps.py --formats bf16,int4,int8 --batch 1,4,16 --json steps.json
    python benchmarks/gpu_steps.py --bring qkv:o:9 --bring qkv:o:9,qkv:gate_up:19

A step is one new token of each sequence after `--tokens` of them: by default of two models of Llama-3 8B's
layers, one with as many as `--layers`, one with half. What the former takes longer, divided by the layers it
has more, is the time of a layer, and with the bytes of its weights the bandwidth that it reaches. Steps are
called one after the other without waiting for any, which the host must do faster than the GPU runs them; a
figure is the median over rounds of `STEPS`.

`--bring AFTER:OF:MB` measures, too, what models do not do by themselves: a branch of the graph, which nothing
waits for but its end, brings the first so many MB of the codes of the next product OF to the L2 cache once
the product AFTER is done. Several of one measurement have commas between them; what a branch costs by itself
is seen where it brings next to nothing, `qkv:o:0.01`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch.fx import GraphModule, Node
from transformers import LlamaConfig, LlamaForCausalLM

import quantkit
from quantkit.bench.speed import weight_bytes
from quantkit.errors import UsageError
from quantkit.kernels.linear import OPERATOR, linear_in_order
from quantkit.kernels.measure import read_time
from quantkit.model import fused_forward
from quantkit.model.decoding import forward_of, graph_decoding, static_cache
from quantkit.model.graphs import NotRecorded

#: Of Llama-3 8B, but for the vocabulary, which is outside of layers.
SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
#: Products of a layer, in the order of a step, with the rows of their weights.
PRODUCTS = {"qkv": 6144, "o": 4096, "gate_up": 28672, "down": 4096}
#: What is not packed.
DENSE = "bf16"
#: Steps of a round, and rounds.
STEPS, ROUNDS = 20, 7
#: Most of the time of a step that the host may need to launch it.
MOST_OF_STEP = 0.8
#: Bytes that a thread asks for at a time, and programs of 32 threads.
PIECE, PROGRAMS = 4096, 132


@dataclass(frozen=True)
class Row:
    """Microseconds of a step and of one of its layers, and the part of the bandwidth that a layer reaches."""

    format: str
    bring: str
    batch: int
    step_us: float
    layer_us: float
    bandwidth: float


@dataclass(frozen=True)
class Bring:
    """The first `megabytes` of the next product `of`, once a product `after` is done."""

    after: str
    of: str
    megabytes: float

    @classmethod
    def parse(cls, text: str) -> "Bring":
        try:
            after, of, megabytes = text.split(":")
            found = cls(after, of, float(megabytes))
        except ValueError as error:
            raise UsageError(f"{text!r} is not AFTER:OF:MB, such as qkv:o:9.") from error
        if not {after, of} <= set(PRODUCTS) or not found.megabytes > 0:
            raise UsageError(f"{text!r}: products are {', '.join(PRODUCTS)}, and MB more than 0.")
        return found

    def __str__(self) -> str:
        return f"{self.after}:{self.of}:{self.megabytes:g}"

    @property
    def distance(self) -> int:
        """How many products later the one that it is of comes."""
        names = list(PRODUCTS)
        return (names.index(self.of) - names.index(self.after) - 1) % len(names) + 1


@triton.jit
def _ask(at, pieces, PROGRAMS: tl.constexpr, PIECE: tl.constexpr):
    """Have pieces from address `at` on brought to the L2 cache."""
    for first in range(0, pieces, PROGRAMS * 32):
        piece = first + tl.arange(0, 32) * PROGRAMS + tl.program_id(0)
        tl.inline_asm_elementwise(
            "{.reg .pred p; setp.ne.b32 p, $2, 0;"
            "@p cp.async.bulk.prefetch.L2.global [$1], $3; mov.b32 $0, 0;}",
            "=r,l,r,r",
            [at.to(tl.int64) + piece.to(tl.int64) * PIECE, (piece < pieces).to(tl.int32), PIECE],
            tl.int32,
            is_pure=False,
            pack=1,
        )


def bring(codes: torch.Tensor, megabytes: float, branch: Any) -> None:
    """Ask for the first part of `codes` in a stream of its own, after what was launched so far."""
    pieces = max(1, min(int(megabytes * 2**20), codes.nbytes) // PIECE)
    branch.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(branch):
        _ask[(PROGRAMS,)](codes, pieces, PROGRAMS, PIECE, num_warps=1)


def with_branches(module: GraphModule, brings: Sequence[Bring], branch: Any) -> GraphModule:
    """`module`, a step, which asks for weights as `brings` say. `NotRecorded` if it has other products."""

    def ask(codes: torch.Tensor, megabytes: float) -> None:
        bring(codes, megabytes, branch)

    def join() -> None:
        # A graph ends with all that it began.
        torch.cuda.current_stream().wait_stream(branch)

    graph = module.graph
    products = [node for node in graph.nodes if node.target in (OPERATOR, linear_in_order)]
    rows = [node.args[5] for node in products]
    if len(rows) < len(PRODUCTS) or rows != [*PRODUCTS.values()] * (len(rows) // len(PRODUCTS)):
        raise NotRecorded(f"products with {rows} rows are not {PRODUCTS} of each layer")
    for constant in reversed(graph.find_nodes(op="get_attr")):
        # They are where they are first used.
        next(iter(graph.nodes)).prepend(constant)
    names, asked = list(PRODUCTS), False
    for number, node in enumerate(products):
        for one in brings:
            later = number + one.distance
            if names[number % len(names)] == one.after and later < len(products):
                with graph.inserting_after(node):
                    graph.call_function(ask, (_codes(products[later]), one.megabytes))
                asked = True
    if asked:
        with graph.inserting_before(graph.output_node()):
            graph.call_function(join)
    graph.lint()
    module.recompile()
    return module


def _codes(product: Node) -> Any:
    layout: Any = product.args[2]
    return layout[0]


@contextmanager
def bringing(brings: Sequence[Bring]) -> Iterator[None]:
    """A block in which steps are recorded with branches."""
    if not brings:
        yield
        return
    branch: Any = torch.cuda.Stream()
    fused = fused_forward.fused

    def branched(step: Callable[..., Any], inputs: Sequence[torch.Tensor], what: str) -> GraphModule:
        module = fused(step, inputs, what)
        return with_branches(module, brings, branch) if what == "decoding steps" else module

    fused_forward.fused = branched
    try:
        yield
    finally:
        fused_forward.fused = fused


def made(directory: Path, layers: int) -> Path:
    """A checkpoint of random weights with so many layers."""
    source = directory / f"{DENSE}-{layers}"
    torch.manual_seed(0)
    with torch.device("cuda"):
        config = LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **SIZES)
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(source)
    return source


@torch.no_grad()
def step_time(model: Any, batch: int, tokens: int) -> float:
    """Median microseconds of a step of `batch` sequences that have so many tokens each."""
    prompt = torch.randint(3, SIZES["vocab_size"], (batch, tokens), device="cuda")
    cache = static_cache(model, tokens + STEPS * (ROUNDS + 1))
    token = model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    step = partial(forward_of(model), input_ids=token, past_key_values=cache, use_cache=True)
    times, launches = [], []
    for _ in range(ROUNDS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began = time.perf_counter()
        start.record()
        for _ in range(STEPS):
            step()
        stop.record()
        launches.append((time.perf_counter() - began) * 1e6 / STEPS)
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / STEPS)
    if step.func.refused:
        raise UsageError(f"steps are not recorded: {', '.join(step.func.refused)}.")
    # The first records the step.
    found, launched = statistics.median(times[1:]), statistics.median(launches[1:])
    if launched > MOST_OF_STEP * found:
        raise UsageError(
            f"the host launches a step in {launched:.0f} of its {found:.0f} us. Use more --layers."
        )
    return found


def measure(
    name: str, sources: Mapping[int, Path], variants: Sequence[Sequence[Bring]], options: argparse.Namespace
) -> Iterator[Row]:
    """The rows of a format, from two models with so many layers."""
    models = {layers: _loaded(name, source) for layers, source in sources.items()}
    (more, whole), (fewer, half) = models.items()
    read = read_time((weight_bytes(whole) - weight_bytes(half)) // (more - fewer))
    for brings in variants:
        with bringing(brings):
            for model in models.values():
                # Without the graphs that it has.
                graph_decoding(model)
            for batch in options.batch:
                step, other = (step_time(model, batch, options.tokens) for model in models.values())
                layer = (step - other) / (more - fewer)
                yield Row(name, ",".join(map(str, brings)), batch, step, layer, read / layer)


def _loaded(name: str, source: Path) -> Any:
    packed = source.with_name(source.name.replace(DENSE, name))
    if name != DENSE:
        quantkit.quantize(source, packed, format=name, method="rtn")
    return quantkit.load(packed, device="cuda")


def text(rows: Sequence[Row]) -> str:
    lines = [
        "| format | brought | batch | step, us | layer, us | of the bandwidth |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.format} | {row.bring} | {row.batch} | {row.step_us:.0f} | {row.layer_us:.1f} | "
        f"{row.bandwidth:.0%} |"
        for row in rows
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=f"{DENSE},int4", help=f"names, or {DENSE}")
    parser.add_argument("--batch", type=lambda given: [int(one) for one in given.split(",")], default=[1, 16])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--bring", action="append", default=[], metavar="AFTER:OF:MB,...")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    try:
        tried = [[Bring.parse(one) for one in given.split(",")] for given in options.bring]
    except UsageError as error:
        parser.error(str(error))
    if options.layers < 2:
        parser.error("--layers are 2 at least, of which the other model has half.")
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here.")
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit.stdout.strip()}")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        sources = {layers: made(Path(directory), layers) for layers in (options.layers, options.layers // 2)}
        for name in options.formats.split(","):
            rows += measure(name, sources, [[], *tried] if name != DENSE else [[]], options)
    print(text(rows))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    try:
        main()
    except UsageError as problem:
        sys.exit(str(problem))
