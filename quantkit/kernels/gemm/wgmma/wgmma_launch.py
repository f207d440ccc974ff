"""`fused-wgmma`: its tiles, the rules for them, those worth measuring, and its launches."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from quantkit.kernels.gemm.gpu_limits import (
    H200_PROCESSORS,
    HOPPER_SHARED,
    processors,
)
from quantkit.kernels.gemm.operands import (
    GROUP_M,
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
from quantkit.kernels.jit.launcher import Launch, overlap
from quantkit.kernels.layouts.dequant_ptx import expression
from quantkit.kernels.layouts.fragment_layout import Geometry, geometry
from quantkit.kernels.layouts.shared_memory import COPIES, undeclared_bytes
from quantkit.kernels.problem import Problem, Tiling
from quantkit.packing.schemes import Scheme

#: Warps that a program begins with, and of a group.
WARPS = 4
#: Bytes of shared memory for all but blocks of x: barriers, and outputs on their way to other threads.
SCRATCH = 8 << 10
#: Columns of a block of x, and of what is multiplied at a time, unless a tile says otherwise.
COLUMNS, TWO_BLOCKS = 128, 256
#: Rows of x that are copied at a time, at most. Those past the last one of x take twice as long as others.
TMA_ROWS = 64
#: Blocks of x in shared memory, each of the rows of a tile, unless there is room for fewer only.
STAGES = 8
#: Numbers of 16 bits that a thread writes at once, if rows of y are multiples of them.
MAX_STORE_VECTOR = 8
#: Bytes of shared memory that a multiprocessor keeps for each program.
RESERVED = 1 << 10
#: With up to so many rows of x there are registers for two programs on a multiprocessor, with 128 rows of the
#: weight and as many columns at a time, or for codes that are on their way early.
FEW_OF_X = 32
#: Rows of x and of the weight that rules choose from, with the microseconds of 256 columns on an H100, at the
#: pace of the rules.
STEP_US: Mapping[tuple[int, int], float] = {
    (32, 128): 1.1,
    (64, 128): 1.1,
    (128, 128): 1.6,
    (128, 192): 2.15,
    (256, 128): 2.6,
}
#: Those that it takes to add what another program has of such a tile. With these, tiles of the rules take
#: 1.010 of the time of the best of eight (H100, 81 problems).
FIXUP_US = dict(zip(STEP_US, (0.2, 0.3, 1.5, 3.5, 4.0), strict=True))
#: Microseconds of what surrounds all steps.
OVERHEAD_US = 3.0
#: A tile that was measured for another problem makes way for one that should take less than this part of its
#: time.
FITS = 0.9
#: Bytes of x that stay in the cache. Programs that each have the same of the last tiles are at different
#: steps, and read x from there.
CACHED = 32 << 20
#: What each field of a tile may be: what the kernel was tried with. Adding a candidate is adding a number.
VALUES: Mapping[str, tuple[int, ...]] = {
    "block_m": (16, 32, 64, 128, 256),
    "block_n": (128, 192),
    "prefetch": (1, 2),
    "stream_k": (False, True),
    "block_k": (COLUMNS, TWO_BLOCKS),
}
#: Registers of a thread that `registers` does not count. 14 do for Triton 3.6; 3.9 spills up to 514 then in a
#: loop: int7 with 1024 rows of x takes 1.47 times as long as by the tile that 24 lead to (an H100).
REGISTER_MARGIN = 24
#: Tokens of one launch and the next are so far apart: by 2^64 divided by the golden ratio.
TOKENS_APART = 0x9E3779B97F4A7C15
_LAUNCHES = count(1, 2)


@dataclass(frozen=True)
class WgmmaTile:
    """Rows of x and of the weight of a program, how early codes are loaded, and who has the last tiles.

    Codes are on their way while so many units are multiplied. Where some programs would be idle at the end,
    they may have a `steps_per_program` of the steps of the tiles left. So many `columns` are decoded, and
    multiplied before the next are: few take few registers, many keep the tensor cores busy with few rows of
    x.
    """

    block_m: int = 128
    block_n: int = 128
    prefetch: int = 1
    stream_k: bool = False
    block_k: int = COLUMNS


@dataclass(frozen=True)
class LaunchBounds:
    """How many programs are on a multiprocessor at once, and the registers of their threads.

    A thread is launched with so many at most, None for as many as there are. One that multiplies gets others
    then, as one that copies keeps 24.
    """

    launch_bounds: int
    max_registers: int | None
    mma_registers: int


def launch_bounds(tile: WgmmaTile) -> LaunchBounds:
    """That of a tile."""
    if tile.block_m <= FEW_OF_X and tile.block_n == 128 and tile.block_k == COLUMNS:
        return LaunchBounds(2, 80, 104)
    return LaunchBounds(1, None, 240 if tile.block_n == 128 else 160)


def stages(tile: WgmmaTile, table: int = 0) -> int:
    """Blocks of x in shared memory: as many as there is room for beside a table of so many bytes, up to what
    memory takes to answer, or to what has Triton ask for room for the table.
    """
    mine, block = (
        (HOPPER_SHARED + RESERVED) // launch_bounds(tile).launch_bounds - RESERVED,
        2 * tile.block_m * COLUMNS,
    )
    found = min(STAGES, (mine - table - SCRATCH) // block)
    return found + -(-undeclared_bytes(found * block, table) // block)


def copies(tile: WgmmaTile) -> int:
    """Of a table of values in shared memory: as many as leave room for a third block of x, and none for two
    programs, whose threads lack the registers.
    """
    return 0 if launch_bounds(tile).launch_bounds > 1 else 16 if tile.block_m == 256 else COPIES


def step_columns(shape: Geometry, tile: WgmmaTile) -> int:
    """Columns of a step of `wgmma_gemm`: twice what it loads at a time."""
    return 2 * max(tile.block_k, shape.span)


def stream_k_schedule(tiles: int, steps: int, programs: int, part_steps: float) -> tuple[int, int, int]:
    """How many of `tiles` are done whole, and for the others the steps of a program and from tile to tile.

    Each of the latter is divided among as many programs, unless it is sooner to give all programs the same,
    some of which have parts of two tiles then. To add a part takes as long as `part_steps`, so that a tile
    may have fewer than there are programs for.
    """
    others = tiles % programs
    if others == 0:
        return tiles, 0, steps

    per_program = [-(-steps // count) for count in range(1, programs // others + 1)]
    candidates = [
        (steps_per_program, -(-steps // steps_per_program) * steps_per_program)
        for steps_per_program in per_program
    ]
    even = (-(-others * steps // programs), steps)
    steps_per_program, tile_stride = min(
        [*candidates, even], key=lambda one: one[0] + part_steps * fixups_per_tile(steps, *one)
    )
    return (
        (tiles, 0, steps) if steps_per_program == steps else (tiles - others, steps_per_program, tile_stride)
    )


def splits_single_tiles(steps_per_program: int, tile_stride: int) -> bool:
    """Whether programs have parts of one tile each, by what `stream_k_schedule` gives."""
    return steps_per_program > 0 and tile_stride % steps_per_program == 0


def fixups_per_tile(steps: int, steps_per_program: int, tile_stride: int) -> float:
    """How many parts who writes a tile adds on average, by what `stream_k_schedule` gives: if programs have
    parts of two tiles, about half of the tiles have one more.
    """
    return -(-steps // steps_per_program) - (
        1.0 if splits_single_tiles(steps_per_program, tile_stride) else 0.5
    )


def step_us(shape: Geometry, tile: WgmmaTile) -> float:
    """Microseconds of a step."""
    return _of_tile(STEP_US, tile) * step_columns(shape, tile) / 256


def fixup_us(tile: WgmmaTile) -> float:
    """Microseconds that a part of a tile takes to be added."""
    return _of_tile(FIXUP_US, tile)


def _of_tile(us: Mapping[tuple[int, int], float], tile: WgmmaTile) -> float:
    """What is known of a tile, or of one with 128 rows of the weight or 32 of x."""
    found = us.get((tile.block_m, tile.block_n))
    return us[max(tile.block_m, FEW_OF_X), 128] * tile.block_n / 128 if found is None else found


def tile_schedule(
    shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int
) -> tuple[int, int, int, int]:
    """Return the steps of a tile, and `stream_k_schedule` for m rows of x; all whole without `stream_k`."""
    columns = shape.spans * shape.span
    tiles, steps = (
        -(-shape.n // tile.block_n) * -(-m // tile.block_m),
        -(-columns // step_columns(shape, tile)),
    )
    if not tile.stream_k:
        return steps, tiles, 0, steps
    programs = multiprocessors * launch_bounds(tile).launch_bounds
    return steps, *stream_k_schedule(tiles, steps, programs, fixup_us(tile) / step_us(shape, tile))


def tile_time(shape: Geometry, m: int, tile: WgmmaTile, multiprocessors: int = H200_PROCESSORS) -> float:
    """Microseconds for m rows of x by what a step of each tile in `STEP_US` was measured to take."""
    steps, whole_tiles, steps_per_program, tile_stride = tile_schedule(shape, m, tile, multiprocessors)
    resident = launch_bounds(tile).launch_bounds
    mine = -(-whole_tiles // (multiprocessors * resident)) * steps + steps_per_program
    sums = (
        fixup_us(tile) * fixups_per_tile(steps, steps_per_program, tile_stride) if steps_per_program else 0.0
    )
    return mine * resident * step_us(shape, tile) + OVERHEAD_US + sums


def registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> int:
    """About how many registers a thread that multiplies has for sums, weights, codes and their scales and
    zero-points, of which those in use take two each, for two rows.
    """
    unit, values = max(tile.block_k, shape.span), (shape.groups > 1) + zeros
    loaded = unit * shape.bits // 64 + values * max(1, unit // shape.group)
    used = tile.block_k // 4 + 2 * values * max(1, tile.block_k // shape.group)
    return tile.block_m // 2 + used + tile.prefetch * loaded


def has_registers(shape: Geometry, tile: WgmmaTile, zeros: bool) -> bool:
    """Whether there are as many."""
    return registers(shape, tile, zeros) + REGISTER_MARGIN <= launch_bounds(tile).mma_registers


def wgmma_tile(
    shape: Geometry, m: int, multiprocessors: int = H200_PROCESSORS, *, zeros: bool = False
) -> WgmmaTile:
    """The tile for m rows of x that should be fastest, by `tile_time`, of a weight with or without zeros."""
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
    """The tile of a size that loads and multiplies as was measured to be fastest, if it has the registers."""
    prefetch_two, prefetch_one, least = (
        WgmmaTile(m, rows, 2, block_k=TWO_BLOCKS),
        WgmmaTile(m, rows, 1, block_k=TWO_BLOCKS),
        WgmmaTile(m, rows, 1),
    )
    tiles = [replace(least, prefetch=2)]
    if m * rows > 128 * 128:
        # Of a span that is multiplied in turns, codes are in registers anyway.
        tiles = tiles if rows == 128 and shape.span > COLUMNS else []
    elif shape.spans * shape.span % TWO_BLOCKS == 0:
        tiles = [*([prefetch_two] if shape.bits == 8 or m <= FEW_OF_X else []), prefetch_one, *tiles]
    return next((tile for tile in tiles if has_registers(shape, tile, zeros)), least)


def _why_not(problem: Problem, tile: WgmmaTile) -> str | None:
    if (reason := unknown_value(tile, VALUES)) is not None:
        return reason
    if tile.block_n != 128 and tile.block_m > 128:
        return f"{tile.block_n} rows of the weight are for up to 128 rows of x, not for {tile.block_m}"
    shape = shape_of(problem)
    columns = shape.spans * shape.span
    if columns % tile.block_k:
        return f"{columns} columns are no multiple of {tile.block_k}"
    return None


def _loses(problem: Problem, tile: WgmmaTile) -> str | None:
    reasons = (
        (problem.m <= 32 < tile.block_m, f"it multiplies {tile.block_m} rows of x"),
        (
            tile.block_m <= 32 and problem.m > 2 * tile.block_m,
            f"it decodes each weight for {tile.block_m} rows of x",
        ),
        (tile.block_m > max(64, 2 * problem.m), f"{tile.block_m} rows do not suit {problem.m} rows of x"),
        (
            tile.block_k > COLUMNS and tile.block_m > 128,
            f"beside {tile.block_m} rows of x {tile.block_k} columns at a time lack registers",
        ),
        (
            tile.stream_k and tile_schedule(shape_of(problem), problem.m, tile, processors(problem))[2] == 0,
            "no tile is left that is sooner in parts",
        ),
        (
            launch_bounds(tile).launch_bounds > 1
            and registers(shape_of(problem), tile, _has_zeros(problem)) > launch_bounds(tile).mma_registers,
            "two programs on a multiprocessor lack registers for its codes",
        ),
    )
    return next((reason for loses, reason in reasons if loses), None)


def _rule(problem: Problem) -> WgmmaTile:
    return wgmma_tile(shape_of(problem), problem.m, processors(problem), zeros=_has_zeros(problem))


def _has_zeros(problem: Problem) -> bool:
    return problem.scheme.has_zero_point


def _adapt(problem: Problem, tile: WgmmaTile, measured: Problem) -> WgmmaTile:
    """The tile of the rules where that should be sooner, by how much longer or less long each takes than for
    `measured`.

    For that the tile of the rules takes as long as the measured one at least, whatever `tile_time` says: it
    tells sizes from each other better than tiles.
    """

    def time(asked: Problem, one: WgmmaTile) -> float:
        return tile_time(shape_of(asked), asked.m, one, processors(asked))

    if (tile.block_m, tile.block_n) not in STEP_US or launch_bounds(tile).launch_bounds > 1:
        return tile
    ruled = _rule(problem)
    if (ruled.block_m, ruled.block_n) == (tile.block_m, tile.block_n):
        ruled = replace(ruled, prefetch=tile.prefetch, block_k=tile.block_k)
    slower = max(1.0, time(measured, ruled) / time(measured, tile))
    theirs = slower * time(problem, ruled) / time(measured, ruled)
    return ruled if theirs < FITS * time(problem, tile) / time(measured, tile) else tile


TILING = Tiling(WgmmaTile, VALUES, _rule, _why_not, _loses, _adapt)


@dataclass(frozen=True)
class _Launches:
    """The launches of `wgmma_gemm`, the layout of what is in shared memory, and who has which steps.

    `stream_k_schedule` are those of the function. Parts of tiles take `sums` numbers, with what programs say
    of them. A weight has so many `spans` and `blocks`.
    """

    kernel: Launch
    layout: Any
    stream_k_schedule: tuple[int, int, int]
    spans: int
    blocks: int
    sums: int


@lru_cache(maxsize=4096)
def _launches(
    m: int,
    n: int,
    k: int,
    scheme: Scheme,
    dtype: torch.dtype,
    bias: bool,
    tile: WgmmaTile,
    features: frozenset[str],
    multiprocessors: int,
) -> _Launches:
    from triton.experimental.gluon.language import NVMMASharedLayout

    from quantkit.kernels.gemm.wgmma.wgmma_kernel import wgmma_gemm as kernel

    shape = geometry(n, k, scheme, dtype)
    known = constants_of(n, k, scheme, dtype, tile)
    resident = launch_bounds(tile)
    most = multiprocessors * resident.launch_bounds
    _, whole_tiles, steps_per_program, tile_stride = tile_schedule(shape, m, tile, multiprocessors)
    programs = most if steps_per_program else min(most, whole_tiles)
    main = Launch(
        kernel,
        (programs,),
        **{name: known[name] for name in kernel.arg_names if name in known},
        HAS_BIAS=bias,
        BN=tile.block_n,
        BM=tile.block_m,
        PREFETCH=tile.prefetch,
        STAGES=stages(tile, table_bytes(scheme, dtype, copies(tile))),
        REGISTERS=resident.mma_registers,
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
        # A word of 64 bits for each group of warps.
        programs * (tile.block_n * tile.block_m + tile.block_n // 64 * 2) if steps_per_program else 0,
    )


def constants_of(n: int, k: int, scheme: Scheme, dtype: torch.dtype, tile: WgmmaTile) -> dict[str, Any]:
    """What `wgmma_gemm` knows of a weight at compile time, the same for every K."""
    shape = geometry(n, k, scheme, dtype)
    known = with_shared_table(constants(n, k, scheme, dtype, True), scheme, dtype, WARPS, copies(tile))
    # The scale of a whole row takes its place in the only block there is.
    known |= {"GROUPS": 1, "PER_BLOCK": COLUMNS} if shape.groups == 1 else {"GROUPS": 2}
    if shape.span > tile.block_k:
        known |= _by_blocks(shape, scheme, dtype, tile)
    else:
        known |= {name: (known[name],) for name in ("ASM", "CONSTRAINTS")}
    return {name: value for name, value in known.items() if name not in ("SPANS", "BLOCKS")}


def _by_blocks(shape: Geometry, scheme: Scheme, dtype: torch.dtype, tile: WgmmaTile) -> dict[str, Any]:
    """The expression of each part of a span that is longer than what is multiplied at a time."""
    name, each = str(dtype).removeprefix("torch."), shape.planes * tile.block_k // shape.span
    parts = [
        expression(scheme.format, name, bare=shape.carried != 1.0, some=(first, first + each))
        for first in range(0, shape.planes, each)
    ]
    return {
        "ASM": tuple(part.asm for part in parts if part is not None),
        "CONSTRAINTS": tuple(part.constraints for part in parts if part is not None),
    }


def run(op: Operands, tile: WgmmaTile, features: frozenset[str] = frozenset()) -> torch.Tensor:
    """y [m, n] for any m, on GPUs of compute capability 9."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    m, k = op.x.shape
    has_bias, programs = op.bias is not None, op.multiprocessors
    launches = _launches(m, op.n, k, op.scheme, op.x.dtype, has_bias, tile, features, programs)
    # A block has no more columns than x.
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
        m,
        op.n,
        *launches.stream_k_schedule,
        launches.spans,
        launches.blocks,
        launch_token(),
    )
    return y


def launch_token() -> int:
    """A number that no other launch of this process has, and that no memory has but by chance.

    By it programs of a launch tell each other, in memory that nobody has cleared, that something is there. It
    is odd, as `Launch` looks kernels up by whether integers are multiples of 16.
    """
    return (next(_LAUNCHES) * TOKENS_APART) % (1 << 63) | 1 << 62
