"""`fused-small-m`: rules for its tile (launch configuration), checks of what it can do, its launches."""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache

import torch

from quantkit.kernels.gemm.bound import BIAS, SUMS, Bound, X, Y
from quantkit.kernels.gemm.gpu_limits import processors, program_memory
from quantkit.kernels.gemm.operands import (
    GemmSpec,
    Grouping,
    Operands,
    bound,
    constants,
    grouping_constexprs,
    shape_of,
    table_bytes,
    unknown_value,
    why_no_gate_up_tiles,
    with_shared_table,
)
from quantkit.kernels.gemm.small_m.small_m_tiles import (
    RESIDENT_WARPS,
    SmallMTile,
    has_aligned_splits,
    is_rolled,
    k_steps,
    memory_budget,
    plan_shared_memory,
    row_tiles,
    rows_of_x,
    rstd_bytes,
    spills,
    staged_scale_blocks,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.geometry import ROWS, Geometry
from quantkit.kernels.problem import Problem, TileSpace

#: Fewest rows of x with a gated epilogue. With 16 a layer of Llama-3 8B takes 78.0 us instead of 80.0 (H200,
#: int4); 5 to 8 were not tried.
LEAST_GATED = 9
#: Rows of x per program of the split-K reduction, for one row tile.
REDUCED_ROWS = 8
#: For experts: most columns of a split, and most waves for which large programs are faster.
SPLIT_COLUMNS, FEW_WAVES = 4096, 2
#: Cost of a program's prologue, and of launching a split-K reduction, in k_steps of a warp.
PROLOGUE_STEPS, REDUCE_STEPS = 4, 3
#: Time of a program alone on a multiprocessor with room for two, relative to sharing it. H100, 37888 x 3584,
#: 8 rows of x: int3 takes 24.8 us in programs of 8 warps, some of them alone, 29.9 in programs of 16.
ALONE = 2 / 3
#: Tested values of each tile field. To add a candidate, add a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "warps": (4, 8, 16),
    "split_k": (1, 2, 4, 7, 8),
    "prefetch": (2, 4),
    "wgmma": (False, True),
}
#: Tiles that the rules choose from: fewest splits first, then largest programs.
_CANDIDATES = [SmallMTile(warps, split_k) for split_k in VALUES["split_k"] for warps in (16, 8)]
#: Fewest rows of x with `wgmma` in the rules. H100, 4096 x 4096, 16 rows: int4 6.0 us instead of 6.7.
LEAST_WGMMA = 9


def waves(tile: SmallMTile, shape: Geometry, multiprocessors: int) -> float:
    """Return the number of waves: programs of the launch divided by those that the GPU runs at once."""
    programs = -(-shape.row_tiles // row_tiles(tile, shape, multiprocessors)) * tile.split_k
    return programs * tile.warps / (multiprocessors * RESIDENT_WARPS)


def _predicted_time(
    tile: SmallMTile, shape: Geometry, multiprocessors: int, alone: float = ALONE
) -> tuple[float, float]:
    """Return a key that orders tiles by predicted time: (time in k_steps of a warp, tie-break).

    A k_step is 128 columns or more. Two small programs share a multiprocessor. If the last wave has only one
    program per multiprocessor, that wave takes `alone` of the time of two.

    The tie-break is the number of idle warps. An exception is e2m1 with 8-bit scales, where larger programs
    come first: two with idle warps take up to 1.3 times as long as one (H100).
    """
    program_tiles = row_tiles(tile, shape, multiprocessors)
    full_waves, last = divmod(waves(tile, shape, multiprocessors), 1.0)
    is_alone = full_waves > 0 and last <= 0.5 and tile.warps < RESIDENT_WARPS
    rest = math.ceil(last) * (alone if is_alone else 1.0)
    length = (full_waves + rest) * (k_steps(tile, shape)[0] + PROLOGUE_STEPS)
    length += REDUCE_STEPS if tile.split_k > 1 else 0
    return length, -tile.warps if shape.scale_kind and shape.bits == 4 else tile.warps - program_tiles


def _rule(problem: Problem) -> SmallMTile:
    """Return the tile (launch configuration) that rules choose for a `problem` without a measured one."""
    shape, count = shape_of(problem), processors(problem)
    return min(
        _valid_tiles(problem) or _CANDIDATES[-1:], key=lambda tile: _predicted_time(tile, shape, count)
    )


def _valid_tiles(problem: Problem) -> list[SmallMTile]:
    """Return the tiles (launch configurations) in `_CANDIDATES` that can run `problem`.

    Tiles that would spill registers are left out, unless all would.
    """
    wgmma = problem.m >= LEAST_WGMMA and "wgmma" in problem.features
    candidates = [replace(tile, wgmma=wgmma) for tile in _CANDIDATES]
    valid = [tile for tile in candidates if _why_invalid(problem, tile) is None]
    return [tile for tile in valid if not spills(tile, shape_of(problem))] or valid


def experts_tile(problem: Problem, weights: int) -> SmallMTile:
    """Return the tile (launch configuration) for a grouped GEMM of `weights` products like `problem`.

    A wave is the programs that run at once. If there are several waves, programs start while others end:
    split-K then only adds cost, and from a third wave on so do large programs. H100, int4: two splits of gate
    and up take 1.02 to 1.27 of the time of one. From a third wave on, 8 warps take 0.93 to 0.99 of the time
    of 16.
    """
    every, count = replace(problem, n=problem.n * weights), processors(problem)
    shape, valid = shape_of(every), _valid_tiles(every)
    tiles = [tile for tile in valid if k_steps(tile, shape)[0] * shape.k_step <= SPLIT_COLUMNS] or valid
    best = min(tiles, key=lambda tile: _predicted_time(tile, shape, count, alone=1.0))
    if waves(best, shape, count) > 1:
        fewest = [tile for tile in tiles if tile.split_k == tiles[0].split_k]
        best = fewest[0 if waves(fewest[0], shape, count) <= FEW_WAVES else -1]
    return best


def why_no_gate(problem: Problem, tile: SmallMTile) -> str | None:
    """Return why `small_m_gemm` cannot compute activation(gate) * up in its epilogue; None if it can.

    Gate and up are the halves of W's rows. A program needs whole sums of both, so there must be no split-K.
    """
    if tile.split_k > 1:
        return "split-K adds sums up in a launch of its own"
    if problem.m < LEAST_GATED:
        return f"it was not seen to be faster than a launch of its own below M={LEAST_GATED}"
    return why_no_gate_up_tiles(problem)


def why_no_norm(problem: Problem, tile: SmallMTile, part: str) -> str | None:
    """Return why `small_m_gemm` cannot compute `part` of an RMSNorm (`problem.Normed`); None if it can.

    "whole" normalizes x: never possible, because x is copied unchanged. "begin" adds up the squares of y for
    the next norm: it needs split-K, whose reduction does that. "end" divides y by the RMS of x: it needs
    shared memory for 1 / RMS of each row of x.
    """
    if part == "whole":
        return "it copies x as it is"
    if part == "begin":
        return None if tile.split_k > 1 else "without split-K it writes y as it is"
    return _why_too_large(problem, tile, rstd_bytes(problem.m))


def why_no_tile(problem: Problem) -> str | None:
    """Return why the tile (launch configuration) that rules choose does not fit the GPU; None if it fits."""
    return _why_invalid(problem, _rule(problem))


def _why_invalid(problem: Problem, tile: SmallMTile) -> str | None:
    """Return why `fused-small-m` cannot run with this tile (launch configuration); None if it can."""
    shape = shape_of(problem)
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.wgmma and "wgmma" not in problem.features:
        return "`wgmma` is for compute capability 9"
    if (reason := _why_too_large(problem, tile)) is not None:
        return reason
    if tile.split_k > shape.k_steps:
        return f"there are no {tile.split_k} splits of {shape.k_steps} k_steps"
    return None


def _why_too_large(problem: Problem, tile: SmallMTile, norm_bytes: int = 0) -> str | None:
    """Return why x and `norm_bytes` more bytes do not fit in shared memory; None if they do.

    `norm_bytes` are for 1 / RMS of each row of x.
    """
    table, memory = table_bytes(problem.scheme, problem.dtype), program_memory(problem)
    shape, m = shape_of(problem), problem.m
    x = plan_shared_memory(tile, shape, m, problem.scheme, memory, table, norm_bytes).nbytes
    needed, most = x + table + norm_bytes, memory_budget(tile, memory)
    if needed <= most:
        return None
    what = "x and the values of codes take" if table else "x takes"
    return f"{what} {needed} bytes of shared memory with split-K {tile.split_k}, of {most} that there are"


def _why_pruned(problem: Problem, tile: SmallMTile) -> str | None:
    """Return why a tile, a launch configuration, is not worth measuring for a product; None if it is."""
    shape, count = shape_of(problem), processors(problem)
    busy = row_tiles(tile, shape, count) * RESIDENT_WARPS // tile.warps
    more = row_tiles(SmallMTile(tile.warps, 1), shape, count) * RESIDENT_WARPS // tile.warps
    reasons = (
        (2 * busy < RESIDENT_WARPS and tile.split_k < 8, "more splits would keep more warps busy"),
        (tile.split_k > 1 and more == RESIDENT_WARPS, "without split-K all warps are busy"),
    )
    return next((reason for applies, reason in reasons if applies), None)


TILE_SPACE = TileSpace(SmallMTile, VALUES, _rule, _why_invalid, _why_pruned)


@lru_cache(maxsize=4096)
def _launches(
    spec: GemmSpec,
    tile: SmallMTile,
    features: frozenset[str],
    multiprocessors: int,
    memory: int,
    gate: str = "",
    norm_offset: float | None = None,
    norm_eps: float | None = None,
    grouping: Grouping | None = None,
) -> tuple[Launch, Launch | None, int]:
    """Build the launches; return (`small_m_gemm`, `split_k_reduce` or None, row tiles of a program).

    A row tile is 16 rows of W. `split_k_reduce` adds the sums of split-K; it is None without split-K.

    spec              sizes and dtypes of the product
    features          what the GPU and Triton can do, such as "overlap" for PDL
    multiprocessors   number of multiprocessors of the GPU
    memory            bytes of shared memory that a program may use
    gate              activation f, if y = f(gate) * up; "" for none
    norm_offset       offset in y * (weight + offset), if y begins an RMSNorm (`problem.Normed`); else None
    norm_eps          eps in y / sqrt(mean(x^2) + eps), if y ends an RMSNorm; else None
    grouping          sizes of a grouped GEMM over experts, or None
    """
    from quantkit.kernels.gemm.small_m.small_m_kernel import small_m_gemm as kernel
    from quantkit.kernels.gluon.split_k_reduce import split_k_reduce

    shape, (m, n, k, scheme, dtype, bias) = spec.shape, spec
    constexprs = with_shared_table(constants(n, k, scheme, dtype, True), scheme, dtype, tile.warps)
    count, chunk = k_steps(tile, shape)
    expert_blocks = () if grouping is None else (grouping.expert_blocks,)
    # With several splits, the split-K reduction applies the gate.
    gates = gate if tile.split_k == 1 else ""
    program_tiles = row_tiles(
        tile, shape, multiprocessors, bool(gates), 1 if grouping is None else grouping.usual
    )
    rows = rows_of_x(m)
    norm_bytes = 0 if norm_eps is None else rstd_bytes(m)
    has = plan_shared_memory(tile, shape, m, scheme, memory, table_bytes(scheme, dtype), norm_bytes)
    main = Launch(
        kernel,
        # Blocks of one expert run next to each other, and share its weights in L2.
        (*expert_blocks, -(-shape.row_tiles // program_tiles) * tile.split_k),
        **{name: constexprs[name] for name in kernel.arg_names if name in constexprs},
        HAS_BIAS=bias,
        NORM_EPS=norm_eps,
        GATE=gates,
        W=tile.warps,
        BM=rows,
        SPLIT_K=tile.split_k,
        K_STEPS=count,
        CHUNK=chunk,
        PADDING_CHUNKS=has.padding_chunks,
        ALIGNED_SPLITS=has_aligned_splits(tile, shape),
        STAGED_BLOCKS=staged_scale_blocks(tile, shape) if has.stages_scales else 0,
        PREFETCH=tile.prefetch,
        ROLLED=is_rolled(tile, shape),
        **grouping_constexprs(grouping),
        CHAINED=grouping is not None and grouping.chained,
        WGMMA=tile.wgmma,
        num_warps=tile.warps,
        maxnreg=128,
        **overlap(features),
    )
    if tile.split_k == 1:
        return main, None, program_tiles
    # Sums of expert blocks are scaled before they are stored.
    after = constexprs if grouping is None else {"GROUPS": 0, "SCALE": "", "HAS_FACTOR": False}
    of_experts = grouping_constexprs(grouping)
    last = Launch(
        split_k_reduce,
        (shape.row_tiles // (2 if gate else 1), rows // REDUCED_ROWS, *expert_blocks),
        **{name: after[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")},
        **{name: value for name, value in of_experts.items() if name in split_k_reduce.arg_names},
        HAS_BIAS=bias,
        BM=rows,
        SPLIT_K=tile.split_k,
        MR=REDUCED_ROWS,
        NORM_OFFSET=norm_offset,
        GATE=gate,
        num_warps=2,
        **overlap(features),
    )
    return main, last, program_tiles


def bind(op: Operands, tile: SmallMTile, features: frozenset[str] = frozenset()) -> Bound:
    """Prepare the launches of `fused-small-m` for the operands `op`; the result is called with x and bias.

    It computes y [m, n] = x [m, k] W^T for m up to 32. `features` are what the GPU and Triton can do, such as
    "overlap" for PDL. The GPU must be an NVIDIA one of compute capability 8.0 or higher.
    """
    spec, grouping = op.spec, op.grouping
    m, n = spec.m, spec.n
    expert_blocks = 1 if grouping is None else grouping.expert_blocks
    main, last, program_tiles = _launches(
        spec,
        tile,
        features,
        op.multiprocessors,
        op.shared_memory,
        op.gate,
        op.norm_offset,
        op.norm_eps,
        grouping,
    )
    squares = Y if op.norm_eps is None else op.norm_operands(Y)[-1]
    first = main, (X, squares, *op.layout, BIAS, Y, SUMS, m, n, program_tiles, *op.grouped)
    if last is None:
        return bound(op, first)
    _, scale, _, factor, _ = op.layout
    second = last, (SUMS, scale, factor, BIAS, Y, *op.norm_operands(Y), m, n, *op.grouped)
    return bound(op, first, second, sums=(expert_blocks, tile.split_k, -(-n // ROWS), rows_of_x(m), ROWS))


def run(op: Operands, tile: SmallMTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-small-m`, for m up to 32.

    `features` are what the GPU and Triton can do, such as "overlap" for PDL.
    """
    return bind(op, tile, features)(op.x, op.bias)
