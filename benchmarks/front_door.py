"""Tokens a second and the time of the first token by each way that a user loads and runs a model on a GPU.

    python benchmarks/front_door.py --layers 32 --format int4 --json benchmarks/results/h100-front-door.json

Of a model of Llama-3 8B's shapes with random weights: `load` is `quantkit.load` and `generate`;
`from_pretrained` that of transformers, on the GPU; `pipeline` is "text-generation", of a model that is loaded
on the CPU and moved, without the tokenizer around it; `eager` is the packed model without graphs
(`disable_compile`), `dense` and `dense-eager` are the model in bfloat16 by `quantkit.load` and by
transformers alone. All models are in one process, and each round runs every way once, in an order drawn
anew: a host's cores differ in speed, and a process moves among them. Tokens a second are those after the
first: what a generation of `--new-tokens` takes more than one of a single token, the median over rounds. The
first token is timed when its prompt has come before; that of the first call of all is beside it. `against` is
the way that ratios are of, the median of those of a round. The last line has the time of a fixed Python loop.
"""

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpu_steps import SIZES, made
from machine import command, machine
from transformers import AutoModelForCausalLM, TextGenerationPipeline

import quantkit

#: Makes so many tokens after a prompt.
Generate = Callable[[torch.Tensor, int], torch.Tensor]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@dataclass(frozen=True)
class Row:
    """Tokens a second of all sequences with their least and most, and milliseconds of the first token.

    `ratio` is that of the tokens a second to those of the way that all are compared with; `rounds` has the
    tokens a second of each round.
    """

    way: str
    batch: int
    tokens_per_second: float
    low: float
    high: float
    ratio: float
    first_ms: float
    start_ms: float
    rounds: tuple[float, ...]

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:.1f} ({self.low:.1f} to {self.high:.1f}) | {self.ratio:.2f}"
        return f"| {self.way} | {self.batch} | {speed} | {self.first_ms:.1f} | {self.start_ms:.0f} |"


def _generate(model: Any, **options: Any) -> Generate:
    def run(prompt: torch.Tensor, tokens: int) -> torch.Tensor:
        found: torch.Tensor = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            **GREEDY,
            **options,
        )
        return found

    return run


def _pipeline(model: Any, device: str = "cuda:0") -> Generate:
    """Its own call of the model, without the tokenizer around it."""
    writer = TextGenerationPipeline(model=model, tokenizer=None, device=device, **GREEDY)

    def run(prompt: torch.Tensor, tokens: int) -> torch.Tensor:
        inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt), "prompt_text": ""}
        made = writer._forward(inputs, max_new_tokens=tokens, min_new_tokens=tokens)
        found: torch.Tensor = made["generated_sequence"].flatten(0, -2)
        return found

    return run


def _from_pretrained(path: Path, **options: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16, **options)


#: Of each way, whether it is of the dense model, and how that is loaded and run.
WAYS: dict[str, tuple[bool, Callable[[Path], Any], Callable[[Any], Generate]]] = {
    "load": (False, lambda path: quantkit.load(path, device="cuda:0"), _generate),
    "from_pretrained": (False, lambda path: _from_pretrained(path, device_map="cuda:0"), _generate),
    "pipeline": (False, _from_pretrained, _pipeline),
    "eager": (
        False,
        lambda path: _from_pretrained(path, device_map="cuda:0"),
        lambda model: _generate(model, disable_compile=True),
    ),
    "dense": (True, lambda path: quantkit.load(path, device="cuda:0"), _generate),
    "dense-eager": (True, lambda path: _from_pretrained(path, device_map="cuda:0"), _generate),
}


def seconds(run: Generate, prompt: torch.Tensor, tokens: int) -> float:
    """Of one generation, which ends on the host."""
    began = time.perf_counter()
    found = run(prompt, tokens)
    assert found.tolist() and found.shape[-1] == prompt.shape[1] + tokens, found.shape
    return time.perf_counter() - began


def measure(runs: dict[str, Generate], batch: int, options: argparse.Namespace) -> list[Row]:
    """The rows of all ways with one number of sequences."""
    prompt = torch.randint(
        3, SIZES["vocab_size"], (batch, options.prompt), generator=torch.Generator().manual_seed(0)
    ).to(options.device)
    starts = {}
    for way, run in runs.items():
        starts[way] = seconds(run, prompt, 1)
        # A prompt is recorded when it comes again, and a step when it comes first.
        for tokens in (options.new_tokens, 1, options.new_tokens):
            seconds(run, prompt, tokens)
    firsts: dict[str, list[float]] = {way: [] for way in runs}
    wholes: dict[str, list[float]] = {way: [] for way in runs}
    order = random.Random(0)
    for _ in range(options.repeats):
        for way in order.sample(list(runs), len(runs)):
            firsts[way].append(seconds(runs[way], prompt, 1))
            wholes[way].append(seconds(runs[way], prompt, options.new_tokens))
    # The median first token, as one that the host was late with would make all others fast.
    rates = {
        way: [batch * (options.new_tokens - 1) / (whole - statistics.median(firsts[way])) for whole in found]
        for way, found in wholes.items()
    }
    base = rates[options.against] if options.against in rates else next(iter(rates.values()))
    return [
        Row(
            way,
            batch,
            statistics.median(found),
            min(found),
            max(found),
            statistics.median(one / other for one, other in zip(found, base, strict=True)),
            1e3 * statistics.median(firsts[way]),
            1e3 * starts[way],
            tuple(found),
        )
        for way, found in rates.items()
    ]


def host_ms() -> list[float]:
    """Milliseconds of a fixed loop of Python, several times: what the host is worth."""
    found = []
    for _ in range(5):
        began = time.perf_counter()
        sum(number * number for number in range(1_000_000))
        found.append(1e3 * (time.perf_counter() - began))
    return found


def main() -> None:
    """Parse the command line, measure each way, print and store its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="int4")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--batch", type=lambda given: [int(one) for one in given.split(",")], default=[1, 16])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--against", default="load", help="the way that ratios are of")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.device = "cuda:0"
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here.")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as directory:
        dense = made(Path(directory), options.layers)
        packed = Path(directory) / options.format
        quantkit.quantize(dense, packed, format=options.format, method="rtn")
        print(f"{machine()}; {options.layers} layers, {options.format}, prompts of {options.prompt}")
        heads = "way | sequences | tokens/s | ratio | first token, ms | first call, ms"
        print(f"| {heads} |\n|{'---|' * 6}", flush=True)
        runs = {}
        for way in options.ways.split(","):
            is_dense, loaded, run_of = WAYS[way]
            runs[way] = run_of(loaded(dense if is_dense else packed))
        for batch in options.batch:
            found = measure(runs, batch, options)
            rows += found
            print(*found, sep="\n", flush=True)
            if options.json is not None:
                record = {
                    "machine": machine(),
                    "command": command(),
                    "layers": options.layers,
                    "format": options.format,
                }
                more = {"prompt": options.prompt, "against": options.against, "host_ms": host_ms()}
                stored = {**record, **more, "rows": [asdict(one) for one in rows]}
                options.json.write_text(json.dumps(stored, indent=2) + "\n")
        print("host, ms:", *[f"{one:.0f}" for one in host_ms()])


if __name__ == "__main__":
    main()
