"""Time kernels on a GPU, for `quantkit tune` and `benchmarks/gpu_matmul.py`.

A time is the median over replays of a CUDA graph, divided by the number of calls in it. The calls read
different copies of the weight, several times the L2 cache in all. So no launch is waited for, and no weight
is cached.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from quantkit.packing.schemes import Scheme
from quantkit.packing.tensor import PackedTensor

#: Bytes of weights that a round of calls reads: several times the L2 cache of any GPU.
ROUND_BYTES = 320 << 20
#: Uncounted replays, during which the clock rises, and fewest counted replays.
WARMUP, LEAST = 3, 5
#: Least M for which a product may exceed a GPU's power limit (seen at M = 256). After about 40 ms the clock
#: falls, so that times depend on the load before.
POWER_ROWS = 128
#: Seconds of rest before such a product, and seconds of counted replays. If the fewest replays take more than
#: 40 ms, the clock falls during them.
REST, SPELL = 0.12, 0.02
#: Codes drawn per block.
_DRAWN = 1 << 24


def copies(nbytes: int) -> int:
    """Return the number of copies of a weight of `nbytes` bytes that together exceed the L2 cache.

    Products that are timed read them in turn, so that no weight is in the cache.
    """
    return max(2, math.ceil(ROUND_BYTES / nbytes))


def rest_for(m: int, rest: float = REST) -> float:
    """Return the seconds that the GPU rests before a product with m rows of x is timed.

    It is `rest` for products that may exceed the power limit, else 0.
    """
    return rest if m >= POWER_ROWS else 0.0


def graph_time(
    calls: Sequence[Callable[[], object]], replays: int = 10, *, rest: float = 0.0, load: float = 0.0
) -> float:
    """Return median microseconds per call of `calls`, which are captured in order in one CUDA graph.

        replays   number of timed replays of the graph
        rest      seconds that the GPU rests before
        load      seconds for which the graph is then replayed, untimed

    If there is rest but no load, timing stops after `SPELL` seconds of replays, before the GPU's clock falls.
    """
    stream: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    # The other stream may still use memory that `calls` got from the allocator.
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in (*calls, *calls):
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    return statistics.median(_counted(partial(_replay, graph), replays, rest, load)) / len(calls)


def _counted(replay: Callable[[], float], replays: int, rest: float, load: float) -> list[float]:
    """Return microseconds of each of up to `replays` calls of `replay`, which returns them.

    Before come `rest` seconds of sleep, then `load` seconds of calls. If there is rest but no load, calls
    stop after `SPELL` seconds.
    """
    time.sleep(rest)
    loaded = time.monotonic() + load
    while time.monotonic() < loaded:
        replay()
    for _ in range(WARMUP):
        replay()
    times: list[float] = []
    spell = SPELL * 1e6 if rest and not load else math.inf
    while len(times) < replays and (len(times) < LEAST or sum(times) < spell):
        times.append(replay())
    return times


def _replay(graph: Any) -> float:
    """Replay a CUDA graph once; return its microseconds."""
    start, stop = _event(), _event()
    start.record()
    graph.replay()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def read_time(nbytes: int) -> float:
    """Return microseconds in which the fastest of 5 bandwidth kernels reads `nbytes` bytes: a floor."""
    from quantkit.kernels.tuning.bandwidth_kernel import read

    nbytes = nbytes // (1 << 15) * (1 << 15)
    data = [torch.ones(nbytes // 4, dtype=torch.int32, device="cuda") for _ in range(copies(nbytes))]
    times = []
    for block, steps, warps in ((1024, 8, 4), (2048, 4, 8), (1024, 4, 4), (2048, 2, 4), (1024, 2, 4)):
        programs = nbytes // 4 // (block * steps)
        out = torch.empty(programs, dtype=torch.int32, device="cuda")
        start = partial(read[(programs,)], BLOCK=block, STEPS=steps, num_warps=warps)
        times.append(graph_time([partial(start, x, out) for x in data]))
    return min(times)


def random_packed(scheme: Scheme, n: int, k: int, device: torch.device) -> PackedTensor:
    """Return a weight [n, k] with random codes of finite numbers, and scales that keep products finite."""
    generator = torch.Generator(device).manual_seed(0)
    scheme = scheme.for_columns(k)
    top, groups = 2**scheme.format.bits, scheme.groups(k)
    values = (0.0,) * top if scheme.is_fitted else scheme.format.values
    numbers = torch.tensor(
        [c for c, v in enumerate(values) if not math.isnan(v)], dtype=torch.uint8, device=device
    )

    def draw(rows: int, columns: int) -> torch.Tensor:
        """Return random codes [rows, columns] uint8."""
        picked = torch.randint(len(numbers), (rows * columns,), generator=generator, device=device)
        return numbers[picked].view(rows, columns)

    step = max(1, _DRAWN // k)
    codes = torch.zeros(n, k, dtype=torch.uint8, device=device)
    for start in range(0, n, step):
        for _ in range(scheme.planes):
            block = codes[start : start + step]
            codes[start : start + step] = (block << scheme.format.bits) | draw(block.shape[0], k)
    _, scales = scheme.storage_shapes((n, k))["scale"]
    scale = torch.rand(scales, generator=generator, device=device) + 0.5
    # Keeps sums of thousands of weights far below 65504, the largest float16.
    unit = min(0.01, 1 / scheme.format.max)
    zeros = draw(n, groups) if scheme.has_zero_point else None
    if zeros is not None and scheme.zero_point_type.is_continuous:
        zeros = zeros + 0.5
    return PackedTensor.from_codes(
        codes,
        scale if scheme.global_scale else scale * unit,
        None if zeros is None else zeros.to(scheme.zero_point_dtype),
        scheme,
        torch.full((1,), 1 / unit, device=device) if scheme.global_scale else None,
        column_scale=torch.ones(k, dtype=scheme.column_scale_dtype, device=device)
        if scheme.column_scale
        else None,
        codebook=torch.linspace(-1, 1, top, device=device) if scheme.is_fitted else None,
    )
