"""Quantizing a source that is low-bit already: seconds and memory against one of as many weights in bfloat16.

Synthetic Llama checkpoints of random codes are written to a directory, one after the other, and each is
quantized to int4 in a process of its own that reports its peak memory beyond what it held once the libraries
were imported (`quantize_stream.py`, whose sizes and limit of memory these are).

    python benchmarks/low_bit_stream.py --directory /data/bench [--weights 4e9] [--json out.json]

Exits with 1 if a limit is exceeded: twice the time of bfloat16, and 1.2 GB of memory.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from machine import command, cpu_machine
from quantize_stream import CHUNK_ROWS, MEMORY_LIMIT, SHARD_BYTES, WORKER, config_of, specs_of

from quantkit.checkpoint.output.shard_file import ShardFile
from quantkit.checkpoint.tensors import TensorSpec

TIME_LIMIT = 2.0
METHODS = ("rtn", "mse")

_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
_MXFP4 = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
_INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128}}},
}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}

#: By format: the section of the config, and the parts of a weight [N, K] after the name of its module.
Parts = list[tuple[str, str, tuple[int, ...]]]
SOURCES: dict[str, tuple[dict[str, Any] | None, Callable[[int, int], Parts]]] = {
    "bf16": (None, lambda n, k: [("weight", "BF16", (n, k))]),
    "fp8": (
        _FP8,
        lambda n, k: [
            ("weight", "F8_E4M3", (n, k)),
            ("weight_scale_inv", "F32", (-(-n // 128), -(-k // 128))),
        ],
    ),
    "mxfp4": (
        _MXFP4,
        lambda n, k: [("weight_packed", "U8", (n, k // 2)), ("weight_scale", "U8", (n, k // 32))],
    ),
    "pack-quantized": (
        _INT4,
        lambda n, k: [
            ("weight_packed", "I32", (n, k // 8)),
            ("weight_scale", "BF16", (n, k // 128)),
            ("weight_shape", "I64", (2,)),
        ],
    ),
    "awq": (
        _AWQ,
        lambda n, k: [
            ("qweight", "I32", (k, n // 8)),
            ("qzeros", "I32", (k // 128, n // 8)),
            ("scales", "F16", (k // 128, n)),
        ],
    ),
}


@dataclass(frozen=True)
class Row:
    """One measurement; `ratio` is the time over that of bfloat16 with the same method."""

    source: str
    method: str
    weights: int
    source_bytes: int
    seconds: float
    ratio: float
    memory_bytes: int

    @property
    def problems(self) -> list[str]:
        found = []
        if self.ratio > TIME_LIMIT:
            found.append(f"{self.source} {self.method} took {self.ratio:.2f} times bf16, over {TIME_LIMIT}")
        if self.memory_bytes > MEMORY_LIMIT:
            found.append(f"{self.source} {self.method} took {self.memory_bytes / 1e9:.2f} GB of memory")
        return found


def parts_of(config: dict[str, Any], kind: str) -> Iterator[tuple[TensorSpec, tuple[int, int]]]:
    """Every tensor of a source, with the [N, K] of the weight that it is a part of."""
    for spec in specs_of(config):
        if spec.name.endswith("_proj.weight"):
            rows, columns = spec.shape
            for part, dtype, shape in SOURCES[kind][1](rows, columns):
                yield TensorSpec(f"{spec.name.removesuffix('weight')}{part}", dtype, shape), (rows, columns)
        else:
            yield spec, (1, 1)


def values(spec: TensorSpec, rows: int, shape: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """Some rows of a tensor: random codes, scales about as in a model, and the shape where that is stored."""
    size = (rows, *spec.shape[1:])
    dtype = spec.torch_dtype
    if spec.name.endswith("weight_shape"):
        return torch.tensor(shape)
    if dtype == torch.uint8 and spec.name.endswith("scale"):
        return torch.randint(115, 120, size, dtype=dtype, generator=generator)
    if dtype == torch.float8_e4m3fn:
        return torch.randn(size, generator=generator).mul_(100).clamp_(-448, 448).to(dtype)
    if not dtype.is_floating_point:
        low, high = (0, 256) if dtype == torch.uint8 else (-(2**31), 2**31)
        return torch.randint(low, high, size, dtype=dtype, generator=generator)
    if spec.name.endswith(("scale", "scales", "scale_inv")):
        return torch.rand(size, generator=generator).mul_(1e-3).add_(1e-4).to(dtype)
    return torch.empty(size).normal_(0, 0.02, generator=generator).to(dtype)


def write_source(directory: Path, config: dict[str, Any], kind: str) -> int:
    """Write a checkpoint a few rows at a time; the bytes of its tensors."""
    directory.mkdir(parents=True)
    shards: list[list[tuple[TensorSpec, tuple[int, int]]]] = [[]]
    for spec, shape in parts_of(config, kind):
        if shards[-1] and sum(s.nbytes for s, _ in shards[-1]) + spec.nbytes > SHARD_BYTES:
            shards.append([])
        shards[-1].append((spec, shape))
    generator = torch.Generator().manual_seed(0)
    weight_map = {}
    for number, members in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = ShardFile(directory, name, [spec for spec, _ in members], {"format": "pt"})
        for spec, shape in members:
            weight_map[spec.name] = name
            for start in range(0, spec.shape[0], CHUNK_ROWS):
                rows = min(CHUNK_ROWS, spec.shape[0] - start)
                offset = start * (spec.elements // spec.shape[0])
                file.write(spec.name, values(spec, rows, shape, generator), offset=offset)
        file.commit()
    section = SOURCES[kind][0]
    written = config if section is None else {**config, "quantization_config": section}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (directory / "config.json").write_text(json.dumps(written, indent=2))
    return sum(spec.nbytes for members in shards for spec, _ in members)


def measure(directory: Path, weights: float, kinds: list[str], methods: list[str]) -> Iterator[Row]:
    config = config_of(int(2 * weights))
    count = sum(spec.elements for spec in specs_of(config))
    bfloat16: dict[str, float] = {}
    for kind in ["bf16", *kinds]:
        work = directory / f"low-bit-stream-{kind}"
        shutil.rmtree(work, ignore_errors=True)
        nbytes = write_source(work / "source", config, kind)
        for method in methods:
            shutil.rmtree(work / "target", ignore_errors=True)
            os.sync()
            command = [sys.executable, "-c", WORKER, str(work / "source"), str(work / "target"), method]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(f"int4 {method} of {kind} failed:\n{done.stderr}")
            result = json.loads(done.stdout.splitlines()[-1])
            seconds = result["seconds"]
            ratio = seconds / bfloat16.setdefault(method, seconds)
            yield Row(kind, method, count, nbytes, seconds, ratio, result["memory"])
        shutil.rmtree(work)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, required=True, help="where checkpoints are written")
    parser.add_argument("--weights", type=float, default=4e9)
    parser.add_argument("--source", nargs="+", default=[name for name in SOURCES if name != "bf16"])
    parser.add_argument("--method", nargs="+", default=list(METHODS))
    parser.add_argument("--json", type=Path, help="write the rows to this file as well")
    arguments = parser.parse_args()
    rows = []
    print(f"{'source':15} {'GB':>6} {'method':6} {'seconds':>8} {'x bf16':>7} {'memory MB':>10}")
    for row in measure(arguments.directory, arguments.weights, arguments.source, arguments.method):
        rows.append(row)
        print(
            f"{row.source:15} {row.source_bytes / 1e9:6.2f} {row.method:6} {row.seconds:8.2f} "
            f"{row.ratio:7.2f} {row.memory_bytes / 1e6:10.0f}",
            flush=True,
        )
    problems = [problem for row in rows for problem in row.problems]
    if arguments.json:
        record = {
            "command": command(),
            "machine": cpu_machine(),
            "rows": [asdict(row) for row in rows],
            "problems": problems,
        }
        arguments.json.write_text(json.dumps(record, indent=2) + "\n")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
