"""Tokens a second and the time of the first token by each way that a user loads and runs a model on a GPU.

    python benchmarks/front_door.py --layers 32 --format int4 --json benchmarks/results/h100-front-door.json

Of a model of Llama-3 8B's shapes with random weights: `load` is `quantkit.load` and `generate`;
`from_pretrained` that of transformers, on the GPU; `pipeline` is "text-generation", of a model that is loaded
on the CPU and moved, without the tokenizer around it; `eager` is the packed model without graphs
(`disable_compile`), `dense` and `dense-eager` are the model in bfloat16 by `quantkit.load` and by
transformers alone. All run in one process, one after the other. Tokens a second are those after the first:
what a generation of `--new-tokens` takes more than one of a single token. The first token is timed when its
prompt has come before; that of the first call of all is beside it.
"""

import argparse
import gc
import json
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
from machine import machine
from transformers import AutoModelForCausalLM, TextGenerationPipeline

import quantkit

#: Makes so many tokens after a prompt.
Generate = Callable[[torch.Tensor, int], torch.Tensor]
GREEDY: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}


@dataclass(frozen=True)
class Row:
    """Tokens a second of all sequences with their least and most, and milliseconds of the first token."""

    way: str
    batch: int
    tokens_per_second: float
    low: float
    high: float
    first_ms: float
    start_ms: float

    def __str__(self) -> str:
        speed = f"{self.tokens_per_second:.1f} ({self.low:.1f} to {self.high:.1f})"
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


#: Of each way, whether it is of the dense model, and how it is loaded and run.
WAYS: dict[str, tuple[bool, Callable[[Path], Generate]]] = {
    "load": (False, lambda path: _generate(quantkit.load(path, device="cuda:0"))),
    "from_pretrained": (False, lambda path: _generate(_from_pretrained(path, device_map="cuda:0"))),
    "pipeline": (False, lambda path: _pipeline(_from_pretrained(path))),
    "eager": (
        False,
        lambda path: _generate(_from_pretrained(path, device_map="cuda:0"), disable_compile=True),
    ),
    "dense": (True, lambda path: _generate(quantkit.load(path, device="cuda:0"))),
    "dense-eager": (True, lambda path: _generate(_from_pretrained(path, device_map="cuda:0"))),
}


def measure(way: str, run: Generate, batch: int, options: argparse.Namespace) -> Row:
    """The row of one way; each of its calls ends on the host."""
    prompt = torch.randint(
        3, SIZES["vocab_size"], (batch, options.prompt), generator=torch.Generator().manual_seed(0)
    ).to(options.device)

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        found = run(prompt, tokens)
        assert found.tolist() and found.shape[-1] == options.prompt + tokens, found.shape
        return time.perf_counter() - began

    start = seconds(1)
    # A prompt is recorded when it comes again, and a step when it comes first.
    for tokens in (options.new_tokens, 1, options.new_tokens):
        seconds(tokens)
    firsts = [seconds(1) for _ in range(options.repeats)]
    first = statistics.median(firsts)
    rates = [
        batch * (options.new_tokens - 1) / (seconds(options.new_tokens) - first)
        for _ in range(options.repeats)
    ]
    return Row(way, batch, statistics.median(rates), min(rates), max(rates), 1e3 * first, 1e3 * start)


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
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.device = "cuda:0"
    if not torch.cuda.is_available():
        sys.exit("there is no GPU here.")
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        dense = made(Path(directory), options.layers)
        packed = Path(directory) / options.format
        quantkit.quantize(dense, packed, format=options.format, method="rtn")
        print(f"{machine()}; {options.layers} layers, {options.format}, prompts of {options.prompt}")
        print(
            "| way | sequences | tokens/s | first token, ms | first call, ms |\n|---|---|---|---|---|",
            flush=True,
        )
        for way in options.ways.split(","):
            is_dense, loaded = WAYS[way]
            run: Generate | None = loaded(dense if is_dense else packed)
            for batch in options.batch:
                rows.append(measure(way, run, batch, options))  # type: ignore[arg-type]
                print(rows[-1], flush=True)
                if options.json is not None:
                    record = {"machine": machine(), "layers": options.layers, "format": options.format}
                    found = {**record, "prompt": options.prompt, "rows": [asdict(one) for one in rows]}
                    options.json.write_text(json.dumps(found, indent=2) + "\n")
            # The next one is to have all of the memory.
            del run
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
