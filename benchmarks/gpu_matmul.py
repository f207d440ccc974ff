"""Time `quantkit.linear` on a GPU beside a kernel that only reads its bytes, dense bfloat16, and tinygemm.

    python benchmarks/gpu_matmul.py --formats int8,int4 --shapes llama3-8b.o,4096x14336 --m 1,16 --json o.json

Each figure is the median of CUDA-graph replays over as many different weights as exceed the L2 cache several
times, divided by their number. Up to M = 16 it is given as a multiple of the floor, above as a multiple of
dense speed. `--jobs` processes compile the kernels first. With QUANTKIT_TILES=none, rules choose all tiles.
"""

import argparse
import json
import multiprocessing
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
import triton

import quantkit
from quantkit.kernels.measure import copies, graph_time, read_time
from quantkit.kernels.shapes import shapes_named
from quantkit.packing.tensor import PackedTensor

GROUPS = {"int2": 64}


@dataclass(frozen=True)
class Row:
    """Microseconds of one product, of reading its bytes, and of the dense one."""

    format: str
    shape: str
    m: int
    us: float
    floor_us: float
    dense_us: float
    bytes: int

    def __str__(self) -> str:
        if self.m <= 16:
            return f"{self.us:.1f} ({self.us / self.floor_us:.2f}x)"
        return f"{self.us:.1f} ({self.dense_us / self.us:.2f}d)"


def dense(n: int, k: int, m: int) -> float:
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies(2 * n * k), 4))
    ]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return graph_time([lambda w=w: torch.nn.functional.linear(x, w) for w in weights])


def tinygemm(n: int, k: int, m: int) -> float:
    """torch's int4 kernel, groups of 128."""
    packed = []
    for _ in range(copies(n * k // 2)):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randn(k // 128, n, 2, device="cuda", dtype=torch.bfloat16)
        packed.append((torch.ops.aten._convert_weight_to_int4pack(codes, 8), scales))
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    return graph_time([lambda w=w, s=s: torch.ops.aten._weight_int4pack_mm(x, w, 128, s) for w, s in packed])


def quantized(name: str, n: int, k: int) -> PackedTensor:
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    return quantkit.quantize_tensor(weight, name, method="rtn", group_size=GROUPS.get(name))


def compile_kernels(job: tuple[str, list[tuple[int, int]], list[int]]) -> None:
    name, shapes, ms = job
    for shape in shapes:
        packed = quantized(name, *shape)
        for m in ms:
            quantkit.linear(torch.randn(m, packed.shape[1], device="cuda", dtype=torch.bfloat16), packed)


def measure(
    names: Sequence[str], shape: str, sides: tuple[int, int], ms: Sequence[int]
) -> Iterator[list[Row]]:
    n, k = sides
    dense_us = {m: dense(n, k, m) for m in ms}
    floors: dict[int, float] = {}
    for name in names:
        packed = quantized(name, n, k)
        nbytes = int(packed.bits_per_weight * n * k / 8)
        if nbytes >> 15 not in floors:
            floors[nbytes >> 15] = read_time(nbytes)
        weights = [
            replace(packed, tensors=tuple(t.clone() for t in packed.tensors), kernel_cache={})
            for _ in range(copies(nbytes))
        ]
        rows = []
        for m in ms:
            x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
            used = weights if m < 1024 else weights[:3]
            us = graph_time([lambda w=w, x=x: quantkit.linear(x, w) for w in used])
            rows.append(Row(name, shape, m, us, floors[nbytes >> 15], dense_us[m], nbytes))
        del weights
        torch.cuda.empty_cache()
        yield rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--formats", default="int8,int6,int4,int3,int2,ternary,binary,fp8,fp6,nf4,mxfp4,nvfp4"
    )
    parser.add_argument("--shapes", default="llama3-8b.o,llama3-8b.gate_up")
    parser.add_argument("--m", default="1,2,4,8,16,32,64,128,256,1024,4096")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    names, shapes = options.formats.split(","), shapes_named(options.shapes.split(","))
    ms = [int(m) for m in options.m.split(",")]
    with multiprocessing.get_context("spawn").Pool(options.jobs) as pool:
        pool.map(compile_kernels, [(name, list(shapes.values()), ms) for name in names], chunksize=1)
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    versions = f"torch {torch.__version__}, triton {triton.__version__}, commit {commit.stdout.strip()}"
    print(f"{torch.cuda.get_device_name()}, {versions}")
    found: list[Row] = []
    for shape, sides in shapes.items():
        print(f"\n{shape} {sides}: us (x floor) up to M=16, us (x dense speed) above")
        print("tinygemm int4: " + ", ".join(f"M={m} {tinygemm(*sides, m):.1f}" for m in ms if m <= 64))
        print("| format | floor | " + " | ".join(f"M={m}" for m in ms) + " |")
        print("|---" * (len(ms) + 2) + "|")
        for rows in measure(names, shape, sides, ms):
            found += rows
            print(
                f"| {rows[0].format} | {rows[0].floor_us:.1f} | " + " | ".join(map(str, rows)) + " |",
                flush=True,
            )
        print("dense: " + ", ".join(f"M={row.m} {row.dense_us:.1f}" for row in found[-len(ms) :]), flush=True)
        if options.json is not None:
            options.json.write_text(json.dumps([asdict(row) for row in found], indent=1))


if __name__ == "__main__":
    main()
