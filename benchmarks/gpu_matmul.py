"""Time `quantkit.linear` on a GPU beside a kernel that only reads its bytes, dense bfloat16, and peers.

    python benchmarks/gpu_matmul.py --formats int8,int4 --shapes llama3-8b.o,4096x14336 --m 1,16 --json o.json
    python benchmarks/gpu_matmul.py --from o.json --markdown --plot o.png

Each figure is the median of CUDA-graph replays over as many different weights as exceed the L2 cache several
times, divided by their number. Up to M = 16 it is given as a multiple of the floor, above as a multiple of
dense speed. `--jobs` processes compile the kernels first. With QUANTKIT_TILES=none, rules choose all tiles.

From M = 128 on products may draw more power than a GPU is allowed, and by how much its clock falls depends
on what ran before: they are timed after a rest, unless `--rest 0` says otherwise. With `--load 0.3` all are,
floors excepted, after 0.3 s of the same product.

Peers are int4 in groups of 128: torch's own kernel (tinygemm, up to M = 64), and GemLite where
`pip install gemlite` put it, tuned in its default mode ("fast") before it is timed. `--from` needs no GPU.
"""

import argparse
import contextlib
import importlib.util
import math
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from machine import command, machine
from matmul_report import Row, Run, draw, markdown, plotted, text

import quantkit
from quantkit.about import pip_install
from quantkit.errors import UsageError
from quantkit.kernels.tuning.shapes import shapes_named
from quantkit.kernels.tuning.timing import POWER_ROWS, REST, copies, graph_time, read_time, rest_for
from quantkit.packing.tensor import PackedTensor

#: What is measured unless options say otherwise.
FORMATS = "int8,int6,int4,int3,int2,ternary,binary,fp8,fp6,nf4,mxfp4,nvfp4"
SHAPES = "llama3-8b.o,llama3-8b.gate_up"
MS = "1,2,4,8,16,32,64,128,256,1024,4096"
PEER_NAMES = "tinygemm,gemlite"
GROUPS = {"int2": 64}
#: Replays that count, at most. Of ten, one figure in fifty was 10 to 25 % too high, most often the first of a
#: weight.
REPLAYS = 30
#: Of the peers' weights; each group has a scale and a zero-point in bfloat16.
PEER_GROUP = 128


@dataclass(frozen=True)
class Peer:
    """Another int4 kernel: `weights(n, k, count)` are calls on x [m, k], each with a weight of its own."""

    weights: Callable[[int, int, int], list[Callable[[torch.Tensor], object]]]
    most_rows: int
    module: str = "torch"
    tuning: str = ""

    @property
    def installed(self) -> bool:
        return importlib.util.find_spec(self.module) is not None


def tinygemm(n: int, k: int, count: int) -> list[Callable[[torch.Tensor], object]]:
    calls = []
    for _ in range(count):
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device="cuda")
        scales = torch.randn(k // PEER_GROUP, n, 2, device="cuda", dtype=torch.bfloat16)
        weight = torch.ops.aten._convert_weight_to_int4pack(codes, 8)
        calls.append(lambda x, w=weight, s=scales: torch.ops.aten._weight_int4pack_mm(x, w, PEER_GROUP, s))
    return calls


def gemlite(n: int, k: int, count: int) -> list[Callable[[torch.Tensor], object]]:
    from gemlite.helper import A16W4_HQQ_INT

    pack = A16W4_HQQ_INT(device="cuda", dtype=torch.bfloat16).from_weights
    groups = (n * k // PEER_GROUP, 1)
    calls = []
    for _ in range(count):
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, device="cuda")
        scales = torch.rand(groups, device="cuda", dtype=torch.bfloat16) * 0.01
        calls.append(pack(codes, scales, torch.full_like(scales, 8)))
    return calls


PEERS: Mapping[str, Peer] = {
    "tinygemm": Peer(tinygemm, 64),
    "gemlite": Peer(gemlite, sys.maxsize, "gemlite", "tuned per M in its default mode, fast"),
}


def activations(m: int, k: int) -> torch.Tensor:
    return torch.randn(m, k, device="cuda", dtype=torch.bfloat16)


@dataclass
class Clock:
    """Times floors, and products: those that draw much power after seconds of `rest`, all after seconds of
    `load` by the same.
    """

    rest: float = REST
    load: float = 0.0
    #: Microseconds by size in units of 32 KiB.
    floors: dict[int, float] = field(default_factory=dict)

    def time(self, calls: Sequence[Callable[[], object]], m: int) -> float:
        """Microseconds of one of `calls`, products with m rows of x."""
        rest = rest_for(m, self.rest)
        if not rest:
            # Some go before: the clock falls while weights are made.
            graph_time(calls)
        return graph_time(calls, REPLAYS, rest=rest, load=self.load)

    def floor(self, nbytes: int) -> float:
        """Microseconds that reading so many bytes takes."""
        key = nbytes >> 15
        if key not in self.floors:
            self.floors[key] = read_time(nbytes)
        return self.floors[key]


def dense(n: int, k: int, m: int, clock: Clock) -> float:
    weights = [
        torch.randn(n, k, device="cuda", dtype=torch.bfloat16) for _ in range(min(copies(2 * n * k), 4))
    ]
    x = activations(m, k)
    return clock.time([lambda w=w: torch.nn.functional.linear(x, w) for w in weights], m)


def quantized(name: str, n: int, k: int) -> PackedTensor:
    weight = torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02
    return quantkit.quantize_tensor(weight, name, method="rtn", group_size=GROUPS.get(name))


def compile_format(name: str, shape: tuple[int, int], ms: Sequence[int]) -> None:
    packed = quantized(name, *shape)
    for m in ms:
        quantkit.linear(activations(m, shape[1]), packed)


def compile_peer(name: str, shape: tuple[int, int], m: int) -> None:
    """Fill Triton's cache with the candidates among which the peer will choose when nothing else runs."""
    # What fails here fails again in `time_peer`, which records it.
    with contextlib.suppress(Exception):
        PEERS[name].weights(*shape, 1)[0](activations(m, shape[1]))


def call(job: Callable[[], None]) -> None:
    job()


def time_formats(
    names: Sequence[str],
    shape: str,
    sides: tuple[int, int],
    dense_us: Mapping[int, float],
    clock: Clock,
) -> Iterator[Row]:
    n, k = sides
    for name in names:
        packed = quantized(name, n, k)
        nbytes = int(packed.bits_per_weight * n * k / 8)
        weights = [
            replace(packed, tensors=tuple(t.clone() for t in packed.tensors), kernel_cache={})
            for _ in range(copies(nbytes))
        ]
        for m in dense_us:
            x, used = activations(m, k), weights if m < 1024 else weights[:3]
            us = clock.time([partial(quantkit.linear, x, weight) for weight in used], m)
            yield Row(name, shape, m, us, clock.floor(nbytes), dense_us[m], nbytes)
        del weights
        torch.cuda.empty_cache()


def time_peer(
    name: str,
    shape: str,
    sides: tuple[int, int],
    dense_us: Mapping[int, float],
    clock: Clock,
) -> Iterator[Row | str]:
    """Its rows, and a sentence for each M that it fails at."""
    n, k = sides
    nbytes = n * k // 2 + n * k // PEER_GROUP * 4
    try:
        weights = PEERS[name].weights(n, k, copies(nbytes))
    except Exception as error:
        yield f"{name} failed to pack {shape}: {_first_line(error)}"
        return
    for m in dense_us:
        if m > PEERS[name].most_rows:
            continue
        x = activations(m, k)
        used = weights if m < 1024 else weights[:3]
        try:
            # Tunes itself here, if it does; it must not while a graph is captured.
            weights[0](x)
            us = clock.time([partial(weight, x) for weight in used], m)
        except Exception as error:
            yield f"{name} failed for {shape} at M={m}: {_first_line(error)}"
        else:
            yield Row("int4", shape, m, us, clock.floor(nbytes), dense_us[m], nbytes, name)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def measure(
    formats: Sequence[str],
    peers: Sequence[str],
    shapes: dict[str, tuple[int, int]],
    ms: Sequence[int],
    jobs: int,
    path: Path | None,
    clock: Clock,
) -> Run:
    """The run, stored at `path` after every format and peer."""
    about = [machine()]
    if clock.rest != REST:
        about.append(f"after {clock.rest:g} s of rest from M = {POWER_ROWS} on")
    if clock.load:
        about.append(f"after {clock.load:g} s of the same product")
    run = Run(
        ", ".join(about),
        shapes,
        notes=[f"{name} is not installed." for name in peers if not PEERS[name].installed],
        command=command(),
    )
    peers = [name for name in peers if PEERS[name].installed]
    run.notes += [f"{name}: {PEERS[name].tuning}." for name in peers if PEERS[name].tuning]
    todo = [partial(compile_format, name, shape, ms) for shape in shapes.values() for name in formats]
    for name in peers:
        if PEERS[name].tuning:
            todo += [partial(compile_peer, name, shape, m) for shape in shapes.values() for m in ms]
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        pool.map(call, todo, chunksize=1)
    for shape, sides in shapes.items():
        dense_us = {m: dense(*sides, m, clock) for m in ms}
        ours = (time_formats([name], shape, sides, dense_us, clock) for name in formats)
        theirs = (time_peer(name, shape, sides, dense_us, clock) for name in peers)
        for found in (*ours, *theirs):
            rows: list[Row] = []
            for row in found:
                if isinstance(row, Row):
                    rows.append(row)
                else:
                    run.notes.append(row)
                    print(row, file=sys.stderr)
            run.rows += rows
            if path is not None:
                run.save(path)
            if rows:
                figures = "; ".join(f"M={row.m} {row}" for row in rows)
                print(f"{shape} {rows[0].name}: {figures}", file=sys.stderr, flush=True)
    return run


def names(text: str) -> list[str]:
    return [name for name in text.split(",") if name]


def numbers(text: str) -> list[int]:
    return [int(number) for number in names(text)]


def seconds(text: str) -> float:
    found = float(text)
    if not 0 <= found < math.inf:
        raise ValueError(text)
    return found


def stored_run(options: argparse.Namespace) -> Run:
    return Run.load(options.stored).only(options.formats, options.shapes, options.m, options.peers)


def new_run(options: argparse.Namespace) -> Run:
    peers = names(PEER_NAMES) if options.peers is None else options.peers
    if unknown := [name for name in peers if name not in PEERS]:
        raise UsageError(f"unknown peers {', '.join(unknown)}; known are {', '.join(PEERS)}")
    shapes = shapes_named(options.shapes or names(SHAPES))
    formats, ms = options.formats or names(FORMATS), options.m or numbers(MS)
    if not torch.cuda.is_available():
        raise UsageError("there is no GPU here; --from FILE.json shows a stored run.")
    return measure(formats, peers, shapes, ms, options.jobs, options.json, Clock(options.rest, options.load))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    stored = parser.add_mutually_exclusive_group()
    stored.add_argument("--json", type=Path, metavar="FILE.json", help="store the run")
    stored.add_argument(
        "--from", dest="stored", type=Path, metavar="FILE.json", help="show a stored run, or a part of it"
    )
    parser.add_argument("--formats", type=names, metavar="A,B", help=f"default {FORMATS}")
    parser.add_argument("--shapes", type=names, metavar="A,B", help=f"default {SHAPES}")
    parser.add_argument("--m", type=numbers, metavar="1,2", help=f"default {MS}")
    parser.add_argument("--peers", type=names, metavar="A,B", help=f"default {PEER_NAMES}; '' for none")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument(
        "--rest",
        type=seconds,
        default=REST,
        metavar="S",
        help=f"seconds of rest before products with {POWER_ROWS} rows of x and more; default {REST}",
    )
    parser.add_argument(
        "--load",
        type=seconds,
        default=0.0,
        metavar="S",
        help="run each product for so many seconds before it is timed; default 0",
    )
    parser.add_argument("--markdown", action="store_true", help="tables in Markdown")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE.png", help="draw those of --formats, else eight well-known ones"
    )
    options = parser.parse_args(arguments)
    if options.plot is not None and importlib.util.find_spec("matplotlib") is None:
        parser.error(f"--plot needs matplotlib; install it with {pip_install('plots')}")
    if options.stored is not None and (options.rest, options.load) != (REST, 0.0):
        parser.error("--rest and --load are for products that are timed; --from shows a stored run")
    try:
        run = stored_run(options) if options.stored is not None else new_run(options)
    except (OSError, UsageError) as error:
        parser.error(str(error))
    print(markdown(run) if options.markdown else text(run))
    if options.plot is not None:
        draw(options.plot, plotted(run) if options.formats is None else run)
        print(f"wrote {options.plot}", file=sys.stderr)


if __name__ == "__main__":
    main()
