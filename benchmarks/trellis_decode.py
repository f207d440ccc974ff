"""Time of decoding a trellis on a GPU: one row of x times weights of 2 bits, by how a weight is decoded.

    python benchmarks/trellis_decode.py --json benchmarks/results/guide/trellis-decode.json
    python benchmarks/trellis_decode.py --instructions     # no times: needs no GPU

`trellis_kernel.py` says what the codes are; only the decoding differs between them. Each time is that of the
fastest of `TILES`: a CUDA graph over different weights that exceed the L2 cache, as `gpu_matmul.py` times.
The floor is the time of the fastest kernel that only reads as many bytes. Sums of the slices of K are stored
and not added up, for all codes alike. The products of a small weight are compared with those of `decoded`
first. There are no scales. Instructions are those of the loop over K, compiled for compute capability 9.0.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from machine import command, machine
from trellis_kernel import ADD, HALVES, MASK, MULTIPLY, X_REGISTERS, gemv
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from quantkit.kernels.tuning.shapes import shapes_named
from quantkit.kernels.tuning.timing import copies, graph_time, read_time

SHAPES = "4096x4096,4096x14336,14336x4096"
#: Rows and warps of a program, steps that are loaded ahead.
TILES = ((32, 4, 1), (32, 4, 2), (64, 4, 1), (64, 4, 2), (32, 8, 2), (32, 4, 4))
#: Slices of K, a program each.
SLICES = (1, 2, 4, 8)
#: Columns of a chunk: 4 words of a row.
CHUNK = 64
#: The tile whose instructions are counted.
COUNTED = (64, 4, 2)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def random_words(n: int, k: int, rows: int, device: str) -> torch.Tensor:
    """Return the words of a random weight, int32 [row tiles, chunks, rows, 4]."""
    shape = (n // rows, k // CHUNK, rows, 4)
    return torch.randint(-(2**31), 2**31, shape, dtype=torch.int64, device=device).to(torch.int32)


def decoded(words: torch.Tensor, code: str) -> torch.Tensor:
    """Return the weights, float64 [N, K], one bit after the other: slow."""
    tiles, chunks, rows, _ = words.shape
    bits = (words.cpu().long()[..., None] >> torch.arange(32)) & 1
    # A row of bits for each chunk of each row.
    bits = bits.permute(0, 2, 1, 3, 4).reshape(tiles * rows, chunks, 2 * CHUNK)
    if code == "int2":
        values = (bits[..., 0::2] + 2 * bits[..., 1::2] - 2).double()
    else:
        step = {"trellis": 2, "pairs": 4}[code]
        # The window at each bit; the last goes on at the first.
        windows = sum(bits.roll(-i, -1) << i for i in range(16))[..., ::step]
        values = hashed(windows)
        values = values.sum(-1) if code == "trellis" else values
    return values.reshape(tiles * rows, chunks * CHUNK)


def hashed(windows: torch.Tensor) -> torch.Tensor:
    """Return the two halves of the hashes of windows of 16 bits, float64 [..., 2]."""
    words = ((windows * MULTIPLY + ADD) & 0xFFFFFFFF & MASK) ^ HALVES
    halves = torch.stack((words & 0xFFFF, words >> 16), -1)
    return (halves - (halves >> 15 << 16)).to(torch.int16).view(torch.float16).double()


def arranged(x: torch.Tensor, code: str) -> torch.Tensor:
    """Return x [K] in float16 as the kernel reads it, int32 [chunks, registers, 4 words]."""
    of_words = x.half().view(-1, 4, 16)
    if code == "trellis":
        pairs = torch.stack((of_words, of_words), -1)
    elif code == "pairs":
        pairs = of_words.view(-1, 4, 8, 2)
    else:
        # The masks of int2 take columns 8 apart at once.
        pairs = of_words.view(-1, 4, 2, 8).transpose(2, 3)
    return pairs.contiguous().view(torch.int32)[..., 0].transpose(1, 2).contiguous()


def steps_of(k: int, warps: int, ahead: int, slices: int) -> int:
    """Return the steps of a program, or 0 where the tile does not divide K."""
    columns = CHUNK * warps * slices * ahead
    return k // (CHUNK * warps * slices) if k % columns == 0 else 0


def launch(
    words: torch.Tensor, x: torch.Tensor, y: torch.Tensor, code: str, tile: tuple[int, int, int]
) -> None:
    """Compute the sums y [slices, N] of each slice of K; x is that of `arranged`."""
    rows, warps, ahead = tile
    steps = words.shape[1] // (warps * len(y))
    gemv[(len(words), len(y))](
        words, x, y, y.shape[1], steps, CODE=code, ROWS=rows, W=warps, D=ahead, num_warps=warps
    )


def error(code: str, device: str, tile: tuple[int, int, int] = TILES[0], slices: int = 2) -> float:
    """Return the largest error of a small product, over the largest sum."""
    rows, warps, ahead = tile
    n, k = 2 * rows, CHUNK * warps * ahead * slices * 2
    words, x = random_words(n, k, rows, device), torch.randn(k, device=device).half()
    y = torch.zeros(slices, n, device=device)
    launch(words, arranged(x, code), y, code, tile)
    wanted = decoded(words, code) @ x.cpu().double()
    return float((y.double().sum(0).cpu() - wanted).abs().max() / wanted.abs().max())


def instructions(code: str) -> float:
    """Return the instructions per weight of the loop over K."""
    rows, warps, ahead = COUNTED
    known = {"CODE": code, "ROWS": rows, "W": warps, "D": ahead}
    types = {"words": "*i32", "x": "*i32", "y": "*fp32", "N": "i32", "STEPS": "i32"}
    names = gemv.arg_names
    source = GluonASTSource(
        gemv,
        {**types, **dict.fromkeys(known, "constexpr")},
        {(names.index(name),): value for name, value in known.items()},
        {(i,): [["tt.divisibility", 16]] for i in range(3)},
    )
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        dumped = [CUOBJDUMP, "-sass", file.name]
        text = subprocess.run(dumped, capture_output=True, text=True, check=True).stdout
    # "/*0a10*/  @!P0 LDG.E.128 R4, desc[UR4][R2.64] ;", "BRA 0x2170"
    found = re.findall(r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][^;]*);", text, re.MULTILINE)
    lines = {int(address, 16): line for address, line in found}
    jumps = [(int(line.split("0x")[1], 16), at) for at, line in lines.items() if re.match("BRA.* 0x", line)]
    loop = max((range(first, at + 1) for first, at in jumps if first < at), key=len)
    return sum(at in loop for at in lines) / (CHUNK * rows // 32 * ahead)


def time_shape(n: int, k: int, device: str = "cuda") -> dict[str, Any]:
    """Return the floor and, by code, microseconds and tile of the fastest tile."""
    nbytes = n * k // 4
    found: dict[str, Any] = {"floor": read_time(nbytes), "codes": {}}
    for code in X_REGISTERS:
        x = arranged(torch.randn(k, device=device), code)
        times = {}
        for tile in TILES:
            weights = [random_words(n, k, tile[0], device) for _ in range(copies(nbytes))]
            for slices in SLICES:
                if steps_of(k, tile[1], tile[2], slices):
                    y = torch.zeros(slices, n, device=device)
                    calls = [partial(launch, words, x, y, code, tile) for words in weights]
                    times[*tile, slices] = graph_time(calls)
        best = min(times, key=times.__getitem__)
        found["codes"][code] = {"us": times[best], "tile": best, "share": found["floor"] / times[best]}
    return found


def table(shapes: Mapping[str, Any]) -> str:
    """Return lines of microseconds and shares of the floor."""
    lines = [f"{'shape':14} {'code':8} {'us':>7} {'of the floor':>13}  rows, warps, ahead, slices"]
    for name, found in shapes.items():
        lines.append(f"{name:14} {'(floor)':8} {found['floor']:7.2f}")
        lines += [
            f"{name:14} {code:8} {one['us']:7.2f} {one['share']:13.1%}  {one['tile']}"
            for code, one in found["codes"].items()
        ]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--instructions", action="store_true")
    asked = parser.parse_args(arguments)
    counts = {code: instructions(code) for code in X_REGISTERS if code != "words"}
    print("instructions per weight: " + ", ".join(f"{code} {count:.2f}" for code, count in counts.items()))
    if asked.instructions:
        return
    errors = {code: error(code, "cuda", tile) for code in X_REGISTERS if code != "words" for tile in TILES}
    print(f"largest error of a small product: {max(errors.values()):.1e}", flush=True)
    assert max(errors.values()) < 1e-2, errors
    named = shapes_named(asked.shapes.split(","))
    found = {name: time_shape(*sides) for name, sides in named.items()}
    print(table(found))
    if asked.json:
        run = {"command": command(), "machine": machine(), "instructions": counts, "shapes": found}
        asked.json.write_text(json.dumps(run, indent=1) + "\n")


if __name__ == "__main__":
    main()
