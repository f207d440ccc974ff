"""`fused-portable-gemv`: rules for its tile (launch configuration), checks of tiles, and its launch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import torch

from quantkit.kernels.gemm.bound import BIAS, Bound, X, Y
from quantkit.kernels.gemm.gpu_limits import (
    CODE_REGISTERS,
    H200_PROCESSORS,
    SUM_REGISTERS,
    has_few_rows,
    processors,
)
from quantkit.kernels.gemm.operands import (
    GemmSpec,
    Grouping,
    Operands,
    bound,
    constants,
    grouping_constexprs,
    shape_of,
    unchanged,
    unknown_value,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.geometry import ROWS, Geometry
from quantkit.kernels.problem import Problem, TileSpace

#: From more columns than this on, a row takes many steps, each of which waits for its loads.
LONG_ROWS = 8192
#: From more columns than this on, unrolled steps do not fit in the instruction cache.
VERY_LONG_ROWS = 16384
#: Tested values of each tile field. To add a candidate, add a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "warps": (2, 4, 8),
    "columns": (128, 256, 512, 1024),
    "row_tiles": (1, 2),
    "prefetch": (False, True),
    "unroll": (4, 8, 16),
    "predicate_x": (False, True),
    "one_accumulator": (False, True),
}


@dataclass(frozen=True)
class PortableGemvTile:
    """Tile of `fused-portable-gemv`: the configuration of its launch.

    warps            warps of a program, which divide the columns K
    columns          columns that a warp loads and multiplies at a time: a step
    row_tiles        row tiles, 16 rows of W, of a program
    prefetch         True to load the codes of the next step before this one is multiplied
    unroll           most steps that are unrolled; longer code misses the instruction cache
    predicate_x      True to mask loads of rows of x from M on, instead of repeating the last row
    one_accumulator  True to add the products of a step once they are scaled, which needs less registers
    """

    warps: int = 4
    columns: int = 512
    row_tiles: int = 1
    prefetch: bool = False
    unroll: int = 16
    predicate_x: bool = False
    one_accumulator: bool = False


def portable_gemv_tile(shape: Geometry, m: int, multiprocessors: int = H200_PROCESSORS) -> PortableGemvTile:
    """Return the tile (launch configuration) of `fused-portable-gemv` that rules choose for m rows of x.

    Registers hold as many bytes in flight as possible. `shape` is that of the weight, `multiprocessors` how
    many multiprocessors (SMs) the GPU has.
    """
    if shape.k > VERY_LONG_ROWS:
        return PortableGemvTile(columns=max(256, shape.span), unroll=4)
    whole = shape.dot == 128 and shape.group >= 128
    long = has_few_rows(shape.n, multiprocessors) and shape.k > LONG_ROWS
    columns = 512 if m <= 8 and whole and not long else 256
    least = shape.k_step
    while columns > least and 4 * columns > shape.spans * shape.span:
        columns //= 2
    if shape.bits <= 4:
        prefetch = whole and (m > 8 or shape.bits == 4 or long)
    else:
        # With more rows of x registers would spill.
        prefetch = whole and m <= 8 and long and shape.bits < 8
    return PortableGemvTile(
        warps=8 if long and not whole else 4, columns=max(columns, least), prefetch=prefetch
    )


def steps(tile: PortableGemvTile, shape: Geometry) -> int:
    """Return the number of steps of a warp over its columns of K; a step is `tile.columns` columns."""
    return -(-shape.spans * shape.span // (tile.warps * tile.columns))


def unrolled(tile: PortableGemvTile, shape: Geometry) -> int:
    """Return the number of steps that are unrolled in the loop; a step is `tile.columns` columns per warp.

    All steps are unrolled if that is at most `tile.unroll`. Otherwise it is the number up to `tile.unroll`
    with which the last iteration has the fewest steps without columns.
    """
    count = steps(tile, shape)
    if count <= tile.unroll:
        return count
    return min(range(tile.unroll, tile.unroll // 2, -1), key=lambda part: -count % part)


def rows_of_x(m: int, features: frozenset[str]) -> int:
    """Return m rounded up to the number of rows of x for which the kernel is compiled: 8, 16 or 32.

    8 needs "ptx" among the `features` of the GPU.
    """
    return next(size for size in (8 if "ptx" in features else 16, 16, 32) if size >= m)


def _why_invalid(problem: Problem, tile: PortableGemvTile) -> str | None:
    """Return why `fused-portable-gemv` cannot run with this tile (launch configuration); None if it can."""
    shape = shape_of(problem)
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.columns % shape.k_step:
        return f"columns must be a multiple of {shape.span} for {shape.bits} bits, {tile.columns} is none"
    return None


def _why_pruned(problem: Problem, tile: PortableGemvTile) -> str | None:
    """Return why a tile, a launch configuration, is not worth measuring for a product; None if it is."""
    shape = shape_of(problem)
    codes = tile.columns * ROWS * tile.row_tiles * shape.bits // (32 * 32) * (2 if tile.prefetch else 1)
    sums = tile.columns // shape.dot * tile.row_tiles * ROWS * rows_of_x(problem.m, problem.features) // 32
    least = VALUES["warps"][0] * shape.k_step
    whole = tile.unroll < VALUES["unroll"][-1] and steps(tile, shape) <= tile.unroll
    idle = tile.warps * tile.columns > max(shape.spans * shape.span, least)
    reasons = (
        (
            tile.one_accumulator and (shape.on_weights or shape.groups == 1),
            "no scales multiply sums of a step",
        ),
        (tile.row_tiles > 1 and problem.m <= 8, "more row tiles never won up to M=8"),
        (whole, "all steps are unrolled as it is"),
        (codes > CODE_REGISTERS, f"codes in flight would take {codes} registers"),
        (sums > SUM_REGISTERS, f"sums would take {sums} registers"),
        (idle, "some warps would have no columns"),
    )
    return next((reason for applies, reason in reasons if applies), None)


TILE_SPACE = TileSpace(
    PortableGemvTile,
    VALUES,
    lambda problem: portable_gemv_tile(shape_of(problem), problem.m, processors(problem)),
    _why_invalid,
    _why_pruned,
)


@lru_cache(maxsize=4096)
def _launch(
    spec: GemmSpec, tile: PortableGemvTile, features: frozenset[str], grouping: Grouping | None
) -> Launch:
    """Build the launch of `portable_gemv`; `features` are what the GPU and Triton can do.

    If there is a `grouping` (experts), `spec` has the sizes of a block of tokens times one of an expert's
    matrices.
    """
    from quantkit.kernels.gemm.portable.portable_gemv_kernel import portable_gemv as kernel

    shape, (m, n, k, scheme, dtype, bias) = spec.shape, spec
    programs = -(-shape.row_tiles // tile.row_tiles)
    return Launch(
        kernel,
        # Blocks of one expert run next to each other, and share its weights in L2.
        (programs,) if grouping is None else (grouping.expert_blocks, programs * grouping.matrices),
        **constants(n, k, scheme, dtype, "ptx" in features),
        HAS_BIAS=bias,
        W=tile.warps,
        DOTS=tile.columns // shape.dot,
        RT=tile.row_tiles,
        BM=rows_of_x(m, features),
        PREFETCH=tile.prefetch,
        UNROLL=unrolled(tile, shape),
        ONE_ACCUMULATOR=tile.one_accumulator,
        PREDICATE_X=tile.predicate_x and m < 8 and "ptx" in features and grouping is None,
        **grouping_constexprs(grouping),
        num_warps=tile.warps,
        num_stages=1,
        **overlap(features),
    )


def bind(op: Operands, tile: PortableGemvTile, features: frozenset[str] = frozenset()) -> Bound:
    """Prepare the launch of `fused-portable-gemv` for the operands `op`, to be called with x and bias.

    It computes y [m, n] = x [m, k] W^T for m up to 32. With experts, y is [P, matrices * n] for P routed
    tokens: a token paired with one of its experts, of which each has `matrices` weights [n, k], such as gate
    and up. `features` are what the GPU and Triton can do.
    """
    spec = op.matrix_spec
    launch = _launch(spec, tile, features, op.grouping)
    return bound(op, (launch, (X, *op.layout, BIAS, Y, spec.m, spec.n, *op.grouped)), prepare=unchanged)


def run(op: Operands, tile: PortableGemvTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-portable-gemv`, for m up to 32.

    `features` are what the GPU and Triton can do, such as "ptx" for inline PTX.
    """
    return bind(op, tile, features)(op.x, op.bias)
