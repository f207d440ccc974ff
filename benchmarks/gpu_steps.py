"""Time decoding steps on a GPU, recorded as `generate` records them, of a model of random weights.

    python benchmarks/gpu_steps.py --formats bf16,int4,int8 --batch 1,4,16 --json steps.json

A step is one new token of each sequence after `--tokens` of them: by default of two models of Llama-3 8B's
layers, one with as many as `--layers`, one with half. What the former takes longer, divided by the layers it
has more, is the time of a layer, and with the bytes of its weights the bandwidth that it reaches. Steps are
called one after the other without waiting for any, which the host must do faster than the GPU runs them; a
figure is the median over rounds of `STEPS`. What there is of them is printed, and stored, as soon as it is.
"""

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine
from transformers import LlamaConfig, LlamaForCausalLM

import quantkit
from quantkit.bench.speed import weight_bytes
from quantkit.errors import UsageError
from quantkit.kernels.tuning.timing import read_time
from quantkit.runtime.cache.cache_name import CACHE
from quantkit.runtime.cache.static_cache import static_cache
from quantkit.runtime.decoding import forward_of

#: Of Llama-3 8B, but for the vocabulary, which is outside of layers.
SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
}
#: What is not packed.
DENSE = "bf16"
#: Steps of a round, and rounds.
STEPS, ROUNDS = 20, 7
#: Most of the time of a step that the host may need to launch it.
MOST_OF_STEP = 0.8


@dataclass(frozen=True)
class Row:
    """Microseconds of a step and of one of its layers, and the part of the bandwidth that a layer reaches."""

    format: str
    batch: int
    step_us: float
    layer_us: float
    bandwidth: float

    def __str__(self) -> str:
        figures = f"{self.step_us:.0f} | {self.layer_us:.1f} | {self.bandwidth:.0%}"
        return f"| {self.format} | {self.batch} | {figures} |"


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
    given: dict[str, Any] = {CACHE: cache, "use_cache": True}
    token = model(input_ids=prompt, logits_to_keep=1, **given).logits.argmax(-1)
    step = partial(forward_of(model), input_ids=token, **given)
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


def measure(name: str, sources: Mapping[int, Path], options: argparse.Namespace) -> Iterator[Row]:
    """The rows of a format, from two models with so many layers."""
    models = {layers: _loaded(name, source) for layers, source in sources.items()}
    (more, whole), (fewer, half) = models.items()
    read = read_time((weight_bytes(whole) - weight_bytes(half)) // (more - fewer))
    for batch in options.batch:
        step, other = (step_time(model, batch, options.tokens) for model in models.values())
        layer = (step - other) / (more - fewer)
        yield Row(name, batch, step, layer, read / layer)


def _loaded(name: str, source: Path) -> Any:
    packed = source.with_name(source.name.replace(DENSE, name))
    if name != DENSE:
        quantkit.quantize(source, packed, format=name, method="rtn")
    return quantkit.load(packed, device="cuda")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", default=f"{DENSE},int4", help=f"names, or {DENSE}")
    parser.add_argument("--batch", type=lambda given: [int(one) for one in given.split(",")], default=[1, 16])
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.layers < 2:
        parser.error("--layers are 2 at least, of which the other model has half.")
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here.")
    print(machine())
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        sources = {layers: made(Path(directory), layers) for layers in (options.layers, options.layers // 2)}
        print("| format | batch | step, us | layer, us | of the bandwidth |\n|---|---|---|---|---|")
        for name in options.formats.split(","):
            for row in measure(name, sources, options):
                rows.append(row)
                print(row, flush=True)
                if options.json is not None:
                    options.json.write_text(json.dumps([asdict(one) for one in rows], indent=1))


if __name__ == "__main__":
    try:
        main()
    except UsageError as problem:
        sys.exit(str(problem))
