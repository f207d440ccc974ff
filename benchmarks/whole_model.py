"""Time a model of Llama-3.1 8B's shapes, packed and dense, by `quantkit bench`, for the performance page.

    python benchmarks/whole_model.py --formats int4,W4AFP8 --json benchmarks/results/h100-bench.json

The weights are random. Names are of `--format` or `--scheme`. The dense model is measured beside the first.
The first length of `--prompt` is measured with all of `--batch`, the others with its first. Linears are
quantized by `rtn`, the head to int8. On a GPU the mode is `cuda-graph`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from machine import command, cpu_machine, machine
from transformers import LlamaConfig, LlamaForCausalLM

from quantkit.packing.presets import SCHEMES

SIZES: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}


def quantkit(*arguments: object) -> None:
    """Run a command of quantkit; `SystemExit` with its code if it fails."""
    done = subprocess.run([sys.executable, "-m", "quantkit", *map(str, arguments)], check=False)
    if done.returncode:
        sys.exit(done.returncode)


def numbers(given: str) -> list[int]:
    return [int(one) for one in given.split(",")]


def write_source(directory: Path, layers: int, device: str) -> Path:
    """A checkpoint of random bfloat16 weights with so many layers."""
    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **SIZES))
    model.to(torch.bfloat16).save_pretrained(directory)
    return directory


def measured(directory: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What `bench` says of each format, and of the dense model beside the first."""
    found: list[dict[str, Any]] = []
    source = write_source(directory / "bf16", options.layers, options.device)
    mode = "flat" if options.device == "cpu" else "cuda-graph"
    for name in options.formats:
        packed, figures = directory / name, directory / f"{name}.json"
        kind = "--scheme" if name in SCHEMES else "--format"
        ways = (kind, name, "--method", "rtn", "--lm-head", "int8")
        quantkit("quantize", source, packed, *ways, "--no-check", "--device", options.device)
        beside = ("--against", source) if name == options.formats[0] else ()
        how = ("--repeats", options.repeats, "--mode", mode, "--device", options.device)
        for prompt in options.prompt:
            batch = options.batch if prompt == options.prompt[0] else options.batch[:1]
            sizes = (
                "--batch",
                ",".join(map(str, batch)),
                "--prompt",
                prompt,
                "--new-tokens",
                options.new_tokens,
            )
            quantkit("bench", packed, *beside, *sizes, *how, "--json", figures)
            found += json.loads(figures.read_text())["speed"]
    return found


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Add the options of every timed generation to `parser`, and parse; ends the script without a GPU."""
    parser.add_argument("--batch", type=numbers, default=[1, 16], metavar="1,16")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    options = parser.parse_args(arguments)
    if options.device != "cpu" and not torch.cuda.is_available():
        parser.error("there is no GPU here")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the models, measure them, and store what `bench` says with machine and command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", type=lambda given: given.split(","), default=["int4"], metavar="A,B")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--prompt", type=numbers, default=[512], metavar="512,4096")
    options = parsed(parser, arguments)
    with tempfile.TemporaryDirectory() as directory:
        speed = measured(Path(directory), options)
    about = cpu_machine() if options.device == "cpu" else machine()
    for one in speed:
        # The place of a temporary directory.
        one["model"] = one["label"]
    record = {"machine": about, "command": command(), "layers": options.layers, "speed": speed}
    options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
