"""Print which kernel the rules choose for each number of rows of x (M) and of the weight (N), as a map.

    python benchmarks/kernel_map.py --write          # the map in docs/kernels.md
    python benchmarks/kernel_map.py --format int5 --k 14336

The map is of an H100 without tile tables, which choose for the weights that they have. Needs no GPU.
"""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from quantkit.kernels.gemm.gpu_limits import HOPPER_SHARED
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import choose_by_rules
from quantkit.packing.schemes import scheme

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, HOPPER_SHARED)
MS = (1, 2, 4, 8, 9, 16, 17, 32, 33, 64, 128, 256, 512, 1024, 2048, 4096)
NS = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
PAGE = Path(__file__).parents[1] / "docs" / "kernels.md"
BEGIN, END = "<!-- generated: map -->", "<!-- end of generated: map -->"
#: The letter of each kernel in the map.
LETTERS = {
    "fused-gemv": "s",
    "fused-portable-gemv": "k",
    "fused-small-m": "n",
    "fused-wgmma": "H",
    "fused-wgmma-8bit": "B",
    "scaled-mm": "L",
    "fused-portable": "t",
    "dequantize": "D",
}


def chosen(name: str, k: int) -> Iterable[list[str]]:
    """For each N, the kernels of `MS`."""
    for n in NS:
        problems = (
            Problem(m, n, k, scheme(name), torch.bfloat16, "cuda", GPU_FEATURES, None, H100) for m in MS
        )
        yield [choose_by_rules(problem).kernel.name for problem in problems]


def drawn(name: str, k: int) -> str:
    """The map, with a line per N, and a line of what the letters mean."""
    found = list(chosen(name, k))
    lines = ["N \\ M    " + "".join(f"{m:>5}" for m in MS)]
    lines += [
        f"{n:<9}" + "".join(f"{LETTERS[row]:>5}" for row in rows) for n, rows in zip(NS, found, strict=True)
    ]
    used = {row for rows in found for row in rows}
    lines.append("  ".join(f"{letter} {row}" for row, letter in LETTERS.items() if row in used))
    return "\n".join(lines)


def with_map(page: str) -> str:
    """docs/kernels.md with the map of int4 between its marks."""
    before, rest = page.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n```\n{drawn('int4', 4096)}\n```\n\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the map of a format for weights with `--k` columns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--format", default="int4")
    parser.add_argument("--k", type=int, default=4096)
    parser.add_argument("--write", action="store_true", help="write the map of int4 to docs/kernels.md")
    options = parser.parse_args(arguments)
    if options.write:
        PAGE.write_text(with_map(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(drawn(options.format, options.k))


if __name__ == "__main__":
    main()
