"""Decoding on a CPU: one row of activations through the linear layers of a 1B model, dense against packed.

The layers are those of a Llama of hidden size 2048, intermediate size 8192, 32 heads and 8 key-value heads
of 64. `--layers` of its 16 blocks are built with weights of their own, so no weight is still in cache when
its turn comes again; times are scaled to the 16.

    python benchmarks/cpu_decode.py [--threads 2] [--formats int4] [--dtypes bfloat16] [--json out.json]

GB/s counts the bytes of weights, scales and layouts that a row reads, over the time. On a machine that does
other work, use `--threads 1`: threads that wait for a core hold up all others of their operation.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from machine import cpu_machine

from quantkit.kernels.linear import linear
from quantkit.kernels.problem import Problem
from quantkit.kernels.registry import FORCE_VARIABLE, KERNELS, choose, explain
from quantkit.packing.schemes import Scheme, scheme
from quantkit.packing.tensor import PackedTensor

MODEL_LAYERS = 16
#: (N, K) of q, k, v, o, gate, up, down.
SHAPES = ((2048, 2048), (512, 2048), (512, 2048), (2048, 2048), (8192, 2048), (8192, 2048), (2048, 8192))
FORMATS = ("int4", "int8", "fp6", "binary")


@dataclass(frozen=True)
class Measurement:
    """One row of the table; `ms` is the median over repeats for all linear layers of a token."""

    dtype: str
    weights: str
    kernel: str
    chosen: bool
    ms: float
    ms_min: float
    megabytes: float
    gb_per_s: float
    speedup: float


def random_packed(layout: Scheme, shape: tuple[int, int], generator: torch.Generator) -> PackedTensor:
    rows, columns = shape
    codes = torch.randint(0, 2**layout.format.bits, shape, dtype=torch.uint8, generator=generator)
    scale = torch.rand(rows, layout.groups(columns), generator=generator) * 0.01
    return PackedTensor.from_codes(codes, scale, None, layout)


Calls = list[Callable[[], torch.Tensor]]


def timed(calls: Calls, dense: Calls, repeats: int) -> tuple[list[float], float]:
    """Seconds of each pass over `calls`, and the median of how often faster it was than the dense pass just
    before it: whatever else the machine does then slows both."""
    seconds, ratios = [], []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        for call in dense:
            call()
        middle = time.perf_counter()
        for call in calls:
            call()
        seconds.append(time.perf_counter() - middle)
        ratios.append((middle - start) / seconds[-1])
    return seconds[1:], statistics.median(ratios[1:])


def bytes_read(weight: PackedTensor, row: str) -> int:
    for entry in weight.kernel_cache.values():
        built = entry[1]
        if built is not None and built.name == row:
            return sum(tensor.nbytes for tensor in built.tensors)
    return weight.nbytes


def measure(dtype: torch.dtype, formats: Sequence[str], layers: int, repeats: int) -> list[Measurement]:
    generator = torch.Generator().manual_seed(0)
    xs = {k: torch.randn(1, k, generator=generator).to(dtype) for _, k in SHAPES}
    name = str(dtype).removeprefix("torch.")
    scale = MODEL_LAYERS / layers

    weights = [torch.randn(s, generator=generator).to(dtype) for _ in range(layers) for s in SHAPES]
    dense: Calls = [lambda w=w: F.linear(xs[w.shape[1]], w) for w in weights]
    found: list[Measurement] = []

    def record(what: str, kernel: str, chosen: bool, calls: Calls, count: int, size: int) -> None:
        times, speedup = timed(calls, dense, count)
        ms, least = statistics.median(times) * scale * 1e3, min(times) * scale * 1e3
        megabytes = size * scale / 1e6
        found.append(Measurement(name, what, kernel, chosen, ms, least, megabytes, megabytes / ms, speedup))

    record("dense", "torch", True, dense, repeats, sum(w.nbytes for w in weights))
    for format_name in formats:
        layout = scheme(format_name)
        packed = [random_packed(layout, s, generator) for _ in range(layers) for s in SHAPES]
        n, k = SHAPES[4]
        problem = Problem.on(torch.device("cpu"), 1, n, k, layout, dtype)
        best, refusals = choose(problem).kernel.name, dict(explain(problem))
        for row in KERNELS:
            os.environ[FORCE_VARIABLE] = row.name
            if "cpu" not in row.devices or row.why_unsupported(problem) is not None:
                continue
            slow = row.name == "unpack" or refusals[row.name] is not None
            calls: Calls = [lambda p=p: linear(xs[p.shape[1]], p) for p in packed]
            for call in calls:
                call()  # builds the layout, which is what bytes_read reads
            size = sum(bytes_read(p, row.name) for p in packed)
            record(str(layout), row.name, row.name == best, calls, 1 if slow else repeats, size)
        os.environ.pop(FORCE_VARIABLE, None)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--dtypes", default="bfloat16,float32")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also write the measurements to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    found: list[Measurement] = []
    with torch.inference_mode():
        for dtype in arguments.dtypes.split(","):
            formats = arguments.formats.split(",")
            found += measure(getattr(torch, dtype), formats, arguments.layers, arguments.repeats)
    print(f"{cpu_machine()}; {arguments.threads} threads")
    heads = ("dtype", "weights", "kernel", "ms/token", "min", "MB read", "GB/s", "speedup")
    print("{:9} {:24} {:11} {:>9} {:>7} {:>8} {:>6} {:>8}".format(*heads))
    for m in found:
        mark = "*" if m.chosen else " "
        print(
            f"{m.dtype:9} {m.weights:24} {m.kernel:10}{mark} {m.ms:9.1f} {m.ms_min:7.1f} {m.megabytes:8.0f} "
            f"{m.gb_per_s:6.1f} {m.speedup:8.2f}"
        )
    print("* what the table chooses")
    if arguments.json is not None:
        given = f"--formats {arguments.formats} --dtypes {arguments.dtypes} --repeats {arguments.repeats}"
        command = f"python benchmarks/cpu_decode.py --threads {arguments.threads} {given}"
        record = {"machine": cpu_machine(), "command": command, "rows": [asdict(m) for m in found]}
        arguments.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
