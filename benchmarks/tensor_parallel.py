"""Tokens a second of one GPU, and of several under tensor parallelism of transformers.

    python benchmarks/tensor_parallel.py --layers 8 --json benchmarks/results/h200-tensor-parallel.json
    python benchmarks/tensor_parallel.py --tiny --device cpu     two processes on a CPU, through gloo

Of a model of Llama-3 8B's shapes with random int4 words, which it writes itself, and one sequence. `tensor`
is how ranks run by themselves, `tensor-eager` without graphs (`disable_compile`); `one` and `one-eager` are
the same on one GPU. Tokens a second are those after the first: what a generation of `--new-tokens` takes
more than one of a single token, the median over rounds. `alike` is for how many tokens a way agrees with
`one`, whose sums have another order. `sum_host_us` is what a sum over ranks of one token's hidden state takes
the host, `sum_us` what it takes in a row of many, `destroy_s` how long the end of the process group takes.

The ranks are processes of their own. After `--limit` seconds each prints where it is and they end; what they
measured before is kept, and the exit status is 1.
"""

import argparse
import faulthandler
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_steps import SIZES
from machine import cpu_machine, machine
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from quantkit.checkpoint.quantization_config import Assignment, QuantizationConfig
from quantkit.packing.schemes import scheme
from quantkit.runtime.decoding import graphs_of
from quantkit.runtime.packed_linear import PackedLinear
from quantkit.runtime.replace import swap_modules

ROOT = Path(__file__).resolve().parents[1]
#: With two heads of keys, as every rank has whole ones.
TINY: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}
#: Of each way, whether ranks share the model, and options of `generate`.
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "tensor-eager": (True, {"disable_compile": True}),
    "tensor": (True, {}),
    "one-eager": (False, {"disable_compile": True}),
    "one": (False, {}),
}
#: Sums that are timed in a row.
SUMS = 200


def write_model(directory: Path, layers: int, sizes: dict[str, Any], device: str) -> None:
    """A packed checkpoint with int4 words drawn at random and scales that keep hidden states in range."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, dtype="bfloat16", **sizes))
    linears = {name: one for name, one in model.named_modules() if isinstance(one, torch.nn.Linear)}
    assignments = [
        Assignment(
            name,
            (name,),
            (one.out_features, one.in_features),
            None if name == "lm_head" else scheme("int4"),
        )
        for name, one in linears.items()
    ]
    packing = QuantizationConfig.from_assignments(assignments)
    swap_modules(model, packing)
    generator = torch.Generator(device).manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        specs = module.part_specs() if isinstance(module, PackedLinear) else {}
        for key, meta in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
            found = _numbers(module, specs.get(key), meta, generator, device)
            if found is not None:
                tensors[f"{name}.{key}"] = found.cpu()
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "bfloat16"}
    config["quantization_config"] = packing.to_dict(assignments)
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def _numbers(
    module: Any, spec: Any, meta: torch.Tensor, generator: torch.Generator, device: str
) -> torch.Tensor | None:
    """The tensor for a parameter or buffer, None for one that no checkpoint has."""
    if spec is None:
        if module.__class__.__name__.endswith("RotaryEmbedding"):
            return None
        if meta.dim() == 1:
            return torch.ones(meta.shape, dtype=torch.bfloat16)
        drawn = torch.randn(meta.shape, generator=generator, device=device)
        return drawn.mul_(0.02).to(torch.bfloat16)
    if spec.part == "packed":
        limits = torch.iinfo(spec.dtype)
        return torch.randint(
            limits.min, limits.max, spec.shape, generator=generator, device=device, dtype=spec.dtype
        )
    if spec.part == "shape":
        return torch.tensor([module.out_features, module.in_features], dtype=spec.dtype)
    # Codes of int4 have a standard deviation of 4.6: weights one of 0.02.
    return torch.full(spec.shape, 0.0043, dtype=spec.dtype)


def load(directory: Path, device: str, shared: bool) -> Any:
    """The model on one device, or what this rank has of it."""
    place = {"tp_plan": "auto"} if shared else {"device_map": "cuda:0" if device == "cuda" else "cpu"}
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16, **place).eval()


def measure(model: Any, ways: list[str], options: argparse.Namespace, say: Callable[[Any], None]) -> None:
    """Time each of `ways`, all of one model, and `say` what was found."""
    prompt = torch.randint(
        3, model.config.vocab_size, (1, options.prompt), generator=torch.Generator().manual_seed(0)
    ).to(model.device)

    def seconds(tokens: int, **more: Any) -> tuple[float, list[int]]:
        began = time.perf_counter()
        found = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=None,
            **more,
        )[0, options.prompt :].tolist()
        return time.perf_counter() - began, found

    for way in ways:
        more = WAYS[way][1]
        start, _ = seconds(options.new_tokens, **more)
        # A prompt is recorded when it comes again.
        seconds(1, **more)
        firsts, wholes = [], []
        tokens: list[int] = []
        for _ in range(options.rounds):
            firsts.append(seconds(1, **more)[0])
            whole, tokens = seconds(options.new_tokens, **more)
            wholes.append(whole)
        first = statistics.median(firsts)
        rates = [(options.new_tokens - 1) / (whole - first) for whole in wholes]
        graphed = graphs_of(model)
        found = {"way": way, "tokens_per_second": statistics.median(rates), "rounds": rates}
        refused = [] if graphed is None or more else list(graphed.refused)
        say(found | {"first_ms": 1e3 * first, "start_s": start, "refused": refused, "tokens": tokens})


def time_sums(hidden: int, device: str, say: Callable[[Any], None]) -> None:
    """What a sum over ranks of one token's hidden state takes the host, and takes in a row of many."""
    x = torch.zeros(1, 1, hidden, dtype=torch.bfloat16, device=device)
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(2):
        torch.distributed.barrier()
        wait()
        began = time.perf_counter()
        for _ in range(SUMS):
            torch.distributed.all_reduce(x)
        launched = time.perf_counter() - began
        wait()
        ended = time.perf_counter() - began
    say({"sum_host_us": 1e6 * launched / SUMS, "sum_us": 1e6 * ended / SUMS})


def rank_main(options: argparse.Namespace) -> int:
    """What each rank runs: 1, and its traceback, if it fails."""
    rank = int(os.environ["RANK"])
    faulthandler.dump_traceback_later(max(1, options.limit - 8), exit=True)

    def say(found: Any) -> None:
        if rank == 0:
            with options.out.open("a") as file:
                file.write(json.dumps(found) + "\n")

    try:
        if options.device == "cpu":
            torch.set_num_threads(1)
        model = load(options.directory, options.device, shared=True)
        time_sums(model.config.hidden_size, options.device, say)
        measure(model, [way for way, (shared, _) in WAYS.items() if shared], options, say)
        # With the model and its graphs alive.
        began = time.perf_counter()
        torch.distributed.destroy_process_group()
        say({"destroy_s": time.perf_counter() - began})
    except BaseException:
        print(f"rank {rank} failed:\n{traceback.format_exc()}", file=sys.stderr, flush=True)
        return 1
    return 0


def run_ranks(directory: Path, options: argparse.Namespace) -> tuple[list[Any], str]:
    """What the ranks measured, and how they failed; nothing if they did not."""
    out = directory.with_suffix(".jsonl")
    out.touch()
    given = {name: getattr(options, name) for name in ("device", "prompt", "new_tokens", "rounds", "limit")}
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={options.ranks}", __file__, f"--directory={directory}", f"--out={out}"),
        *(f"--{name.replace('_', '-')}={value}" for name, value in given.items()),
    ]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, start_new_session=True)
    try:
        code = process.wait(options.limit)
        failed = f"the ranks ended with {code}" if code else ""
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        failed = f"the ranks did not end within {options.limit} s"
    return [json.loads(line) for line in out.read_text().splitlines()], failed


def table(found: list[Any]) -> list[str]:
    """A line for each way, and one for sums."""
    rows = {one["way"]: one for one in found if "way" in one}
    one = rows.get("one")
    lines = ["| way | tokens/s (least to most) | to one-eager | first token, ms | alike |", f"|{'---|' * 5}"]
    for way in WAYS:
        if way not in rows:
            lines.append(f"| {way} | not measured | | | |")
            continue
        row = rows[way]
        speed, rates = row["tokens_per_second"], row["rounds"]
        eager = rows.get("one-eager")
        ratio = "" if eager is None else f"{speed / eager['tokens_per_second']:.2f}"
        alike = "" if one is None else str(_alike(row["tokens"], one["tokens"]))
        lines.append(
            f"| {way} | {speed:.1f} ({min(rates):.1f} to {max(rates):.1f}) | {ratio} | "
            f"{row['first_ms']:.1f} | {alike} |"
        )
        lines += [f"{way} is not recorded: {reason}" for reason in row["refused"]]
    others: dict[str, float] = {}
    for entry in found:
        others |= {} if "way" in entry else entry
    return [*lines, ", ".join(f"{name} {value:.2f}" for name, value in others.items())]


def _alike(mine: list[int], theirs: list[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(mine, theirs, strict=False))
    return next((at for at, (a, b) in pairs if a != b), len(theirs))


def main() -> int:
    """Parse the command line, write the model, measure every way, print and store what was found."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to try it")
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=60, help="seconds that the ranks may take")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--directory", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.out is not None:
        return rank_main(options)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        sys.exit(f"there are {torch.cuda.device_count()} GPUs here, not {options.ranks}.")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary) / "packed"
        write_model(directory, options.layers, TINY if options.tiny else SIZES, options.device)
        print(f"the model is written after {time.perf_counter() - began:.0f} s", flush=True)
        found, failed = run_ranks(directory, options)
        print(f"the ranks have ended after {time.perf_counter() - began:.0f} s", flush=True)
        single = [way for way, (shared, _) in WAYS.items() if not shared]
        measure(load(directory, options.device, shared=False), single, options, found.append)
    where = machine() if options.device == "cuda" else cpu_machine()
    if options.json is not None:
        record = {
            "machine": where,
            "command": shlex.join(["python", "benchmarks/tensor_parallel.py", *sys.argv[1:]]),
            "layers": options.layers,
            "ranks": options.ranks,
            "failed": failed,
        }
        options.json.write_text(json.dumps({**record, "rows": found}, indent=2) + "\n")
    print(f"{where}; {options.layers} layers, {options.ranks} ranks, {time.perf_counter() - began:.0f} s")
    print(*table(found), sep="\n")
    if failed:
        print(f"FAILED: {failed}; what each rank says is above.")
    return int(bool(failed))


if __name__ == "__main__":
    raise SystemExit(main())
