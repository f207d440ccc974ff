"""`fused-portable`: rules for its tile (launch configuration), checks of tiles, and its launches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from quantkit.kernels.gemm.bound import BIAS, SUMS, Bound, X, Y
from quantkit.kernels.gemm.gpu_limits import (
    H200_PROCESSORS,
    HALF_RATE,
    HOPPER_SHARED,
    SUM_REGISTERS,
    has_few_rows,
    processors,
    program_memory,
)
from quantkit.kernels.gemm.operands import (
    GROUP_M,
    GemmSpec,
    Grouping,
    Operands,
    bound,
    constants,
    grouping_constexprs,
    shape_of,
    unknown_value,
    whole_columns,
    whole_rows,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.geometry import ROWS, Geometry, geometry
from quantkit.kernels.problem import GPU_FEATURES, Problem, TileSpace
from quantkit.packing.schemes import Scheme

#: Outputs per program of `reduce_splits`.
REDUCED_OUTPUTS = 512
#: PTX that waits until at most seven products run. The other accumulator has eight or more running, and seven
#: is the largest number that PTX can wait for.
WAIT_PTX = "{wgmma.wait_group.sync.aligned 7;\nmov.b32 $0, $1;}"
#: Tested values of each tile field. To add a candidate, add a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "row_tiles": (4, 8),
    "block_m": (16, 32, 64, 128, 256),
    "split_k": (1, 2, 4, 8),
    "warps": (4, 8),
    "stages": (2, 3, 4, 5),
    "fp16_accumulation": (False, True),
    "accumulators": (1, 2),
    "occupancy": (0, 1, 2),
}


@dataclass(frozen=True)
class PortableGemmTile:
    """Tile of `fused-portable`: the configuration of its launch.

    row_tiles          row tiles, 16 rows of W, per accumulator
    block_m            rows of x of an output tile
    split_k            programs that divide the columns K of a split output tile
    warps              warps of a program
    stages             stages of Triton's software pipeline
    fp16_accumulation  True to sum the products of a step (128 columns or more) in float16, steps in float32
    accumulators       1, or 2: the weights of one are dequantized while those of the other are multiplied
    occupancy          0: all output tiles are split along K. Else programs per multiprocessor: only tiles of
                       the last wave are split, which does not fill the GPU.
    """

    row_tiles: int
    block_m: int
    split_k: int = 1
    warps: int = 4
    stages: int = 3
    fp16_accumulation: bool = False
    accumulators: int = 1
    occupancy: int = 0

    @property
    def block_n(self) -> int:
        """Return the number of rows of W that a program computes."""
        return ROWS * self.row_tiles * self.accumulators


def portable_gemm_tile(
    shape: Geometry,
    m: int,
    shared: int = HOPPER_SHARED,
    multiprocessors: int = H200_PROCESSORS,
    features: frozenset[str] = GPU_FEATURES,
) -> PortableGemmTile:
    """Return the tile (launch configuration) of `fused-portable` that rules choose for m rows of x.

    Weights with few rows are split along K to keep all multiprocessors busy.

    shape            sizes of the fragment layout of the weight
    shared           bytes of shared memory that a program may use
    multiprocessors  number of multiprocessors of the GPU
    features         what the GPU and Triton can do, such as "wgmma"
    """
    few = has_few_rows(shape.n, multiprocessors)
    if m <= 64:
        columns = 16 if m <= 16 else 32 if m <= 32 else 64
        tile, most = PortableGemmTile(4 if few else 8, columns, stages=4), 2 * multiprocessors
    elif "wgmma" in features and shape.span <= 128:
        return _two_accumulators(shape, m, shared, multiprocessors, features)
    elif shape.span > 128 and not few:
        tile, most = PortableGemmTile(8, 128, warps=8), 0
    else:
        tile, most = PortableGemmTile(4, 128), multiprocessors
    tile = _fit_memory(tile, shape, shared, features)
    split_k = (replace(tile, split_k=splits) for splits in (4, 2, 1) if shape.k_steps % splits == 0)
    return next(one for one in split_k if one.split_k == 1 or programs(one, shape, m) <= most)


def _two_accumulators(
    shape: Geometry, m: int, shared: int, multiprocessors: int, features: frozenset[str]
) -> PortableGemmTile:
    """Return a tile (launch configuration) with two accumulators for m rows of x.

    It keeps 3/4 of the multiprocessors busy, if any candidate does. Tiles with fewer splits of K are
    preferred, then larger ones. `shape` is that of the weight, `shared` the bytes of shared memory of a
    program, `features` what the GPU and Triton can do.
    """
    tiles = [PortableGemmTile(warps, 128, 1, warps, 3, accumulators=2) for warps in (8, 4)]
    tiles = [_fit_memory(tile, shape, shared, features) for tile in tiles]
    splits = [splits for splits in (1, 2, 4) if shape.k_steps % splits == 0]
    found = [replace(tile, split_k=split_k) for split_k in splits for tile in tiles]
    busy = (tile for tile in found if 4 * programs(tile, shape, m) >= 3 * multiprocessors)
    return next(busy, found[-1])


def _fit_memory(
    tile: PortableGemmTile, shape: Geometry, shared: int, features: frozenset[str]
) -> PortableGemmTile:
    """Return `tile` with fewer stages, then fewer rows of x, until it fits `shared` bytes of shared memory.

    A stage has the operands of one step of columns. If even two stages and 16 rows of x are too large, the
    result has 4 row tiles, 16 rows of W each.

    `features` are those of the device (`device_features`).
    """
    if shared_memory(replace(tile, stages=2, block_m=16), shape, features) > shared:
        tile = replace(tile, row_tiles=4)
    while shared_memory(tile, shape, features) > shared and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    while shared_memory(tile, shape, features) > shared and tile.block_m > 16:
        tile = replace(tile, block_m=tile.block_m // 2)
    return tile


def shared_memory(tile: PortableGemmTile, shape: Geometry, features: frozenset[str] = GPU_FEATURES) -> int:
    """Return an upper bound of the bytes of shared memory of a program: its operands in all stages.

    If `features` do not include "ptx", the dequantized weights of a step may also pass through shared memory.
    """
    columns = shape.k_step
    weights = tile.block_n * columns
    scales = weights // shape.group * 4 * (2 if shape.group < columns else 1)
    stage = 2 * columns * tile.block_m + weights * shape.bits // 8 + scales + 1024
    return stage * tile.stages if "ptx" in features else stage * (tile.stages - 1) + 2 * weights


def programs(tile: PortableGemmTile, shape: Geometry, m: int) -> int:
    """Return the number of programs of a launch for m rows of x, if all output tiles are split along K."""
    return -(-shape.n // tile.block_n) * -(-m // tile.block_m) * tile.split_k


def _why_invalid(problem: Problem, tile: PortableGemmTile) -> str | None:
    """Return why `fused-portable` cannot run with this tile (launch configuration); None if it can."""
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.fp16_accumulation and not problem.fp16_accumulation:
        return "torch.backends.cuda.matmul.allow_fp16_accumulation is not set, or x is not float16"
    shape = shape_of(problem)
    if tile.accumulators > 1 and shape.span > 128:
        return f"two accumulators take spans of up to 128 columns, {shape.bits} bits have {shape.span}"
    if shape.k_steps % tile.split_k:
        return f"{shape.k_steps} steps are not divided by a split of {tile.split_k}"
    return None


def _why_pruned(problem: Problem, tile: PortableGemmTile) -> str | None:
    """Return why a tile, a launch configuration, is not worth measuring for a product; None if it is."""
    shape, m, split_k = shape_of(problem), problem.m, tile.split_k > 1
    sums, shared = (
        tile.block_n * tile.block_m // (32 * tile.warps),
        shared_memory(tile, shape, problem.features),
    )
    tiles, occupancy = programs(tile, shape, m) // tile.split_k, tile.occupancy * processors(problem)
    reasons = (
        (
            tile.block_m > max(16, 2 * m) or 4 * tile.block_m < min(m, 256),
            f"{tile.block_m} rows do not suit {m} rows of x",
        ),
        (sums > SUM_REGISTERS, f"sums would take {sums} registers"),
        # `shared_memory` is an upper bound.
        (shared > program_memory(problem) * 5 // 4, f"stages would take {shared} bytes of shared memory"),
        (tile.occupancy and not split_k, "no columns are split"),
        (occupancy and (tiles < occupancy or tiles % occupancy == 0), "no wave is partly filled"),
        (
            split_k and not occupancy and tiles * tile.split_k > 8 * processors(problem),
            "there are programs enough",
        ),
        (tile.accumulators > 1 and "wgmma" not in problem.features, "products are waited for at once"),
        (tile.accumulators > 1 and tile.fp16_accumulation, "sums in float16 are added up at once"),
        (
            tile.accumulators > 1 and tile.row_tiles < tile.warps,
            "an accumulator has too few rows for its warps",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _rule(problem: Problem) -> PortableGemmTile:
    """Return the tile (launch configuration) that rules choose for a `problem` without a measured one."""
    tile = portable_gemm_tile(
        shape_of(problem), problem.m, program_memory(problem), processors(problem), problem.features
    )
    # AMD has a capability 12.0 too, hence the check for PTX.
    fast = "ptx" in problem.features and problem.gpu is not None and problem.gpu.capability in HALF_RATE
    return replace(tile, fp16_accumulation=problem.fp16_accumulation and fast)


TILE_SPACE = TileSpace(PortableGemmTile, VALUES, _rule, _why_invalid, _why_pruned)


@dataclass(frozen=True)
class _Launches:
    """Launches of `portable_gemm` for one `GemmSpec` and tile, with the arguments that follow from both.

    kernel          `portable_gemm`
    reduce_splits   kernel that adds the sums of output tiles that are split along K; None if none is split
    m               the kernel's argument M; with experts, all rows of their blocks
    unsplit         number of output tiles that are not split along K
    rest            number of output tiles that are split along K
    """

    kernel: Launch
    reduce_splits: Launch | None
    m: int
    unsplit: int
    rest: int


@lru_cache(maxsize=1024)
def fp16_weight_scale(n: int, k: int, scheme: Scheme) -> float:
    """Return the power of two by which weights are multiplied before products are summed in float16.

    It is 1 if a row has several scales. If it has one, dequantized codes are up to 57344; multiplied by the
    result, they are at most 1.
    """
    if geometry(n, k, scheme, torch.float16).groups > 1:
        return 1.0
    largest = 2.0**scheme.format.bits if scheme.has_zero_point else scheme.format.max
    return 2.0 ** -math.ceil(math.log2(largest))


def unsplit_tiles(tile: PortableGemmTile, tiles: int, multiprocessors: int) -> int:
    """Return how many of `tiles` output tiles are not split along K: those in waves that fill the GPU.

    All are, if `tile.split_k` is 1; none, if `tile.occupancy` is 0.
    """
    if tile.split_k == 1:
        return tiles
    occupancy = tile.occupancy * multiprocessors
    return tiles // occupancy * occupancy if occupancy else 0


@lru_cache(maxsize=4096)
def _launches(
    spec: GemmSpec,
    tile: PortableGemmTile,
    features: frozenset[str],
    multiprocessors: int,
    grouping: Grouping | None,
) -> _Launches:
    """Build the launches of `portable_gemm` and, if output tiles are split along K, of `reduce_splits`.

    spec             sizes and dtypes; with experts, of a block of tokens times one of an expert's matrices
    features         what the GPU and Triton can do
    multiprocessors  number of multiprocessors of the GPU
    grouping         sizes of a grouped GEMM over experts, or None
    """
    from quantkit.kernels.gemm.portable.portable_gemm_kernel import portable_gemm as kernel
    from quantkit.kernels.gemm.portable.portable_gemm_kernel import reduce_splits

    shape, (m, n, k, scheme, dtype, bias) = spec.shape, spec
    assert shape.k_steps % tile.split_k == 0 and (grouping is None or tile.split_k == 1), (shape, tile)
    constexprs = constants(n, k, scheme, dtype, "ptx" in features) | {"K": whole_columns(k)}
    of_segment = 1 if grouping is None else -(-grouping.rows // tile.block_m)
    if grouping is not None:
        m = grouping.expert_blocks * of_segment * tile.block_m
    tiles = -(-n // tile.block_n) * (1 if grouping is None else grouping.matrices) * -(-m // tile.block_m)
    unsplit = unsplit_tiles(tile, tiles, multiprocessors)
    rest = tiles - unsplit
    main = Launch(
        kernel,
        (unsplit + rest * tile.split_k,),
        **constexprs,
        HAS_BIAS=bias,
        RT=tile.row_tiles,
        BM=tile.block_m,
        ACCUMULATORS=tile.accumulators,
        SPLIT_K=tile.split_k if rest else 1,
        SPLIT_LAST_WAVE=tile.occupancy > 0,
        SYNC_MMA=tile.accumulators == 1 and not features.isdisjoint({"ptx", "wgmma"}),
        STAGES=tile.stages,
        GROUP_M=GROUP_M,
        FP16_SCALE=fp16_weight_scale(n, k, scheme) if tile.fp16_accumulation else None,
        WAIT_PTX=WAIT_PTX if tile.accumulators > 1 and "wgmma" in features else None,
        **grouping_constexprs(grouping),
        TILES_OF_BLOCK=of_segment,
        PDL="overlap" in features,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if not rest:
        return _Launches(main, None, m, unsplit, rest)
    part = max(1, min(tile.block_m, REDUCED_OUTPUTS // tile.block_n))
    last = Launch(
        reduce_splits,
        (rest, tile.block_m // part),
        **{name: constexprs[name] for name in ("GROUPS", "SCALE", "HAS_FACTOR")},
        HAS_BIAS=bias,
        BM=tile.block_m,
        ROWS=tile.block_n,
        SPLIT_K=tile.split_k,
        GROUP_M=GROUP_M,
        REDUCE_M=part,
        **overlap(features),
    )
    return _Launches(main, last, m, unsplit, rest)


def bind(op: Operands, tile: PortableGemmTile, features: frozenset[str] = frozenset()) -> Bound:
    """Prepare the launches of `fused-portable` for the operands `op`; the result is called with x and bias.

    It computes y [m, n] = x [m, k] W^T for any m. With experts, y is [P, matrices * n] for P routed tokens: a
    token paired with one of its experts. `features` are what the GPU and Triton can do.
    """
    launches = _launches(op.matrix_spec, tile, features, op.multiprocessors, op.grouping)
    sizes = launches.m, op.n, launches.unsplit
    main = launches.kernel, (X, *op.layout, BIAS, Y, SUMS, *sizes, *op.grouped)
    if launches.reduce_splits is None:
        return bound(op, main, prepare=whole_rows)
    _, scale, _, factor, _ = op.layout
    last = launches.reduce_splits, (SUMS, scale, factor, BIAS, Y, *sizes)
    sums = tile.split_k, launches.rest, tile.block_m, tile.block_n
    return bound(op, main, last, prepare=whole_rows, sums=sums)


def run(op: Operands, tile: PortableGemmTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-portable`.

    `features` are what the GPU and Triton can do, such as "ptx" for inline PTX.
    """
    return bind(op, tile, features)(op.x, op.bias)
