"""How the rules agree with what was measured on the H100 and H200: kernels, and tiles of `fused-wgmma`.

    python benchmarks/tile_rules.py            # add --write for tests/golden/tile_rules.json

Needs no GPU: times are those that `quantkit tune` measured, and what the rules make of other rows of x. The
golden file lists where the kernel that the rules choose takes more than 1.05 times the fastest one's time.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median, quantiles

from quantkit.kernels.gemm.gpu_limits import HOPPER_SHARED
from quantkit.kernels.gemm.operands import shape_of
from quantkit.kernels.gemm.wgmma.wgmma_launch import TILE_SPACE
from quantkit.kernels.gemm.wgmma.wgmma_tiles import STEP_US, WgmmaTile, tile_time
from quantkit.kernels.problem import GPU_FEATURES, Gpu, Problem
from quantkit.kernels.registry import KERNELS, choose, choose_by_rules
from quantkit.kernels.tuning.store import shipped_tables
from quantkit.kernels.tuning.tile_table import Entry, Key

H100 = Gpu("NVIDIA H100 80GB HBM3", (9, 0), 132, HOPPER_SHARED)
H200 = replace(H100, name="NVIDIA H200")
GOLDEN = Path(__file__).parents[1] / "tests" / "golden" / "tile_rules.json"
#: A kernel that takes this part of the fastest one's time is as good.
NEAR = 1.05
#: For the entries of the larger number, rows of x between it and the power of two before.
BETWEEN = {512: (257, 320, 384), 1024: (513, 576, 640)}
#: And for 1024, further on.
FURTHER = (641, 704, 768)


def asked(key: Key, gpu: Gpu = H100) -> Problem:
    return Problem(key.m, key.n, key.k, key.scheme, key.dtype, "cuda", GPU_FEATURES, None, gpu)


@cache
def kernels_by_rules(gpu: Gpu) -> dict[str, float | None]:
    """For each entry of the table of `gpu` with times of several kernels, the rules' over the fastest's.

    Of both the time is that with the fastest tile; one kernel has no time for other tiles. None where the
    kernel that the rules choose was not timed.
    """
    (table,) = (one for one in shipped_tables(gpu, KERNELS) if one.gpu.name == gpu.name)
    found: dict[str, float | None] = {}
    for key, entry in table.entries.items():
        if entry.others:
            row = choose_by_rules(asked(key, gpu)).kernel.name
            us = entry.us if row == entry.kernel else entry.others.get(row)
            name = f"{key.scheme} {key.dtype} {key.n}x{key.k} M={key.m}"
            assert name not in found
            found[name] = None if us is None else round(us / entry.us, 3)
    return found


def beyond(gpu: Gpu) -> dict[str, float | None]:
    """The entries of `kernels_by_rules` that are not `NEAR`, or not known."""
    return {name: one for name, one in kernels_by_rules(gpu).items() if one is None or one > NEAR}


def time(problem: Problem, tile: WgmmaTile) -> float:
    return tile_time(shape_of(problem), problem.m, tile)


def parts(measured: Problem, tile: WgmmaTile, rows_of_x: tuple[int, ...]) -> Iterator[float]:
    """The part of the time of `tile` that a fitted one should take, for each M where it is another one."""
    for m in rows_of_x:
        problem = replace(measured, m=m)
        fitted = TILE_SPACE.adapt(problem, tile, measured)
        if fitted != tile:
            slower = max(1.0, time(measured, fitted) / time(measured, tile))
            grown = time(problem, fitted) / time(measured, fitted)
            yield slower * grown / (time(problem, tile) / time(measured, tile))


def fits(entries: dict[Key, Entry], of: int, rows_of_x: tuple[int, ...]) -> str:
    found = [list(parts(asked(key), one.tile, rows_of_x)) for key, one in entries.items() if key.m == of]
    all_parts = [part for of_one in found for part in of_one]
    return (
        f"{rows_of_x[0]} to {rows_of_x[-1]} rows of x: {sum(map(bool, found))} of {len(found)} weights have "
        f"fitted tiles, {min(all_parts):.2f} to {max(all_parts):.2f} of the time by the rules"
    )


def main() -> None:
    """Print the figures, or write the golden file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {GOLDEN.name}")
    if parser.parse_args().write:
        GOLDEN.write_text(json.dumps({gpu.name: beyond(gpu) for gpu in (H100, H200)}, indent=1) + "\n")
        return
    for gpu in (H100, H200):
        known = [one for one in kernels_by_rules(gpu).values() if one is not None]
        near = sum(one <= NEAR for one in known)
        print(
            f"{gpu.name}: the kernel by rules is within {NEAR} of the fastest for {near} of {len(known)}, "
            f"median {median(known):.2f}, at most {max(known):.2f}; for "
            f"{len(kernels_by_rules(gpu)) - len(known)} others it was not timed"
        )
    table, *_ = shipped_tables(H100, KERNELS)
    entries = {
        key: entry
        for key, entry in table.entries.items()
        if entry.kernel == "fused-wgmma" and (entry.tile.block_m, entry.tile.block_n) in STEP_US
    }
    times = quantiles([entry.us / time(asked(key), entry.tile) for key, entry in entries.items()], n=20)
    print(
        f"{len(entries)} measured times are {times[0]:.2f} to {times[-1]:.2f} (nine in ten), by a median of ",
        end="",
    )
    print(f"{times[9]:.2f}, times those of the rules")
    for of, rows_of_x in BETWEEN.items():
        print(fits(entries, of, rows_of_x))
    print(fits(entries, 1024, FURTHER))
    taken = Counter[str]()
    for key in (key for one in shipped_tables(H100, KERNELS) for key in one.entries):
        measured = choose(asked(key)).measured
        if measured is not None and measured.m != key.m:
            taken[key.scheme.format.name] += 1
    named = ", ".join(f"{name} {count}" for name, count in taken.most_common(3))
    print(f"{taken.total()} problems take what was faster for more rows of x: {named}, ...")


if __name__ == "__main__":
    main()
