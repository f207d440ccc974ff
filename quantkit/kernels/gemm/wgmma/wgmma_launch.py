"""`fused-wgmma`: rules for its tile (launch configuration), checks of tiles, and its launch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from quantkit.kernels.gemm.gpu_limits import (
    H200_PROCESSORS,
    processors,
)
from quantkit.kernels.gemm.operands import (
    GROUP_M,
    GemmSpec,
    Operands,
    constants,
    empty,
    output_size,
    shape_of,
    table_bytes,
    unknown_value,
    whole_rows,
    with_shared_table,
)
from quantkit.kernels.gemm.wgmma.wgmma_tiles import (
    COLUMNS,
    FEW_OF_X,
    STEP_US,
    TWO_BLOCKS,
    WgmmaTile,
    copies,
    has_registers,
    launch_bounds,
    registers,
    splits_single_tiles,
    stages,
    tile_schedule,
    tile_time,
)
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.dequant_ptx import expression
from quantkit.kernels.layouts.geometry import Geometry, geometry
from quantkit.kernels.problem import Problem, TileSpace
from quantkit.packing.schemes import Scheme

#: Warps that a program starts with, and warps of a warp group.
WARPS = 4
#: Most rows of x per TMA copy. Rows past the end of x take twice as long to copy as others.
TMA_ROWS = 64
#: Most 16-bit values of a vector store, if rows of y are multiples of them.
MAX_STORE_VECTOR = 8
#: A tile measured for another problem is replaced by one with less than this part of its predicted time.
FITS = 0.9
#: Bytes of x that stay in L2. Programs that share the last tiles are at different steps, and read x from L2.
CACHED = 32 << 20
#: Tested values of each tile field. To add a candidate, add a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (128, 192),
    "prefetch": (1, 2),
    "stream_k": (False, True),
    "block_k": (COLUMNS, TWO_BLOCKS),
}
#: Distance of the tokens of two launches: 2^64 divided by the golden ratio.
TOKENS_APART = 0x9E3779B97F4A7C15
_LAUNCHES = count(1, 2)


def wgmma_tile(
    shape: Geometry, m: int, multiprocessors: int = H200_PROCESSORS, *, zeros: bool = False
) -> WgmmaTile:
    """Return the tile (launch configuration) of `fused-wgmma` with the least predicted time for m rows of x.

    `tile_time` predicts times. `shape` is that of the weight, `zeros` is True if it has zero-points, which
    take registers.
    """
    sizes = [
        _tile_of_size(shape, x, rows, zeros) for x, rows in STEP_US if (x <= FEW_OF_X) == (m <= FEW_OF_X)
    ]
    able = [tile for tile in sizes if has_registers(shape, tile, zeros)]
    shared = [
        tile
        for tile in (replace(tile, stream_k=True) for tile in able or sizes)
        if 2 * m * shape.k <= CACHED
        or splits_single_tiles(*tile_schedule(shape, m, tile, multiprocessors)[2:])
    ]
    return min([*(able or sizes), *shared], key=lambda tile: tile_time(shape, m, tile, multiprocessors))


def _tile_of_size(shape: Geometry, m: int, rows: int, zeros: bool) -> WgmmaTile:
    """Return the fastest tile with these rows of x (`m`) and of W (`rows`) for which registers suffice.

    Candidates differ in `prefetch` and `block_k`, in the order of measured speed. `zeros` is True if the
    weight has zero-points, which take registers.
    """
    prefetch_two, prefetch_one, least = (
        WgmmaTile(m, rows, 2, block_k=TWO_BLOCKS),
        WgmmaTile(m, rows, 1, block_k=TWO_BLOCKS),
        WgmmaTile(m, rows, 1),
    )
    tiles = [replace(least, prefetch=2)]
    if m * rows > 128 * 128:
        # Codes of a span longer than `block_k` are in registers anyway.
        tiles = tiles if rows == 128 and shape.span > COLUMNS else []
    elif shape.spans * shape.span % TWO_BLOCKS == 0:
        tiles = [*([prefetch_two] if shape.bits == 8 or m <= FEW_OF_X else []), prefetch_one, *tiles]
    return next((tile for tile in tiles if has_registers(shape, tile, zeros)), least)


def _why_invalid(problem: Problem, tile: WgmmaTile) -> str | None:
    """Return why `fused-wgmma` cannot run with this tile (launch configuration); None if it can."""
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.block_n != 128 and tile.block_m > 128:
        return f"{tile.block_n} rows of the weight are for up to 128 rows of x, not for {tile.block_m}"
    shape = shape_of(problem)
    columns = shape.spans * shape.span
    if columns % tile.block_k:
        return f"{columns} columns are no multiple of {tile.block_k}"
    return None


def _why_pruned(problem: Problem, tile: WgmmaTile) -> str | None:
    """Return why a tile, a launch configuration, is not worth measuring for a product; None if it is."""
    reasons = (
        (problem.m <= 32 < tile.block_m, f"it multiplies {tile.block_m} rows of x"),
        (
            tile.block_m <= 32 and problem.m > 2 * tile.block_m,
            f"it dequantizes each weight for {tile.block_m} rows of x",
        ),
        (tile.block_m > max(64, 2 * problem.m), f"{tile.block_m} rows do not suit {problem.m} rows of x"),
        (
            tile.block_k > COLUMNS and tile.block_m > 128,
            f"beside {tile.block_m} rows of x {tile.block_k} columns at a time lack registers",
        ),
        (
            tile.stream_k and tile_schedule(shape_of(problem), problem.m, tile, processors(problem))[2] == 0,
            "no tile of the last wave is faster with stream-K",
        ),
        (
            launch_bounds(tile).occupancy > 1
            and registers(shape_of(problem), tile, _has_zeros(problem)) > launch_bounds(tile).mma_registers,
            "two programs on a multiprocessor lack registers for its codes",
        ),
    )
    return next((reason for applies, reason in reasons if applies), None)


def _rule(problem: Problem) -> WgmmaTile:
    """Return the tile (launch configuration) that rules choose for a `problem` without a measured one."""
    return wgmma_tile(shape_of(problem), problem.m, processors(problem), zeros=_has_zeros(problem))


def _has_zeros(problem: Problem) -> bool:
    """Return True if the weight has zero-points."""
    return problem.scheme.has_zero_point


def _adapt(problem: Problem, tile: WgmmaTile, measured: Problem) -> WgmmaTile:
    """Return the tile that rules choose, if it is predicted to be clearly faster than `tile`; else `tile`.

    `tile` was the fastest one measured for `measured`, the same weight with other rows of x. Predicted times
    are divided by those for `measured`, for which the rules' tile counts as no faster than `tile`.
    """

    def time(asked: Problem, one: WgmmaTile) -> float:
        return tile_time(shape_of(asked), asked.m, one, processors(asked))

    if (tile.block_m, tile.block_n) not in STEP_US or launch_bounds(tile).occupancy > 1:
        return tile
    rule_tile = _rule(problem)
    if (rule_tile.block_m, rule_tile.block_n) == (tile.block_m, tile.block_n):
        rule_tile = replace(rule_tile, prefetch=tile.prefetch, block_k=tile.block_k)
    slower = max(1.0, time(measured, rule_tile) / time(measured, tile))
    rule_time = slower * time(problem, rule_tile) / time(measured, rule_tile)
    return rule_tile if rule_time < FITS * time(problem, tile) / time(measured, tile) else tile


TILE_SPACE = TileSpace(WgmmaTile, VALUES, _rule, _why_invalid, _why_pruned, _adapt)


@dataclass(frozen=True)
class _Launches:
    """Launch of `wgmma_gemm` for one `GemmSpec` and tile, with the arguments that follow from both.

    kernel              the launch
    layout              shared memory layout of x, for its TMA descriptor
    stream_k_schedule   WHOLE_TILES, STEPS_PER_PROGRAM and TILE_STRIDE (`wgmma_tiles.stream_k_schedule`)
    spans, blocks       spans and scale blocks of a row of the weight, as in `Geometry`
    sums                size in float32 of the memory for partial sums and flags; 0 if no tile is shared
    """

    kernel: Launch
    layout: Any
    stream_k_schedule: tuple[int, int, int]
    spans: int
    blocks: int
    sums: int


@lru_cache(maxsize=4096)
def _launches(spec: GemmSpec, tile: WgmmaTile, features: frozenset[str], multiprocessors: int) -> _Launches:
    """Build the launch of `wgmma_gemm` for sizes and dtypes `spec` and a tile (launch configuration).

    `features` are what the GPU and Triton can do, such as "overlap" for PDL.
    """
    from triton.experimental.gluon.language import NVMMASharedLayout

    from quantkit.kernels.gemm.wgmma.wgmma_kernel import wgmma_gemm as kernel

    shape, (m, n, k, scheme, dtype, bias) = spec.shape, spec
    constexprs = constants_of(n, k, scheme, dtype, tile)
    resident = launch_bounds(tile)
    most = multiprocessors * resident.occupancy
    _, whole_tiles, steps_per_program, tile_stride = tile_schedule(shape, m, tile, multiprocessors)
    programs = most if steps_per_program else min(most, whole_tiles)
    main = Launch(
        kernel,
        (programs,),
        **{name: constexprs[name] for name in kernel.arg_names if name in constexprs},
        HAS_BIAS=bias,
        BN=tile.block_n,
        BM=tile.block_m,
        PREFETCH=tile.prefetch,
        STAGES=stages(tile, table_bytes(scheme, dtype, copies(tile))),
        MMA_REGISTERS=resident.mma_registers,
        GROUP_M=GROUP_M,
        BLOCK_K=tile.block_k,
        STORE_VECTOR=math.gcd(n, MAX_STORE_VECTOR),
        num_warps=WARPS,
        maxnreg=resident.max_registers,
        **overlap(features),
    )
    return _Launches(
        main,
        NVMMASharedLayout(128, 16, 2),
        (whole_tiles, steps_per_program, tile_stride),
        shape.spans,
        shape.blocks,
        # Partial sums, and a 64-bit flag per warp group.
        programs * (tile.block_n * tile.block_m + tile.block_n // 64 * 2) if steps_per_program else 0,
    )


def constants_of(n: int, k: int, scheme: Scheme, dtype: torch.dtype, tile: WgmmaTile) -> dict[str, Any]:
    """Return the constexprs of `wgmma_gemm` that follow from a weight [n, k], x's `dtype` and a tile.

    SPANS and BLOCKS are not in it, so that weights of any k share one compiled kernel.
    """
    shape = geometry(n, k, scheme, dtype)
    constexprs = with_shared_table(constants(n, k, scheme, dtype, True), scheme, dtype, WARPS, copies(tile))
    # One scale per row is the only scale of one block.
    constexprs |= {"GROUPS": 1, "PER_BLOCK": COLUMNS} if shape.groups == 1 else {"GROUPS": 2}
    if shape.span > tile.block_k:
        constexprs |= _by_blocks(shape, scheme, dtype, tile)
    else:
        constexprs |= {name: (constexprs[name],) for name in ("ASM", "CONSTRAINTS")}
    return {name: value for name, value in constexprs.items() if name not in ("SPANS", "BLOCKS")}


def _by_blocks(shape: Geometry, scheme: Scheme, dtype: torch.dtype, tile: WgmmaTile) -> dict[str, Any]:
    """Return ASM and CONSTRAINTS for spans longer than `tile.block_k` columns: a tuple of PTX texts each.

    A span is the columns whose codes are stored in the same registers; a block is `tile.block_k` of them.
    Entry i of ASM dequantizes the fragments (16 columns) of block i. Entry i of CONSTRAINTS has the
    constraints of its operands.
    """
    name, each = str(dtype).removeprefix("torch."), shape.fragments * tile.block_k // shape.span
    parts = [
        expression(scheme.format, name, is_folded=shape.folded_factor != 1.0, fragments=(first, first + each))
        for first in range(0, shape.fragments, each)
    ]
    return {
        "ASM": tuple(part.asm for part in parts if part is not None),
        "CONSTRAINTS": tuple(part.constraints for part in parts if part is not None),
    }


def run(op: Operands, tile: WgmmaTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """Return y [m, n] = x [m, k] W^T of the operands `op`, computed by `fused-wgmma`, for any m.

    The GPU must have compute capability 9. `features` are what the GPU and Triton can do, such as "overlap"
    for PDL.
    """
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    launches = _launches(op.spec, tile, features, op.multiprocessors)
    # TMA requires x to have at least the columns of a block.
    y, x = empty(op, *output_size(op)), whole_rows(op.x, COLUMNS)
    blocks = TensorDescriptor(
        x, list(x.shape), list(x.stride()), [min(tile.block_m, TMA_ROWS), COLUMNS], launches.layout
    )
    launches.kernel(
        blocks,
        *op.layout,
        y if op.bias is None else op.bias,
        y,
        empty(op, launches.sums, dtype=torch.float32) if launches.sums else y,
        op.x.shape[0],
        op.n,
        *launches.stream_k_schedule,
        launches.spans,
        launches.blocks,
        launch_token(),
    )
    return y


def launch_token() -> int:
    """Return a number that no other launch of this process has: the value of its flags in stream-K.

    Programs of a launch signal each other by writing it to memory that is never cleared. It is odd, because
    `Launch` compiles another kernel for multiples of 16.
    """
    return (next(_LAUNCHES) * TOKENS_APART) % (1 << 63) | 1 << 62
