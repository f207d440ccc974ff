"""Quantizing a checkpoint that is larger than memory should be: seconds and memory against copying its files.

Synthetic Llama checkpoints in bfloat16, of random normal weights, are written to a directory. Then, on the
same disk: a copy of the files with fsync, and `quantkit.quantize` to int4 with each method, each in a
process of its own that reports its peak memory beyond what it held once the libraries were imported.

    python benchmarks/quantize_stream.py --directory /data/bench [--size-gb 2 8] [--json out.json]

Exits with 1 if a limit is exceeded: 3 times the copy for rtn, 30 times for mse, and 1.2 GB of memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.tensors import TensorSpec

TIME_LIMITS = {"rtn": 3.0, "mse": 30.0}
MEMORY_LIMIT = 1.2e9
SHARD_BYTES = 1 << 30
CHUNK_ROWS = 256
#: Of all bytes, those of the embedding.
EMBEDDING_SHARE = 0.1

WORKER = """
import json, resource, sys, time
import torch, transformers.models.llama.modeling_llama
import quantkit.quantizing as driver

def status(key):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(key))

before = status("VmRSS")
start = time.perf_counter()
driver.quantize(sys.argv[1], sys.argv[2], format="int4", method=sys.argv[3], device="cpu")
seconds = time.perf_counter() - start
peak = max(status("VmHWM"), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(json.dumps({"seconds": seconds, "memory": peak - before}))
"""


@dataclass(frozen=True)
class Row:
    """One measurement. `ratio` is the time over that of the copy; limits are None where there is none."""

    size_gb: float
    what: str
    seconds: float
    ratio: float
    ratio_limit: float | None
    memory_bytes: int | None
    memory_limit: float | None

    @property
    def problems(self) -> list[str]:
        found = []
        if self.ratio_limit is not None and self.ratio > self.ratio_limit:
            found.append(
                f"{self.what} of {self.size_gb} GB took {self.ratio:.1f} copies, over {self.ratio_limit}"
            )
        if self.memory_limit is not None and (self.memory_bytes or 0) > self.memory_limit:
            found.append(
                f"{self.what} of {self.size_gb} GB took {(self.memory_bytes or 0) / 1e9:.2f} GB of memory, "
                f"over {self.memory_limit / 1e9}"
            )
        return found


def config_of(size: int) -> dict[str, Any]:
    """config.json of a Llama with about `size` bytes of bfloat16 weights."""
    hidden = 4096 if size >= 4e9 else 2048 if size >= 1e9 else 1024
    intermediate = hidden * 7 // 2
    heads = hidden // 128
    key_values = max(1, heads // 4)
    per_layer = 2 * hidden * hidden + 2 * hidden * key_values * 128 + 3 * hidden * intermediate + 2 * hidden
    layers = max(1, round(size * (1 - EMBEDDING_SHARE) / 2 / per_layer))
    vocabulary = round(size * EMBEDDING_SHARE / 2 / hidden / 64) * 64
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "head_dim": 128,
        "num_hidden_layers": layers,
        "vocab_size": max(64, vocabulary),
        "hidden_act": "silu",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": True,
    }


def specs_of(config: dict[str, Any]) -> Iterator[TensorSpec]:
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    key_values = config["num_key_value_heads"] * config["head_dim"]
    yield TensorSpec("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))
    for i in range(config["num_hidden_layers"]):
        for name, shape in {
            "input_layernorm": (hidden,),
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (key_values, hidden),
            "self_attn.v_proj": (key_values, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "post_attention_layernorm": (hidden,),
            "mlp.gate_proj": (intermediate, hidden),
            "mlp.up_proj": (intermediate, hidden),
            "mlp.down_proj": (hidden, intermediate),
        }.items():
            yield TensorSpec(f"model.layers.{i}.{name}.weight", "BF16", shape)
    yield TensorSpec("model.norm.weight", "BF16", (hidden,))


def write_checkpoint(directory: Path, size: int) -> int:
    """Write a checkpoint of about `size` bytes, a few rows at a time; the bytes of its tensors."""
    directory.mkdir(parents=True)
    config = config_of(size)
    shards: list[list[TensorSpec]] = [[]]
    for spec in specs_of(config):
        if shards[-1] and sum(s.nbytes for s in shards[-1]) + spec.nbytes > min(SHARD_BYTES, size // 4):
            shards.append([])
        shards[-1].append(spec)
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, specs in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = ShardFile(directory, name, specs, {"format": "pt"})
        for spec in specs:
            weight_map[spec.name] = name
            columns = spec.elements // spec.shape[0]
            for start in range(0, spec.shape[0], CHUNK_ROWS):
                rows = min(CHUNK_ROWS, spec.shape[0] - start)
                values = torch.empty(rows, columns).normal_(0, 0.02, generator=generator)
                file.write(spec.name, values.bfloat16(), offset=start * columns)
        file.commit()
    total = sum(spec.nbytes for specs in shards for spec in specs)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return total


def copy(source: Path, target: Path) -> float:
    """Seconds to copy the files of `source`, each on the disk before the next."""
    target.mkdir()
    start = time.perf_counter()
    for path in sorted(source.iterdir()):
        shutil.copyfile(path, target / path.name)
        with (target / path.name).open("rb") as file:
            os.fsync(file.fileno())
    return time.perf_counter() - start


def measure(directory: Path, size_gb: float, *, keep: bool) -> list[Row]:
    work = directory / f"quantize-stream-{size_gb:g}gb"
    source, target = work / "source", work / "target"
    shutil.rmtree(work, ignore_errors=True)
    written = write_checkpoint(source, int(size_gb * 1e9)) / 1e9
    # Written-back pages of one step would slow the next.
    os.sync()
    copied = copy(source, target)
    rows = [Row(written, "copy", copied, 1.0, None, None, None)]
    for method, limit in TIME_LIMITS.items():
        shutil.rmtree(target)
        os.sync()
        command = [sys.executable, "-c", WORKER, str(source), str(target), method]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"int4 {method} failed on {written:.2f} GB:\n{done.stderr}")
        result = json.loads(done.stdout.splitlines()[-1])
        ratio = result["seconds"] / copied
        rows.append(
            Row(written, f"int4 {method}", result["seconds"], ratio, limit, result["memory"], MEMORY_LIMIT)
        )
    shutil.rmtree(target if keep else work)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="where checkpoints are written")
    parser.add_argument("--size-gb", type=float, nargs="+", default=[2.0, 8.0])
    parser.add_argument("--keep", action="store_true", help="leave the synthetic checkpoints there")
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    arguments = parser.parse_args()

    rows = []
    print(f"{'GB':>6}  {'what':10} {'seconds':>8} {'x copy':>7} {'limit':>6} {'memory MB':>10} {'limit':>6}")
    for size in arguments.size_gb:
        for row in measure(arguments.directory, size, keep=arguments.keep):
            rows.append(row)
            memory = "" if row.memory_bytes is None else f"{row.memory_bytes / 1e6:.0f}"
            memory_limit = "" if row.memory_limit is None else f"{row.memory_limit / 1e6:.0f}"
            ratio_limit = "" if row.ratio_limit is None else f"{row.ratio_limit:g}"
            print(
                f"{row.size_gb:6.2f}  {row.what:10} {row.seconds:8.2f} {row.ratio:7.2f} {ratio_limit:>6} "
                f"{memory:>10} {memory_limit:>6}",
                flush=True,
            )
    problems = [problem for row in rows for problem in row.problems]
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"rows": [asdict(row) for row in rows], "problems": problems}, indent=2) + "\n"
        )
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
