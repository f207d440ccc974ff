"""Tokens a second in vLLM on a GPU: its own kernels and quantkit's plug-in, beside `quantkit.load`.

    python benchmarks/vllm_speed.py --batch 1,16,64,256 --json benchmarks/results/engines/h100-vllm.json

Of a model of Llama-3 8B's shapes with random weights, in int4 with groups of 128, and dense. Each way runs
in a process of its own, one after the other on the same GPU: `vllm` is vLLM with the kernel that it chooses,
`marlin` with Marlin (Machete is switched off), `plugin` with `--quantization quantkit` on the same directory,
`dense` the model in bfloat16 in vLLM, `load` is `quantkit.load` and `generate`. vLLM runs as it does by
default: compiled, with CUDA graphs (of the batch sizes that are measured), the engine in another process.
Tokens a second are those after the first: what a generation of `--new-tokens` takes more than one of a single
token, the median over `--repeats`. `ratio` is that to `--against`.
"""

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from gpu_steps import SIZES, made
from machine import command, machine

#: Generates so many tokens for a number of prompts, and returns how many it made.
Generate = Callable[[int, int], int]
#: For each way: if it is of the dense model, arguments of `vllm.LLM` (None for `quantkit.load`), environment.
WAYS: dict[str, tuple[bool, dict[str, Any] | None, dict[str, str]]] = {
    "vllm": (False, {}, {}),
    "marlin": (False, {}, {"VLLM_DISABLED_KERNELS": "MacheteLinearKernel"}),
    "plugin": (False, {"quantization": "quantkit"}, {}),
    "dense": (True, {}, {}),
    "load": (False, None, {}),
}
#: How vLLM names in its log the kernel that it took.
KERNEL = re.compile(r"Using (\w+Kernel) for")


def prompts(batch: int, tokens: int) -> list[list[int]]:
    """The ids of random prompts."""
    chance = random.Random(0)
    return [[chance.randrange(3, SIZES["vocab_size"]) for _ in range(tokens)] for _ in range(batch)]


def in_vllm(directory: Path, options: argparse.Namespace, arguments: dict[str, Any]) -> Generate:
    """vLLM with the model of `directory`."""
    from vllm import LLM, SamplingParams

    model = LLM(
        model=str(directory),
        skip_tokenizer_init=True,
        max_model_len=1024,
        max_num_seqs=max(options.batch),
        gpu_memory_utilization=0.8,
        enable_prefix_caching=False,
        compilation_config={"cudagraph_capture_sizes": sorted(options.batch)},
        **arguments,
    )

    def run(batch: int, tokens: int) -> int:
        given = [{"prompt_token_ids": ids} for ids in prompts(batch, options.prompt)]
        sampling = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        return sum(len(one.outputs[0].token_ids) for one in model.generate(given, sampling, use_tqdm=False))

    return run


def in_quantkit(directory: Path, options: argparse.Namespace) -> Generate:
    """`quantkit.load` and `generate`."""
    import quantkit

    model: Any = quantkit.load(directory, device="cuda:0")

    def run(batch: int, tokens: int) -> int:
        ids = torch.tensor(prompts(batch, options.prompt), device="cuda:0")
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **lengths,
        )
        return int(found[:, ids.shape[1] :].numel())

    return run


def measure(run: Generate, batch: int, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second of one number of sequences: median, least and most; milliseconds of the first token."""

    def seconds(tokens: int) -> float:
        began = time.perf_counter()
        assert run(batch, tokens) == batch * tokens
        return time.perf_counter() - began

    for tokens in (1, options.new_tokens, 1, options.new_tokens):
        seconds(tokens)
    firsts, wholes = zip(
        *((seconds(1), seconds(options.new_tokens)) for _ in range(options.repeats)), strict=True
    )
    first = statistics.median(firsts)
    rates = [batch * (options.new_tokens - 1) / (whole - first) for whole in wholes]
    return {
        "batch": batch,
        "tokens_per_second": statistics.median(rates),
        "low": min(rates),
        "high": max(rates),
        "first_ms": 1e3 * first,
    }


def run_way(way: str, work: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The rows of one way, from a process of its own, and the kernel that vLLM said it took."""
    inside = {**os.environ, "VLLM_LOGGING_LEVEL": "INFO", "HF_HUB_OFFLINE": "1", **WAYS[way][2]}
    arguments = [sys.executable, __file__, *sys.argv[1:], "--way", way, "--work", str(work)]
    done = subprocess.run(arguments, env=inside, capture_output=True, text=True, check=False)
    log = done.stdout + done.stderr
    if done.returncode:
        return {"way": way, "error": log[-6000:], "rows": []}
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"batch"')]
    return {"way": way, "kernels": sorted(set(KERNEL.findall(log))), "rows": rows}


def make(work: Path, layers: int) -> None:
    """Write the dense and the packed model into `work`, unless they are there."""
    import quantkit

    if not (work / "packed").exists():
        made(work, layers).rename(work / "dense")
        quantkit.quantize(
            work / "dense", work / "packed", format="int4", group_size=128, method="rtn", device="cuda:0"
        )


def main() -> None:
    """Parse the command line, run each way, print and store its rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument(
        "--batch", type=lambda given: [int(one) for one in given.split(",")], default=[1, 16, 64, 256]
    )
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--against", default="marlin", help="the way that ratios are of")
    parser.add_argument("--work", type=Path, help="a directory for the models, kept")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.against not in options.ways.split(","):
        parser.error("--against is one of --ways")
    if options.way:
        is_dense, arguments, _ = WAYS[options.way]
        directory = options.work / ("dense" if is_dense else "packed")
        own = arguments is None
        run = in_quantkit(directory, options) if own else in_vllm(directory, options, arguments or {})
        for batch in options.batch:
            print(json.dumps(measure(run, batch, options)), flush=True)
        return
    with tempfile.TemporaryDirectory() as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        make(work, options.layers)
        torch.cuda.empty_cache()
        print(f"{machine()}, vllm {version('vllm')}; {options.layers} layers, prompts of {options.prompt}")
        print(
            "| way | kernel | sequences | tokens/s | ratio | first token, ms |\n|---|---|---|---|---|---|",
            flush=True,
        )
        found: list[dict[str, Any]] = []
        ways = sorted(options.ways.split(","), key=lambda way: way != options.against)
        for way in ways:
            one = run_way(way, work, options)
            found.append(one)
            if "error" in one:
                print(f"| {way} | failed |\n{one['error']}", flush=True)
            base = {row["batch"]: row["tokens_per_second"] for row in found[0]["rows"]}
            for row in one["rows"]:
                row["ratio"] = row["tokens_per_second"] / base.get(row["batch"], float("nan"))
                speed = f"{row['tokens_per_second']:.1f} ({row['low']:.1f} to {row['high']:.1f})"
                named = " ".join([way, "|", *one["kernels"]])
                print(
                    f"| {named} | {row['batch']} | {speed} | {row['ratio']:.2f} | {row['first_ms']:.1f} |",
                    flush=True,
                )
            if options.json is not None:
                record = {"machine": machine(), "vllm": version("vllm"), "command": command()}
                more = {"layers": options.layers, "prompt": options.prompt, "new_tokens": options.new_tokens}
                stored = {**record, **more, "against": options.against, "ways": found}
                options.json.write_text(json.dumps(stored, indent=1) + "\n")


if __name__ == "__main__":
    main()
