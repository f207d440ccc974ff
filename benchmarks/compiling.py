"""How long the kernels of a model's products take to compile, one after the other and side by side.

    python benchmarks/compiling.py [--format int4] [--head int8] [--shapes N,K ...] [--rows 1,512]

For an H200, which need not be there: nothing is launched, and C that would launch it is not compiled. The
shapes are those of Llama-3.1-8B, the last of them that of the head, for which only one row of x is asked.
Each way has a process of its own and an empty cache.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

#: q, k and v; o; gate and up; down; the head.
SHAPES = ("6144,4096", "4096,4096", "28672,4096", "4096,14336", "128256,4096")
WAYS = ("one after the other", "side by side")


def main() -> None:
    """Parse the command line, compile each way in a process of its own, print a line for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--format", default="int4")
    parser.add_argument("--head", default="int8", help="format of the last shape")
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="N,K")
    parser.add_argument("--rows", default="1,512", help="rows of x")
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.way is not None:
        compile_all(arguments)
        return
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    for way in WAYS:
        with tempfile.TemporaryDirectory() as cache:
            subprocess.run(
                [sys.executable, __file__, *sys.argv[1:], f"--way={way}"],
                env=environment | {"TRITON_CACHE_DIR": cache},
                check=True,
            )


def compile_all(arguments: argparse.Namespace) -> None:
    """Compile one way, and print how long it took."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from quantkit.kernels.gemm.fused_kernels import FRAGMENTS, compile_kernels
    from quantkit.kernels.jit.compile_pool import compiled_first, cores
    from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
    from quantkit.kernels.registry import choose
    from quantkit.kernels.tuning.gpu_bench import CompileOnly
    from quantkit.kernels.tuning.timing import random_packed
    from quantkit.packing.schemes import scheme

    torch.set_num_threads(1)
    driver.set_active(CompileOnly(GPUTarget("cuda", 90, 32)))
    gpu = Gpu("NVIDIA H200", (9, 0), 132, 227 << 10)
    asked = []
    for number, shape in enumerate(arguments.shapes):
        n, k = map(int, shape.split(","))
        is_head = number == len(arguments.shapes) - 1
        of_shape = scheme(arguments.head if is_head else arguments.format).for_columns(k)
        layout = FRAGMENTS.build(random_packed(of_shape, 16, k, torch.device("cpu")), torch.bfloat16)
        for m in (1,) if is_head else map(int, arguments.rows.split(",")):
            problem = Problem(m, n, k, of_shape, torch.bfloat16, "cuda", GPU_FEATURES, FRAGMENTS.name, gpu)
            chosen = choose(problem)
            asked.append((chosen.kernel.name, problem, layout, chosen.tile))

    def run() -> None:
        for one in asked:
            compile_kernels(*one)

    started = time.perf_counter()
    if arguments.way == WAYS[0]:
        run()
    else:
        compiled_first(torch.device("cuda"), run)
    seconds = time.perf_counter() - started
    print(f"{arguments.way}: {len(asked)} products, {seconds:.1f} s, {cores()} cores", flush=True)


if __name__ == "__main__":
    main()
