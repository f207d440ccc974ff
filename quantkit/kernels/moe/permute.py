"""Launches that sort pairs of a token and an expert, and weigh what experts gave."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, overlap
from quantkit.kernels.layouts.shared_memory import power_of_two

#: Pairs of a segment: those of `fused-narrow` and `fused-skinny`, and the most there are.
FEW_PAIRS, MOST_PAIRS = 8, 128
#: Pairs that experts have on average from which on `fused-tiled` is faster than `fused-skinny` (H200, 16
#: tokens of Mixtral at int4: 215 us instead of 293), and than `fused-narrow` or about as fast (H100, 8 pairs:
#: int4 0.94 of its time, fp8 0.95, int3 1.05, nvfp4 1.10).
TILED_PAIRS, MANY_PAIRS = 4, 8
#: The most pairs that one program orders by comparing each with all, and where counting takes a launch.
COMPARED, MOST_COMPARED = 64, 128
#: Pairs that a program has at a time which counts those of experts, and which finds the places of its own.
COUNTED, PLACED = 512, 2048
#: The most experts, with none, whose pairs each program may as well count itself.
FEW_BUCKETS = 256
#: Outputs that a program of `weigh_pairs` has.
WEIGHED = 1024


def segment_rows(pairs: int, experts: int, spread: int) -> int:
    """How many pairs of one expert a program multiplies with at most: `FEW_PAIRS`, or more than most have.

    Of `spread` times as many experts as pairs, or more, it is one: hardly any expert has two then, which are
    as soon multiplied with one after the other (H100, as many pairs as experts: int4 0.97 of the time of
    segments of 8, int8 1.01). 0 is for never, as kernels for few pairs do not have x in shared memory.
    """
    usual = -(-3 * pairs // (2 * experts))
    if 0 < spread * pairs <= experts:
        return 1
    if pairs < (MANY_PAIRS if spread else TILED_PAIRS) * experts:
        return FEW_PAIRS
    return min(max(1 << (usual - 1).bit_length(), 2 * FEW_PAIRS), MOST_PAIRS)


@dataclass(frozen=True)
class _Order:
    """The launches of `order_pairs`: `place`, and `count` before it where that needs counts of chunks."""

    place: IndexLaunch
    count: IndexLaunch | None = None
    chunks: int = 0
    buckets: int = 0


@lru_cache(maxsize=4096)
def _order(pairs: int, experts: int, rows: int, dtype: torch.dtype, features: frozenset[str]) -> _Order:
    """`dtype` is that of the index, which kernels are compiled for."""
    from quantkit.kernels.moe.permute_kernels import count_pairs, order_few_pairs
    from quantkit.kernels.moe.permute_kernels import order_pairs as kernel

    known = {"EXPERTS": experts, **overlap(features)}
    padded, buckets = power_of_two(pairs), power_of_two(experts + 1)
    few = buckets <= FEW_BUCKETS
    if pairs <= (COMPARED if few else MOST_COMPARED):
        # A lane for each pair, which compares it with all others by itself.
        warps = max(padded // 32, 1)
        return _Order(IndexLaunch(order_few_pairs, (1,), PADDED=padded, ROWS=rows, **known, num_warps=warps))
    known["BUCKETS"] = buckets
    grid = (experts + 1,)
    if pairs <= COUNTED and few:
        alone = {"counts": None, "CHUNKS": 0}
        return _Order(IndexLaunch(kernel, grid, CHUNK=padded, ROWS=rows, **alone, **known))
    place = IndexLaunch(kernel, grid, CHUNK=min(padded, PLACED), ROWS=rows, **known)
    chunks = -(-pairs // COUNTED)
    return _Order(place, IndexLaunch(count_pairs, (chunks,), CHUNK=COUNTED, **known), chunks, buckets)


def order_pairs(
    index: torch.Tensor, experts: int, rows: int, features: frozenset[str] = frozenset()
) -> tuple[torch.Tensor, torch.Tensor]:
    """`order` and `segments` of `Pairs` for the chosen experts [P], contiguous integers, P >= 1."""
    pairs = len(index)
    run = _order(pairs, experts, rows, index.dtype, features)

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=index.device)

    order, segments = empty(pairs), empty(pairs, 3)
    if run.count is None:
        run.place(index, order, segments, pairs)
    else:
        counts = empty(run.chunks, run.buckets)
        run.count(index, counts, pairs)
        run.place(index, order, segments, pairs, counts, run.chunks)
    return order, segments


@lru_cache(maxsize=1024)
def _weigh(
    tokens: int,
    slots: int,
    n: int,
    experts: int,
    dtypes: tuple[torch.dtype, ...],
    features: frozenset[str],
) -> Launch:
    """`dtypes` are those of the tensors, which the kernel is compiled for."""
    from quantkit.kernels.moe.permute_kernels import weigh_pairs as kernel

    grid = (tokens, -(-n // WEIGHED))
    return Launch(kernel, grid, EXPERTS=experts, SLOTS=slots, BLOCK=WEIGHED, **overlap(features))


def weigh_pairs(
    y: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    features: frozenset[str] = frozenset(),
) -> torch.Tensor:
    """The sums over slots of y [T * slots, n] times `weights` [T, slots], in y's dtype, added up in float32.

    Rows of y whose `index` [T, slots] is no expert's are not read. All are contiguous.
    """
    out = y.new_empty(index.shape[0], y.shape[1])
    dtypes = (y.dtype, index.dtype, weights.dtype)
    launch = _weigh(*index.shape, y.shape[1], experts, dtypes, features)
    launch(y, index, weights, out, y.shape[1])
    return out
