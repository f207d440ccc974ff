"""Sorting of tokens by expert (MoE permute), and the weighted sum of expert outputs: their launches."""

from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.jit.launcher import IndexLaunch, Launch, overlap
from quantkit.kernels.layouts.shared_memory import next_power_of_2

#: Most routed tokens of a small expert block, for kernels with few rows of x; and of any expert block.
SMALL_BLOCK_ROWS, MAX_BLOCK_ROWS = 8, 128
#: Routed tokens per expert from which blocks are larger. The first is for weights unsupported by kernels with
#: a shared x (H200, 16 tokens of Mixtral at int4: 215 us instead of 293). The second is for all others (H100,
#: 8 per expert: 0.94 of the time of small blocks at int4, 0.95 at fp8, 1.05 at int3, 1.10 at nvfp4).
TILED_TOKENS, MANY_TOKENS = 4, 8
#: Most routed tokens that one program sorts by comparing all pairs; the second number if counting would take
#: a launch of its own.
COMPARED, MOST_COMPARED = 64, 128
#: Routed tokens per step of a program: of `count_tokens`, and of `sort_tokens_by_expert`.
COUNTED, PLACED = 512, 2048
#: Most buckets (experts, and one for no expert) with which each program counts all routed tokens itself.
FEW_BUCKETS = 256
#: Columns per program of `combine_experts`.
WEIGHED = 1024


def usual_block_rows(routed: int, experts: int, single_row_ratio: int) -> int:
    """Return the maximum number of routed tokens per expert block: 1, or a power of two from 8 to 128.

    A routed token is a token paired with one of its experts; those of an expert block have the same expert.
    The result is 1 if experts / routed >= `single_row_ratio`, because few experts then have two tokens. If
    `single_row_ratio` is 0, it is never 1: for weights without a kernel whose warps share x. Measured on an
    H100, for as many routed tokens as experts: blocks of 1 take 0.97 of the time of blocks of 8 at int4, and
    1.01 at int8.
    """
    usual = -(-3 * routed // (2 * experts))
    if 0 < single_row_ratio * routed <= experts:
        return 1
    if routed < (MANY_TOKENS if single_row_ratio else TILED_TOKENS) * experts:
        return SMALL_BLOCK_ROWS
    return min(max(1 << (usual - 1).bit_length(), 2 * SMALL_BLOCK_ROWS), MAX_BLOCK_ROWS)


@dataclass(frozen=True)
class _Order:
    """Launches that sort tokens by expert: `count`, if it is not None, and then `place`.

    place            sorts the tokens; counts them itself if `count` is None
    count            counts the tokens of each expert in each of `parts` pieces (`count_tokens`)
    parts, buckets   shape of the counts, int32 [`parts`, `buckets`]: a bucket is an expert, or no expert
    """

    place: IndexLaunch
    count: IndexLaunch | None = None
    parts: int = 0
    buckets: int = 0


@lru_cache(maxsize=4096)
def _order(routed: int, experts: int, rows: int, dtype: torch.dtype, features: frozenset[str]) -> _Order:
    """Build the launches that sort `routed` routed tokens by expert; `dtype` is that of the experts' indices.

    A routed token is a token paired with one of its experts; up to `rows` of the same expert form an expert
    block.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.moe.permute_kernels import count_tokens, sort_few_tokens
    from quantkit.kernels.moe.permute_kernels import sort_tokens_by_expert as kernel

    common = {"EXPERTS": experts, **overlap(features)}
    padded, buckets = next_power_of_2(routed), next_power_of_2(experts + 1)
    few = buckets <= FEW_BUCKETS
    if routed <= (COMPARED if few else MOST_COMPARED):
        # One lane per routed token compares it with all others.
        warps = max(padded // 32, 1)
        return _Order(IndexLaunch(sort_few_tokens, (1,), PADDED=padded, ROWS=rows, **common, num_warps=warps))
    common["BUCKETS"] = buckets
    grid = (experts + 1,)
    if routed <= COUNTED and few:
        alone = {"counts": None, "PARTS": 0}
        return _Order(IndexLaunch(kernel, grid, PART=padded, ROWS=rows, **alone, **common))
    place = IndexLaunch(kernel, grid, PART=min(padded, PLACED), ROWS=rows, **common)
    parts = -(-routed // COUNTED)
    return _Order(place, IndexLaunch(count_tokens, (parts,), PART=COUNTED, **common), parts, buckets)


def launch_sort_by_expert(
    index: torch.Tensor, experts: int, rows: int, features: frozenset[str] = frozenset()
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort P routed tokens (token-expert pairs) by expert, without waiting for the GPU.

        index              [P] int64 or int32, contiguous, P >= 1: the expert of each; outside 0 to
                           `experts` - 1 no expert
        rows               maximum number of routed tokens of an expert block
        order (result)     [P] int32: indices of routed tokens, sorted by expert; no expert last
        expert_blocks      (result) [P, 3] int32, for blocks of one expert: (expert, first index in `order`,
                           count); count is 0 in unused rows

    Other projects call this moe_align_block_size.

    `features` are those of the device (`device_features`).
    """
    routed = len(index)
    run = _order(routed, experts, rows, index.dtype, features)

    def empty(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.int32, device=index.device)

    order, expert_blocks = empty(routed), empty(routed, 3)
    if run.count is None:
        run.place(index, order, expert_blocks, routed)
    else:
        counts = empty(run.parts, run.buckets)
        run.count(index, counts, routed)
        run.place(index, order, expert_blocks, routed, counts, run.parts)
    return order, expert_blocks


@lru_cache(maxsize=1024)
def _weigh(
    tokens: int,
    top_k: int,
    n: int,
    experts: int,
    dtypes: tuple[torch.dtype | None, ...],
    features: frozenset[str],
) -> Launch:
    """Build the launch of `combine_experts` for `tokens` tokens and rows of `n` columns.

    `dtypes` are the dtypes of y, index, weights and bias.

    `features` are those of the device (`device_features`).
    """
    from quantkit.kernels.moe.permute_kernels import combine_experts as kernel

    grid = (tokens, -(-n // WEIGHED))
    constexprs = {"EXPERTS": experts, "TOP_K": top_k, "BLOCK": WEIGHED, **overlap(features)}
    return Launch(kernel, grid, **constexprs, **({"bias": None} if dtypes[-1] is None else {}))


def combine_experts(
    y: torch.Tensor,
    index: torch.Tensor,
    weights: torch.Tensor,
    experts: int,
    features: frozenset[str] = frozenset(),
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Sum the outputs of each token's experts: [T, n] = sum over k of weights[t, k] y[t * top_k + k].

        y          [T * top_k, n] for T tokens
        index      [T, top_k]: the expert of each row of y; outside 0 to `experts` - 1 the row is not read
        weights    [T, top_k]
        bias       [experts, n] or None: the row of its expert is first added to each row of y

    Sums are float32. All tensors are contiguous.

    `features` are those of the device (`device_features`).
    """
    out = y.new_empty(index.shape[0], y.shape[1])
    dtypes = (y.dtype, index.dtype, weights.dtype, None if bias is None else bias.dtype)
    launch = _weigh(*index.shape, y.shape[1], experts, dtypes, features)
    launch(y, index, weights, out, y.shape[1], *(() if bias is None else (bias,)))
    return out
